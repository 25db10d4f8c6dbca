"""Nothing changes one output token: with exact numerics the answers are those of plain transformers, alone and in batches of random arrival, in
slices and passes of any size, over shared pages, preempted, swapped and computed anew, after `kill -9`, and with weights that come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hexrt.client import Client  # noqa: E402
from hexrt.core import TokenLogprob  # noqa: E402
from hexrt.devices.places import anonymous  # noqa: E402
from hexrt.llm.batch import Ended, SequenceRequest  # noqa: E402
from hexrt.llm.engine_model import PagedModel  # noqa: E402
from hexrt.protocol.messages import Update  # noqa: E402
from hexrt.workflow.build import WorkflowBuilder  # noqa: E402
from hexrt.workflow.model import Workflow  # noqa: E402
from tests.exact import PAGE, Case, Judge, Reader, cases  # noqa: E402
from tests.llm_support import NAME, HostProcess, Service, model_config, model_folder  # noqa: E402
from tests.running import Running, wait_gone  # noqa: E402
from tests.seeds import seeds  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the model is loaded by each host
LONG = [pytest.mark.campaign, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder()


@pytest.fixture(scope="module")
def judge(folder: Path) -> Iterator[Judge]:
    judge = Judge(folder)
    yield judge
    print(
        f"\n{judge.positions} positions, {judge.near} near ties, {judge.unsure} answers of which float32 is not sure,"
    )
    print(f"log-probabilities off by {judge.worst:.2g} at most, logits by {judge.worst_logits:.2g}")


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[HostProcess]:
    with HostProcess(folder.parent) as process:
        yield process


@pytest.fixture(scope="module")
def facts(host: HostProcess, folder: Path) -> dict[str, Any]:
    return host.load(NAME, folder.name)


@pytest.fixture(
    scope="module", params=[(8, 80, 8), pytest.param((50, 1000, 20), marks=LONG)], ids="{0[0]}-prompts".format
)
def asked(request: pytest.FixtureRequest, folder: Path) -> list[Case]:
    return cases(folder, *request.param)


def few(asked: list[Case], count: int) -> list[Case]:
    """So many of the short form's, spread over all lengths; all of the long form's."""
    return asked if len(asked) > 20 else asked[:: -(-len(asked) // count)]


# --- one model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [(50, 1000, 20)], indirect=True, ids=["50-prompts"])
@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_logits_of_the_whole_vocabulary_are_those_of_transformers_in_packed_passes_of_any_slices(
    folder: Path, asked: list[Case], judge: Judge
) -> None:
    chance = random.Random(1)
    plain = [case for case in asked if case.key.endswith("greedy")]
    frames = chance.sample(range(1000), 1000)
    model = PagedModel(NAME, folder, "float32", memoryview(anonymous(1000 * 720 << 10)), PAGE, threads=1)
    readers = [Reader(case, [frames.pop() for _ in range(case.pages)]) for case in plain]
    going = readers
    while going:
        some = chance.sample(going, min(len(going), chance.randint(1, 24)))
        pairs = [(reader, reader.slice(chance.choice([1, 7, 64, 400]))) for reader in some]
        pairs.sort(key=lambda pair: len(pair[1].ids) > 1)
        logits, _ = model.run_over([row for _, row in pairs], model.arena)
        for reader, found in zip([reader for reader, row in pairs if row.draws], logits, strict=True):
            reader.take(found)
        for reader in [reader for reader in going if reader.is_done]:
            judge.check_logits(reader)
        going = [reader for reader in going if not reader.is_done]


# --- a host and a batcher -------------------------------------------------------------------------------------------------


def serve(
    service: Service, asked: Sequence[Case], chance: random.Random, arrival: float = 1.0, preempt: float = 0.0,
    root: bytes = b"",
) -> dict[Any, Ended]:  # fmt: skip
    """Answers to requests of random priority that come in random order; between any two chunks each may be stopped."""
    waiting = chance.sample(list(asked), len(asked))
    service.outcomes.clear()
    while waiting or not service.engine.is_idle:
        while waiting and (service.engine.is_idle or chance.random() < arrival):
            case = waiting.pop()
            priority = chance.choice([0, 0, 1, 5])
            request = SequenceRequest(case.key, case.prompt, case.sampling, priority=priority, root=root)
            service.engine.add(request, 0)
        if chance.random() < preempt and (running := [key for key, _ in service.engine.holdings()]):
            service.engine.preempt(chance.choice(running))
        service.turn()
    return service.run()


def judge_all(judge: Judge, asked: Sequence[Case], answers: dict[Any, Ended]) -> None:
    assert len(answers) == len(asked)
    for case in asked:
        judge.check(case, answers[case.key].ids, answers[case.key].logprobs)


def test_each_alone_gives_the_tokens_of_transformers(
    host: HostProcess, facts: dict[str, Any], asked: list[Case], judge: Judge
) -> None:
    for case in few(asked, 4):
        judge_all(judge, [case], serve(Service(host, facts), [case], random.Random(0)))


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_batches_of_random_arrival_give_the_same(
    host: HostProcess, facts: dict[str, Any], asked: list[Case], judge: Judge, seed: int
) -> None:
    judge_all(judge, asked, serve(Service(host, facts), asked, random.Random(seed), 0.7))


SIZES = [(passes, budget) for passes in (1, 7, 64) for budget in (1, 7, 64)]


@pytest.mark.parametrize(
    ("passes", "budget"), [(7, 7), *(pytest.param(*s, marks=LONG) for s in SIZES if s != (7, 7))]
)  # fmt: skip
def test_passes_and_slices_of_any_size_give_the_same(
    host: HostProcess, facts: dict[str, Any], asked: list[Case], judge: Judge, passes: int, budget: int
) -> None:
    chosen = [case for case in few(asked, 6) if budget > 1 or case.key.endswith("greedy")]
    service = Service(host, facts, budget=budget, passes=passes)
    judge_all(judge, chosen, serve(service, chosen, random.Random(passes * budget)))


@pytest.mark.parametrize("seed", seeds(1, 5))
def test_sequences_stopped_at_random_and_computed_anew_for_want_of_room_give_the_same(
    host: HostProcess, facts: dict[str, Any], asked: list[Case], judge: Judge, seed: int
) -> None:
    chosen = few(asked, 6)
    frames = max(case.pages for case in chosen) + 2
    service = Service(host, facts, frames, budget=64, passes=2)
    judge_all(judge, chosen, serve(service, chosen, random.Random(seed), 0.6, preempt=0.5))
    found = service.engine.statistics()
    assert found.preemptions > 2
    assert found.prompt_tokens > sum(len(case.prompt) for case in chosen), "nothing was computed twice"
    assert found.frames_free == frames


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_beginnings_that_are_shared_give_the_same(
    host: HostProcess, facts: dict[str, Any], asked: list[Case], judge: Judge, seed: int
) -> None:
    service = Service(host, facts, budget=64, passes=3)
    chance = random.Random(seed)
    chosen = [case for case in asked if len(case.prompt) > PAGE]
    judge_all(judge, chosen, serve(service, chosen, chance, 0.6, preempt=0.1, root=b"all"))
    shared = service.engine.statistics().shared_tokens
    assert shared > 0
    judge_all(judge, chosen, serve(service, chosen, chance, root=b"all"))
    found = service.engine.statistics().shared_tokens - shared
    fit = sum(case.pages for case in chosen) <= facts["frames"]  # else some were given up meanwhile
    assert found >= (sum((len(case.prompt) - 1) // PAGE * PAGE for case in chosen) if fit else 1)
    service.engine.pages.prefixes.clear()
    assert service.engine.statistics().frames_free == facts["frames"]


# --- a daemon -------------------------------------------------------------------------------------------------------------


def workflow(case: Case, model: str, priority: int) -> Workflow:
    """The case's answer, by a step whose prompt is ids."""
    w = WorkflowBuilder(case.key, priority=priority)
    given = msgspec.structs.asdict(case.sampling)
    params = {name: value for name, value in given.items() if name != "grammar"} | {"model": model, "numerics": "exact"}
    prefix = {"ids": list(case.prompt), "prompt_tokens": len(case.prompt)}
    w.output("answer", w.step("llm.decode", id="say", inputs={"prefix": prefix}, params=params, timeout_s=7000))
    return w.build()


def speaks(client: Client, run: bytes, words: int = 1) -> None:
    """Returns once tokens of the run came so many times, or it has ended."""
    for update in client.watch(run):
        words -= isinstance(update, Update) and update.event == "tokens"
        if words <= 0:
            return


def submit(
    client: Client, asked: Sequence[Case], chance: random.Random, waves: int, models: Sequence[str] = ("small",)
) -> dict[bytes, Case]:
    """In random order and waves; each is more urgent than the one before, and comes when that has begun to answer."""
    order = chance.sample(list(asked), len(asked))
    runs: dict[bytes, Case] = {}
    for wave in range(waves):
        mine = order[wave::waves]
        new = [client.submit(workflow(c, models[wave % len(models)], wave * 2 + chance.randrange(3))) for c in mine]
        runs |= zip(new, mine, strict=True)
        if wave < waves - 1:
            speaks(client, chance.choice(new))
    return runs


def judge_runs(client: Client, runs: dict[bytes, Case], judge: Judge) -> None:
    for run, case in runs.items():
        answer: Any = client.result(run).check().outputs["answer"]
        logprobs = msgspec.convert(answer["logprobs"], list[TokenLogprob])
        assert tuple(answer["ids"][: len(case.prompt)]) == case.prompt
        judge.check(case, answer["ids"][len(case.prompt) :], logprobs)


def tight(asked: Sequence[Case], host_mib: int, nvme_mib: int, share: str = "off") -> str:
    """A device that holds the largest sequence and hardly more."""
    arena_mib = -(-(max(case.pages for case in asked) + 4) * 720 // 1024)
    return model_config(
        f"[cpu]\narena_mib = {arena_mib}\npasses = 3\ntoken_budget = 64\n"
        f"[memory]\nhost_mib = {host_mib}\nnvme_mib = {nvme_mib}\n[llm]\nshare_prefixes = '{share}'\n"
    )


@pytest.mark.parametrize("kills", [1, *(pytest.param(n, marks=LONG) for n in (0, 4))])
@pytest.mark.parametrize(
    ("host_mib", "nvme_mib"), [(8, 256), *(pytest.param(*s, marks=LONG) for s in ((256, 0), (8, 16)))]
)
def test_with_hardly_any_room_and_the_daemon_killed_in_the_middle_the_answers_are_the_same(
    tmp_path: Path, asked: list[Case], judge: Judge, kills: int, host_mib: int, nvme_mib: int
) -> None:
    chance = random.Random(kills)
    share = chance.choice(["off", "user"])
    daemon = Running(tmp_path, tight(asked, host_mib, nvme_mib, share)).start()
    with daemon.client() as client:
        runs = submit(client, asked, chance, 4)
        last = list(runs)[-1]
        speaks(client, last)
        found = client.statistics()
        assert found["cpu:0_small_preemptions"] > 0 and found["memory_stored_pages"] > 0, found
    for _ in range(kills):
        hosts = daemon.hosts()
        daemon.kill()
        wait_gone(hosts)
        daemon.start()
        with daemon.client() as client:
            speaks(client, chance.choice(list(runs)), 2)
    with daemon, daemon.client() as client:
        judge_runs(client, runs, judge)
        assert client.statistics()["memory_faults"] == 0


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_models_that_take_turns_in_too_little_memory_for_both_give_the_same(
    tmp_path: Path, asked: list[Case], judge: Judge
) -> None:
    more = f'[models.again]\npath = "{NAME}"\n[cpu]\nweights_mib = 900\narena_mib = 256\n'
    with Running(tmp_path, model_config(more)) as daemon, daemon.client() as client:
        runs = submit(client, asked, random.Random(0), 6, ("small", "again"))
        judge_runs(client, runs, judge)
        states = {m.name: m.places[0].state for m in client.models().models}
        assert sorted(states.values()) == ["loaded", "unloaded"]
        answered = {m.name: m.places[0].answer_tokens for m in client.models().models}
        assert all(answered.values()), answered
