"""kgorch checkpoints list | verify | prune | export"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, json_option, run_argument, state
from orchestrator.errors import CheckpointBroken, KgorchError, NotFound

if TYPE_CHECKING:
    from db.records import CheckpointInfo


@click.group("checkpoints")
def command() -> None:
    """List, verify, prune or export the checkpoints of a run.

    \b
    Example:
      kgorch checkpoints export ink-demo model.safetensors
    """


@command.command("list")
@run_argument
@click.option("--dropped", is_flag=True, help="Also those that were dropped or found broken.")
@json_option
def list_(run: str | None, dropped: bool, as_json: bool) -> int:
    """The checkpoints of RUN, oldest first."""
    from orchestrator.report.view import plain, stamp

    found = [row for row in _rows(run)[1] if dropped or (row.state == "verified" and Path(row.path).is_dir())]
    if as_json:
        fields = ("stage", "step", "final", "state", "bytes", "took_s", "blocking_s", "path")
        render.as_json(
            [
                {name: getattr(row, name) for name in fields}
                | {"at": stamp(row.created_at), "metrics": plain(row.metrics), "source": row.source or None}
                for row in found
            ]
        )
        return 0
    rows = [
        [
            row.stage,
            str(row.step),
            "final" if row.final else "",
            row.state,
            render.size(row.bytes),
            render.duration(row.took_s or None),
            render.clock(stamp(row.created_at)),
            render.metrics(plain(row.metrics)),
        ]
        for row in found
    ]
    render.table(["stage", "step", "", "state", "size", "save took", "at", "metrics"], rows)
    return 0


@command.command("verify")
@run_argument
@json_option
def verify(run: str | None, as_json: bool) -> int:
    """Read every checkpoint of RUN back and compare it with its manifest. Exit 2 when one is broken.

    \b
    Example:
      kgorch checkpoints verify ink-demo
    """
    from orchestrator import manifest

    found, rows = _rows(run)
    results: list[dict[str, Any]] = []
    for folder in _folders(found.folder, rows):
        try:
            results.append({"path": str(folder), "step": manifest.verify(folder).step, "verified": True, "why": ""})
        except CheckpointBroken as error:
            results.append({"path": str(folder), "step": None, "verified": False, "why": str(error)})
        if not as_json:
            click.echo(f"{'verified' if results[-1]['verified'] else 'BROKEN'}\t{folder}")
    if as_json:
        render.as_json(results)
    broken = [item for item in results if not item["verified"]]
    if broken:
        raise CheckpointBroken(
            f"{len(broken)} of {len(results)} checkpoints of {found.name} are broken",
            *[item["why"] for item in broken],
            next_step=f"kgorch resume {found.name}    (takes the newest that is whole)",
        )
    return 0


@command.command("prune")
@run_argument
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--keep", type=click.IntRange(min=1), help="Keep the last N instead of what the plan says.")
def prune(run: str | None, dry_run: bool, keep: int | None) -> int:
    """Drop the checkpoints of RUN that its plan need not keep; the newest verified one always stays.

    \b
    Example:
      kgorch checkpoints prune ink-demo --keep 1 --dry-run
    """
    from db import checkpoints as rows
    from orchestrator.runtime import checkpoints, keeping
    from orchestrator.runtime.opening import plan_of

    _, _, engine = state()
    found = find_run(engine, run)
    plan = plan_of(found)
    if keep:
        part = plan.checkpoint
        plan = plan.model_copy(
            update={"checkpoint": part.model_copy(update={"keep": part.keep.model_copy(update={"last": keep})})}
        )
    for folder in keeping.doomed(engine, found.id, plan):
        click.echo(f"{'would drop' if dry_run else 'dropped'}\t{folder}")
        if not dry_run:
            checkpoints.drop(folder)
            rows.set_state(engine, str(folder), "dropped")
    return 0


@command.command("export")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--stage", help="Of which stage; the newest checkpoint's by default.")
@click.option("--step", type=int, help="Of which step; the newest by default.")
@click.option("--only", metavar="NAME", help="What was tracked under this name; 'model' by default.")
@click.option(
    "--all", "everything", is_flag=True, help="Every tensor of the checkpoint: optimizer and the rest as well."
)
def export(run: str, out: Path, stage: str | None, step: int | None, only: str | None, everything: bool) -> int:
    """Write a checkpoint of RUN into one safetensors file; equal states give equal bytes.

    \b
    Example:
      kgorch checkpoints export ink-demo model.safetensors --step 400
    """
    from orchestrator import manifest
    from orchestrator.runtime import export as exporting

    found, rows = _rows(run)
    for row in reversed(rows):
        folder = Path(row.path)
        if row.state == "verified" and folder.is_dir() and stage in (None, row.stage) and step in (None, row.step):
            manifest.verify(folder)
            count = exporting.export(folder, out, None if everything else (only or "model"))
            click.echo(
                f"{out}: {count} tensors of step {row.step} of {row.stage}, {render.size(out.stat().st_size)}", err=True
            )
            return 0
    raise NotFound(f"{found.name} has no such checkpoint", next_step=f"kgorch checkpoints list {found.name}")


def _rows(run: str | None) -> tuple[Any, list[CheckpointInfo]]:
    from db import checkpoints

    _, _, engine = state()
    found = find_run(engine, run)
    return found, checkpoints.of_run(engine, found.id)


def _folders(run_folder: str, rows: list[CheckpointInfo]) -> list[Path]:
    """What lies on disk, known to the database or not."""
    from orchestrator import manifest

    roots = {Path(row.path).parent for row in rows} | {
        path for path in Path(run_folder, "checkpoints").glob("*") if path.is_dir()
    }
    found = [folder for root in sorted(roots) for folder in reversed(manifest.checkpoints(root))]
    if not found:
        raise KgorchError("there is no checkpoint yet")
    return found
