"""The shelf of weights: what is loaded, what makes way, and that under a fair host nobody waits for ever."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrt.brain.shelf import AGAIN_NS, Shelf, Stand, Want
from hexrt.errors import ErrorRecord

pytestmark = pytest.mark.timeout(60)
SECOND = 1_000_000_000
ERROR = ErrorRecord("unavailable", "its folder holds no safetensors")


def shelf_of(budget: int, **models: int) -> Shelf:
    """With these models loaded one after the other, each in a second, at 1, 2, ... seconds."""
    shelf = Shelf(budget)
    for at, (model, size) in enumerate(models.items(), 1):
        plan = shelf.plan([Want(model, size, 0)], (), 0)
        assert plan.load == [model]
        shelf.loaded(model, size, SECOND, at * SECOND)
    return shelf


def moves(shelf: Shelf, wants: Mapping[str, int], idle: str = "", at_s: float = 100, since_s: float = 100) -> tuple[list[str], list[str], set[str]]:  # fmt: skip
    """What is loaded, unloaded and drained for these models, wanted one after the other since then."""
    ask = [Want(model, size, int(since_s * SECOND) + i) for i, (model, size) in enumerate(wants.items())]
    plan = shelf.plan(ask, idle, int(at_s * SECOND))
    return plan.load, plan.unload, {w.model for w in shelf.holders() if w.draining}


def test_a_model_that_fits_beside_the_others_is_loaded_at_once() -> None:
    shelf = shelf_of(10, a=4)
    assert moves(shelf, {"b": 6}) == (["b"], [], set())
    assert shelf.used_bytes == 10, "its estimate is taken while it loads"
    shelf.loaded("b", 5, SECOND, 0)
    assert shelf.used_bytes == 9, "and then what the host says"


def test_the_least_recently_used_of_the_idle_ones_makes_way() -> None:
    shelf = shelf_of(3, a=1, b=1, c=1)
    shelf.used("a", 50 * SECOND)
    assert moves(shelf, {"d": 1}, idle="abc") == ([], ["b"], set())
    assert moves(shelf, {"d": 1}, idle="abc") == ([], [], set()), "room is on its way"
    shelf.unloaded("b")
    assert moves(shelf, {"d": 1}, idle="ac") == (["d"], [], set())


@pytest.mark.parametrize(
    ("sizes", "wanted", "gone"),
    [
        ({"a": 1, "b": 5, "c": 4}, 5, ["b"]),  # a would not do, and with b is not needed
        ({"a": 2, "b": 2, "c": 6}, 4, ["a", "b"]),
        ({"a": 1, "b": 1, "c": 8}, 10, ["a", "b", "c"]),
    ],
)
def test_no_more_of_them_make_way_than_make_the_room(sizes: dict[str, int], wanted: int, gone: list[str]) -> None:
    assert moves(shelf_of(10, **sizes), {"d": wanted}, idle="abc")[1] == gone


def test_nothing_is_unloaded_where_it_would_not_make_the_room() -> None:
    assert moves(shelf_of(10, a=2, b=8), {"c": 5}, idle="a") == ([], [], set())


def test_a_later_want_may_take_what_is_free_until_one_before_it_has_waited_too_long() -> None:
    shelf = shelf_of(10, a=8)
    assert moves(shelf, {"b": 6, "c": 2}) == (["c"], [], set())
    shelf = shelf_of(10, a=8)
    assert moves(shelf, {"b": 6, "c": 2}, since_s=1) == ([], [], {"a"})


def test_once_a_task_has_waited_long_the_least_recently_loaded_model_in_use_drains_for_it() -> None:
    shelf = shelf_of(10, a=5, b=5)
    shelf.used("a", 99 * SECOND)
    patience = shelf.patience_ns(Want("c", 5, 0)) / SECOND
    assert patience == 2.0, "two loads of five bytes, as fast as those before"
    assert moves(shelf, {"c": 5}, at_s=100 + patience) == ([], [], set())
    assert moves(shelf, {"c": 5}, at_s=100.1 + patience) == ([], [], {"a"})
    shelf.used("b", 200 * SECOND)
    assert moves(shelf, {"c": 5}, at_s=101 + patience)[2] == {"a"}, "it keeps to what it began"
    assert moves(shelf, {"c": 5}, idle="a", at_s=102 + patience) == ([], ["a"], set())
    shelf.unloaded("a")
    assert moves(shelf, {"c": 5}, at_s=103 + patience)[0] == ["c"]


def test_a_model_that_was_just_loaded_serves_for_as_long_as_its_load_took_before_it_drains() -> None:
    shelf = Shelf(10)
    shelf.plan([Want("a", 10, 0)], (), 0)
    shelf.loaded("a", 10, 20 * SECOND, 100 * SECOND)
    assert moves(shelf, {"b": 1}, since_s=0, at_s=119) == ([], [], set())
    assert moves(shelf, {"b": 1}, since_s=0, at_s=120) == ([], [], {"a"})


def test_nobody_drains_any_more_once_nobody_wants_the_room() -> None:
    shelf = shelf_of(10, a=10)
    assert moves(shelf, {"b": 10}, since_s=0)[2] == {"a"} and shelf.makes_way_for == "b"
    assert moves(shelf, {})[2] == set() and shelf.makes_way_for == ""


def test_what_turned_out_larger_than_thought_is_brought_back_under_the_budget() -> None:
    shelf = shelf_of(10, a=4, b=4)
    shelf.plan([Want("c", 2, 0)], (), 0)
    shelf.loaded("c", 5, SECOND, 9 * SECOND)
    assert shelf.is_over and moves(shelf, {}, idle="ab") == ([], ["a"], set())
    assert moves(shelf, {}, idle="b") == ([], [], set()), "it is on its way"
    shelf = shelf_of(10, a=4, b=4)
    shelf.plan([Want("c", 2, 0)], (), 0)
    shelf.loaded("c", 5, SECOND, 9 * SECOND)
    assert moves(shelf, {}) == ([], [], {"a"}) and "more than the budget" in shelf.why_making_way
    assert moves(shelf, {}, idle="b") == ([], ["b"], set()), "another became idle, and that is enough"


def test_a_load_that_fails_again_and_again_is_tried_every_few_seconds_only() -> None:
    shelf = Shelf(10)
    for times, at_ns in enumerate((7, 8, 8 + AGAIN_NS), 1):
        assert shelf.refusal("a", at_ns) is None
        assert shelf.plan([Want("a", 5, 0)], (), at_ns).load == ["a"]
        shelf.failed("a", ERROR, at_ns)
        refusal = shelf.last_refusal("a")
        assert refusal is not None and refusal.times == times and shelf.used_bytes == 0
    assert shelf.refusal("a", 9 + AGAIN_NS) is not None
    shelf.plan([Want("a", 5, 0)], (), 10 * AGAIN_NS)
    shelf.loaded("a", 5, SECOND, 11 * AGAIN_NS)
    assert shelf.last_refusal("a") is None


class Play:
    """A fair host: loads and unloads end after a while, and so does what a model does, unless new tasks keep coming."""

    def __init__(self, budget: int, sizes: Mapping[str, int], guesses: Mapping[str, int] | None = None) -> None:
        """`guesses`: of the sizes, before a model was loaded for the first time."""
        self.shelf, self.sizes, self.now = Shelf(budget), sizes, 0
        self.guesses = guesses or sizes
        self.waiting: dict[str, int] = {}  # model -> since when
        self.work: dict[str, int] = {}  # model -> when it is idle
        self.loads: dict[str, int] = {}
        self.unloads: list[str] = []
        self.served: list[str] = []
        self.used: dict[str, int] = {}

    def ask(self, model: str, takes_ns: int) -> None:
        weights = self.shelf.find(model)
        if weights is not None and weights.stand is Stand.LOADED and not weights.draining:
            self.work[model] = max(self.work.get(model, 0), self.now + takes_ns)
            self._use(model)
        else:
            self.waiting.setdefault(model, self.now)

    def _use(self, model: str) -> None:
        self.shelf.used(model, self.now)
        self.used[model] = self.now

    def idle(self) -> set[str]:
        return {
            w.model
            for w in self.shelf.holders()
            if w.stand is Stand.LOADED and self.work.get(w.model, 0) <= self.now and (w.draining or w.model not in self.waiting)
        }  # fmt: skip

    def turn(self) -> None:
        for model, at in list(self.loads.items()):
            if at <= self.now:
                del self.loads[model]
                self.shelf.loaded(model, self.sizes[model], SECOND, self.now)
        for model in self.unloads:
            self.shelf.unloaded(model)
        self.unloads = []
        for model in list(self.waiting):
            weights = self.shelf.find(model)
            if weights is not None and weights.stand is Stand.LOADED and not weights.draining:
                del self.waiting[model]
                self.work[model] = self.now + SECOND // 2
                self.served.append(model)
                self._use(model)
        idle = self.idle()
        wants = [
            Want(m, self.shelf.size_of(m, self.guesses[m]), at)
            for m, at in self.waiting.items()
            if self.shelf.find(m) is None
        ]
        plan = self.shelf.plan(wants, idle, self.now)
        for model in plan.unload:
            assert model in idle, "nobody who is at work is unloaded"
            spared = [m for m in idle - set(plan.unload) if self.sizes[m] >= self.sizes[model]]
            assert all(self.used[model] <= self.used[m] for m in spared), "the least recently used goes first"
        self.unloads = plan.unload
        self.loads |= dict.fromkeys(plan.load, self.now + SECOND)
        assert self.guesses is not self.sizes or not self.shelf.is_over


ASKS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3), st.integers(0, 20)), max_size=40)


SIZES = st.lists(st.integers(1, 10), min_size=5, max_size=5)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, budget=st.integers(10, 20), asks=ASKS)
def test_whoever_asks_for_what_the_budget_is_never_exceeded_and_everybody_is_served(
    sizes: list[int], budget: int, asks: list[tuple[str, int, int]]
) -> None:
    play = Play(budget, dict(zip("abcde", sizes, strict=True)))
    _serve_all(play, asks)
    assert not play.waiting


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, guesses=SIZES, budget=st.integers(10, 20), asks=ASKS)
def test_whatever_sizes_turn_out_to_be_everybody_is_served_and_the_budget_kept_in_the_end(
    sizes: list[int], guesses: list[int], budget: int, asks: list[tuple[str, int, int]]
) -> None:
    play = Play(budget, dict(zip("abcde", sizes, strict=True)), dict(zip("abcde", guesses, strict=True)))
    _serve_all(play, asks)
    assert not play.waiting
    for _ in range(60):
        play.now += SECOND // 4
        play.turn()
    assert not play.shelf.is_over and not play.shelf.is_draining


def _serve_all(play: Play, asks: list[tuple[str, int, int]]) -> None:
    for model, wait, takes in asks:
        play.now += wait * SECOND // 4
        play.ask(model, takes * SECOND // 4)
        play.turn()
    for _ in range(600):
        if not play.waiting:
            break
        play.now += SECOND // 4
        play.turn()


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(5, 10), min_size=5, max_size=5))
def test_models_that_never_run_out_of_work_take_turns(sizes: list[int]) -> None:
    play = Play(10, dict(zip("abcde", sizes, strict=True)))
    for _ in range(2000):
        for model in "abcde":
            play.ask(model, SECOND)
        play.turn()
        play.now += SECOND // 4
    rounds = {model: play.served.count(model) for model in "abcde"}
    assert min(rounds.values()) >= 10 and max(rounds.values()) <= 2 * min(rounds.values()) + 2, rounds
