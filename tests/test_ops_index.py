"""Vector indexes: nearest neighbours, persistence over processes, additions that race with searches, hostile input."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt.errors import BadRequest, NotFound, OutOfMemory, TaskFailed, Unavailable
from tests.bodies import ROOT, Machine, launch


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def some_vectors(count: int, dimension: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)


def index_files(machine: Machine) -> list[str]:
    return sorted(path.name for path in Path(machine.hello.state_dir).glob("ops/index/7/x/*"))


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_a_flat_index_finds_exactly_the_nearest(machine: Machine, metric: str) -> None:
    vectors, queries = some_vectors(300), some_vectors(5, seed=1)
    machine.run("index.build", {"name": "x", "kind": "flat", "metric": metric}, {"vectors": vectors})
    found = machine.run("search.vector", {"index": "x", "k": 4}, {"vectors": queries})
    if metric == "cosine":
        scale = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=1)[None]
        expected = -(queries @ vectors.T) / scale
    elif metric == "ip":
        expected = -(queries @ vectors.T)
    else:
        expected = ((queries[:, None] - vectors[None]) ** 2).sum(-1)
    order = expected.argsort(axis=1)[:, :4]
    assert found["ids"].tolist() == order.tolist()
    sign = 1 if metric == "l2" else -1
    assert np.allclose(found["scores"], sign * np.take_along_axis(expected, order, 1), atol=1e-4)


def test_hnsw_finds_nearly_all_that_flat_finds_and_returns_the_documents(machine: Machine) -> None:
    vectors, queries = some_vectors(2_000), some_vectors(50, seed=1)
    documents = [{"number": i, "note": None, "blob": bytes([i % 256])} for i in range(2_000)]
    for kind in ("hnsw", "flat"):
        built = machine.run("index.build", {"name": kind, "kind": kind}, {"vectors": vectors, "documents": documents})
        assert (built["count"], built["dimension"], built["kind"]) == (2_000, 16, kind)
    found = {
        kind: machine.run("search.vector", {"k": 10, "ef": 200}, {"vectors": queries, "index": {"index": kind}})
        for kind in ("hnsw", "flat")
    }
    common = sum(len(set(a) & set(b)) for a, b in zip(found["hnsw"]["ids"], found["flat"]["ids"], strict=True))
    assert common >= 490
    for ids, row in zip(found["hnsw"]["ids"], found["hnsw"]["documents"], strict=True):
        assert row == [documents[i] for i in ids]


def test_one_query_may_be_a_plain_vector_or_a_list_of_numbers(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": [[1, 0], [0, 1.5]], "documents": ["right", "up"]})
    found = machine.run("search.vector", {"index": "x", "k": 1}, {"vectors": [0.1, 1]})
    assert found["documents"] == [["up"]] and found["ids"].shape == (1, 1) and found["ids"].dtype == np.int64


def test_many_equal_vectors_are_all_found(machine: Machine) -> None:
    machine.run("index.build", {"name": "x", "m": 2}, {"vectors": np.ones((500, 4), np.float32)})
    found = machine.run("search.vector", {"index": "x", "k": 500}, {"vectors": np.ones(4, np.float32)})
    assert found["ids"].shape == (1, 500)
    assert all((document is None) for document in found["documents"][0])


def test_an_addition_is_found_and_running_it_again_adds_nothing(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(10), "documents": list(range(10))})
    more = {"vectors": some_vectors(3, seed=5), "documents": ["a", "b", "c"]}
    first = machine.run("index.add", {"name": "x"}, more)
    again = machine.run("index.add", {"name": "x"}, more)
    assert (first["first"], first["count"]) == (10, 13)
    assert again == first
    other_step = machine.run("index.add", {"name": "x"}, more, step="t")
    other_run = machine.run("index.add", {"name": "x"}, more, run=b"q" * 16)
    assert (other_step["count"], other_run["count"]) == (16, 19)
    found = machine.run("search.vector", {"index": "x", "k": 3}, {"vectors": more["vectors"][1]})
    assert found["documents"] == [["b", "b", "b"]]


def test_building_again_replaces_the_whole_index(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(10)})
    machine.run("search.vector", {"index": "x"}, {"vectors": some_vectors(1)})
    built = machine.run("index.build", {"name": "x", "metric": "l2"}, {"vectors": some_vectors(6, 8)})
    found = machine.run("search.vector", {"index": "x", "k": 6}, {"vectors": some_vectors(1, 8)})
    assert (built["count"], built["dimension"], found["metric"]) == (6, 8, "l2")


def test_only_two_generations_stay_on_disk_and_nobody_else_may_read_them(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})
    for seed in range(1, 6):
        machine.run("index.add", {"name": "x"}, {"vectors": some_vectors(2, seed=seed)})
    assert [name.partition("-")[0] for name in index_files(machine)] == ["00000005"] * 2 + ["00000006"] * 2 + [
        "manifest.json"
    ]
    folder = Path(machine.hello.state_dir) / "ops/index/7/x"
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_left_overs_of_a_writer_that_was_killed_are_cleared_away(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})
    folder = Path(machine.hello.state_dir) / "ops/index/7/x"
    (folder / "00000002-dead0000.faiss").write_bytes(b"half")
    (folder / "manifest.new").write_bytes(b"{")
    assert machine.run("search.vector", {"index": "x", "k": 4}, {"vectors": some_vectors(1)})["ids"].shape == (1, 4)
    assert machine.run("index.add", {"name": "x"}, {"vectors": some_vectors(1)})["count"] == 5
    assert not [name for name in index_files(machine) if "dead" in name or name.endswith(".new")]


def test_a_damaged_index_is_named_and_can_be_dropped_and_built_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})
    [stored] = tmp_path.glob("ops/index/7/x/*.faiss")
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    with pytest.raises(TaskFailed, match=r"index 'x' is damaged on disk; drop it") as caught:
        machine.run("search.vector", {"index": "x", "k": 1}, {"vectors": some_vectors(1)})
    assert str(tmp_path) not in str(caught.value)
    assert machine.run("index.drop", {"name": "x"}) == {"index": "x", "dropped": True}
    assert machine.run("index.drop", {"name": "x"}) == {"index": "x", "dropped": False}
    assert machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})["count"] == 4


def test_indexes_of_different_users_do_not_meet(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)}, uid=7)
    with pytest.raises(NotFound, match=r"there is no index 'x' of yours"):
        machine.run("search.vector", {"index": "x"}, {"vectors": some_vectors(1)}, uid=8)
    with pytest.raises(NotFound, match=r"make it with index.build"):
        machine.run("index.add", {"name": "x"}, {"vectors": some_vectors(1)}, uid=8)
    assert machine.run("index.drop", {"name": "x"}, uid=8)["dropped"] is False


BAD_VECTORS: list[tuple[Any, str]] = [
    (None, r"numbers of shape \[n, d\]"),
    ("text", r"numbers of shape \[n, d\]"),
    ([], "at least one vector"),
    ([[]], "at least one vector"),
    ([[1.0], [1.0, 2.0]], "rows of different lengths"),
    ([[1.0, float("nan")]], "vector 0 has a number that is NaN"),
    ([[0.0, 1.0], [float("inf"), 0.0]], "vector 1 has a number that is NaN, infinite"),
    ([[1e300, 1.0]], "too large for float32"),
    ([["a", "b"]], r"numbers of shape \[n, d\]"),
    ([[[1.0]]], r"numbers of shape \[n, d\]"),
]


@pytest.mark.parametrize(("vectors", "message"), BAD_VECTORS)
def test_bad_vectors_are_refused_by_name_and_change_nothing(machine: Machine, vectors: Any, message: str) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4, 2)})
    before = index_files(machine)
    for op, params in (
        ("index.build", {"name": "x"}),
        ("index.add", {"name": "x"}),
        ("search.vector", {"index": "x", "k": 1}),
    ):
        with pytest.raises(BadRequest, match=f"^s.inputs.vectors: .*{message}"):
            machine.run(op, params, {"vectors": vectors})
    assert index_files(machine) == before


def test_what_does_not_fit_the_index_is_refused_by_name(machine: Machine) -> None:
    machine.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})
    with pytest.raises(BadRequest, match=r"s.params.k: 5 is more than the 4 vectors in the index"):
        machine.run("search.vector", {"index": "x", "k": 5}, {"vectors": some_vectors(1)})
    for op, params in (("search.vector", {"index": "x", "k": 1}), ("index.add", {"name": "x"})):
        with pytest.raises(BadRequest, match=r"vectors of 3 numbers, and those of the index have 16"):
            machine.run(op, params, {"vectors": some_vectors(1, 3)})
    with pytest.raises(BadRequest, match=r"s.inputs.documents: has 1 entries for 4 vectors"):
        machine.run("index.build", {"name": "y"}, {"vectors": some_vectors(4), "documents": ["one"]})
    with pytest.raises(NotFound, match=r"there is no index 'y'"):
        machine.run("search.vector", {"index": "y"}, {"vectors": some_vectors(1)})


@pytest.mark.parametrize("name", ["../x", "..", ".", ".locks", "a/b", "a\\b", "x\n", "x\x00", "", "n" * 65, "é"])
def test_an_index_name_that_is_no_plain_word_is_refused(machine: Machine, name: str) -> None:
    for op in ("index.build", "index.add", "index.drop"):
        with pytest.raises(msgspec.ValidationError, match="name"):
            launch(op, {"name": name}, {"vectors": [[1.0]]})
    with pytest.raises(BadRequest, match=r"s.inputs.index"):
        machine.run("search.vector", {"k": 1}, {"vectors": [1.0], "index": {"index": name}})


@pytest.mark.parametrize(
    ("params", "index"), [({}, None), ({"index": "x"}, "x"), ({}, {"other": 1}), ({}, {"index": 5})]
)
def test_a_search_needs_one_index_and_says_so(machine: Machine, params: dict[str, Any], index: Any) -> None:
    with pytest.raises(BadRequest, match=r"s.inputs.index: (give the index either|names no index)"):
        machine.run("search.vector", {"k": 1, **params}, {"vectors": [1.0], "index": index})


def test_the_configured_limits_hold(tmp_path: Path) -> None:
    small = Machine(tmp_path, {"index.build": {"max_vectors": 5, "max_indexes": 1}, "index.add": {"max_vectors": 5}})
    small.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})
    with pytest.raises(OutOfMemory, match=r"would hold 6 vectors, and 5 are allowed"):
        small.run("index.add", {"name": "x"}, {"vectors": some_vectors(2)})
    with pytest.raises(OutOfMemory, match=r"you have 1 indexes, the most allowed: drop one"):
        small.run("index.build", {"name": "y"}, {"vectors": some_vectors(4)})
    small.run("index.build", {"name": "x"}, {"vectors": some_vectors(5)})
    wrong = Machine(tmp_path, {"index.build": {"max_vektors": 5}})
    with pytest.raises(Unavailable, match=r'\[ops."index.build"\] is wrong.*max_vektors'):
        wrong.run("index.build", {"name": "x"}, {"vectors": some_vectors(4)})


SCRIPT = """
import json, sys
import numpy as np
from pathlib import Path
from tests.bodies import Machine
machine = Machine(Path(sys.argv[1]))
draw = np.random.default_rng(int(sys.argv[3]))
if sys.argv[2] == "search":
    sizes = []
    print("ready", flush=True)
    for line in sys.stdin:
        found = machine.run("search.vector", {"index": "x", "k": 10}, {"vectors": draw.standard_normal((4, 16))})
        assert all(d == {"id": int(i)} for ids, ds in zip(found["ids"], found["documents"]) for i, d in zip(ids, ds))
        print(json.dumps(int(found["ids"].max())), flush=True)
else:
    print("ready", flush=True)
    for line in sys.stdin:
        rows = draw.standard_normal((5, 16)).astype(np.float32)
        added = machine.run("index.add", {"name": "x"}, {"vectors": rows, "documents": [None] * 5}, step=sys.argv[2])
        print(json.dumps([added["first"], added["count"]]), flush=True)
"""


def child(state: Path, role: str, seed: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(state), role, str(seed)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return process


def finish(process: subprocess.Popen[str], rounds: int) -> list[Any]:
    out, _ = process.communicate("\n" * rounds, timeout=60)
    assert process.returncode == 0
    first, *lines = out.splitlines()
    assert first == "ready"
    return [json.loads(line) for line in lines]


def test_an_index_outlives_the_process_that_built_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(
        "index.build", {"name": "x"}, {"vectors": some_vectors(50), "documents": [{"id": i} for i in range(50)]}
    )
    [largest] = finish(child(tmp_path, "search", 3), 1)
    assert 0 < largest < 50


def test_two_processes_add_while_a_third_searches_and_no_addition_is_lost(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(
        "index.build",
        {"name": "x", "kind": "flat"},
        {"vectors": some_vectors(50), "documents": [{"id": i} for i in range(50)]},
    )
    adders = [child(tmp_path, role, seed) for seed, role in enumerate(("first", "second"), 1)]
    for adder in adders:  # both begin at once, and the searches of this process run between
        assert adder.stdout is not None and adder.stdout.readline() == "ready\n"
        assert adder.stdin is not None
        adder.stdin.write("\n" * 20)
        adder.stdin.close()
    query = some_vectors(1, seed=9)
    spans: list[list[int]] = []
    for adder in itertools.cycle(adders):
        assert adder.stdout is not None
        line = adder.stdout.readline()
        if not line:
            break
        spans.append(json.loads(line))
        found = machine.run("search.vector", {"index": "x", "k": 50}, {"vectors": query})
        assert len(found["documents"][0]) == 50
    for adder in adders:
        rest = adder.stdout.read() if adder.stdout else ""
        spans += [json.loads(line) for line in rest.splitlines()]
        assert adder.wait(timeout=60) == 0
        if adder.stdout:
            adder.stdout.close()
    taken = sorted(number for first, count in spans for number in range(first, count))
    assert taken == list(range(50, 50 + 2 * 20 * 5))
    assert machine.run("search.vector", {"index": "x", "k": 250}, {"vectors": query})["ids"].shape == (1, 250)


def test_a_document_holds_whatever_a_step_may_return(machine: Machine) -> None:
    document = {"text": "ü" * 1000, "tensor": np.arange(6, dtype=np.int16).reshape(2, 3), "deep": [[[1.5, None, True]]]}
    machine.run("index.build", {"name": "x"}, {"vectors": [[1.0]], "documents": [document]})
    [[found]] = machine.run("search.vector", {"index": "x", "k": 1}, {"vectors": [1.0]})["documents"]
    assert found["text"] == document["text"] and found["deep"] == document["deep"]
    assert (found["tensor"] == document["tensor"]).all()
