"""Decode passes as graphs: their buckets, what stays out of them, and that a replay draws what the pass itself would.

Where there is no GPU a tape stands for the CUDA graph: the operations of one pass, with the very tensors they had, done again in order. What
reads a number on the host cannot be taped, as it cannot be captured. The real capture is in tests/device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hexrt.llm.engine_graphs import CUT, GREEDY, RANDOM, DecodeGraphs, rows_bucket, width_bucket
from hexrt.llm.engine_pass import advance
from hexrt.protocol.host import Sampling
from tests.llm_toy import PAGE, VOCABULARY, GatheredAttention, ToyModel, buffers, decoding, sampling, tokens_of

READS_ON_THE_HOST = ("_local_scalar_dense", "nonzero", "is_nonzero", "unique")
PAGES, FRAMES = 4, 50


class Tape(TorchDispatchMode):
    """The operations of what runs under it. `replay` does them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.overloadpacket.__name__ not in READS_ON_THE_HOST, f"{func} reads on the host"
        made = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        fresh = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known]  # fmt: skip
        changes = func._schema.is_mutable
        if fresh or changes:
            self._done.append((func, args, kwargs, fresh))
        self._kept.append(made)  # a graph's memory is its own for as long as it lives
        return made

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, fresh in self._done:
                made = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, Tensor)] if fresh else func(*args, **kwargs)  # fmt: skip
                for there, here in zip(fresh, made if fresh else (), strict=False):
                    there.copy_(here)


class TapeCapture:
    """`taken`: bytes a graph is said to take."""

    def __init__(self, taken: int = 1000) -> None:
        self.captures = 0
        self._taken, self._free = taken, 1 << 30

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Tape:
        tape = Tape()
        with torch.inference_mode(), tape:
            run()
        self.captures += 1
        self._free -= self._taken
        return tape

    def free_bytes(self) -> int:
        return self._free


def graphs(model: ToyModel, most_bytes: int = 1 << 20, rows: int = 16, passes: int = 8, width: int = PAGES) -> tuple[DecodeGraphs, TapeCapture]:  # fmt: skip
    capture = TapeCapture()
    made = DecodeGraphs(
        model.step, lambda inputs, drawn: advance(inputs, drawn, PAGE), torch.device("cpu"), VOCABULARY,
        rows=rows, width=width, passes=passes, most_bytes=most_bytes, capture=capture,
    )  # fmt: skip
    return made, capture


def both(samplings: list[Sampling], passes: int = 6, start: int = 13) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens by pass of replayed graphs and of plain passes."""
    answers = []
    for captured in (True, False):
        model, own = ToyModel(GatheredAttention(), FRAMES), buffers()
        rows = decoding(samplings, start, PAGES)
        made, _ = graphs(model, most_bytes=(1 << 20) * captured)
        answers.append(tokens_of(made.decode(own.fill(rows, passes), passes)))
        assert bool(made.statistics().replays) is captured
    return answers[0], answers[1]


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (64, 64), (65, 72)]
)
def test_rows_go_into_the_next_bucket(rows: int, bucket: int) -> None:
    assert rows_bucket(rows) == bucket


def test_tables_go_into_buckets_four_times_as_wide_each_but_no_wider_than_the_model_reads() -> None:
    assert [width_bucket(width, 600) for width in (1, 16, 17, 64, 65, 256, 257, 600)] == [16, 16, 64, 64, 256, 256, 600, 600]  # fmt: skip
    assert width_bucket(3, 8) == 8


def test_a_replayed_pass_draws_what_the_pass_itself_draws_across_pages() -> None:
    replayed, plain = both([sampling()] * 5)
    assert replayed == plain
    assert len({token for step in plain for token in step}) > 5


GREEDILY, FREELY = sampling(), sampling(1.0, seed=4)
TOP_K, TOP_P = sampling(0.7, top_k=5, seed=5), sampling(1.3, top_p=0.5, seed=6)
ALL_CUTS = sampling(2.0, top_k=40, top_p=0.9, min_p=0.05, seed=7)


@pytest.mark.parametrize(
    "samplings",
    [
        [GREEDILY, FREELY, TOP_K, TOP_P, ALL_CUTS], [TOP_K, TOP_P, ALL_CUTS], [TOP_P, FREELY, TOP_K, FREELY, FREELY],
        [FREELY] * 3, [TOP_K] * 4,
    ],
    ids=["every kind", "cut ones", "cut ones and free ones", "free ones", "a full bucket"],
)  # fmt: skip
def test_rows_draw_the_same_when_replayed_whatever_their_kinds(samplings: list[Sampling]) -> None:
    replayed, plain = both(samplings)
    assert replayed == plain


def test_one_graph_serves_all_chunks_of_a_bucket_however_many_rows_and_passes() -> None:
    model, own = ToyModel(GatheredAttention(), FRAMES), buffers()
    plain, _ = graphs(ToyModel(GatheredAttention(), FRAMES), most_bytes=0)
    made, capture = graphs(model)
    for count, passes, start in ((8, 3, 0), (5, 1, 10), (7, 8, 14), (6, 2, 30)):
        rows = decoding([sampling()] * count, start, PAGES)
        drawn = tokens_of(made.decode(own.fill(rows, passes), passes))
        assert drawn == tokens_of(plain.decode(buffers().fill(rows, passes), passes))
        assert [len(step) for step in drawn] == [count] * passes
    assert capture.captures == 1
    statistics = made.statistics()
    assert (statistics.graphs, statistics.bytes, statistics.replays, statistics.eager) == (1, 1000, 14, {})


def test_rows_that_fill_a_bucket_up_write_no_page() -> None:
    model = ToyModel(GatheredAttention(), FRAMES)
    model.arena.fill_(7.0)
    made, _ = graphs(model)
    made.decode(buffers().fill(decoding([sampling()] * 3, 0, PAGES), 2), 2)
    changed = (model.arena[:-1, 0, 0] != 7.0).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[0, 0], [0, 1], [4, 1], [4, 2], [8, 2], [8, 3]]


def test_each_kind_of_draw_has_its_own_graph_and_warming_up_makes_them_ahead() -> None:
    made, capture = graphs(ToyModel(GatheredAttention(), FRAMES))
    assert all(made.warm_up(4, kind=kind) for kind in (GREEDY, RANDOM, CUT))
    assert not made.warm_up(17)
    assert capture.captures == 3
    own = buffers()
    for one in (sampling(), sampling(1.0), sampling(1.0, top_k=3)):
        made.decode(own.fill(decoding([one] * 3, 2, PAGES), 2), 2)
    assert capture.captures == 3
    assert made.statistics().replays == 6


def test_what_is_not_captured_runs_as_it_is_and_is_counted_by_its_reason() -> None:
    model, own = ToyModel(GatheredAttention(), FRAMES), buffers()
    made, capture = graphs(model, rows=8, passes=4, width=3)
    one = [sampling()]
    slices = own.fill(decoding(one, 3, PAGES))
    slices.decodes = False
    made.decode(slices, 1)
    made.decode(own.fill(decoding([sampling(logprobs=1)], 3, PAGES)), 1)
    made.decode(own.fill(decoding(one * 9, 3, PAGES)), 1)
    made.decode(own.fill(decoding(one, 50, PAGES)), 1)
    made.decode(own.fill(decoding(one, 3, PAGES), 5), 5)
    assert made.statistics().eager == {
        "prompt slices": 1, "log-probabilities": 1, "more than 8 rows": 1, "more than 3 pages a row": 1,
        "more than 4 passes": 1,
    }  # fmt: skip
    assert capture.captures == 0


def test_no_more_is_captured_once_graphs_hold_their_memory() -> None:
    made, capture = graphs(ToyModel(GatheredAttention(), FRAMES), most_bytes=1500)
    own = buffers()
    for count in (1, 2, 3, 1):
        made.decode(own.fill(decoding([sampling()] * count, 2, PAGES)), 1)
    assert capture.captures == 2
    assert made.statistics().eager == {"the graphs' memory is full": 1}
    assert made.statistics().replays == 3


def test_the_stand_in_refuses_what_a_capture_refuses() -> None:
    with pytest.raises(AssertionError, match="reads on the host"), Tape():
        torch.ones(1).item()
