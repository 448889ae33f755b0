"""Namespaces and mounts by system call: no helper program is needed, and no time is lost in starting one. Linux.

All functions but `clone` are for the new process alone, before it runs anything foreign. They raise OSError.
"""

import ctypes
import os
import platform
import signal
from collections.abc import Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

# linux/sched.h
NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mount, UTS, IPC, user, process ids, network."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

# linux/mount.h
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY_NOSUID = 0x1 | 0x2

DEVICES = ("null", "zero", "random", "urandom")
_NEW_ROOT = "/proc"
"""Where the new root is put together: a directory that every machine has and the program must not see."""
_ROOT_BYTES = 2**20
"""For the directories and links that lead to what is shown."""
WORKING_DIRECTORY = "/tmp"
PROGRAM_DIRECTORY = "/program"


def supported() -> bool:
    """Are the machine's system call numbers known?"""
    return platform.system() == "Linux" and platform.machine() in _CLONE


def clone(flags: int) -> int:
    """`fork` into new namespaces: 0 in the child. The caller must have one thread only."""
    pid = _LIBC.syscall(_CLONE[platform.machine()], flags | signal.SIGCHLD, 0, 0, 0, 0)
    return _checked(pid, "clone")


def map_user(pid: int, inside: int) -> None:
    """Give the process `pid` in its new user namespace one user and one group, both `inside`.

    From root they become nobody's: root's own would be beyond every limit of processes.
    """
    user, group, root = os.geteuid(), os.getegid(), os.geteuid() == 0
    process = Path(f"/proc/{pid}")
    if not root:
        (process / "setgroups").write_text("deny")
    nobody = 65534
    (process / "gid_map").write_text(f"0 {group} 1\n{inside} {nobody} 1\n" if root else f"{inside} {group} 1\n")
    (process / "uid_map").write_text(f"0 {user} 1\n{inside} {nobody} 1\n" if root else f"{inside} {user} 1\n")


def enter_new_root(shown: Sequence[str], files: dict[str, bytes], writable_bytes: int) -> None:
    """Leave the machine's files behind, for good.

    Args:
        shown: directories that are kept, read-only, under their names.
        files: contents by name, for PROGRAM_DIRECTORY (read-only).
        writable_bytes: of WORKING_DIRECTORY, which is empty, private, and the current directory afterwards.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    size = _ROOT_BYTES + sum(map(len, files.values()))
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},mode=755")
    os.chdir(_NEW_ROOT)
    for name in _top_level_links():
        os.symlink(os.readlink(f"/{name}"), name)
    for path in shown:
        _under(path).mkdir(parents=True, exist_ok=True)
        _mount(path, str(_under(path)), None, _MS_BIND | _MS_REC)
    for device in DEVICES:
        _under("/dev").mkdir(exist_ok=True)
        _under(f"/dev/{device}").touch()
    _under(PROGRAM_DIRECTORY).mkdir()
    for name, content in files.items():
        _under(f"{PROGRAM_DIRECTORY}/{name}").write_bytes(content)
    _under(WORKING_DIRECTORY).mkdir(exist_ok=True)
    _make_read_only(".")
    for device in DEVICES:
        _mount(f"/dev/{device}", str(_under(f"/dev/{device}")), None, _MS_BIND)
    options = f"size={writable_bytes},mode=1777,nr_inodes=4096"
    _mount("tmpfs", str(_under(WORKING_DIRECTORY)), "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    # The old root comes to lie over the new one, and is taken off.
    _checked(_LIBC.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _checked(_LIBC.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir(WORKING_DIRECTORY)


def system_directories() -> list[str]:
    """What a program needs of the machine beside the interpreter: shared libraries and the loader."""
    names = ["usr", *(name for name in _LIBRARIES if not os.path.islink(f"/{name}"))]
    return [f"/{name}" for name in names if os.path.isdir(f"/{name}")]


_LIBRARIES = ("lib", "lib32", "lib64", "libx32", "bin")


def _top_level_links() -> list[str]:
    """On most systems /lib and its like are links into /usr."""
    return [name for name in _LIBRARIES if os.path.islink(f"/{name}")]


def _under(path: str) -> Path:
    return Path(f".{path}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = kind.encode() if kind is not None else None
    result = _LIBC.mount(source.encode(), target.encode(), encoded, flags, options.encode())
    _checked(result, f"mount of {source} at {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def _make_read_only(path: str) -> None:
    """A whole tree of mounts. Since Linux 5.12."""
    wanted = _MountAttributes(set=_ATTR_RDONLY_NOSUID)
    result = _LIBC.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(wanted), ctypes.sizeof(wanted)
    )
    _checked(result, "mount_setattr")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
