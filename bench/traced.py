"""A process whose file-system calls another one sees, in order, before each is done, and may let fail (Linux on x86-64).

A seccomp filter stops each call until the supervisor answers. Unlike a preloaded library, it also sees the calls that the
C library and Rust make by themselves, and those of every thread and child process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Number and arguments of each call: P a path, D the descriptor of a folder that the next path is relative to, F a file's
# descriptor, . another argument.
CALLS = {
    "read": (0, "F"), "write": (1, "F.."), "open": (2, "P."), "stat": (4, "P"), "fstat": (5, "F"), "lstat": (6, "P"),
    "mmap": (9, "....F"), "pread64": (17, "F"), "pwrite64": (18, "F..."), "readv": (19, "F"), "writev": (20, "F.."),
    "access": (21, "P"), "sendfile": (40, "F"), "flock": (73, "F"), "fsync": (74, "F"), "fdatasync": (75, "F"),
    "truncate": (76, "P."), "ftruncate": (77, "F."), "rename": (82, "PP"), "mkdir": (83, "P"), "rmdir": (84, "P"),
    "creat": (85, "P"), "link": (86, "PP"), "unlink": (87, "P"), "symlink": (88, ".P"), "readlink": (89, "P"),
    "chmod": (90, "P"), "fchmod": (91, "F"), "getdents64": (217, "F"), "openat": (257, "DP."), "mkdirat": (258, "DP"),
    "newfstatat": (262, "DP"), "unlinkat": (263, "DP."), "renameat": (264, "DPDP"), "linkat": (265, "DPDP"),
    "symlinkat": (266, ".DP"), "readlinkat": (267, "DP"), "faccessat": (269, "DP"), "fallocate": (285, "F..."),
    "pwritev": (296, "F..."), "renameat2": (316, "DPDP"), "copy_file_range": (326, "F.F"), "pwritev2": (328, "F..."),
    "statx": (332, "DP"), "openat2": (437, "DP"), "faccessat2": (439, "DP"),
}  # fmt: skip
NAMES = {number: (name, kinds) for name, (number, kinds) in CALLS.items()}
SAME = {"creat": "open", "openat": "open", "mkdirat": "mkdir", "renameat": "rename", "renameat2": "rename",
        "linkat": "link", "fdatasync": "fsync", "ftruncate": "truncate", "newfstatat": "stat", "lstat": "stat",
        "statx": "stat", "faccessat": "access", "faccessat2": "access", "readlinkat": "readlink"}  # fmt: skip
NOT_KNOWN = {
    "sendfile",
    "symlink",
    "symlinkat",
    "fallocate",
    "copy_file_range",
    "pwritev",
    "pwritev2",
    "openat2",
    "link",
}
ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000
NOTICE_BYTES, RECEIVE, ANSWER = 80, 0xC0502100, 0xC0182101  # <linux/seccomp.h>: struct seccomp_notif and its ioctls
LONGEST_S = 120.0  # of one command: longer is a hang
AT_REMOVEDIR = 0x200


@dataclass(frozen=True)
class Call:
    """name: of SAME's values, if it has one. path: below the root. to: the second path. data: what it writes, from `at`.

    at: also the new length of `truncate`; None: at the end of the file. changes: whether it changes the disk.
    """

    name: str
    path: str
    to: str = ""
    flags: int = 0
    data: bytes = b""
    at: int | None = None
    changes: bool = False


def install(channel: socket.socket) -> None:
    """Let the supervisor at the other end of `channel` decide all calls of this process from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(0x20, 0, 0, 0)]  # load the call's number
    code += [(0x15, len(NAMES) - place, 0, number) for place, number in enumerate(NAMES)]  # to the last line, if equal
    code += [(0x06, 0, 0, ALLOW), (0x06, 0, 0, NOTIFY)]
    lines = b"".join(struct.pack("HBBI", operation, yes, no, value) for operation, yes, no, value in code)
    memory = ctypes.create_string_buffer(lines)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(memory)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    listener = libc.syscall(317, 1, 8, program)  # seccomp(SET_MODE_FILTER, NEW_LISTENER)
    assert listener >= 0, os.strerror(ctypes.get_errno())
    socket.send_fds(channel, [b"x"], [listener])
    os.close(listener)


def supervise(
    start: Callable[[Callable[[], None]], Any], root: str, answer: Callable[[Call], int] | None = None
) -> int | None:
    """The exit code of the process that `start(prepare)` starts, None if it hangs. It must call `prepare` at first.

    root: calls outside this folder are let through. answer: is asked before each other call; 0 lets it through, an errno
    lets it fail. Calls of several threads or processes are asked one at a time. Without it, no call is stopped.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = start(lambda: install(theirs) if answer else None)
    poller, listeners = select.poll(), set()
    poller.register(ours, select.POLLIN)
    deadline = time.monotonic() + LONGEST_S
    while process.poll() is None and time.monotonic() < deadline:
        for descriptor, event in poller.poll(10):
            if descriptor == ours.fileno():
                listeners.update(found := socket.recv_fds(ours, 1, 1)[1])
                poller.register(found[0], select.POLLIN)
            elif event & select.POLLIN:
                decide(descriptor, root, answer)
            else:
                poller.unregister(descriptor)
    if (code := process.poll()) is None:
        for each in getattr(process, "ranks", [process]):
            each.send_signal(signal.SIGKILL)
            each.wait()
    for descriptor in (ours, theirs, *map(os.fdopen, listeners)):
        descriptor.close()
    return code


def decide(listener: int, root: str, answer: Callable[[Call], int]) -> None:
    notice = bytearray(NOTICE_BYTES)
    with contextlib.suppress(OSError):  # the process has been killed meanwhile
        fcntl.ioctl(listener, RECEIVE, notice)
        number, pid = struct.unpack_from("QI", notice)
        call = None
        with contextlib.suppress(OSError):  # its address is wrong: the call fails anyway
            call = described(pid, *struct.unpack_from("i", notice, 16), struct.unpack_from("6Q", notice, 32), root)
        errno = answer(call) if call else 0
        reply = struct.pack("QqiI", number, 0, -errno, 0 if errno else 1)
        fcntl.ioctl(listener, ANSWER, bytearray(reply))


def described(pid: int, number: int, arguments: tuple[int, ...], root: str) -> Call | None:
    """The call; None if it is outside of `root`."""
    name, kinds = NAMES[number]
    folder, paths = os.readlink(f"/proc/{pid}/cwd"), []
    for kind, value in zip(kinds, arguments, strict=False):
        descriptor = ctypes.c_int32(value).value
        if kind == "D" and descriptor >= 0 or kind == "F":
            try:
                place = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                place = ""
            folder, paths = (place, paths) if kind == "D" else (folder, [*paths, place])
        elif kind == "P":
            paths.append(os.path.normpath(os.path.join(folder, text_at(pid, value))))
    if not any(path == root or path.startswith(root + "/") for path in paths):
        return None
    inside = [os.path.relpath(path, root) for path in paths]
    return with_details(pid, name, inside, arguments)


def with_details(pid: int, name: str, paths: list[str], arguments: tuple[int, ...]) -> Call:
    plain = SAME.get(name, name)
    assert name not in NOT_KNOWN, f"{name} of {paths}: replaying it is not written yet"
    path, to = paths[0], paths[1] if len(paths) > 1 else ""
    if plain == "open":
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC if name == "creat" else arguments[1 + (name == "openat")]
        return Call(plain, path, flags=flags, changes=bool(flags & (os.O_CREAT | os.O_TRUNC)))
    if plain == "mmap":
        assert not (arguments[2] & 2 and arguments[3] & 1), (
            f"{path} is mapped for writing: replaying it is not written yet"
        )
    if plain in ("write", "pwrite64", "writev"):
        at = ctypes.c_int64(arguments[3]).value if plain == "pwrite64" else position(pid, arguments[0])
        if name == "writev":
            spans = struct.unpack(f"{2 * arguments[2]}Q", memory_at(pid, arguments[1], 16 * arguments[2]))
            data = b"".join(memory_at(pid, *span) for span in zip(spans[::2], spans[1::2], strict=True))
        else:
            data = memory_at(pid, arguments[1], arguments[2])
        return Call("write", path, data=data, at=at, changes=not path.endswith(" (deleted)"))
    if plain == "truncate":
        return Call(plain, path, at=arguments[1], changes=not path.endswith(" (deleted)"))
    if plain == "unlinkat":
        plain = "rmdir" if arguments[2] & AT_REMOVEDIR else "unlink"
    return Call(plain, path, to, changes=plain in ("rename", "mkdir", "rmdir", "unlink", "fsync"))


def position(pid: int, descriptor: int) -> int | None:
    """Where the next write to the file begins; None: at its end."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}") as about:
        fields = dict(line.split(":", 1) for line in about if ":" in line)
    return None if int(fields["flags"], 8) & os.O_APPEND else int(fields["pos"])


def memory_at(pid: int, address: int, size: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, address) if size else b""


def text_at(pid: int, address: int) -> str:
    """The text that ends with a zero byte. A page at a time: the next one may not exist."""
    text = b""
    while b"\0" not in text:
        text += memory_at(pid, address + len(text), 4096 - (address + len(text)) % 4096)
    return os.fsdecode(text.partition(b"\0")[0])
