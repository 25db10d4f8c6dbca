"""A decode pass with its draws reads nothing back and takes nothing new from the host: it could be captured as a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hexrt.kernels.native import load  # noqa: E402
from hexrt.llm.engine_pass import DrawRow, Pass, PassBuffers, Row, advance  # noqa: E402
from hexrt.llm.engine_sampling import sample  # noqa: E402
from tests.llm_hand import Hand, sampling  # noqa: E402

pytestmark = pytest.mark.timeout(120)

READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal"}
NEW_DATA = {"lift_fresh", "lift", "_pin_memory"}
FROM_HOST = {"tensor", "as_tensor", "from_numpy", "frombuffer", "tolist", "numpy", "item", "cpu", "to_dlpack", "__bool__", "__int__", "__float__", "__index__"}  # fmt: skip


class Forbidden(AssertionError):
    pass


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS | NEW_DATA or (name == "index" and _has_mask(args)):
            raise Forbidden(name)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in FROM_HOST:
            raise Forbidden(func.__name__)
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """Indexing by a mask of booleans asks how many there are."""
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def watched(work: Callable[[], Any]) -> Any:
    with torch.inference_mode(), Functions(), Dispatches():
        return work()


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "temperature": [{"temperature": 0.8}],
    "top_k": [{"temperature": 0.8, "top_k": 5}],
    "top_p": [{"temperature": 0.8, "top_p": 0.9}],
    "min_p": [{"temperature": 0.8, "min_p": 0.1}],
    "penalty": [{"repetition_penalty": 1.3}],
    "logprobs": [{"logprobs": 3}],
    "all": [
        {},
        {"temperature": 1.1, "seed": 4},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 2},
        {"repetition_penalty": 0.8},
    ],
}


def rows(buffers: PassBuffers, kind: str, count: int) -> list[Row]:
    many = []
    for at in range(count):
        how = sampling(**KINDS[kind][at % len(KINDS[kind])])
        slot = buffers.seen.take((3, 5, at)) if how.repetition_penalty != 1 else -1
        frames = np.arange(8 * at, 8 * at + 8, dtype=np.int32)
        many.append(Row((9 + at,), frames, 14 + at, DrawRow(how, 2, slot)))
    return many


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Hand:
    return Hand(tmp_path_factory.mktemp("capture") / "tiny")


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_pass_and_the_step_to_the_next_leave_the_host_alone(hand: Hand, kind: str) -> None:
    if load().library is None:
        pytest.skip(f"the attention of plain torch reads its tables: {load().why}")
    model, drawn = hand.model, []
    inputs = model.buffers.fill(rows(model.buffers, kind, 5), 3)

    def decode(inputs: Pass) -> None:
        for number in range(3):
            if number:
                advance(inputs, drawn[-1], 16)
            drawn.append(model.step(inputs))

    watched(lambda: decode(inputs))
    assert all(not one.tokens[1].any() for one in drawn)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_so_do_other_families(tmp_path: Path, family: str) -> None:
    if load().library is None:
        pytest.skip(f"the attention of plain torch reads its tables: {load().why}")
    model = Hand(tmp_path / "tiny", family).model
    inputs = model.buffers.fill(rows(model.buffers, "all", 4), 1)
    watched(lambda: model.step(inputs))


def test_draws_under_a_grammar_leave_the_host_alone_too() -> None:
    buffers = PassBuffers(torch.device("cpu"), 320, 16)

    def allow(address: int, size: int) -> None:
        import ctypes

        ctypes.memset(address, 0b10, size)

    draws = buffers.draws([DrawRow(sampling(temperature=0.7), 0, -1, allow), DrawRow(sampling(), 0)])
    logits = torch.randn(2, 320, generator=torch.Generator().manual_seed(1))
    drawn = watched(lambda: sample(logits, draws)).tokens
    assert drawn[0][0] % 8 == 1, "the bits allow every eighth"
    assert drawn[0][1] == logits[1].argmax()


@pytest.mark.parametrize(
    "work",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.tensor([1.0, 2.0]) + t,
        lambda t: bool(t.any()),
        lambda t: t.numpy(),
    ],
)
def test_the_watch_sees_what_it_is_for(work: Callable[[Any], Any]) -> None:
    given = torch.tensor([1.0, -1.0])
    with pytest.raises(Forbidden):
        watched(lambda: work(given))


def test_a_pass_moved_on_by_the_device_is_the_pass_filled_anew(hand: Hand) -> None:
    """Across a page's end, for rows of different lengths."""
    buffers = hand.model.buffers
    first = rows(buffers, "greedy", 5)
    inputs = buffers.fill(first, 4)
    starts = [row.start for row in first]
    for step in range(1, 4):
        with torch.inference_mode():
            drawn = hand.model.step(inputs)
            advance(inputs, drawn, 16)
        ids = drawn.tokens[0].tolist()
        moved = [inputs.ids, inputs.positions, inputs.tensors.slots, inputs.tensors.ends]
        other = PassBuffers(torch.device("cpu"), hand.model.shape.vocabulary, 16)
        again = other.fill([Row((t,), r.frames, s + step, r.draws) for t, r, s in zip(ids, first, starts, strict=True)])
        for mine, theirs in zip(
            moved, [again.ids, again.positions, again.tensors.slots, again.tensors.ends], strict=True
        ):
            assert torch.equal(mine, theirs)
