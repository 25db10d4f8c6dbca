"""The batcher and a real host on a real model: the tokens are those of plain transformers, however the sequences were run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hexrt.llm.batch import Emitted, Prefilled, Refused, SequenceRequest  # noqa: E402
from hexrt.llm.tokenise import Vocabulary, load_vocabulary, tokenise  # noqa: E402
from hexrt.ops.llm import Continued  # noqa: E402
from hexrt.protocol.host import (  # noqa: E402
    DEVICE,
    BindPages,
    Chunk,
    Chunked,
    ChunkSequence,
    Copied,
    Copy,
    HostFailed,
    LoadModel,
    Piece,
    Release,
    Sampling,
    Stats,
)
from tests.llm_support import NAME, HostProcess, Service, greedy, model_folder  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # the model is loaded twice and answered for twice before the first test

ANSWER = 12
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write one line about mountains 🏔 in Spanish.",
    "Sum up in a sentence: " + "The river rises in the hills and runs through seven towns to the sea. " * 8,
    "Count from one to five.",
)


@pytest.fixture(scope="session")
def folder() -> Path:
    return model_folder()


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(folder, NAME)


@pytest.fixture(scope="session")
def prompts(vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    return [tuple(tokenise(vocabulary, NAME, False, {"prompt": question})) for question in QUESTIONS]


@pytest.fixture(scope="session")
def host(folder: Path) -> Iterator[HostProcess]:
    with HostProcess(folder.parent) as process:
        yield process


@pytest.fixture(scope="session")
def facts(host: HostProcess, folder: Path) -> dict[str, Any]:
    return host.load(NAME, folder.name)


@pytest.fixture(scope="session")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[tuple[int, float]]]:
    """For each prompt the greedy tokens of transformers' own generate, each with its lead over the second best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads spin, which beside other tests costs more than the second one gains
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=ANSWER,
            do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=2,
        )  # fmt: skip
        leads = [float(best[0] - best[1]) for best in (logits[0].topk(2).values for logits in out.logits)]
        answers.append(list(zip(out.sequences[0][len(prompt) :].tolist(), leads, strict=True)))
    torch.set_num_threads(threads)
    return answers


def assert_same(ids: tuple[int, ...], expected: list[tuple[int, float]]) -> None:
    """Equal up to the first near tie, where fp32 may go either way."""
    for position, (token, lead) in enumerate(expected):
        if lead <= 1e-3:
            return
        assert ids[position] == token, f"token {position} of {ids}"
    assert len(ids) == len(expected)


def requests(prompts: list[tuple[int, ...]], sampling: Sampling) -> list[SequenceRequest]:
    return [SequenceRequest(key, prompt, sampling) for key, prompt in enumerate(prompts)]


@pytest.fixture(scope="session")
def batched(host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]]) -> dict[Any, tuple[int, ...]]:
    """Our answers to all prompts at once."""
    answers = Service(host, facts).run(*requests(prompts, greedy(ANSWER)))
    return {key: ended.ids for key, ended in answers.items()}


def test_a_batch_gives_the_tokens_of_transformers(
    batched: dict[Any, tuple[int, ...]], expected: list[list[tuple[int, float]]]
) -> None:
    for key, answer in enumerate(expected):
        assert_same(batched[key], answer)


def test_a_sequence_alone_gives_what_it_gave_in_the_batch(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], expected: list[list[tuple[int, float]]]
) -> None:
    for key in (0, 4):
        alone = Service(host, facts).run(SequenceRequest(key, prompts[key], greedy(ANSWER)))
        assert_same(alone[key].ids, expected[key])


@pytest.mark.parametrize(("budget", "passes", "frames"), [(7, 3, 0), (64, 1, 0), (512, 7, 16)])
def test_slices_passes_and_a_small_arena_change_no_token(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]],
    expected: list[list[tuple[int, float]]], budget: int, passes: int, frames: int,
) -> None:  # fmt: skip
    service = Service(host, facts, frames, budget, passes)
    waited = 0
    chosen = [2, 4, 0, 3] if frames else [0, 2, 5]
    for key in chosen:
        service.engine.add(SequenceRequest(key, prompts[key], greedy(ANSWER)), 0)
    while not service.engine.is_idle:
        service.turn()
        waited = max(waited, service.engine.statistics().waiting)
    answers = service.run()
    for key in chosen:
        assert_same(answers[key].ids, expected[key])
    assert bool(waited) == bool(frames)
    assert service.engine.statistics().frames_free == (frames or facts["frames"])


def test_sequences_that_come_late_join_without_changing_a_token(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], expected: list[list[tuple[int, float]]]
) -> None:
    service = Service(host, facts, passes=2)
    for key in (0, 1, 2):
        service.engine.add(SequenceRequest(key, prompts[key], greedy(ANSWER)), 0)
        service.turn()
    answers = service.run()
    for key in (0, 1, 2):
        assert_same(answers[key].ids, expected[key])


def test_a_conversation_goes_on_from_its_pages_with_the_tokens_of_a_full_recompute(
    host: HostProcess, facts: dict[str, Any], vocabulary: Vocabulary, prompts: list[tuple[int, ...]]
) -> None:
    service = Service(host, facts)
    first = service.run(SequenceRequest("first", prompts[0], greedy(40), retain=True))["first"]
    assert first.text == "The capital of France is Paris."
    assert first.finish == "stop"
    prior = Continued(prompts[0] + first.ids, len(prompts[0]))
    asked = {
        name: tuple(tokenise(vocabulary, NAME, False, {"prompt": text, "continue_from": prior}))
        for name, text in (("spain", "And of Spain?"), ("river", "Which river is there?"))
    }
    assert all(ids[: len(prior.ids)] == prior.ids for ids in asked.values())
    shared = service.run(*(SequenceRequest(k, ids, greedy(8), parent="first") for k, ids in asked.items()))
    assert service.engine.statistics().shared_tokens == 2 * (len(prior.ids) - 1), "the page that is partly full too"
    service.engine.release("first")
    service.engine.check_integrity()
    assert service.engine.statistics().frames_free == facts["frames"]
    whole = Service(host, facts).run(*(SequenceRequest(k, ids, greedy(8)) for k, ids in asked.items()))
    assert {k: shared[k].ids for k in asked} == {k: whole[k].ids for k in asked}
    assert "Madrid" in shared["spain"].text


def test_a_prefill_serves_several_decodes(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], expected: list[list[tuple[int, float]]]
) -> None:
    service = Service(host, facts)
    service.run(SequenceRequest("prefill", prompts[0], None, retain=True))
    assert [type(o) for o in service.outcomes] == [Prefilled]
    answers = service.run(*(SequenceRequest(i, prompts[0], greedy(ANSWER), parent="prefill") for i in range(3)))
    for key in range(3):
        assert_same(answers[key].ids, expected[0])
    assert service.engine.statistics().shared_tokens == 3 * (len(prompts[0]) - 1)


def test_cancelling_in_mid_decode_frees_all_pages_and_leaves_the_others(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], expected: list[list[tuple[int, float]]]
) -> None:
    service = Service(host, facts, passes=2)
    service.engine.add(SequenceRequest("victim", prompts[1], greedy(400, ignore_eos=True)), 0)
    service.engine.add(SequenceRequest("other", prompts[0], greedy(ANSWER)), 0)
    while not service.emitted("victim"):
        service.turn()
    service.engine.cancel("victim")
    answers = service.run()
    assert "victim" not in answers
    assert_same(answers["other"].ids, expected[0])
    assert service.engine.statistics().frames_free == facts["frames"]


def test_a_stop_string_cuts_the_text_and_is_never_shown(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]]
) -> None:
    service = Service(host, facts)
    ended = service.run(SequenceRequest("a", prompts[0], greedy(40, stop=("of Spain", "is Par"))))["a"]
    assert (ended.text, ended.finish) == ("The capital of France ", "stop")
    assert "".join(e.text for e in service.emitted("a")) == ended.text


def test_the_text_in_pieces_is_the_text_of_all_ids(
    host: HostProcess, facts: dict[str, Any], vocabulary: Vocabulary
) -> None:
    prompt = tuple(tokenise(vocabulary, NAME, True, {"prompt": "日本, été, 🙂, " * 6}))
    service = Service(host, facts, passes=1)
    ended = service.run(SequenceRequest("a", prompt, greedy(14, ignore_eos=True)))["a"]
    assert ended.text == vocabulary.tokeniser.decode(ended.ids, skip_special_tokens=True)
    assert "".join(e.text for e in service.emitted("a")) == ended.text
    assert not ended.text.isascii()


def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_again(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]]
) -> None:
    def run(seeds: list[int]) -> dict[Any, tuple[int, ...]]:
        wanted = [SequenceRequest(s, prompts[1], Sampling(0.9, 40, 0.95, s, (), 8, True)) for s in seeds]
        return {key: ended.ids for key, ended in Service(host, facts).run(*wanted).items()}

    batch = run([11, 12, 13])
    assert run([12]) == {12: batch[12]}
    assert len(set(batch.values())) == 3


@pytest.mark.parametrize("answered", [1, 5, ANSWER])
def test_a_restart_goes_on_with_the_same_tokens_and_text(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], answered: int
) -> None:
    sampling = Sampling(0.8, 0, 0.9, 5, ("never",), ANSWER, True)
    service = Service(host, facts, passes=1)
    whole = service.run(SequenceRequest("a", prompts[2], sampling))["a"]
    before = [emitted for emitted in service.emitted("a") if emitted.first < answered]
    text = "".join(emitted.text for emitted in before)
    again = Service(host, facts)
    ended = again.run(SequenceRequest("a", prompts[2], sampling, whole.ids[:answered], answered_text=text))["a"]
    assert (ended.ids, ended.text, ended.finish) == (whole.ids, whole.text, "length")


def test_a_bad_token_id_ends_its_own_sequence_alone(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], expected: list[list[tuple[int, float]]]
) -> None:
    service = Service(host, facts)
    service.engine.add(SequenceRequest("bad", (1, 2, 10**6), greedy(4)), 0)
    service.engine.add(SequenceRequest("good", prompts[0], greedy(ANSWER)), 0)
    while not service.engine.is_idle:
        service.turn()
    refused = [o for o in service.outcomes if isinstance(o, Refused)]
    assert [o.key for o in refused] == ["bad"]
    assert "outside the vocabulary of 49152" in refused[0].error.message
    assert_same(tuple(t for e in service.emitted("good") for t in e.ids), expected[0])


def chunk_of(host: HostProcess, passes: int, sequence: ChunkSequence) -> Chunked:
    report = host.ask(Chunk(host.command(), NAME, passes, (sequence,)))
    assert isinstance(report, Chunked)
    return report


def test_copied_frames_carry_a_sequence_on_and_a_stale_binding_is_refused(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]], batched: dict[Any, tuple[int, ...]]
) -> None:
    prompt, pages = prompts[1], len(prompts[1]) // 16 + 2
    old, new = tuple(range(3, 3 + pages)), tuple(range(40, 40 + pages))
    host.send([BindPages(NAME, 900, 0, old, 5)])
    start = chunk_of(host, 3, ChunkSequence(900, 0, prompt, True, greedy(ANSWER))).tokens[0].ids
    assert start == batched[1][:3]
    size = facts["page_bytes"]
    copied = host.ask(Copy(host.command(), (Piece(DEVICE, 3 * size, DEVICE, 40 * size, size, pages),)))
    assert isinstance(copied, Copied)
    assert (copied.bytes, copied.faults) == (pages * size, ())
    assert host.ask(BindPages(NAME, 900, 0, (0, 0), 4)) == Stats({f"{NAME}_stale_bindings": 1.0})
    host.send([BindPages(NAME, 900, 0, new, 6), BindPages(NAME, 901, 0, old, 1)])
    other = chunk_of(host, 1, ChunkSequence(901, 0, tuple(reversed(prompt)), False))  # writes over the old frames
    assert other.tokens[0].ids == ()
    rest = chunk_of(host, 3, ChunkSequence(900, len(prompt) + 2, (), False)).tokens[0].ids
    assert start + rest == batched[1][:6]
    host.send([Release(NAME, 900), Release(NAME, 901)])


def test_a_chunk_that_does_not_fit_its_sequence_is_refused_by_name(host: HostProcess, facts: dict[str, Any]) -> None:
    host.send([BindPages(NAME, 910, 0, (0,), 1)])
    first = chunk_of(host, 1, ChunkSequence(910, 0, (5,) * 17, True, greedy(4))).tokens[0]
    assert first.finish == "error: 1 pages are bound, too few for token 0"
    unknown = chunk_of(host, 1, ChunkSequence(999, 0, (5,), True, greedy(4))).tokens[0]
    assert unknown.finish == "error: the host knows no sequence 999"
    host.send([Release(NAME, 910)])


@pytest.mark.parametrize(
    ("path", "words"),
    [("nowhere", "'other' does not exist"), ("../.models/absent", "does not exist")],
)
def test_a_model_that_is_not_there_is_named_without_its_path(host: HostProcess, path: str, words: str) -> None:
    report = host.ask(LoadModel(host.command(), "other", path, "float32", 16))
    assert isinstance(report, HostFailed)
    assert words in report.error.message
    assert "/" not in report.error.message


def test_a_chunk_for_a_model_that_is_not_loaded_fails_by_name(host: HostProcess) -> None:
    report = host.ask(Chunk(host.command(), "other", 1, ()))
    assert isinstance(report, HostFailed)
    assert report.error.kind == "not_found"


def test_what_is_emitted_comes_in_order_and_once(
    host: HostProcess, facts: dict[str, Any], prompts: list[tuple[int, ...]]
) -> None:
    service = Service(host, facts, passes=3)
    ended = service.run(SequenceRequest("a", prompts[2], greedy(ANSWER)))["a"]
    emitted = service.emitted("a")
    assert [type(o) for o in service.outcomes][:2] == [Prefilled, Emitted]
    assert [e.first for e in emitted] == [0, 3, 6, 9]
    assert tuple(token for e in emitted for token in e.ids) == ended.ids


def test_a_model_computes_with_the_threads_that_the_config_says_whatever_plain_bodies_use(
    facts: dict[str, Any],
) -> None:
    assert facts["facts"]["threads"] == 2
