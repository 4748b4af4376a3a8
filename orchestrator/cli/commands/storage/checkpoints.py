"""kgorch checkpoints list | verify | prune | pin | unpin | drop | export"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, run_argument
from kgorch.cli.usage import Group
from kgorch.core.codes import CheckpointState
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, KgorchError, NotFound, ReplayFailed

if TYPE_CHECKING:
    from kgorch.db.rows import CheckpointInfo
    from kgorch.preflight.determinism_check import Difference


@click.group("checkpoints", cls=Group)
def command() -> None:
    """List, verify, prune, pin, drop or export the checkpoints of a run.

    \b
    Example:
      kgorch checkpoints export surface-demo model.safetensors
    """


@command.command("list")
@run_argument
@click.option("--dropped", is_flag=True, help="Also list dropped and broken checkpoints.")
@json_option
def list_(run: str | None, dropped: bool, as_json: bool) -> int:
    """List the checkpoints of RUN, the oldest first.

    \b
    Example:
      kgorch checkpoints list surface-demo --dropped
    """
    from kgorch.report import checkpoint_list
    from kgorch.report.json_fields import finite_metrics, stamp

    rows = _rows(run)[1] if dropped else _verified_rows(run)[1]
    if as_json:
        render.as_json(checkpoint_list.entries(rows))
        return 0
    cells = [
        [
            row.stage,
            str(row.step),
            " ".join(
                word
                for word, is_so in (
                    ("final", row.final),
                    ("best", checkpoint_list.best_by(row)),
                    ("pinned", row.pinned),
                )
                if is_so
            ),
            row.state,
            render.size(row.bytes),
            render.duration(row.save_duration_s or None),
            render.clock(stamp(row.created_at)),
            render.metrics(finite_metrics(row.metrics)),
        ]
        for row in rows
    ]
    render.table(["stage", "step", "", "state", "size", "save took", "at", "metrics"], cells)
    return 0


@command.command("verify")
@run_argument
@click.option(
    "--replay",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train N steps from a checkpoint twice and compare the bits.",
)
@click.option("--step", metavar="N", type=int, help="With --replay: the step of the checkpoint (default: the newest).")
@json_option
def verify(run: str | None, replay: int | None, step: int | None, as_json: bool) -> int:
    """Read every checkpoint of RUN and compare it with its manifest. Exits with 2 if one is broken or unreadable.

    With --replay, test instead whether the training is deterministic: train the same steps twice from one checkpoint, in
    temporary folders, and compare the results. Exits with 20 if the bits differ. Files that the script writes outside of its
    output folder are written as in a normal run.

    \b
    Example:
      kgorch checkpoints verify surface-demo
      kgorch checkpoints verify surface-demo --replay 20
    """
    from kgorch.checkpoint.verify import verify_checkpoint

    if replay:
        return _replay(run, replay, step, as_json=as_json)
    if step is not None:
        raise click.UsageError("--step needs --replay N")
    info, rows = _rows(run)
    results: list[dict[str, Any]] = []
    broken: list[str] = []
    unreadable: list[str] = []
    # the folders on disk and not the rows: a checkpoint whose message was lost is used by a resume, too
    for folder in _folders(info.folder, rows):
        step, why, word = None, "", "verified"
        try:
            step = verify_checkpoint(folder).step
        except (CheckpointBroken, CheckpointUnreadable) as error:
            if _is_gone(folder):  # dropped by a training while the others were read
                continue
            why, is_broken = str(error), isinstance(error, CheckpointBroken)
            word = "BROKEN" if is_broken else "UNREADABLE"
            (broken if is_broken else unreadable).append(why)
        results.append({"path": str(folder), "step": step, "verified": not why, "why": why})
        if not as_json:
            render.echo(f"{word}\t{folder}")
    if as_json:
        render.as_json(results)
    if broken:
        raise CheckpointBroken(
            f"{len(broken)} of {len(results)} checkpoints of {info.name} are broken",
            *broken,
            *unreadable,
            next_step=f"kgorch resume {info.name}    (uses the newest that is not broken)",
        )
    if unreadable:
        raise CheckpointUnreadable(
            f"{len(unreadable)} of {len(results)} checkpoints of {info.name} cannot be read now",
            *unreadable,
            next_step=f"mount the disk again, or install the kgorch that wrote them; then kgorch checkpoints verify {info.name}",
        )
    return 0


def _is_gone(folder: Path) -> bool:
    """Whether nothing has that name any more; not after an error of the disk, which proves nothing."""
    try:
        folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _replay(name: str | None, steps: int, step: int | None, *, as_json: bool) -> int:
    from dataclasses import asdict

    from kgorch.admission import ownership
    from kgorch.admission.resolve_run import load_stored_plan
    from kgorch.db import sessions
    from kgorch.launch import launcher
    from kgorch.preflight import determinism_check
    from kgorch.system.file_lock import FileLock
    from kgorch.system.paths import lock_path

    run, rows = _verified_rows(name)
    _, home, engine = open_state()
    lock = FileLock(lock_path(home, run.name))
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    is_live = not lock.acquire() or ownership.is_live(engine, home, run.name)
    # ranks may train on without a supervisor, and then hold no lock of the run
    if is_live or (attempt and launcher.is_running(Path(attempt.folder))):
        raise KgorchError(
            f"{run.name} is being trained", next_step=f"kgorch stop {run.name}, then the same again", error_code="KG303"
        )
    try:
        # after a final checkpoint its stage has no steps left to train
        usable = [row for row in rows if not row.final]
        start = next((row for row in reversed(usable) if step in (None, row.step)), None)
        if start is None:
            raise NotFound(
                f"{run.name} has no such checkpoint to train from (a final one has no steps after it)",
                next_step=f"kgorch checkpoints list {run.name}",
            )
        result = determinism_check.replay(
            engine, run, load_stored_plan(run), Path(start.path), steps, lambda text: render.echo(text, err=True)
        )
    finally:
        lock.release()
    if as_json:
        render.as_json({"run": run.name, "equal": result.equal, **asdict(result)})
    what = f"{result.to_step - result.from_step} steps from step {result.from_step}, trained twice"
    if result.equal:
        if not as_json:
            render.echo(f"{what}: the bits are equal ({result.tensors} tensors, {render.size(result.bytes)})")
        return 0
    details = [
        *(_difference(item) for item in result.differing[: determinism_check.MEASURED]),
        *result.other[: determinism_check.MEASURED],
    ]
    raise ReplayFailed(
        f"{what}: {len(result.differing)} of {result.tensors} tensors differ",
        *details,
        "likely: kernels without a fixed order of additions (torch.use_deterministic_algorithms(True) names them),",
        "or randomness that no checkpoint holds (os.urandom, the time, a generator that is not tracked, another loader)",
        next_step=f"kgorch checkpoints verify {run.name} --replay 1 --step {result.from_step}    (compares a single step)",
    )


def _difference(item: Difference) -> str:
    if item.elements is None:
        return f"{item.tensor!r:.200} in {item.shard}"
    most = "nan" if item.max_abs is None else f"{item.max_abs:.3g}"
    return f"{item.tensor!r:.200} in {item.shard}: {item.elements} elements, by at most {most}"


@command.command("prune")
@run_argument
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@click.option(
    "--keep", metavar="N", type=click.IntRange(min=1), help="Keep the last N (default: the plan's checkpoint.keep)."
)
def prune(run: str | None, dry_run: bool, keep: int | None) -> int:
    """Delete the checkpoints of RUN that its plan does not keep; the newest verified one is always kept.

    \b
    Example:
      kgorch checkpoints prune surface-demo --keep 1 --dry-run
    """
    from kgorch.admission.resolve_run import load_stored_plan
    from kgorch.checkpoint import registry, store

    _, _, engine = open_state()
    info = find_run(engine, run)
    plan = load_stored_plan(info)
    if keep:
        section = plan.checkpoint
        rule = section.keep.model_copy(update={"last": keep})
        plan = plan.model_copy(update={"checkpoint": section.model_copy(update={"keep": rule})})

    def delete(folder: Path) -> bool:
        render.echo(f"dropped\t{folder}")
        store.delete(folder, Path(info.checkpoints))
        return True

    if dry_run:
        for folder in registry.expired_folders(engine, info.id, plan):
            render.echo(f"would drop\t{folder}")
    else:
        registry.drop_expired(engine, info.id, plan, delete)
    return 0


step_option = click.option("--step", metavar="N", type=int, required=True, help="Which checkpoint.")
stage_option = click.option("--stage", metavar="STAGE", help="Which stage (default: the last one that has that step).")


@command.command("pin")
@run_argument
@step_option
@stage_option
def pin(run: str | None, step: int, stage: str | None) -> int:
    """Keep a checkpoint of RUN until it is unpinned, whatever its plan keeps and whatever disk it takes.

    \b
    Example:
      kgorch checkpoints pin surface-demo --step 400
    """
    return _set_pinned(run, step, stage, is_pinned=True)


@command.command("unpin")
@run_argument
@step_option
@stage_option
def unpin(run: str | None, step: int, stage: str | None) -> int:
    """Let the plan of RUN decide again how long a checkpoint is kept.

    \b
    Example:
      kgorch checkpoints unpin surface-demo --step 400
    """
    return _set_pinned(run, step, stage, is_pinned=False)


@command.command("drop")
@run_argument
@step_option
@stage_option
def drop(run: str | None, step: int, stage: str | None) -> int:
    """Delete one checkpoint of RUN; not the newest verified one, from which the run goes on, and no pinned one.

    \b
    Example:
      kgorch checkpoints drop surface-demo --step 200
    """
    from kgorch.checkpoint import registry

    info, row = _one(run, step, stage)
    _, _, engine = open_state()
    registry.drop(engine, info.id, row, Path(info.checkpoints))
    render.echo(f"dropped\t{row.path}")
    return 0


def _set_pinned(run: str | None, step: int, stage: str | None, *, is_pinned: bool) -> int:
    from kgorch.db import checkpoints

    info, row = _one(run, step, stage)
    _, _, engine = open_state()
    checkpoints.set_pinned(engine, row.path, is_pinned)
    render.echo(f"{info.name}: step {row.step} of {row.stage} is {'pinned' if is_pinned else 'not pinned'}")
    return 0


def _one(run: str | None, step: int, stage: str | None) -> tuple[Any, CheckpointInfo]:
    """The checkpoint of that step. Raises: NotFound."""
    info, rows = _verified_rows(run)
    if found := [row for row in rows if row.step == step and stage in (None, row.stage)]:
        return info, found[-1]
    raise NotFound(
        f"{info.name} has no verified checkpoint of step {step}", next_step=f"kgorch checkpoints list {info.name}"
    )


@command.command("export")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--stage", metavar="STAGE", help="Which stage (default: the one of the newest checkpoint).")
@click.option("--step", metavar="N", type=int, help="Which step (default: the newest).")
@click.option(
    "--best",
    metavar="[METRIC[:min|:max]]",
    is_flag=False,
    flag_value="",
    default=None,
    help="The best checkpoint by the plan's keep.best, or by METRIC. Must be the last option.",
)
@click.option("--only", metavar="NAME", help="The object that was tracked under this name (default: model).")
@click.option("--all", "everything", is_flag=True, help="Every tensor of the checkpoint: optimizer and all else.")
def export(
    run: str, out: Path, stage: str | None, step: int | None, best: str | None, only: str | None, everything: bool
) -> int:
    """Write a checkpoint of RUN into one file: .safetensors (equal states give equal bytes), .pt or .pth.

    Of a program of [stage.foreign] the program's own checkpoint is written, a file or a folder, whatever its name.

    \b
    Example:
      kgorch checkpoints export surface-demo model.safetensors --step 400
      kgorch checkpoints export surface-demo model.safetensors --best
      kgorch checkpoints export surface-demo model.safetensors --best accuracy:max
    """
    from kgorch.checkpoint.export import export_foreign, exporter_for
    from kgorch.checkpoint.foreign_contents import is_foreign
    from kgorch.checkpoint.verify import verify_checkpoint

    if best is not None and step is not None:
        raise click.UsageError("--best and --step each select a checkpoint: give one of them")
    info, rows = _verified_rows(run)
    figure = ""
    if best is not None:
        path, figure = _best(info, rows, stage, best)
        rows = [row for row in rows if row.path == path]
    for row in reversed(rows):
        folder = Path(row.path)
        if stage in (None, row.stage) and step in (None, row.step):
            what = f"step {row.step} of {row.stage}{figure}"
            if is_foreign(verify_checkpoint(folder)):
                size = export_foreign(folder, out)
                render.echo(f"{out}: {what}, {render.size(size)}", err=True)
                return 0
            count = exporter_for(out)(folder, out, None if everything else (only or "model"))
            render.echo(f"{out}: {count} tensors of {what}, {render.size(out.stat().st_size)}", err=True)
            return 0
    raise NotFound(f"{info.name} has no such checkpoint", next_step=f"kgorch checkpoints list {info.name}")


def _best(run: Any, rows: list[CheckpointInfo], stage: str | None, option: str) -> tuple[str, str]:
    """The path of the best checkpoint, and its figure in words.

    Args:
        stage: None for the last one that has a best checkpoint.
        option: of --best: empty, METRIC, or METRIC:min or METRIC:max.
    Raises: KgorchError.
    """
    from kgorch.admission.resolve_run import load_stored_plan
    from kgorch.checkpoint import registry

    planned = load_stored_plan(run).checkpoint.keep.best
    metric, _, mode = option.rpartition(":") if option.endswith((":min", ":max")) else (option, "", "")
    if planned and registry.parse_best(planned)[0] == (metric or planned.rpartition(":")[0]):
        metric, highest = registry.parse_best(planned)
        highest = mode == "max" if mode else highest
    elif metric and mode:
        highest = mode == "max"
    else:
        names = sorted({name for row in rows for name in row.metrics})
        what = f"whether the lowest or the highest {metric} is the best" if metric else "which metric decides the best"
        raise KgorchError(
            f"the plan of {run.name} does not say {what}",
            f"metrics of its checkpoints: {', '.join(names) or 'none'}",
            next_step=f"give --best {metric or (names or ['METRIC'])[0]}:max, or :min",
        )
    _, _, engine = open_state()
    for name in dict.fromkeys(row.stage for row in reversed(rows)):
        if stage in (None, name) and (best := registry.best_checkpoint(engine, run.id, name, metric, highest)):
            is_measured = best.measured.get(metric) == best.step
            note = "" if is_measured else ", the last report before it: it was not evaluated itself"
            return best.key, f" ({metric} {best.metrics[metric]:.6g}{note})"
    raise NotFound(
        f"no checkpoint of {run.name} holds weights that were evaluated by {metric}",
        next_step=f"kgorch checkpoints list {run.name}",
    )


def _rows(run: str | None, *states: str) -> tuple[Any, list[CheckpointInfo]]:
    """A run and its checkpoints in these states (default: in any), the oldest first."""
    from kgorch.db import checkpoints

    _, _, engine = open_state()
    info = find_run(engine, run)
    return info, checkpoints.of_run(engine, info.id, *states)


def _verified_rows(run: str | None) -> tuple[Any, list[CheckpointInfo]]:
    """The same, of those that were verified and still exist on disk."""
    info, rows = _rows(run, CheckpointState.VERIFIED)
    return info, [row for row in rows if Path(row.path).is_dir()]


def _folders(run_folder: str, rows: list[CheckpointInfo]) -> list[Path]:
    """All checkpoints on disk, also those without a row in the database. Raises: NotFound."""
    from kgorch.checkpoint.folder import list_checkpoints

    roots = {Path(row.path).parent for row in rows} | {
        path for path in Path(run_folder, "checkpoints").glob("*") if path.is_dir()
    }
    folders = [folder for root in sorted(roots) for folder in reversed(list_checkpoints(root))]
    if not folders:
        raise NotFound("there is no checkpoint yet", next_step="kgorch status")
    return folders
