"""A model over the arena: where its pages lie and what it leaves alone there, and what one sequence makes it raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hexrt.devices.places import anonymous  # noqa: E402
from hexrt.errors import OutOfMemory, Unavailable  # noqa: E402
from hexrt.llm.engine import ModelEngine  # noqa: E402
from hexrt.llm.engine_model import PagedModel  # noqa: E402
from hexrt.llm.engine_pass import GREEDY, Pass, Row  # noqa: E402
from hexrt.protocol.host import BindPages, Chunk, ChunkSequence, Sampling  # noqa: E402

ARENA = 4 << 20
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def arena(size: int = ARENA) -> memoryview:
    return memoryview(anonymous(size))


def make(folder: Path, family: str, **more: Any) -> Path:
    """A model of `family` with seeded random weights."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # the usual start is so even that all tokens tie
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def read(model: PagedModel, ids: list[int], frames: list[int], start: int = 0) -> Any:
    """The logits after the last of `ids`, which stand from `start` on."""
    row = Row(ids, np.array(frames, np.int32), start, GREEDY)
    return model.run_over([row], model.arena)[0]


def test_a_model_in_bfloat16_is_probed_by_its_distribution(tmp_path: Path) -> None:
    model = PagedModel("tiny", make(tmp_path / "tiny", "Llama"), "bfloat16", arena(), 16)
    assert model.arena.dtype == torch.bfloat16
    assert model.page_bytes == 8192, "6144 bytes of K and V, up to the next 4096"
    assert model.arena.stride() == (4096, 1024, 512, 32, 16, 1)
    assert model.frames == ARENA // model.page_bytes


def test_two_models_in_one_arena_leave_each_others_frames_alone(tmp_path: Path) -> None:
    memory = arena()
    small = PagedModel("small", make(tmp_path / "small", "Llama"), "bfloat16", memory, 16)
    large = PagedModel("large", make(tmp_path / "large", "Qwen3"), "float32", memory, 16)
    assert (small.page_bytes, large.page_bytes) == (8192, 12288)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.fill_(0xAB)
    prompt = [1, *range(5, 41)]
    mine, yours = range(10), range(200, 204)  # bytes 0 .. 81920 and 2457600 .. 2506752
    for _ in range(2):
        read(small, prompt, mine)
        read(large, prompt, yours)
    frames = whole.view(-1, 4096)
    changed = (frames != 0xAB).any(1).nonzero().flatten().tolist()
    tokens = 48  # of three pages; the 37 that are written, and nothing past K and V of a small one
    assert changed == [*range(tokens // 16 * 2), *range(600, 600 + tokens // 16 * 3)]
    assert (frames[1:6:2, 2048:] == 0xAB).all(), "what is between one page's end and the next frame belongs to nobody"


def test_no_memory_of_an_arena_is_taken_before_it_is_written(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    memory = arena(1 << 36)
    folder = make(tmp_path / "tiny", "Llama")
    before = resident()
    model = PagedModel("tiny", folder, "float32", memory, 16)
    assert model.frames == (1 << 36) // 12288
    last = model.frames - 1
    read(model, [1, 5], [last])
    assert resident() - before < 64 << 20


def test_an_arena_that_holds_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="hold no page of 'tiny'"):
        PagedModel("tiny", make(tmp_path / "tiny", "Llama"), "float32", arena(4096), 16)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", None, "cannot be loaded"),
        ("model.safetensors", b"", "cannot be loaded"),
        ("model.safetensors", b"\xff" * 64, "cannot be loaded"),
        ("config.json", None, "is missing or has no config.json"),
        ("config.json", b"{", "config.json of the model 'tiny' cannot be read"),
    ],
)
def test_a_broken_folder_is_named_without_its_path(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    folder = make(tmp_path / "tiny", "Llama")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(Unavailable, match=words) as caught:
        PagedModel("tiny", folder, "float32", arena(), 16)
    assert "'tiny'" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make(tmp_path / "tiny", "Llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unavailable, match=r"1 weights are missing.*'model.layers.1.mlp.up_proj.weight'"):
        PagedModel("tiny", folder, "float32", arena(), 16)


class Poisoned(PagedModel):
    """Raises where token 13 is among the tokens, and gives no finite logits after token 14."""

    def logits(self, inputs: Pass, arena: Any) -> tuple[Any, list[int]]:
        tokens = inputs.ids[0].tolist()
        if arena is not self.arena:  # of the load probe
            return super().logits(inputs, arena)
        if 13 in tokens:
            raise RuntimeError("thirteen")
        logits, layers = super().logits(inputs, arena)
        starts = inputs.tensors.starts.tolist()
        for row, last in enumerate(inputs.keep.tolist()):
            if 14 in tokens[max(start for start in starts if start <= last) : last + 1]:
                logits[row] = torch.nan
        return logits, layers


def test_what_one_sequence_makes_the_model_raise_ends_that_one_alone(tmp_path: Path) -> None:
    engine = ModelEngine(Poisoned("tiny", make(tmp_path / "tiny", "Llama"), "float32", arena(), 16), str)
    prompts = {1: (5, 6, 7), 2: (5, 13, 7), 3: (5, 14, 7), 4: (8,), 5: (13,)}
    for number in prompts:
        engine.bind(BindPages("tiny", number, 0, (number,), 1))
    sampling = Sampling(0.0, 0, 1.0, 0, (), 3, True)
    rows = tuple(ChunkSequence(number, 0, ids, True, sampling) for number, ids in prompts.items())
    report = engine.run(Chunk(1, "tiny", 3, rows))
    finishes = {token.sequence: token.finish for token in report.tokens}
    assert finishes == {
        1: "length", 2: "error: RuntimeError: thirteen", 3: "error: the model's logits are not finite", 4: "length",
        5: "error: RuntimeError: thirteen",
    }  # fmt: skip
    alone = ModelEngine(engine.model, str)
    alone.bind(BindPages("tiny", 1, 0, (9,), 1))
    assert alone.run(Chunk(2, "tiny", 3, rows[:1])).tokens[0] == report.tokens[0]


def test_a_masked_sequence_takes_no_part_in_the_passes_that_follow(tmp_path: Path) -> None:
    engine = ModelEngine(PagedModel("tiny", make(tmp_path / "tiny", "Llama"), "float32", arena(), 16), str)
    engine.bind(BindPages("tiny", 1, 0, (0,), 1))
    engine.mask(1)
    sampling = Sampling(0.0, 0, 1.0, 0, (), 3, True)
    token = engine.run(Chunk(1, "tiny", 3, (ChunkSequence(1, 0, (5,), True, sampling),))).tokens[0]
    assert (token.ids, token.finish) == ((), "")
