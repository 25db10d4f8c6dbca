"""Compiling the kernels: whole or not at all, nothing twice, and a process that has one OpenMP runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hexrt.kernels import build  # noqa: E402
from hexrt.kernels.native import load, processor_words  # noqa: E402
from hexrt.kernels.native_attention import choose  # noqa: E402

HAS_COMPILER = True
try:
    build.find_compiler()
except build.BuildError:
    HAS_COMPILER = False
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler here")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of its own, with one small one."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@needs_compiler
def test_what_is_there_and_newer_than_its_sources_is_not_made_again(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "objects"
    made = build.build(out)
    assert [path.name for path in made] == [build.object_path(level).name for level in build.levels()]
    assert sorted(out.iterdir()) == sorted(made), "and no half-made file is left"
    first = [path.stat().st_ino for path in made]
    assert [path.stat().st_ino for path in build.build(out)] == first
    later = max(path.stat().st_mtime_ns for path in made) + 1
    os.utime(sources / "one.c", ns=(later, later))
    assert all(new.stat().st_ino != old for new, old in zip(build.build(out), first, strict=True))


@needs_compiler
def test_sources_that_do_not_compile_leave_the_older_objects(sources: Path, tmp_path: Path) -> None:
    made = build.build(tmp_path / "objects")
    before = [path.read_bytes() for path in made]
    (sources / "two.c").write_text("int two(void) { return }\n")
    with pytest.raises(build.BuildError, match=r"failed:\n.*two\.c"):
        build.build(tmp_path / "objects", force=True)
    assert [path.read_bytes() for path in made] == before
    assert sorted((tmp_path / "objects").iterdir()) == sorted(made)


def test_without_a_compiler_the_build_says_so_and_set_up_goes_on(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="there is no C compiler: install gcc"):
        build.build(tmp_path / "objects")
    monkeypatch.setenv("CC", "/nowhere/cc -O2")
    with pytest.raises(build.BuildError, match="/nowhere/cc cannot be run"):
        build.build(tmp_path / "objects")
    assert build.main(tmp_path / "objects") == 0
    assert "the plain torch ones are used" in capsys.readouterr().err


@needs_compiler
def test_our_sources_compile_without_a_warning_for_every_level() -> None:
    sources = sorted(map(str, build.SOURCES.glob("*.c")))
    for level in build.levels():
        command = [*build.find_compiler(), *build.COMMON, "-O0", "-fsyntax-only", *level.flags, "-Werror", *sources]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert not done.returncode, done.stderr


def test_a_processor_is_given_the_best_object_that_it_can_run() -> None:
    words = processor_words()
    able = [level.name for level in build.levels() if level.needs <= words]
    unable = [level for level in build.levels() if not level.needs <= words]
    if not build.object_path(build.levels()[-1]).exists():
        pytest.fail(load().why) if os.environ.get("CI") else pytest.skip(load().why)
    assert load().level == able[0] and load().threads
    for level in unable:
        assert load(level.name).library is None
        assert load(level.name).why.startswith("the processor has no ")


def test_without_objects_attention_runs_as_plain_torch_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    missing = load("", tmp_path)
    assert missing.library is None
    assert missing.why.startswith("the kernels are not compiled") or missing.why.startswith("no kernels are written")
    monkeypatch.setattr("hexrt.kernels.native_attention.load", lambda: missing)
    kernel, why = choose(torch.float32, torch.float32, 64)
    assert (kernel.name, why) == ("plain torch", missing.why)
    (tmp_path / build.object_path(build.levels()[-1]).name).write_bytes(b"not an object")
    load.cache_clear()
    broken = load("", tmp_path)
    assert broken.library is None and "cannot be loaded" in broken.why and str(tmp_path) not in broken.why


CHILD = """
import json, torch
from hexrt.kernels.attention import PassTensors
from hexrt.kernels.native_attention import NativeAttention
torch.set_num_threads(2)
torch.mm(torch.ones(512, 512), torch.ones(512, 512))
short = torch.int32
tensors = PassTensors(torch.arange(15, 512, 16), torch.arange(32, dtype=short)[:, None],
                      torch.arange(33, dtype=short), torch.full((32,), 16, dtype=short))
out = torch.empty(32, 4, 64)
NativeAttention()(torch.ones(32, 4, 64), torch.ones(32, 2, 64), torch.ones(32, 2, 64), torch.zeros(32, 1, 2, 16, 2, 64), 0,
                  tensors, scale=1.0, out=out)
names = {line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps([sorted(n for n in names if "omp" in n and ".so" in n and "hexrt" not in n), out.mean().item()]))
"""


def test_a_process_that_computed_with_both_has_one_openmp_runtime() -> None:
    if load().library is None:
        pytest.skip(load().why)
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    runtimes, mean = json.loads(done.stdout)
    assert len(runtimes) == 1, runtimes
    assert mean == pytest.approx(1.0, abs=1e-4)  # one key of ones among zeros, with a score of 64
