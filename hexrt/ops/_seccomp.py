"""The system-call filter of the sandbox, as a classic BPF program for `bwrap --seccomp`.

Owns the list of calls that a program in the sandbox is refused. It refuses what reaches past the namespaces or the limits: other
processes' memory, kernel keys, modules, mounts, new namespaces, sockets other than Unix and IP (AF_VSOCK is in no network
namespace), and memory that no tmpfs size or rlimit counts (memfds, System V shared memory). Everything else is allowed.
"""

from __future__ import annotations

import errno
import struct

from hexrt.errors import Unavailable

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine name -> (AUDIT_ARCH value, column in the tables below)."""

CLONE, CLONE3, SOCKET, IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)

REFUSED: dict[str, tuple[int, int]] = {  # name: number on x86-64 and on aarch64; -1: not there
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "quotactl": (179, 60), "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1),
    "personality": (135, 92), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
}  # fmt: skip

NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENT_0_AT, ARGUMENT_1_AT = 0, 4, 16, 24  # offsets in struct seccomp_data
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int, error: int = errno.EPERM) -> bytes:
    return _instruction(EQUAL, number, 0, 1) + _instruction(RETURN, FAIL | error)


def _on_argument(number: int, offset: int, tests: list[tuple[int, int]], verdict: int, otherwise: int) -> bytes:
    """For call `number`: load the low half of an argument; the first test (code, value) that holds gives `verdict`."""
    block = _instruction(LOAD, offset)
    for at, (code, value) in enumerate(tests):
        block += _instruction(code, value, len(tests) - at, 0)
    block += _instruction(RETURN, otherwise) + _instruction(RETURN, verdict)
    return _instruction(EQUAL, number, 0, len(block) // 8) + block


def build(machine: str) -> bytes:
    """The filter for a machine (`platform.machine()`). Raises Unavailable where its call numbers are not known here."""
    if machine not in ARCHITECTURES:
        raise Unavailable(f"the sandbox's system-call filter knows {' and '.join(ARCHITECTURES)}, not {machine}")
    audit, column = ARCHITECTURES[machine]
    program = _instruction(LOAD, ARCH_AT) + _instruction(EQUAL, audit, 1, 0) + _instruction(RETURN, KILL)
    program += _instruction(LOAD, NUMBER_AT)
    if machine == "x86_64":  # the x32 numbers would go round the list
        program += _instruction(AT_LEAST, 0x40000000, 0, 1) + _instruction(RETURN, FAIL | errno.ENOSYS)
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            program += _refuse(numbers[column])
    program += _refuse(CLONE3[column], errno.ENOSYS)  # its flags lie in memory; the C library falls back to clone
    program += _on_argument(CLONE[column], ARGUMENT_0_AT, [(ANY_BIT, NAMESPACE_FLAGS)], FAIL | errno.EPERM, ALLOW)
    program += _on_argument(
        SOCKET[column], ARGUMENT_0_AT, [(EQUAL, family) for family in FAMILIES], ALLOW, FAIL | errno.EAFNOSUPPORT
    )
    program += _on_argument(
        IOCTL[column], ARGUMENT_1_AT, [(EQUAL, request) for request in TERMINAL_INPUT], FAIL | errno.EPERM, ALLOW
    )
    return program + _instruction(RETURN, ALLOW)
