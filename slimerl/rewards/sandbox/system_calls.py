"""System calls that a sandboxed program must not make, as a seccomp filter.

Namespaces alone would leave a way around the limits: a program that makes a user namespace of its own may mount a file
system of any size there, and memory in files of that kind or in System V segments is nobody's address space. The calls
refused here are those, and some whose only use would be an attack on the kernel. Everything else is allowed.
"""

import ctypes
import errno
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

# linux/bpf_common.h: load a word, jump if equal, if any bit is set, if not less; return
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; the low half of the argument (both machines are little-endian)."""
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_ANY_NEW_NAMESPACE = 0x7E020080
_X32 = 0x40000000
"""Numbers from here on are a second way to make the same calls on x86-64."""

_MACHINES = ("x86_64", "aarch64")
_REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "memfd_create": (319, 279),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
}
"""Name → number on each of the machines."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_dangerous_calls() -> None:
    """For this process and all that it starts, for good. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = _filter(platform.machine())
    program = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp filters are not available")


def _filter(machine: str) -> bytes:
    def do(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, value)

    def refuse(number: int, error: int) -> bytes:
        return do(_EQUAL, number, 0, 1) + do(_RETURN, _REFUSE | error)

    code = do(_LOAD, _ARCHITECTURE) + do(_EQUAL, _AUDIT_ARCHITECTURE[machine], 1, 0) + do(_RETURN, _KILL)
    code += do(_LOAD, _NUMBER) + do(_AT_LEAST, _X32, 0, 1) + do(_RETURN, _REFUSE | errno.EPERM)
    for numbers in _REFUSED.values():
        code += refuse(numbers[_MACHINES.index(machine)], errno.EPERM)
    # The flags of clone3 lie in memory, where a filter cannot look; without it libraries fall back to clone.
    code += refuse(_CLONE3, errno.ENOSYS)
    code += do(_EQUAL, _CLONE[machine], 0, 3) + do(_LOAD, _FIRST_ARGUMENT)
    code += do(_ANY_BIT, _ANY_NEW_NAMESPACE, 0, 1) + do(_RETURN, _REFUSE | errno.EPERM)
    return code + do(_RETURN, _ALLOW)
