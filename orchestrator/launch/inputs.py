"""What the stages of a plan read, looked at before a session starts: files and folders (`inputs`), and their content (`preflight`).

A path is looked at in this process, no further than the first bytes of a file. What the bytes mean the person's own function tells:
it is called in a process of its own (worker/preflight.py), which sees no GPU and is ended after LIMIT_S. It is code of the plan,
and trusted as its entries are: no plan found in a source comes so far without the user's consent (admission/import_run.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import KgorchError, nearest
from orchestrator.launch.verdicts import FAIL, PASS, WARN, Check
from orchestrator.plan import StageSection
from orchestrator.system import process_protection

LIMIT_S = 60.0
"""For a stage's `preflight`. It imports PyTorch, perhaps, from a cold disk, and reads a sample."""

LOOKED_AT = 10_000
"""Entries of a folder in which a first file is looked for: a second or two on a network mount."""

SHOWN, SHOWN_BYTES = 8, 64 << 10
"""Names of a folder that an error shows; bytes of an answer that are read."""

_ATTACH = {
    "kaggle": "attach the data set to the notebook (Add Input; of a pushed one: dataset_sources in kernel-metadata.json)",
    "colab": "mount the drive that holds it",
}


def paths(stages: Sequence[StageSection], workdir: Path, platform: str) -> Iterator[Check]:
    """Each path that the stages name as an input, once."""
    done: set[Path] = set()
    for stage, name in ((one, name) for one in stages for name in one.inputs):
        for value in stage.paths_of(name):
            path = Path(os.path.normpath(workdir / value))
            if path in done:
                continue
            done.add(path)
            try:
                yield Check(f"input {name}", PASS, look(path))
            except KgorchError as error:
                correct = f"correct it, in the plan or by --set stage.{stage.name}.args.{name}=PATH"
                do = "; or ".join(part for part in (error.next_step or _ATTACH.get(platform), correct) if part)
                what = f"stage {stage.name!r}, argument {name} = {value!r}: {error.what}"
                yield Check(f"input {name}", FAIL, what, error.facts, do)


def look(path: Path) -> str:
    """What a file, or the first one in a folder, holds, in words.

    Raises: KgorchError where there is none that can be read and holds something; with a next step where that is known.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _look_into(path)
        if not stat.S_ISREG(mode):
            raise KgorchError(f"{path} is neither a file nor a folder")
        if not (count := _read(path)):
            raise KgorchError(f"the file {path} is empty")
        return f"{path}: a file of {count} bytes"
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise KgorchError(f"{path} is a link to {path.readlink()}, which is not there") from None
        raise _missing(path) from None
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise KgorchError(f"{path} cannot be read: {why}", next_step=f"see ls -ld {path}") from None


def _read(path: str | Path) -> int:
    """Bytes of a file whose first ones could be read; 0 for what is no file. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        return found.st_size if stat.S_ISREG(found.st_mode) and os.read(descriptor, 4096) else 0
    finally:
        os.close(descriptor)


def _look_into(root: Path) -> str:
    """As look. Hidden files are nobody's data.

    Raises: KgorchError; OSError where the folder itself cannot be listed.
    """
    unreadable, empty, folders = "", 0, 0
    with contextlib.closing(_below(root)) as entries:
        for number, entry in enumerate(entries):
            if number >= LOOKED_AT:
                return f"{root}: no file among its first {LOOKED_AT} entries, and not all were looked at"
            try:
                if isinstance(entry, OSError):
                    raise entry
                if entry.is_dir():
                    folders += 1
                elif count := _read(entry.path):
                    return f"{root}: a folder; {os.path.relpath(entry.path, root)} has {count} bytes"
                else:
                    empty += 1
            except OSError as error:
                unreadable = unreadable or f"{error.filename or root}: {error.strerror}"
    if unreadable:
        raise KgorchError(
            f"no file in {root} can be read", unreadable, next_step=f"see ls -ld {unreadable.split(': ')[0]}"
        )
    if empty:
        raise KgorchError(f"every file in {root} is empty (files: {empty})", next_step="copy or unpack the data again")
    raise KgorchError(f"the folder {root} holds no file" + (f", only folders ({folders})" if folders else ""))


def _below(root: Path) -> Generator[os.DirEntry[str] | OSError]:
    """What is in a folder, level by level, and what could not be listed; through a link to a folder once.

    Raises: OSError for the folder itself.
    """
    waiting, linked = deque([str(root)]), {os.path.realpath(root)}
    while waiting:
        folder = waiting.popleft()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        yield entry
                        with contextlib.suppress(OSError):  # a link to itself
                            real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                            if entry.is_dir() and real not in linked:
                                waiting.append(entry.path)
                                linked |= {real} if entry.is_symlink() else set()
        except OSError as error:
            if folder == str(root):
                raise
            yield error


def _missing(path: Path) -> KgorchError:
    """With what lies beside it: the name that was meant, or the same name further down, where another mount has it."""
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    try:
        names = sorted(islice((entry.name + "/" * entry.is_dir() for entry in os.scandir(parent)), LOOKED_AT))
    except OSError as error:
        return KgorchError(f"there is no {path}", f"{parent} cannot be listed: {error.strerror}")
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    facts = [
        f"{parent} holds {', '.join(names[:SHOWN]) or 'nothing'}{more}{nearest(missing, (n.rstrip('/') for n in names))}"
    ]
    if parent != Path(parent.anchor):
        with contextlib.suppress(OSError), contextlib.closing(_below(parent)) as entries:
            for entry in islice(entries, LOOKED_AT):
                if not isinstance(entry, OSError) and entry.name == missing and Path(entry.path).parent != parent:
                    facts.append(f"there is {Path(entry.path, *path.relative_to(parent).parts[1:])}")
                    break
    return KgorchError(f"there is no {path}", *facts)


def calls(stages: Sequence[StageSection], workdir: Path, *, limit_s: float = LIMIT_S) -> Iterator[Check]:
    """What the stages' own functions answer; one that several stages call alike is called once."""
    done = set()
    for stage in (stage for stage in stages if stage.preflight):
        key = json.dumps([stage.preflight, stage.args], sort_keys=True)
        if key not in done:
            done.add(key)
            yield _call(stage, workdir, limit_s)


def _call(stage: StageSection, workdir: Path, limit_s: float) -> Check:
    name, function = f"stage {stage.name}", stage.preflight
    order = {
        "function": function, "args": stage.args, "workdir": str(workdir), "parent": os.getpid(),
        "score": process_protection.rank_oom_score(),
    }  # fmt: skip
    try:
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
            code = _run(json.dumps(order), workdir, answer, log, limit_s)
            told, last = _answer(answer), _last_line(log)
    except OSError as error:  # no room for another process, or for its files: the training has to see for itself
        return Check(name, WARN, f"its preflight could not be called: {error}")
    if code is None:
        what = f"its preflight {function} was not done after {limit_s:g} s and was ended: nobody knows whether the data are sound"
        return Check(name, WARN, what, (last,) if last else (), "have it list names and read one sample, no more")
    if told is None:
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return Check(name, FAIL, f"its preflight {function} {ended} and gave no answer", (last,) if last else ())
    if "said" in told:
        return Check(name, PASS, told["said"])
    facts = [*told["facts"], *([f"raised in {told['line']}"] if told["line"] else [])]
    return Check(name, FAIL, f"stage {stage.name!r}, preflight: {told['what']}", tuple(facts), told["do"])


def _run(order: str, workdir: Path, answer: IO[bytes], log: IO[bytes], limit_s: float) -> int | None:
    """Its exit code (negative: the signal); None where it was ended after `limit_s`. Nothing of it lives afterwards.

    Raises: OSError.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.worker.preflight"],
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=log,
        cwd=workdir,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        umask=process_protection.user_umask(),
        start_new_session=True,
    )
    try:
        process.communicate(order.encode(), timeout=limit_s)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
        process.wait()


def _answer(file: IO[bytes]) -> dict[str, Any] | None:
    file.seek(0)
    try:
        told = json.loads(file.read(SHOWN_BYTES))
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
