"""Checks of what the stages of a plan read, before a session starts: files and folders (`inputs`), and their content (`preflight`).

A path is checked in this process, no further than the first bytes of a file. The content is checked by the user's own function in
a process of its own (worker/preflight_entry.py), which sees no GPU and is ended after LIMIT_S. The function is code of the plan,
and trusted as its entries are: a plan from another machine is not run without the user's consent (admission/import_run.py).
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

from kgorch.errors import KgorchError, nearest
from kgorch.launch.verdicts import FAIL, PASS, WARN, Check
from kgorch.plan import StageSection
from kgorch.system import process_protection

LIMIT_S = 60.0
"""Seconds for a stage's `preflight`: it may import PyTorch from a cold disk, and reads a sample."""

MAX_ENTRIES = 10_000
"""Entries of a folder that are searched for a file: a second or two on a network mount."""

MAX_NAMES = 8
"""Names of a folder that an error shows."""

MAX_ANSWER_BYTES = 64 << 10
"""Bytes of a function's answer that are read."""

_ATTACH = {
    "kaggle": "attach the data set to the notebook (Add Input; of a pushed one: dataset_sources in kernel-metadata.json)",
    "colab": "mount the drive that holds it",
}


def check_paths(stages: Sequence[StageSection], workdir: Path, platform: str) -> Iterator[Check]:
    """Check each path that the stages name as an input, once. `platform`: its name, for advice on how to attach data."""
    done: set[Path] = set()
    for stage, name in ((one, name) for one in stages for name in one.inputs):
        for value in stage.paths_of(name):
            path = Path(os.path.normpath(workdir / value))
            if path in done:
                continue
            done.add(path)
            try:
                yield Check(f"input {name}", PASS, describe_path(path))
            except KgorchError as error:
                correct = f"correct it, in the plan or by --set stage.{stage.name}.args.{name}=PATH"
                do = "; or ".join(part for part in (error.next_step or _ATTACH.get(platform), correct) if part)
                what = f"stage {stage.name!r}, argument {name} = {value!r}: {error.what}"
                yield Check(f"input {name}", FAIL, what, error.facts, do)


def describe_path(path: Path) -> str:
    """The size of a file, or of the first file in a folder, as a sentence.

    Raises: KgorchError where there is no file that can be read and is not empty; with a next step where one is known.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _describe_folder(path)
        if not stat.S_ISREG(mode):
            raise KgorchError(f"{path} is neither a file nor a folder")
        if not (count := _readable_bytes(path)):
            raise KgorchError(f"the file {path} is empty")
        return f"{path}: a file of {count} bytes"
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise KgorchError(f"{path} is a link to {path.readlink()}, which is not there") from None
        raise _missing(path) from None
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise KgorchError(f"{path} cannot be read: {why}", next_step=f"see ls -ld {path}") from None


def _readable_bytes(path: str | Path) -> int:
    """Size of a file, after its first bytes were read; 0 for what is no file. Raises: OSError."""
    # O_NONBLOCK: the open of a named pipe would wait for its writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        return status.st_size if stat.S_ISREG(status.st_mode) and os.read(descriptor, 4096) else 0
    finally:
        os.close(descriptor)


def _describe_folder(root: Path) -> str:
    """As `describe_path`. Hidden files do not count as data.

    Raises: KgorchError; OSError where the folder itself cannot be listed.
    """
    unreadable, empty, folders = "", 0, 0
    with contextlib.closing(_below(root)) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                return f"{root}: no file among its first {MAX_ENTRIES} entries, and not all were looked at"
            try:
                if isinstance(entry, OSError):
                    raise entry
                if entry.is_dir():
                    folders += 1
                elif count := _readable_bytes(entry.path):
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
        names = sorted(islice((entry.name + "/" * entry.is_dir() for entry in os.scandir(parent)), MAX_ENTRIES))
    except OSError as error:
        return KgorchError(f"there is no {path}", f"{parent} cannot be listed: {error.strerror}")
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    facts = [
        f"{parent} holds {', '.join(names[:MAX_NAMES]) or 'nothing'}{more}{nearest(missing, (n.rstrip('/') for n in names))}"
    ]
    if parent != Path(parent.anchor):
        with contextlib.suppress(OSError), contextlib.closing(_below(parent)) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                if not isinstance(entry, OSError) and entry.name == missing and Path(entry.path).parent != parent:
                    facts.append(f"there is {Path(entry.path, *path.relative_to(parent).parts[1:])}")
                    break
    return KgorchError(f"there is no {path}", *facts)


def call_preflights(stages: Sequence[StageSection], workdir: Path, *, limit_s: float = LIMIT_S) -> Iterator[Check]:
    """Call the stages' own functions; one that several stages call with the same arguments is called once."""
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
            result, last = _answer(answer), _last_line(log)
    except OSError as error:  # no room for another process, or for its files: the training has to see for itself
        return Check(name, WARN, f"its preflight could not be called: {error}")
    if code is None:
        what = f"its preflight {function} was not done after {limit_s:g} s and was ended: nobody knows whether the data are sound"
        return Check(name, WARN, what, (last,) if last else (), "have it list names and read one sample, no more")
    if result is None:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return Check(name, FAIL, f"its preflight {function} {how} and gave no answer", (last,) if last else ())
    if "said" in result:
        return Check(name, PASS, result["said"])
    facts = [*result["facts"], *([f"raised in {result['line']}"] if result["line"] else [])]
    return Check(name, FAIL, f"stage {stage.name!r}, preflight: {result['what']}", tuple(facts), result["do"])


def _run(order: str, workdir: Path, answer: IO[bytes], log: IO[bytes], limit_s: float) -> int | None:
    """Run the function in a process. Returns its exit code (negative: the signal); None where it was ended after `limit_s`.

    Raises: OSError.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "kgorch.worker.preflight_entry"],
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
        answer = json.loads(file.read(MAX_ANSWER_BYTES))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
