"""kgorch logs"""

from __future__ import annotations

import time
from pathlib import Path

import click

from orchestrator.cli.common import find_run, run_argument, state
from orchestrator.errors import NotFound


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the session is over.")
@click.option("--rank", default=0, show_default=True, help="Whose words.")
@click.option("--launcher", "of_launcher", is_flag=True, help="torchrun's own words instead.")
@click.option("--stacks", "of_stacks", is_flag=True, help="Where all ranks stood in the newest hang instead.")
@click.option("-n", "--lines", default=50, show_default=True, help="How many lines from the end; 0 for all.")
@click.option("--attempt", metavar="SESSION.NUMBER", help="An attempt other than the newest.")
def command(
    run: str | None, follow: bool, rank: int, of_launcher: bool, of_stacks: bool, lines: int, attempt: str | None
) -> int:
    """What a rank of RUN prints, standard output and errors in their order.

    \b
    Example:
      kgorch logs ink-demo -f --rank 1
    """
    from db import sessions
    from orchestrator.report import view

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
    at, path = 0, Path(attempts[-1].folder, name)
    if path.exists() and lines:
        at = _start_of_last(path, lines)
    elif not path.exists() and not follow:
        raise NotFound(
            f"there is no {name} in {path.parent}", next_step="see --rank, or --launcher for torchrun's own words"
        )
    while True:
        at = _print_from(path, at)
        if not follow:
            return 0
        last = sessions.last(engine, found.id)
        newest = sessions.attempts(engine, found.id)[-1]
        if not attempt and Path(newest.folder) != path.parent:
            at, path = 0, Path(newest.folder, name)
            click.echo(f"── attempt {path.parent.name}, stage {newest.stage}", err=True)
        elif last is None or not view.is_supervised(last):
            _print_from(path, at)
            return 0
        else:
            time.sleep(0.3)


def _print_stacks(folders: list[Path]) -> int:
    """Of the newest attempt that wrote any: what faulthandler and py-spy told of each rank."""
    for folder in reversed(folders):
        if found := [path for path in sorted(folder.glob("rank*.stacks")) if path.stat().st_size]:
            for path in found:
                click.echo(f"── {path}", err=True)
                _print_from(path, 0)
            return 0
    raise NotFound("no attempt has hung, so nobody wrote its stacks down")


def _start_of_last(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin; read from its end, for a log may be large."""
    with open(path, "rb") as file:
        at = file.seek(0, 2)
        found = 0
        while at > 0 and found <= lines:
            size = min(65536, at)
            at -= size
            file.seek(at)
            block = file.read(size)
            found += block.count(b"\n")
        file.seek(at)
        rest = file.read()
    kept = rest.splitlines(keepends=True)[-lines:]
    return at + len(rest) - sum(map(len, kept))


def _print_from(path: Path, at: int) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(at)
            content = file.read()
    except FileNotFoundError:
        return at
    click.echo(content, nl=False)
    return at + len(content)
