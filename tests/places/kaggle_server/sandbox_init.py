"""PID 1 of a session: makes a root like Kaggle's, starts the script, reaps what it leaves, and ends with its exit code.

Runs in mount and pid namespaces of its own, so nothing here is seen outside. Standard library alone.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
OWN = {"kaggle", "tmp", "proc", "mnt"}
"""Of the machine's root, what a session has anew or not at all."""


def mount(source: Path | str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = [str(word).encode() or None for word in (source, target, kind, data)]
    if LIBC.mount(words[0] or b"", words[1], words[2], flags, words[3]):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def bind(source: Path, target: Path, read_only: bool = False, flags: int = MS_BIND | MS_REC) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(source, target, flags=flags)
    if read_only:
        mount("", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def make_root(order: dict) -> Path:
    root = Path(order["root"])
    mount("", Path("/"), flags=MS_REC | MS_PRIVATE)
    mount("none", root, "tmpfs", data="mode=755")
    for path in Path("/").iterdir():
        if path.name in OWN:
            continue
        if path.is_symlink():
            (root / path.name).symlink_to(path.readlink())
        else:
            bind(path, root / path.name)
    for name in ("tmp", "dev/shm"):
        (root / name).mkdir(parents=True, exist_ok=True)
        mount("none", root / name, "tmpfs", data="mode=1777")
    (root / "proc").mkdir()
    mount("proc", root / "proc", "proc")
    for folder in order["hide"]:
        if below(root, folder).is_dir():  # what lies below /tmp is hidden already
            mount("none", below(root, folder), "tmpfs", data="mode=755")
    for folder in order["keep"]:
        if any(folder.startswith(name + "/") for name in ("/tmp", *order["hide"])):
            bind(Path(folder), below(root, folder), read_only=True)
    return root


def make_kaggle(order: dict, root: Path) -> None:
    inputs, sources = root / "kaggle" / "input", root / "kaggle" / "src"
    inputs.mkdir(parents=True)
    mount("none", inputs, "tmpfs", data="mode=755")
    for name, folder in order["inputs"].items():
        bind(Path(folder), inputs / name, read_only=True, flags=MS_BIND)
    mount("", inputs, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    bind(Path(order["working"]), root / "kaggle" / "working", flags=MS_BIND)
    sources.mkdir()
    (sources / "script.py").write_bytes(Path(order["script"]).read_bytes())


def raise_loopback() -> None:
    """A new network namespace has a loopback that is down; gloo and torchrun need it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 1 | 64)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    root = make_root(order)
    make_kaggle(order, root)
    if order["own_network"]:
        raise_loopback()
    os.chroot(root)
    os.chdir("/kaggle/working")
    child = os.fork()
    if child == 0:
        os.execv(order["python"], [order["python"], "/kaggle/src/script.py"])
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


main()
