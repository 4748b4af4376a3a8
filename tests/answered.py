"""A verb in this process, that must answer or say what is wrong; and a state folder for it to look at."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from kgorch.cli import cli, main
from kgorch.core.codes import Reason
from kgorch.db import charges, checkpoints, queue, rungs, runs, samples, sessions
from kgorch.db.engine import open_database
from kgorch.db.rows import PoolInfo
from kgorch.errors import ExitCode

PLAN = 'name = "ink"\n[[stage]]\nname = "train"\nentry = "t.py"\n'
ALLOWED = {int(code) for code in ExitCode} - {1}


def _hung(*_: object) -> None:
    raise AssertionError("it hangs")


def code_of(args: list[str], within_s: int = 20) -> int:
    """The exit code of `kgorch args`. Raises: what a person would see as a traceback; AssertionError when it hangs."""
    before = signal.signal(signal.SIGALRM, _hung)
    signal.alarm(within_s)
    try:
        main(args)
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    raise AssertionError("main() returned")


def verbs(command: click.Command = cli, typed: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb as it is typed; a group that does something itself, too."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from verbs(inner, (*typed, name))
    if typed:
        yield typed, command


def make_state(home: Path, workdir: Path) -> None:
    """A run that is finished and one that waits in the queue, with a row in every table."""
    engine = open_database(home)
    at = datetime.now(UTC)
    for name, phase in (("ink", "finished"), ("digits", "suspended")):
        folder = home / "runs" / name / "1"
        saved = folder / "checkpoints" / "train" / "step-00000010"
        saved.mkdir(parents=True)
        run = runs.create(
            engine, id=name, name=name, number=1, folder=str(folder), workdir=str(workdir), checkpoints=str(saved.parents[1]),
            plan=PLAN.replace("ink", name), overrides=["session.wall=1h"], plan_hash="h", stages=["train"],
        )  # fmt: skip
        session = sessions.open_session(engine, run.id, boot_id="b", wall_at=at, pool="kaggle")
        attempt = sessions.open_attempt(
            engine, session.id, stage="train", ranks=2, folder_of=lambda number, at=folder: str(at / "attempts" / f"1.{number}")
        )  # fmt: skip
        sessions.record_heartbeat(
            engine, session.id, attempt.id, epoch=1, epochs_total=4, step=10, steps_total=40, metrics={"dice": 0.5}
        )
        sessions.add_event(engine, run.id, "exactness", {"data": "keyed"}, session.id)
        lasted = {
            "stage": "train",
            "epoch": 1,
            "step": 10,
            "steps": 10,
            "lasted_s": 0.5,
            "first": False,
            "metrics": {"dice": 0.5},
        }
        sessions.add_event(engine, run.id, "epoch", lasted, session.id)
        checkpoints.record(
            engine, run.id, str(saved), state="verified", session_id=session.id, stage="train", step=10, final=False, bytes=2048,
            save_duration_s=0.5, blocking_s=0.01, metrics={"dice": 0.4},
        )  # fmt: skip
        rungs.add(
            engine, run.id, session.id, plan_hash="h", stage="train", device="cpu", world_size=2, step=5, rung="microbatch/2",
            why="rank 1: OutOfMemoryError", settings={"settings": {"microbatch": 4, "activation_checkpointing": False}},
        )  # fmt: skip
        samples.write(engine, session.id, [(at, {"gpu0.mem_used": 2.0**30, "host.cpu": 12.5, "rank0.data_wait": 0.25})])
        charges.set_pool(engine, run.id, PoolInfo("kaggle", 30 * 3600.0, "rolling 7d", 7200.0, at))
        charges.charge(engine, session.id, "kaggle", [(at - timedelta(minutes=1), 60.0)], factor=2.0, accelerator="T4")
        sessions.record(
            engine, run.id, session.id, kind="attempt_suspended", phase=phase, facts={"step": 10}, why="wall"
        )
        if phase == "finished":
            checkpoints.supersede(engine, run.id, "train", before=datetime.now(UTC), why="begun anew")
            runs.set_state(engine, run.id, "finished")
        else:
            queue.put(
                engine,
                run.id,
                reason=Reason.TIME_LIMIT,
                due_at=at + timedelta(hours=1),
                resource_request={"ranks": 2, "priority": 5},
            )
    engine.dispose()
    gc.collect()  # a connection still open would remove the log later, in the midst of a test's copy of the folder
    assert not [*home.glob("kgorch.db-*")]
