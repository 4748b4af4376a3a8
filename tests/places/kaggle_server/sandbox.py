"""Execution of what was pushed: in namespaces as root (sandbox_init.py), else as a plain process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil
from places.kaggle_server.values import Session

INIT = Path(__file__).with_name("sandbox_init.py")
PREFIX = Path(sys.prefix).resolve()
CHECKOUT = Path(__file__).parents[3]
MAX_EVENTS = 200_000

PR_SET_PDEATHSIG = 1


def has_namespaces() -> bool:
    """Whether this process may make namespaces: as root, and not in a container that forbids it."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


def hidden_folders() -> list[str]:
    """What a session must not see: the checkout, other checkouts that are installed here, and the person's home."""
    site = Path(sysconfig.get_path("purelib"))
    lines = [line for path in site.glob("__editable__*kgorch*.pth") for line in path.read_text().splitlines()]
    folders = {CHECKOUT, Path.home(), *(Path(line) for line in lines if line.startswith("/"))}
    return sorted(str(folder.resolve()) for folder in folders if folder.is_dir() and folder != Path("/"))


def run(session: Session, working: Path, timeout_s: float, variables: dict[str, str]) -> int | None:
    """Execute the session's script. Returns its exit code, None when it was killed at its time limit or cancelled."""
    script = session.folder / "script.py"
    script.write_text(session.request["text"])
    environ = {
        "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/root", "PYTHONUNBUFFERED": "1",
        "KAGGLE_KERNEL_RUN_TYPE": "Batch", "KAGGLE_URL_BASE": "https://www.kaggle.com", **variables,
    }  # fmt: skip
    python = str(PREFIX / "bin" / "python")
    if has_namespaces():
        command = _isolated(session, working, script, python)
    else:
        inputs = session.folder / "input"
        for name, folder in session.inputs.items():
            shutil.copytree(folder, inputs / name)
        inputs.mkdir(exist_ok=True)
        environ |= {
            "KGORCH_REMOTE_INPUT": str(inputs),
            "KGORCH_REMOTE_OUTPUT": str(working),
            "HOME": str(session.folder),
        }
        command = [python, str(script)]
    session.process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=working,
        env=environ, start_new_session=True, preexec_fn=_die_with_parent,
    )  # fmt: skip
    began_s = time.monotonic()
    pipes = {"stdout": session.process.stdout, "stderr": session.process.stderr}
    readers = [
        threading.Thread(target=_read, args=(session, name, pipes[name], began_s), daemon=True) for name in pipes
    ]
    for reader in readers:
        reader.start()
    was_killed = False
    if session.cancelled.is_set():
        kill(session)
    try:
        session.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        was_killed = True
    kill(session)
    for reader in readers:
        reader.join(5)
    return None if was_killed or session.cancelled.is_set() else session.process.returncode


def _isolated(session: Session, working: Path, script: Path, python: str) -> list[str]:
    root = session.folder / "root"
    root.mkdir()
    order = {
        "root": str(root), "working": str(working), "script": str(script), "python": python,
        "inputs": {name: str(folder) for name, folder in session.inputs.items()},
        "hide": hidden_folders(), "keep": sorted({str(PREFIX), str(Path(sys.base_prefix).resolve())}),
        "own_network": not session.request.get("enableInternet", True),
    }  # fmt: skip
    path = session.folder / "order.json"
    path.write_text(json.dumps(order))
    spaces = ["--mount", "--pid", "--ipc", "--uts", *([] if session.request.get("enableInternet", True) else ["--net"])]
    return ["unshare", *spaces, "--fork", "--kill-child", sys.executable, "-I", str(INIT), str(path)]


def kill(session: Session) -> None:
    """End the session's processes, all of them."""
    process = session.process
    if process is None:
        return
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in below:
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(session: Session, name: str, pipe, began_s: float) -> None:
    for line in pipe:
        if len(session.log) < MAX_EVENTS:
            at = round(time.monotonic() - began_s, 6)
            session.log.append({"stream_name": name, "time": at, "data": line.decode(errors="replace")})
