"""kgorch logs"""

from __future__ import annotations

import collections
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import run_argument
from kgorch.core.codes import REMOTE_OPEN
from kgorch.errors import NotFound
from kgorch.launch.log_rotation import older_part

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RemoteSessionInfo, RunInfo

BLOCK_BYTES = 64 << 10
LINE_BYTES = 10_000
"""Printed of one line: a script that writes megabytes without a line break must not flood the terminal."""
BACK_BYTES = 32 << 20
"""Read back from the end of a log at most, to find where its last lines begin."""
INTERVAL_S = 0.3
"""Between two reads of --follow."""
JOB_INTERVAL_S = 5.0
"""The same of a session on another node, in a Slurm job."""


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the session is over.")
@click.option("--rank", metavar="N", default=0, show_default=True, help="Which rank.")
@click.option("--launcher", "of_launcher", is_flag=True, help="The output of torchrun itself instead.")
@click.option("--stacks", "of_stacks", is_flag=True, help="The stack traces of all ranks in the newest hang instead.")
@click.option("-n", "--lines", metavar="N", default=50, show_default=True, help="Lines from the end; 0 for all.")
@click.option("--raw", is_flag=True, help="Print bytes unchanged, control characters too (default: colours only).")
@click.option("--job", "of_job", is_flag=True, help="The output of the run's newest Slurm job instead.")
@click.option("--attempt", metavar="SESSION.NUMBER", help="An attempt other than the newest.")
def command(
    run: str | None,
    follow: bool,
    rank: int,
    of_launcher: bool,
    of_stacks: bool,
    lines: int,
    raw: bool,
    of_job: bool,
    attempt: str | None,
) -> int:
    """Print the output of a rank of RUN, standard output and standard error in their order.

    The newest 128 MB of a rank are kept, and its first MB in rankK.log.first of the attempt's folder. Of a line longer than
    10 kB the beginning is printed. Of a run at another place: what the newest session there has printed.

    \b
    Example:
      kgorch logs surface-demo -f --rank 1
    """
    from kgorch.db import remote, sessions
    from kgorch.report import run_view

    _, home, engine = open_state()
    info = find_run(engine, run)
    name = "torchrun.log" if of_launcher else f"rank{rank}.log"
    attempts = sessions.attempts(engine, info.id)
    elsewhere = remote.newest(engine, info.id)
    if of_job:
        return _print_job(engine, info, lines, raw=raw)
    if elsewhere and not attempt and (elsewhere.state in REMOTE_OPEN or not attempts):
        return _print_elsewhere(home, elsewhere, lines, follow=follow, raw=raw)
    if attempt:
        attempts = [item for item in attempts if Path(item.folder).name == attempt]
    if not attempts:
        raise NotFound(
            f"{info.name} has no attempt" + (f" {attempt}" if attempt else " yet"),
            next_step=f"kgorch history {info.name}",
        )
    if of_stacks:
        return _print_stacks([Path(item.folder) for item in attempts])
    at, path, output = 0, Path(attempts[-1].folder, name), Output(raw=raw)
    if path.exists():
        at = _print_older(path, lines, output)
    elif not follow:
        raise NotFound(
            f"there is no {name} in {path.parent}", next_step="give another --rank, or --launcher for torchrun's output"
        )
    while True:
        at = _print_from(path, at, output)
        if not follow:
            output.end()
            return 0
        last = sessions.last(engine, info.id)
        newest = sessions.attempts(engine, info.id)[-1]
        if not attempt and Path(newest.folder) != path.parent:
            at, path = 0, Path(newest.folder, name)
            render.echo(f"── attempt {path.parent.name}, stage {newest.stage}", err=True)
        elif last is None or not run_view.is_live(engine, last):
            _print_from(path, at, output)
            output.end()
            return 0
        else:
            # Slurm must not be asked several times a second
            time.sleep(INTERVAL_S if run_view.is_supervised(engine, last) else JOB_INTERVAL_S)


def _print_elsewhere(home: Path, row: RemoteSessionInfo, lines: int, *, follow: bool, raw: bool) -> int:
    """What a session at another place has printed. Raises: NotFound before it was pushed; KgorchError."""
    from kgorch.cli.remote_errors import place_errors
    from kgorch.remote.places.registry import open_place
    from kgorch.system import process_protection

    if not row.pushed_at:
        raise NotFound(f"session {row.number} was not pushed to {row.place} yet", next_step="kgorch status")
    process_protection.protect()
    place, output = open_place(row.place, home), Output(raw=raw)
    try:
        with place_errors(row.place):
            printed = place.log(row.name, follow=follow)
            for line in printed if follow or not lines else collections.deque(printed, lines):
                output.show(line.encode(errors="replace"))
    finally:
        place.close()
    output.end()
    return 0


def _print_job(engine: Engine, run: RunInfo, lines: int, *, raw: bool) -> int:
    """What the run's newest Slurm job has printed: how its sessions ended, and what followed. Raises: NotFound."""
    from kgorch.db import slurm_jobs
    from kgorch.slurm import jobs

    row, output = slurm_jobs.newest(engine, run.id), Output(raw=raw)
    path = jobs.job_folder(run) / f"{row.job}.log" if row and row.job else None
    if path is None or not path.exists():
        raise NotFound(f"no Slurm job of {run.name} has begun", next_step=f"kgorch status {run.name}")
    _print_from(path, _start_of_last(path, lines)[0] if lines else 0, output)
    output.end()
    return 0


def _print_stacks(folders: list[Path]) -> int:
    """Of the newest attempt that has any: the stack traces that faulthandler and py-spy wrote for each rank."""
    for folder in reversed(folders):
        if paths := [path for path in sorted(folder.glob("rank*.stacks")) if path.stat().st_size]:
            for path in paths:
                render.echo(f"── {path}", err=True)
                _print_from(path, 0, output := Output(raw=False))
                output.end()
            return 0
    raise NotFound("no attempt hung, so there are no stack traces", next_step="kgorch logs, or kgorch logs --launcher")


class LongLines:
    """Cuts the lines of a stream to LINE_BYTES, and says at the end of each how many bytes are left out."""

    def __init__(self) -> None:
        self._length = 0  # of the line that has not ended yet

    def feed(self, block: bytes) -> bytes:
        pieces = []
        # splitlines, because a carriage return ends a line, too: a progress bar is no long line
        for part in block.splitlines(keepends=True):
            text = part.rstrip(b"\r\n")
            pieces.append(text[: max(0, LINE_BYTES - self._length)])
            self._length += len(text)
            if ending := part[len(text) :]:
                pieces += [self.end().rstrip(b"\n"), ending]
        return b"".join(pieces)

    def end(self) -> bytes:
        """The note behind a line that was cut; empty behind any other."""
        more, self._length = self._length - LINE_BYTES, 0
        return b" [and %d bytes more]\n" % more if more > 0 else b""


class Output:
    """Writes the output of a training to the terminal. `raw`: without cutting lines or removing control characters."""

    def __init__(self, *, raw: bool) -> None:
        self._long_lines, self._text = LongLines(), None if raw else render.LogText()

    def show(self, block: bytes) -> None:
        if self._text:
            render.echo_log(self._text.feed(self._long_lines.feed(block)))
        else:
            render.echo_bytes(block)

    def end(self) -> None:
        if self._text:
            render.echo_log(self._text.feed(self._long_lines.end(), is_last=True))


def _print_older(path: Path, lines: int, output: Output) -> int:
    """Print those of the last `lines` (0: of all) that are in the older part of a log that was rotated.

    Returns: where the log itself is to be printed from.
    """
    at, count = _start_of_last(path, lines) if lines else (0, -1)
    older = older_part(path)
    if at == 0 and count < lines and older.exists():
        rest = lines - count if lines else 0  # the last line of the older part continues in the log
        _print_from(older, _start_of_last(older, rest)[0] if rest else 0, output)
    return at


def _start_of_last(path: Path, lines: int) -> tuple[int, int]:
    """The offset at which the last `lines` lines of a file begin, and how many line ends lie behind it.

    Reads blocks from the end, BACK_BYTES at most: a log may be large, and one line of it as large as the log.
    """
    with open(path, "rb") as file:
        size = at = file.seek(0, 2)
        count = 0
        while at > 0 and size - at < BACK_BYTES:
            step = min(BLOCK_BYTES, at)
            at -= step
            file.seek(at)
            block = file.read(step)
            end = len(block) - (at + step == size and block.endswith(b"\n"))  # the last line end ends no earlier line
            while (end := block.rfind(b"\n", 0, end)) >= 0:
                count += 1
                if count == lines:
                    return at + end + 1, count
    return at, count


def _print_from(path: Path, at: int, output: Output) -> int:
    """Print the file from this offset. Returns its end."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if file.seek(0, 2) < at:  # the log was rotated since the last read
            render.echo(f"── {path.name} was rotated: {older_part(path)} holds what was before", err=True)
            at = 0
        file.seek(at)
        while block := file.read(BLOCK_BYTES):
            output.show(block)
            at += len(block)
    return at
