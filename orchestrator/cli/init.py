"""kgorch init"""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

import click

from orchestrator.cli import render, template
from orchestrator.errors import KgorchError, NotFound, nearest
from orchestrator.system import files

COPIED = (".py", ".toml", ".md")


def _workloads() -> dict[str, Path]:
    """The reference trainings that are installed, by name."""
    spec = importlib.util.find_spec("workloads")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return {plan.parent.name: plan.parent for root in roots for plan in sorted(root.glob("*/plan.toml"))}


def _complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [f"workloads/{name}" for name in _workloads() if f"workloads/{name}".startswith(typed)]


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option(
    "--from", "workload", metavar="WORKLOAD", shell_complete=_complete,
    help="Copy a reference training and its plans instead; PATH is a folder then.",
)  # fmt: skip
@click.option("--print", "only_print", is_flag=True, help="Print the plan with every key explained; write nothing.")
@click.option("--force", is_flag=True, help="Write also where there is such a file; that one is kept as FILE.bak.")
def command(path: Path | None, workload: str | None, only_print: bool, force: bool) -> int:
    """Write a plan with every key explained and a small train.py that it runs: both work as they are, and are to be changed.

    A train.py that is there stays as it is. PATH: the plan's file, or its folder.

    \b
    Example:
      kgorch init && kgorch start plan.toml
      kgorch init --from workloads/timeseries mine && kgorch check mine/plan.toml
    """
    if only_print:
        if workload or path or force:
            raise click.UsageError("--print writes nothing: leave the others out")
        render.echo(template.plan_text(), nl=False)
        return 0
    if workload:
        return _copy(workload, path, force=force)
    path = path or Path("plan.toml")
    if path.is_dir():
        path = path / "plan.toml"
    if path.exists() and not force:
        raise _taken(path, f"kgorch init {_typed(path)} --force")
    _write(path, template.plan_text())
    script = path.parent / "train.py"
    if os.path.lexists(script):
        render.echo(f"{script} is there already and stays as it is; the plan's stage runs it")
        render.echo(f"next: make the plan's stages fit it, then: kgorch check {_typed(path)}")
    else:
        _write(script, template.script_text())
        render.echo(f"{script} is written: a small training that the plan runs")
        render.echo(f"next: kgorch start {_typed(path)}")
    return 0


def _copy(workload: str, folder: Path | None, *, force: bool) -> int:
    known, name = _workloads(), Path(workload).name
    if name not in known:
        raise NotFound(
            f"there is no workload {workload!r}{nearest(name, known)}", f"known: {', '.join(known) or 'none'}"
        )
    folder = folder or Path(name)
    sources = [file for file in sorted(known[name].iterdir()) if file.suffix in COPIED and file.name != "__init__.py"]
    taken = [folder / file.name for file in sources if (folder / file.name).exists()]
    if taken and not force:
        raise _taken(taken[0], f"kgorch init --from {workload} {_typed(folder)} --force")
    for file in sources:
        # the copy is its own: its modules lie beside its plan, and no longer in the package
        text = file.read_text().replace(f"from workloads.{name}.", "from ").replace(f"workloads.{name}.", "")
        text = text.replace(f"workloads/{name}/", "")
        _write(folder / file.name, text, says=False)
    render.echo(f"{len(sources)} files of {name} are copied to {folder}, which {folder / 'README.md'} explains")
    render.echo(f"next: kgorch check {_typed(folder / 'plan.toml')}")
    return 0


def _taken(path: Path, forced: str) -> KgorchError:
    return KgorchError(
        f"{path} is there already; nothing was written",
        f"{forced} writes a new one and keeps this one as {path.name}.bak",
        next_step="kgorch init --print    (shows every key explained; kgorch explain KEY shows one)",
    )


def _write(path: Path, text: str, *, says: bool = True) -> None:
    """A file in one step; what was there is kept beside it. Raises: KgorchError."""
    kept = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacement(path, suffix=f".{os.getpid()}") as file:
            file.write(text.encode())
            if os.path.lexists(path):
                kept = _kept_beside(path)
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error), next_step="name another folder") from None
    if kept:
        render.echo(f"the former {path.name} is kept as {kept}")
    if says and path.suffix == ".toml":
        render.echo(f"{path} is written: a plan with every key explained")


def _kept_beside(path: Path) -> Path:
    """The file under the first of FILE.bak, FILE.bak2 … that is free; a link, so that no moment is without it."""
    for number in range(1, 10_000):
        place = path.with_name(f"{path.name}.bak{number if number > 1 else ''}")
        try:
            os.link(path, place, follow_symlinks=False)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if os.path.lexists(place):
                continue
            path.rename(place)
        return place
    raise KgorchError(f"{path} has 9999 copies beside it", next_step=f"rm {shlex.quote(str(path))}.bak*")


def _typed(path: Path) -> str:
    """As a shell takes it."""
    return shlex.quote(str(path))
