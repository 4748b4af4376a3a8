"""kgorch init"""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

import click

from kgorch.cli import template
from kgorch.cli.display import render
from kgorch.errors import KgorchError, NotFound, nearest
from kgorch.system import files

COPY_SUFFIXES = (".py", ".toml", ".md")


def _workloads() -> dict[str, Path]:
    """The folders of the installed reference trainings, by name."""
    spec = importlib.util.find_spec("kgorch.workloads")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return {plan.parent.name: plan.parent for root in roots for plan in sorted(root.glob("*/plan.toml"))}


def _complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [f"workloads/{name}" for name in _workloads() if f"workloads/{name}".startswith(typed)]


@click.command("init")
@click.argument("typed", metavar="[PATH]", type=click.Path(), required=False)
@click.option(
    "--from", "workload", metavar="WORKLOAD", shell_complete=_complete,
    help="Copy a reference training and its plans instead; PATH is its new folder.",
)  # fmt: skip
@click.option("--print", "only_print", is_flag=True, help="Print the plan with every key explained; write nothing.")
@click.option("--force", is_flag=True, help="Replace existing files; each is kept as FILE.bak.")
def command(typed: str | None, workload: str | None, only_print: bool, force: bool) -> int:
    """Write a plan with every key explained, and a small train.py that it runs.

    Both work unchanged and are meant to be edited. An existing train.py is not replaced. PATH is the file or the folder of the
    plan.

    \b
    Example:
      kgorch init && kgorch start plan.toml
      kgorch init --from workloads/timeseries mine && kgorch check mine/plan.toml
    """
    path = Path(typed) if typed else None
    if only_print:
        if workload or path or force:
            raise click.UsageError("--print writes nothing: leave out the other arguments")
        render.echo(template.plan_text(), nl=False)
        return 0
    if workload:
        return _copy(workload, path, force=force)
    if path is None or path.is_dir() or str(typed).endswith("/"):  # of a new folder, too
        path = (path or Path()) / "plan.toml"
    if path.exists() and not force:
        raise _exists_error(path, f"kgorch init {_shell_word(path)} --force")
    _write(path, template.plan_text())
    render.echo(f"wrote {path}, a plan with every key explained")
    script = path.parent / "train.py"
    if os.path.lexists(script):
        render.echo(f"{script} exists already and was not changed; the plan's stage runs it")
        render.echo(f"next: adapt the plan's stage to it, then: kgorch check {_shell_word(path)}")
    else:
        _write(script, template.script_text())
        render.echo(f"wrote {script}, a small training that the plan runs")
        render.echo(f"next: kgorch start {_shell_word(path)}")
    return 0


def _copy(workload: str, folder: Path | None, *, force: bool) -> int:
    folders, name = _workloads(), Path(workload).name
    if name not in folders:
        raise NotFound(
            f"there is no workload {workload!r}{nearest(name, folders)}",
            f"workloads: {', '.join(folders) or 'none'}",
            error_code="KG108",
        )
    folder = folder or Path(name)
    files = [
        file for file in sorted(folders[name].iterdir()) if file.suffix in COPY_SUFFIXES and file.name != "__init__.py"
    ]
    existing = [folder / file.name for file in files if (folder / file.name).exists()]
    if existing and not force:
        raise _exists_error(existing[0], f"kgorch init --from {workload} {_shell_word(folder)} --force")
    for file in files:
        # the modules of the copy are beside its plan, not in the package `workloads`, so imports, entries and paths must change
        text = (
            file.read_text().replace(f"from kgorch.workloads.{name}.", "from ").replace(f"kgorch.workloads.{name}.", "")
        )
        text = text.replace(f"workloads/{name}/", "")
        _write(folder / file.name, text)
    render.echo(f"copied {len(files)} files of {name} to {folder}; {folder / 'README.md'} explains them")
    render.echo(f"next: kgorch check {_shell_word(folder / 'plan.toml')}")
    return 0


def _exists_error(path: Path, force_command: str) -> KgorchError:
    """The refusal to replace a file; `force_command` replaces it."""
    return KgorchError(
        f"{path} exists already; nothing was written",
        f"{force_command} writes a new one and keeps the old one as {path.name}.bak",
        next_step="kgorch init --print    (explains every key; kgorch explain KEY explains one)",
        error_code="KG503",
    )


def _write(path: Path, text: str) -> None:
    """Write a file atomically; an existing one is kept beside it. Raises: KgorchError."""
    backup = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacement(path, suffix=f".{os.getpid()}") as file:
            file.write(text.encode())
            if os.path.lexists(path):
                backup = _back_up(path)
    except OSError as error:
        raise KgorchError(
            f"{path} cannot be written", str(error), next_step="name another folder", error_code="KG503"
        ) from None
    if backup:
        render.echo(f"the old {path.name} is kept as {backup}")


def _back_up(path: Path) -> Path:
    """Keep a file under the first free name of FILE.bak, FILE.bak2, …

    It is linked, not renamed, so that a crash leaves no moment in which the file does not exist.
    """
    for number in range(1, 10_000):
        backup = path.with_name(f"{path.name}.bak{number if number > 1 else ''}")
        try:
            os.link(path, backup, follow_symlinks=False)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if os.path.lexists(backup):
                continue
            path.rename(backup)
        return backup
    raise KgorchError(f"{path} has 9999 backups", next_step=f"rm {shlex.quote(str(path))}.bak*", error_code="KG503")


def _shell_word(path: Path) -> str:
    """The path as a shell takes it."""
    return shlex.quote(str(path))
