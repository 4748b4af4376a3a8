"""kgorch checkpoints list | verify | prune | export"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, json_option, run_argument, state
from orchestrator.cli.usage import Group
from orchestrator.core.codes import CheckpointState
from orchestrator.errors import CheckpointBroken, KgorchError, NotFound, ReplayFailed

if TYPE_CHECKING:
    from db.records import CheckpointInfo
    from orchestrator.preflight.determinism_check import Difference


@click.group("checkpoints", cls=Group)
def command() -> None:
    """List, verify, prune or export the checkpoints of a run.

    \b
    Example:
      kgorch checkpoints export surface-demo model.safetensors
    """


@command.command("list")
@run_argument
@click.option("--dropped", is_flag=True, help="Also those that were dropped or found broken.")
@json_option
def list_(run: str | None, dropped: bool, as_json: bool) -> int:
    """The checkpoints of RUN, oldest first."""
    from orchestrator.report.run_view import plain, stamp

    rows = _rows(run)[1] if dropped else _standing(run)[1]
    if as_json:
        fields = ("stage", "step", "final", "state", "bytes", "took_s", "blocking_s", "path")
        render.as_json(
            [
                {name: getattr(row, name) for name in fields}
                | {"at": stamp(row.created_at), "metrics": plain(row.metrics), "source": row.source or None}
                | {"measured": dict(row.measured), "best": _best_by(row) or None}
                for row in rows
            ]
        )
        return 0
    shown = [
        [
            row.stage,
            str(row.step),
            " ".join(word for word, holds in (("final", row.final), ("best", _best_by(row))) if holds),
            row.state,
            render.size(row.bytes),
            render.duration(row.took_s or None),
            render.clock(stamp(row.created_at)),
            render.metrics(plain(row.metrics)),
        ]
        for row in rows
    ]
    render.table(["stage", "step", "", "state", "size", "save took", "at", "metrics"], shown)
    return 0


def _best_by(row: CheckpointInfo) -> str:
    """By what it is the best of its stage, as the plan's keep.best has it; empty if it is not."""
    return row.best if row.state == CheckpointState.VERIFIED else ""


@command.command("verify")
@run_argument
@click.option(
    "--replay", type=click.IntRange(min=1), metavar="N", help="Train N steps from a checkpoint twice and compare bits."
)
@click.option("--step", type=int, help="Replay from the checkpoint of this step; the newest by default.")
@json_option
def verify(run: str | None, replay: int | None, step: int | None, as_json: bool) -> int:
    """Read every checkpoint of RUN back and compare it with its manifest. Exit 2 when one is broken.

    With --replay, see instead whether its training is exact: the same steps twice from one checkpoint, in folders that
    go afterwards (what the script writes outside of its output folder, it writes there). Exit 20 when the bits differ.

    \b
    Example:
      kgorch checkpoints verify surface-demo
      kgorch checkpoints verify surface-demo --replay 20
    """
    from orchestrator.checkpoint.verify import verify_checkpoint

    if replay:
        return _replay(run, replay, step, as_json=as_json)
    if step is not None:
        raise click.UsageError("--step goes with --replay N")
    found, rows = _rows(run)
    results: list[dict[str, Any]] = []
    for folder in _folders(found.folder, rows):
        try:
            results.append({"path": str(folder), "step": verify_checkpoint(folder).step, "verified": True, "why": ""})
        except CheckpointBroken as error:
            results.append({"path": str(folder), "step": None, "verified": False, "why": str(error)})
        if not as_json:
            render.echo(f"{'verified' if results[-1]['verified'] else 'BROKEN'}\t{folder}")
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


def _replay(name: str | None, steps: int, step: int | None, *, as_json: bool) -> int:
    from dataclasses import asdict

    from db import sessions
    from orchestrator.admission import ownership
    from orchestrator.admission.resolve_run import plan_of
    from orchestrator.launch import launcher
    from orchestrator.preflight import determinism_check
    from orchestrator.system.file_lock import FileLock
    from orchestrator.system.paths import lock_path

    run, rows = _standing(name)
    _, home, engine = state()
    lock = FileLock(lock_path(home, run.name))
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    is_live = not lock.acquire() or ownership.is_live(engine, home, run.name)
    if is_live or (attempt and launcher.is_running(Path(attempt.folder))):
        raise KgorchError(f"{run.name} is training", next_step=f"kgorch stop {run.name}, then replay")
    try:
        usable = [row for row in rows if not row.final]
        chosen = next((row for row in reversed(usable) if step in (None, row.step)), None)
        if chosen is None:
            raise NotFound(
                f"{run.name} has no such checkpoint to train on from (a final one closes its stage)",
                next_step=f"kgorch checkpoints list {run.name}",
            )
        found = determinism_check.replay(
            engine, run, plan_of(run), Path(chosen.path), steps, lambda text: render.echo(text, err=True)
        )
    finally:
        lock.release()
    if as_json:
        render.as_json({"run": run.name, "equal": found.equal, **asdict(found)})
    trained = f"{found.to_step - found.from_step} steps from step {found.from_step} twice"
    if found.equal:
        if not as_json:
            render.echo(f"{trained}: equal bits ({found.tensors} tensors, {render.size(found.bytes)})")
        return 0
    shown = [
        *(_difference(item) for item in found.differing[: determinism_check.MEASURED]),
        *found.other[: determinism_check.MEASURED],
    ]
    raise ReplayFailed(
        f"{trained}: {len(found.differing)} of {found.tensors} tensors differ",
        *shown,
        "likely: kernels that add in no fixed order (torch.use_deterministic_algorithms(True) names them),",
        "or chance that no checkpoint holds (os.urandom, the time, a generator that is not tracked, a loader of its own)",
        next_step=f"kgorch checkpoints verify {run.name} --replay 1 --step {found.from_step}    (the first step that differs)",
    )


def _difference(item: Difference) -> str:
    if item.elements is None:
        return f"{item.tensor!r:.200} in {item.shard}"
    most = "no number" if item.max_abs is None else f"{item.max_abs:.3g}"
    return f"{item.tensor!r:.200} in {item.shard}: {item.elements} elements, by at most {most}"


@command.command("prune")
@run_argument
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--keep", type=click.IntRange(min=1), help="Keep the last N instead of what the plan says.")
def prune(run: str | None, dry_run: bool, keep: int | None) -> int:
    """Drop the checkpoints of RUN that its plan need not keep; the newest verified one always stays.

    \b
    Example:
      kgorch checkpoints prune surface-demo --keep 1 --dry-run
    """
    from db import checkpoints as rows
    from orchestrator.admission.resolve_run import plan_of
    from orchestrator.checkpoint import registry, store

    _, _, engine = state()
    found = find_run(engine, run)
    plan = plan_of(found)
    if keep:
        part = plan.checkpoint
        plan = plan.model_copy(
            update={"checkpoint": part.model_copy(update={"keep": part.keep.model_copy(update={"last": keep})})}
        )
    for folder in registry.expired_folders(engine, found.id, plan):
        render.echo(f"{'would drop' if dry_run else 'dropped'}\t{folder}")
        if not dry_run:
            store.delete(folder, Path(found.checkpoints))
            rows.set_state(engine, str(folder), CheckpointState.DROPPED)
    return 0


@command.command("export")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--stage", help="Of which stage; the newest checkpoint's by default.")
@click.option("--step", type=int, help="Of which step; the newest by default.")
@click.option(
    "--best",
    metavar="[METRIC[:min|:max]]",
    is_flag=False,
    flag_value="",
    default=None,
    help="The best by the plan's keep.best, or by this metric, of those whose weights were evaluated. Stands last.",
)
@click.option("--only", metavar="NAME", help="What was tracked under this name; 'model' by default.")
@click.option(
    "--all", "everything", is_flag=True, help="Every tensor of the checkpoint: optimizer and the rest as well."
)
def export(
    run: str, out: Path, stage: str | None, step: int | None, best: str | None, only: str | None, everything: bool
) -> int:
    """Write a checkpoint of RUN into one file: .safetensors (equal states give equal bytes), .pt or .pth.

    \b
    Example:
      kgorch checkpoints export surface-demo model.safetensors --step 400
      kgorch checkpoints export surface-demo model.safetensors --best
      kgorch checkpoints export surface-demo model.safetensors --best accuracy:max
    """
    from orchestrator.checkpoint.export import exporter_for
    from orchestrator.checkpoint.verify import verify_checkpoint

    if best is not None and step is not None:
        raise click.UsageError("--best and --step choose a checkpoint each: give one of them")
    found, rows = _standing(run)
    write = exporter_for(out)
    figure = ""
    if best is not None:
        path, figure = _best(found, rows, stage, best)
        rows = [row for row in rows if row.path == path]
    for row in reversed(rows):
        folder = Path(row.path)
        if stage in (None, row.stage) and step in (None, row.step):
            verify_checkpoint(folder)
            count = write(folder, out, None if everything else (only or "model"))
            what = f"step {row.step} of {row.stage}{figure}"
            render.echo(f"{out}: {count} tensors of {what}, {render.size(out.stat().st_size)}", err=True)
            return 0
    raise NotFound(f"{found.name} has no such checkpoint", next_step=f"kgorch checkpoints list {found.name}")


def _best(run: Any, rows: list[CheckpointInfo], stage: str | None, asked: str) -> tuple[str, str]:
    """The path of the best checkpoint of that stage, of the furthest one that has any by default; and its figure, in words.

    Raises: KgorchError.
    """
    from orchestrator.admission.resolve_run import plan_of
    from orchestrator.checkpoint import registry

    planned = plan_of(run).checkpoint.keep.best
    metric, _, way = asked.rpartition(":") if asked.endswith((":min", ":max")) else (asked, "", "")
    if planned and registry.parse_best(planned)[0] == (metric or planned.rpartition(":")[0]):
        metric, highest = registry.parse_best(planned)
        highest = way == "max" if way else highest
    elif metric and way:
        highest = way == "max"
    else:
        known = sorted({name for row in rows for name in row.metrics})
        what = f"whether the lowest or the highest {metric} is the best" if metric else "by which metric"
        raise KgorchError(
            f"the plan of {run.name} does not say {what}",
            f"its checkpoints hold: {', '.join(known)}" if known else "its checkpoints hold no metrics",
            next_step=f"give --best {metric or (known or ['METRIC'])[0]}:max, or :min",
        )
    _, _, engine = state()
    for name in dict.fromkeys(row.stage for row in reversed(rows)):
        if stage in (None, name) and (best := registry.best_checkpoint(engine, run.id, name, metric, highest)):
            sure = (
                "" if best.measured.get(metric) == best.step else ", reported last before it: its own was not measured"
            )
            return best.key, f" ({metric} {best.metrics[metric]:.6g}{sure})"
    raise NotFound(
        f"no checkpoint of {run.name} holds weights on which {metric} was measured",
        next_step=f"kgorch checkpoints list {run.name}",
    )


def _rows(run: str | None, *states: str) -> tuple[Any, list[CheckpointInfo]]:
    from db import checkpoints

    _, _, engine = state()
    found = find_run(engine, run)
    return found, checkpoints.of_run(engine, found.id, *states)


def _standing(run: str | None) -> tuple[Any, list[CheckpointInfo]]:
    """Verified, and there."""
    found, rows = _rows(run, CheckpointState.VERIFIED)
    return found, [row for row in rows if Path(row.path).is_dir()]


def _folders(run_folder: str, rows: list[CheckpointInfo]) -> list[Path]:
    """What lies on disk, known to the database or not."""
    from orchestrator.checkpoint.folder import list_checkpoints

    roots = {Path(row.path).parent for row in rows} | {
        path for path in Path(run_folder, "checkpoints").glob("*") if path.is_dir()
    }
    found = [folder for root in sorted(roots) for folder in reversed(list_checkpoints(root))]
    if not found:
        raise KgorchError("there is no checkpoint yet")
    return found
