"""kgorch logs"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, run_argument, state
from orchestrator.errors import NotFound
from orchestrator.system.log_rotation import older_part

BLOCK_BYTES, LINE_BYTES, BACK_BYTES = 64 << 10, 10_000, 32 << 20


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the session is over.")
@click.option("--rank", default=0, show_default=True, help="Whose words.")
@click.option("--launcher", "of_launcher", is_flag=True, help="torchrun's own words instead.")
@click.option("--stacks", "of_stacks", is_flag=True, help="Where all ranks stood in the newest hang instead.")
@click.option("-n", "--lines", default=50, show_default=True, help="How many lines from the end; 0 for all.")
@click.option("--raw", is_flag=True, help="Bytes as they are, control characters too; else colours are the most.")
@click.option("--attempt", metavar="SESSION.NUMBER", help="An attempt other than the newest.")
def command(
    run: str | None,
    follow: bool,
    rank: int,
    of_launcher: bool,
    of_stacks: bool,
    lines: int,
    raw: bool,
    attempt: str | None,
) -> int:
    """What a rank of RUN prints, standard output and errors in their order.

    The newest 128 MB of a rank are kept, and its first MB in rankK.log.first of the attempt's folder. Of a line of more than
    10 kB its beginning is printed.

    \b
    Example:
      kgorch logs surface-demo -f --rank 1
    """
    from db import sessions
    from orchestrator.report import run_view

    _, _, engine = state()
    found = find_run(engine, run)
    name = "torchrun.log" if of_launcher else f"rank{rank}.log"
    attempts = sessions.attempts(engine, found.id)
    if attempt:
        attempts = [item for item in attempts if Path(item.folder).name == attempt]
    if not attempts:
        raise NotFound(f"{found.name} has no attempt" + (f" {attempt}" if attempt else " yet"))
    if of_stacks:
        return _print_stacks([Path(item.folder) for item in attempts])
    at, path, output = 0, Path(attempts[-1].folder, name), Output(raw=raw)
    if path.exists():
        at = _print_older(path, lines, output)
    elif not path.exists() and not follow:
        raise NotFound(
            f"there is no {name} in {path.parent}", next_step="see --rank, or --launcher for torchrun's own words"
        )
    while True:
        at = _print_from(path, at, output)
        if not follow:
            output.end()
            return 0
        last = sessions.last(engine, found.id)
        newest = sessions.attempts(engine, found.id)[-1]
        if not attempt and Path(newest.folder) != path.parent:
            at, path = 0, Path(newest.folder, name)
            render.echo(f"── attempt {path.parent.name}, stage {newest.stage}", err=True)
        elif last is None or not run_view.is_supervised(last):
            _print_from(path, at, output)
            output.end()
            return 0
        else:
            time.sleep(0.3)


def _print_stacks(folders: list[Path]) -> int:
    """Of the newest attempt that wrote any: what faulthandler and py-spy told of each rank."""
    for folder in reversed(folders):
        if found := [path for path in sorted(folder.glob("rank*.stacks")) if path.stat().st_size]:
            for path in found:
                render.echo(f"── {path}", err=True)
                _print_from(path, 0, output := Output(raw=False))
                output.end()
            return 0
    raise NotFound("no attempt has hung, so nobody wrote its stacks down")


class LongLines:
    """Of a stream of lines each one's first LINE_BYTES, and how many more there were."""

    def __init__(self) -> None:
        self._length = 0  # of the line that is not over

    def feed(self, block: bytes) -> bytes:
        found = []
        for part in block.splitlines(keepends=True):  # also at a carriage return: a progress bar is no long line
            text = part.rstrip(b"\r\n")
            found.append(text[: max(0, LINE_BYTES - self._length)])
            self._length += len(text)
            if ending := part[len(text) :]:
                found += [self.end().rstrip(b"\n"), ending]
        return b"".join(found)

    def end(self) -> bytes:
        """What is to be said of a line that was cut, at its end."""
        more, self._length = self._length - LINE_BYTES, 0
        return b" [and %d bytes more]\n" % more if more > 0 else b""


class Output:
    """A training's output on its way to the terminal. `raw`: bytes as they are, long lines and control characters too."""

    def __init__(self, *, raw: bool) -> None:
        self._cut, self._text = LongLines(), None if raw else render.LogText()

    def show(self, block: bytes) -> None:
        if self._text:
            render.echo_log(self._text.feed(self._cut.feed(block)))
        else:
            render.echo_bytes(block)

    def end(self) -> None:
        if self._text:
            render.echo_log(self._text.feed(self._cut.end(), is_last=True))


def _print_older(path: Path, lines: int, output: Output) -> int:
    """Print those of the last `lines` (0: of all) that lie in the log's older part. Returns where to go on in the log itself."""
    at, found = _start_of_last(path, lines) if lines else (0, -1)
    before = older_part(path)
    if at == 0 and found < lines and before.exists():
        left = lines - found if lines else 0  # its last line goes on in the log
        _print_from(before, _start_of_last(before, left)[0] if left else 0, output)
    return at


def _start_of_last(path: Path, lines: int) -> tuple[int, int]:
    """Where the last `lines` lines of a file begin, and how many line ends were found before that; read from its end in blocks, and
    no further back than BACK_BYTES, for a log may be large and a line as large as a log."""
    with open(path, "rb") as file:
        size = at = file.seek(0, 2)
        found = 0
        while at > 0 and size - at < BACK_BYTES:
            step = min(BLOCK_BYTES, at)
            at -= step
            file.seek(at)
            block = file.read(step)
            end = len(block) - (at + step == size and block.endswith(b"\n"))
            while (end := block.rfind(b"\n", 0, end)) >= 0:
                found += 1
                if found == lines:
                    return at + end + 1, found
    return at, found


def _print_from(path: Path, at: int, output: Output) -> int:
    """What the file holds from there on. Returns where it ends now."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if file.seek(0, 2) < at:  # its older part was cut off meanwhile
            render.echo(f"── {path.name} was cut: {older_part(path)} holds what was before", err=True)
            at = 0
        file.seek(at)
        while block := file.read(BLOCK_BYTES):
            output.show(block)
            at += len(block)
    return at
