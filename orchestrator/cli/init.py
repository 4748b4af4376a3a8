"""kgorch init"""

from __future__ import annotations

import importlib.util
import shlex
from importlib import resources
from pathlib import Path

import click

from orchestrator.errors import KgorchError, NotFound, nearest

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
@click.option("--force", is_flag=True, help="Write over files that are there.")
def command(path: Path | None, workload: str | None, force: bool) -> int:
    """Write a plan with every key explained, to be edited; or copy a training that works, to be made one's own.

    \b
    Example:
      kgorch init && kgorch start plan.toml
      kgorch init --from workloads/timeseries mine && kgorch check mine/plan.toml
    """
    if workload:
        return _copy(workload, path, force=force)
    path = path or Path("plan.toml")
    _write(path, resources.files("orchestrator.cli").joinpath("template.toml").read_text(), force=force)
    click.echo(f"{path} is written; edit its stages, then: kgorch start {_typed(path)}")
    return 0


def _copy(workload: str, folder: Path | None, *, force: bool) -> int:
    known, name = _workloads(), Path(workload).name
    if name not in known:
        raise NotFound(
            f"there is no workload {workload!r}{nearest(name, known)}", f"known: {', '.join(known) or 'none'}"
        )
    folder = folder or Path(name)
    files = [file for file in sorted(known[name].iterdir()) if file.suffix in COPIED and file.name != "__init__.py"]
    taken = [folder / file.name for file in files if (folder / file.name).exists()]
    if taken and not force:
        raise KgorchError(
            f"{taken[0]} is there already",
            next_step=f"kgorch init --from {workload} {_typed(folder)} --force writes over it",
        )
    for file in files:
        # the copy is its own: its modules lie beside its plan, and no longer in the package
        text = file.read_text().replace(f"from workloads.{name}.", "from ").replace(f"workloads.{name}.", "")
        text = text.replace(f"workloads/{name}/", "")
        _write(folder / file.name, text, force=True)
    click.echo(f"{len(files)} files of {name} are copied to {folder}, which {folder / 'README.md'} explains")
    click.echo(f"next: kgorch check {_typed(folder / 'plan.toml')}")
    return 0


def _write(path: Path, text: str, *, force: bool) -> None:
    if path.exists() and not force:
        raise KgorchError(f"{path} is there already", next_step=f"kgorch init {_typed(path)} --force writes over it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error)) from None


def _typed(path: Path) -> str:
    """As a shell takes it."""
    return shlex.quote(str(path))
