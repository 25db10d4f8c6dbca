"""`code.python` against programs that mean harm, that fail, and that are merely odd; all in the real sandbox."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from hexrt.errors import BadRequest, TaskFailed, TimedOut, Unavailable
from hexrt.ops._sandbox import own_uid
from hexrt.ops._sandbox_inside import HELLO
from hexrt.ops._sandbox_watch import DRAIN_BYTES, Limits, Watch, is_plain_name
from hexrt.ops._seccomp import build
from hexrt.ops.code_python import OP, Params, run
from hexrt.ops.spec import StepContext

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    (folder / "secret").write_text("secret")
    return folder


def context(state_dir: Path, settings: dict[str, Any] | None = None) -> StepContext:
    return StepContext(b"r" * 16, "program", 0, 1, os.getuid(), "pool:0", 100.0, str(state_dir), "", settings or {})


@pytest.fixture
def program(state_dir: Path) -> Iterator[Run]:
    """Runs a program and, at the end of the test, makes sure that nothing of it is left."""

    def start(
        code: str, settings: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None, **params: Any
    ) -> Any:
        return run(context(state_dir, settings), Params(**params), {"code": code, **(inputs or {})})

    yield start
    left = [p for p in psutil.process_iter(["name", "uids", "status"]) if is_of_sandbox(p)]
    assert not left


def is_of_sandbox(process: psutil.Process) -> bool:
    if process.info["status"] == psutil.STATUS_ZOMBIE:
        return False
    uid = own_uid()
    return bool(process.info["uids"].real == uid) if uid else process.info["name"] == "bwrap"


# --- what it is for ----------------------------------------------------------------------------------------------


def test_a_program_gets_its_inputs_and_hands_back_what_it_printed_and_wrote(program: Run) -> None:
    code = """
import sys, helper, pathlib
print(sys.stdin.read().upper(), sys.argv[1:], helper.NAME)
print("to stderr", file=sys.stderr)
pathlib.Path("out/deep").mkdir()
pathlib.Path("out/deep/table.bin").write_bytes(pathlib.Path("data/in.bin").read_bytes()[::-1])
"""
    files = {"helper.py": "NAME = 'helped'", "data/in.bin": b"\x00\x01\xff"}
    output = program(code, inputs={"stdin": "ünï", "files": files, "arguments": ["a b", ""]})
    assert output["stdout"] == "ÜNÏ ['a b', ''] helped\n"
    assert output["stderr"] == "to stderr\n"
    assert output["files"] == {"deep/table.bin": b"\xff\x01\x00"}
    assert (output["exit_code"], output["stopped"], output["timed_out"], output["truncated"]) == (0, "", False, False)
    assert 0 < output["seconds"] < 10


def test_threads_processes_and_queues_work_within_the_limits(program: Run) -> None:
    code = """
import multiprocessing, subprocess, threading
def child(queue): queue.put("child")
if __name__ == "__main__":
    queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=child, args=(queue,))
    process.start(); print(queue.get()); process.join()
    thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
    print(subprocess.run(["echo", "shell"], capture_output=True, text=True).stdout, end="")
"""
    assert program(code)["stdout"] == "child\nthread\nshell\n"


def test_a_failing_program_fails_the_step_with_the_last_line_of_its_complaint(program: Run) -> None:
    with pytest.raises(TaskFailed, match=r"exit code 1: ZeroDivisionError: division by zero") as caught:
        program("print('so far')\n1 / 0")
    assert caught.value.where == "program"


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit()", 0), ("sys.exit(7)", 7), ("sys.exit('no')", 1), ("os._exit(200)", 200)]
)
def test_an_exit_code_is_handed_on_where_it_is_not_checked(program: Run, ending: str, code: int) -> None:
    assert program(f"import os, sys; {ending}", check=False)["exit_code"] == code


def test_a_crash_names_its_signal(program: Run) -> None:
    with pytest.raises(TaskFailed, match="killed by SIGSEGV"):
        program("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_program_can_be_taken_out_of_markdown(program: Run) -> None:
    text = "Sure:\n```python\nprint(6 * 7)\n```\nThat prints 42.\n```\nprint('second')\n```"
    assert program(text, from_markdown=True)["stdout"] == "42\n"
    assert program("print('bare')", from_markdown=True)["stdout"] == "bare\n"


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["", " \n\t", "```python\n\n```"])
def test_an_empty_program_is_refused(program: Run, code: str) -> None:
    with pytest.raises(BadRequest, match=r"program\.inputs\.code: there is no program"):
        program(code, from_markdown=True)


def test_a_nul_in_the_program_is_a_syntax_error_of_the_program(program: Run) -> None:
    with pytest.raises(TaskFailed, match="null bytes"):
        program("print(1)\0")


def test_a_program_of_two_mebibytes_is_refused(program: Run) -> None:
    with pytest.raises(BadRequest, match="more than the 1048576 allowed"):
        program("#" * (2 << 20))


BAD_NAMES = [
    "",
    "/etc/x",
    "../x",
    "a/../../x",
    "a//b",
    "./x",
    "x/",
    "a\0b",
    "a\nb",
    "program.py",
    "n" * 300,
    "/".join("a" * 40),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_cannot_be_put_elsewhere(program: Run, name: str) -> None:
    with pytest.raises(BadRequest, match=r"program\.inputs\.files"):
        program("1", inputs={"files": {name: b"x"}})


def test_files_that_exclude_each_other_are_named_so(program: Run) -> None:
    with pytest.raises(BadRequest, match=r"program\.inputs\.files"):
        program("1", inputs={"files": {"a": b"x", "a/b": b"y"}})


def test_files_of_a_wrong_type_or_too_large_are_refused(program: Run) -> None:
    with pytest.raises(BadRequest, match="int"):
        program("1", inputs={"files": {"a": 5}})
    with pytest.raises(BadRequest, match="disk_mib"):
        program("1", inputs={"files": {"a": b"x" * (2 << 20)}}, disk_mib=1)
    with pytest.raises(BadRequest, match=r"inputs\.stdin"):
        program("1", inputs={"stdin": [1]})
    with pytest.raises(BadRequest, match="NUL"):
        program("1", inputs={"arguments": ["a\0b"]})


@pytest.mark.parametrize("field", ["timeout_s", "memory_mib", "processes", "disk_mib", "output_kib", "result_mib"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, -1e300, 1e300, "5", None])
def test_a_limit_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode({field: value}), type=OP.params)


def test_a_limit_above_the_daemons_is_refused(program: Run) -> None:
    with pytest.raises(BadRequest, match=r"program\.params\.memory_mib: is more than the 100"):
        program("1", settings={"max_memory_mib": 100}, memory_mib=128)


def test_an_unknown_setting_is_named(program: Run) -> None:
    with pytest.raises(Unavailable, match="max_memory"):
        program("1", settings={"max_memory": 100})


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)", "import signal; signal.pause()"])
def test_a_program_that_does_not_end_is_ended(program: Run, code: str) -> None:
    with pytest.raises(TimedOut, match=r"longer than 0\.3 s"):
        program(code, timeout_s=0.3)
    output = program(f"print('begun', flush=True)\n{code}", timeout_s=1.0, check=False)
    assert (output["timed_out"], output["stopped"], output["stdout"]) == (True, "time", "begun\n")


def test_a_program_that_stops_its_supervisor_is_ended_all_the_same(program: Run) -> None:
    with pytest.raises(TimedOut):
        program("import os, signal; os.kill(os.getppid(), signal.SIGSTOP)", timeout_s=0.3)


def test_a_program_that_kills_everything_it_sees_ends_itself_alone(program: Run) -> None:
    code = "import os, signal, sys\ntry: os.kill(int(sys.argv[1]), 9)\nexcept ProcessLookupError: os.kill(-1, signal.SIGKILL)"
    with pytest.raises(TaskFailed, match="killed by SIGKILL"):
        program(code, inputs={"arguments": [str(os.getpid())]})


def test_a_fork_bomb_stays_within_its_processes(program: Run) -> None:
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except BlockingIOError:
    print(made)
"""
    assert program(code, processes=16)["stdout"] == "15\n"


def test_memory_is_limited_for_one_process(program: Run) -> None:
    with pytest.raises(TaskFailed, match="MemoryError"):
        program("x = bytearray(200 << 20)", memory_mib=128)


def test_memory_is_limited_for_all_processes_together(program: Run) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * (40 << 20)
        time.sleep(1000)
os.wait()
"""
    with pytest.raises(TaskFailed, match="more than 128 MiB"):
        program(code, memory_mib=128, timeout_s=20)


def test_printing_without_end_is_cut_and_then_stopped(program: Run) -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * (1 << 20))"
    output = program(code, output_kib=1, check=False, timeout_s=60)
    assert (output["stdout"], output["truncated"], output["stopped"]) == ("x" * 1024, True, "output")
    with pytest.raises(TaskFailed, match=f"printed more than {DRAIN_BYTES >> 20} MiB"):
        program(code, timeout_s=60)


def test_printing_somewhat_too_much_is_cut_and_goes_on(program: Run) -> None:
    output = program("import sys\nsys.stderr.write('e' * 5_000_000)\nprint('end')", output_kib=2)
    assert (output["stdout"], len(output["stderr"]), output["truncated"]) == ("end\n", 2048, True)


def test_the_disk_is_limited(program: Run) -> None:
    code = """
import errno, itertools
for folder in ("/box", "/tmp", "/dev/shm"):
    try:
        for number in itertools.count():
            with open(f"{folder}/{number}", "wb") as file:
                file.write(b"x" * 500_000)
    except OSError as error:
        print(folder, errno.errorcode[error.errno], number)
"""
    assert program(code, disk_mib=2)["stdout"] == "/box ENOSPC 4\n/tmp ENOSPC 4\n/dev/shm ENOSPC 4\n"


def test_making_files_without_end_is_stopped(program: Run) -> None:
    code = "import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'w').close()"
    with pytest.raises(TaskFailed, match="files"):
        program(code, timeout_s=60)


def test_what_is_left_in_the_background_is_ended(program: Run) -> None:
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(1000)
        os._exit(0)
"""
    assert program(code, timeout_s=60)["exit_code"] == 0  # and the fixture looks for what is left


# --- walls -------------------------------------------------------------------------------------------------------


def test_nothing_of_the_machine_can_be_seen(program: Run, state_dir: Path) -> None:
    paths = [
        "/etc/passwd", "/etc/shadow", "/home", "/root/.ssh", "/root/.bashrc", "/run", "/var", "/sys", "/proc/1", "/proc/self",
        str(state_dir), str(state_dir / "secret"), str(ROOT), str(Path.home() / ".config"), "/dev/tty", "/dev/sda", "/dev/kvm",
    ]  # fmt: skip
    code = "import os, sys\nprint([path for path in sys.argv[1:] if os.path.lexists(path)])\nprint(os.listdir('/proc'))"
    assert program(code, inputs={"arguments": paths})["stdout"] == "[]\n[]\n"


def test_nothing_can_be_written_but_work_and_tmp(program: Run) -> None:
    code = """
import os
for folder, folders, files in os.walk("/"):
    for name in ["new", *files[:2]]:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT))
        except OSError:
            continue
        print(os.path.join(folder, name))
    if folder.count("/") > 3:
        folders.clear()
"""
    written = program(code)["stdout"].split()
    assert {"/box/new", "/box/out/new", "/tmp/new"} <= set(written)
    private = ("/box/", "/tmp/", "/dev/shm/")
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}
    assert [path for path in written if not path.startswith(private) and path not in devices] == []


def test_the_environment_is_empty_but_for_its_own(program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    output = program("import os\nprint(sorted(os.environ))\nprint(os.path.expanduser('~'), os.getcwd())")
    assert output["stdout"] == "['HOME', 'LANG', 'LOGNAME', 'PATH', 'TMPDIR', 'USER']\n/box /box\n"


def test_no_socket_outside_can_be_reached(program: Run, state_dir: Path) -> None:
    code = """
import socket, sys
port, abstract, path = int(sys.argv[1]), "\\0" + sys.argv[2], sys.argv[3]
for family, kind, address in ((2, 1, ("127.0.0.1", port)), (2, 2, ("192.0.2.1", 9)), (1, 1, abstract), (1, 1, path)):
    try:
        socket.socket(family, kind).connect(address)
        print("reached", address)
    except OSError:
        pass
for family in (16, 17, 38, 40):  # netlink, packet, kernel crypto, virtual machine
    try:
        socket.socket(family, socket.SOCK_RAW)
        print("opened", family)
    except OSError:
        pass
a = socket.create_server(("127.0.0.1", 0)); socket.create_connection(a.getsockname()); print("own loopback")
"""
    path, abstract = str(state_dir / "hexrt.sock"), f"hexrt-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as a,
        socket.socket(socket.AF_UNIX) as b,
    ):
        a.bind(f"\0{abstract}")
        b.bind(path)
        a.listen()
        b.listen()
        output = program(code, inputs={"arguments": [str(tcp.getsockname()[1]), abstract, path]})
    assert output["stdout"] == "own loopback\n"


def test_system_calls_that_reach_past_the_walls_are_refused(program: Run) -> None:
    code = """
import ctypes
library = ctypes.CDLL(None)
for name, arguments in {
    "ptrace": (16, 2, 0, 0), "unshare": (0x10000000,), "mount": (b"none", b"/tmp", b"tmpfs", 0, 0), "chroot": (b"/",),
    "setuid": (0,), "sethostname": (b"x", 1), "memfd_create": (b"x", 0), "shmget": (0, 4096, 0o1600), "personality": (0,),
    "keyctl": (0, -3), "reboot": (0,), "umount2": (b"/proc", 0),
}.items():
    try:
        answer = getattr(library, name)(*arguments)
    except AttributeError:
        continue
    if answer != -1:
        print(name, answer)
"""
    assert program(code)["stdout"] == ""


def test_an_interpreter_outside_of_the_sandbox_has_no_packages_in_it(program: Run) -> None:
    code = "import importlib.util as u\nprint([n for n in ('msgspec', 'numpy', 'pip', 'hexrt') if u.find_spec(n)])"
    assert program(code)["stdout"] == "[]\n"


def test_a_folder_of_packages_can_be_allowed(program: Run, tmp_path: Path) -> None:
    (tmp_path / "allowed.py").write_text("WORD = 'allowed'")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == psutil.Process().username() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    code = "import allowed\nprint(allowed.WORD)\nopen(allowed.__file__, 'a')"
    output = program(code, settings={"site_dir": str(tmp_path)}, check=False)
    assert output["stdout"] == "allowed\n"
    assert "Error" in output["stderr"]


def test_only_plain_files_come_back(program: Run, state_dir: Path) -> None:
    code = """
import os, sys
os.chdir("/box/out")
os.symlink(sys.argv[1], "link"); os.symlink("/", "folder"); os.symlink("../program.py", "inner"); os.mkfifo("pipe")
os.makedirs("/".join("d" * 30)); open("/".join("d" * 30) + "/deep", "w")
open(b"bad\\xff", "w"); open("new\\nline", "w"); open("closed", "w"); os.chmod("closed", 0)
open("large", "wb").truncate(2 << 20)
open("good", "w").write("good")
"""
    output = program(code, inputs={"arguments": [str(state_dir / "secret")]}, result_mib=1)
    assert output["files"] == {"good": b"good"}
    assert len(output["left_out"]) == 9
    assert "closed: cannot be read (Permission denied)" in output["left_out"]
    assert "link: not a plain file" in output["left_out"]


def test_a_replaced_or_missing_result_folder_is_no_way_out(program: Run) -> None:
    code = "import os\nos.rmdir('/box/out')\nos.symlink('/usr/bin', '/box/out')"
    output = program(code)
    assert (output["files"], output["left_out"]) == ({}, [".: not a folder"])
    assert program("import os\nos.rmdir('/box/out')")["files"] == {}


def test_bytes_that_are_no_text_do_no_harm(program: Run) -> None:
    output = program("import sys\nsys.stdout.buffer.write(bytes(range(256)))\nsys.stderr.buffer.write(b'\\xff')")
    assert output["stdout"].encode("utf-8", "replace")[:3] == b"\x00\x01\x02"
    assert output["stderr"] == "\ufffd"


@pytest.mark.parametrize("name", ["a", "a/b.txt", "ü", ".hidden"])
def test_a_plain_name_is_plain(name: str) -> None:
    assert is_plain_name(name)


# --- failing closed ----------------------------------------------------------------------------------------------


def test_without_bubblewrap_nothing_is_run(program: Run) -> None:
    with pytest.raises(Unavailable, match="install the package bubblewrap"):
        program("1", settings={"bwrap": "/nowhere/bwrap"})


def wrapper(folder: Path, script: str) -> str:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/bash\n[[ $1 != --help ]] || exec {shutil.which('bwrap')} --help\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_where_namespaces_are_forbidden_the_error_says_what_to_allow(program: Run, tmp_path: Path) -> None:
    said = "bwrap: setting up uid map: Permission denied"
    with pytest.raises(Unavailable, match="allow unprivileged user namespaces") as caught:
        program("1", settings={"bwrap": wrapper(tmp_path, f"echo '{said}' >&2; exit 1")})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("keep=(); for a; do [[ $a == --unshare-net ]] || keep+=($a); done", "a AF_INET socket outside can be reached"),
        ("keep=(--ro-bind /var /var $@)", "/var can be seen"),
        ("keep=($@ --ro-bind /usr /proc)", "/proc is not empty"),
    ],
)
def test_a_sandbox_that_leaks_is_found_out_before_anything_runs_in_it(
    program: Run, tmp_path: Path, change: str, reason: str
) -> None:
    # The wrapper splits no argument: the program's source and its argument follow the double dash and are passed on as they are.
    script = f"""
options=(); while [[ $1 != -- ]]; do options+=("$1"); shift; done
rest=("$@"); set -- "${{options[@]}}"
{change}
exec {shutil.which("bwrap")} "${{keep[@]}}" "${{rest[@]}}"
"""
    with pytest.raises(Unavailable, match="does not hold here") as caught:
        program("1", settings={"bwrap": wrapper(tmp_path, script)})
    assert reason in str(caught.value)


def test_an_unknown_processor_has_no_filter_and_so_no_sandbox() -> None:
    with pytest.raises(Unavailable, match="riscv64"):
        build("riscv64")


# --- the worker around it ----------------------------------------------------------------------------------------

WORKER = """
import sys
from hexrt.ops._sandbox import Job, plan, run
from hexrt.ops._sandbox_watch import Limits
code = b"open('" + sys.argv[2].encode() + b"/pipe', 'w').write('up'); import time; time.sleep(1000)"
run(plan(sys.argv[1], False, read_only=(sys.argv[2],)), Job(code), Limits(timeout_s=100.0))
"""


def test_when_the_worker_is_killed_its_program_dies_with_it(tmp_path: Path) -> None:
    shared = Path("/var/tmp") / f"hexrt-test-{os.getpid()}"
    shared.mkdir(mode=0o755)
    try:
        os.mkfifo(shared / "pipe")
        (shared / "pipe").chmod(0o666)
        bwrap = shutil.which("bwrap")
        assert bwrap
        with subprocess.Popen([sys.executable, "-c", WORKER, bwrap, str(shared)]) as worker:
            assert (shared / "pipe").read_text() == "up"
            fds = [os.pidfd_open(child.pid) for child in psutil.Process(worker.pid).children(recursive=True)]
            assert len(fds) >= 3
            worker.send_signal(signal.SIGKILL)
        for fd in fds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(10_000), "a process of the sandbox outlived its worker"
            os.close(fd)
    finally:
        shutil.rmtree(shared)


PLAIN = """
import sys
from pathlib import Path
from hexrt.ops.code_python import Params, run
from hexrt.ops.spec import StepContext
context = StepContext(b"r" * 16, "program", 0, 1, 12345, "pool:0", 100.0, "/var/lib/hexrt", "", {})
print(run(context, Params(), {"code": "import os; print(os.getuid())"})["stdout"], end="")
fork = "import os, time\\nn = 0\\ntry:\\n  while True:\\n    if os.fork() == 0: time.sleep(1000)\\n    n += 1\\nexcept OSError: print(n)"
print(run(context, Params(processes=8), {"code": fork})["stdout"], end="")
many = "import itertools\\nfor n in itertools.count(): open(f'/tmp/{n}', 'w').close()"
print(run(context, Params(check=False, timeout_s=60), {"code": many})["stopped"])
"""


def as_root_only() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to change what the worker may do")


def plain_user() -> tuple[list[str], dict[str, str]]:
    """A command that runs Python code as a user with no rights, and its environment."""
    as_root_only()
    python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    command = [
        "setpriv",
        "--reuid",
        "12345",
        "--regid",
        "12345",
        "--clear-groups",
        "--no-new-privs",
        python,
        "-B",
        "-c",
    ]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{Path(msgspec.__file__).parents[1]}"}
    tried = [*command, "import msgspec, hexrt"]
    if not Path(python).exists() or subprocess.run(tried, env=environment, capture_output=True, check=False).returncode:
        pytest.skip(f"a plain user cannot run {python} with this checkout")
    return command, environment


def test_as_a_plain_user_a_user_namespace_takes_the_place_of_root() -> None:
    command, environment = plain_user()
    result = subprocess.run(
        [*command, PLAIN], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.stdout, result.stderr) == ("65534\n7\nfiles\n", "")


MASK = """
set -e
mount --make-rprivate /
mount -o bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o bind /dev/null /proc/kallsyms
exec "$@"
"""


@pytest.mark.parametrize("user", ["root", "plain"])
def test_a_masked_proc_does_not_stand_in_the_way(user: str) -> None:
    command, environment = plain_user()
    if user == "root":
        command, environment = [sys.executable, "-c"], {"PATH": "/usr/bin:/bin"}
    masked = ["unshare", "--mount", "bash", "-c", MASK, "mask", *command, PLAIN]
    result = subprocess.run(masked, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (result.stdout.split()[1:], result.stderr) == (["7", "files"], "")


def test_where_the_kernel_refuses_namespaces_nothing_is_run() -> None:
    as_root_only()
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", PLAIN]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.stdout == ""
    assert "Unavailable: the sandbox cannot be set up" in result.stderr
    assert "allow unprivileged user namespaces" in result.stderr


def test_a_program_yields_to_others_and_keeps_no_file_of_the_worker(program: Run) -> None:
    code = """
import os
print(os.nice(0))
for fd in range(3, 1024):
    try:
        print(fd, os.fstat(fd))
    except OSError:
        pass
"""
    with socket.create_server(("127.0.0.1", 0)) as held:
        os.set_inheritable(held.fileno(), True)
        assert int(program(code)["stdout"]) >= 10


def test_only_the_clock_is_watched_until_the_sandbox_stands() -> None:
    """Before that its first process is as large, and its root as full, as the machine makes them: it was killed for it where set-up took long."""
    result_r, result_w = os.pipe()
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        watch = Watch(process, result_r, Limits(memory_bytes=1))
        watch.init, watch.init_fd = process.pid, os.pidfd_open(process.pid)
        try:
            watch._check(time.monotonic())
            assert watch.outcome.stopped == ""
            os.write(result_w, HELLO)
            watch._read(result_r)
            watch._check(time.monotonic())
            assert watch.outcome.stopped == "memory"
        finally:
            watch.end()
            os.close(result_r)
            os.close(result_w)
