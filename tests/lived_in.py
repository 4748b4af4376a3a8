"""A state folder that a few weeks of training might have left: for the tests of the page, and for the pictures in docs/looking.md.

Rows and files are made up; nothing is trained. The live session belongs to the process that made the folder, so it looks live as
long as that process does.
"""

from __future__ import annotations

import json
import math
import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert

from kgorch.db.engine import open_database
from kgorch.db.tables import (
    Attempt,
    Charge,
    Checkpoint,
    EventRow,
    Pool,
    Resume,
    Run,
    RungRow,
    Sample,
    SessionRow,
    Stage,
)
from kgorch.system import process_identity
from kgorch.system.clock import boottime_s

GIB = 1 << 30
PLAN = """\
name = "{name}"
# segmentation of papyrus scans; two GPUs, four sessions a week

[[stage]]
name = "train"
entry = "workloads.surface_detection.train:main"
ranks = 2
args = {{ data = "data/fragments", epochs = 40, lr = 2e-3, global_batch = 64 }}

[[stage]]
name = "predict"
entry = "workloads.surface_detection.predict:main"

[session]
wall = "9h"

[quota]
pool = "kaggle"
hours = 30
resets = "Sat 00:00 UTC"

[checkpoint]
every = "30m"
keep = {{ last = 3, best = "dice:max" }}

[memory]
ladder = ["microbatch/2", "activation_checkpointing"]

[forecast]
target = "dice >= 0.9"
"""
STEPS = 24_000
PER_SESSION = 4_600
LOG = "epoch {epoch:3d}  step {step:6d}  loss {loss:.4f}  dice {dice:.4f}  lr {lr:.2e}\n"


class Home:
    """Fills a database and the folders beside it. `now` is the instant that all else is relative to."""

    def __init__(self, home: Path, *, now: datetime | None = None) -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home, self.engine = home, open_database(home)
        self.now = now or datetime.now(UTC)
        self.random = random.Random(5)
        self._session = self._attempt = 0

    def add(self, table: Any, *rows: dict[str, Any]) -> None:
        with self.engine.begin() as connection:
            connection.execute(insert(table), list(rows))

    def run(self, name: str, *, age: timedelta, state: str = "active", number: int = 1, **more: Any) -> Path:
        folder = self.home / "runs" / name / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        row = {
            "id": f"{name}-{number}",
            "name": name,
            "number": number,
            "folder": str(folder),
            "workdir": "/home/mira/scrolls",
            "checkpoints": str(folder / "checkpoints"),
            "plan": PLAN.format(name=name),
            "overrides": [],
            "plan_hash": "5f1c",
            "created_at": self.now - age,
            "state": state,
            "pool": "kaggle",
        }
        self.add(Run, row | more)
        self.add(Stage, {"run_id": row["id"], "position": 0, "name": "train", "finished_at": None})
        self.add(Stage, {"run_id": row["id"], "position": 1, "name": "predict", "finished_at": None})
        return folder

    def session(
        self, run_id: str, number: int, began: datetime, ended: datetime | None, first: int, last: int, **more: Any
    ) -> int:
        self._session += 1
        row = {
            "id": self._session,
            "run_id": run_id,
            "number": number,
            "site": "kaggle",
            "phase": "suspended",
            "reason": "time_limit",
            "why": "the session's time limit",
            "boot_id": "b",
            "wall_at": began + timedelta(hours=9),
            "save_lead_s": 95.0,
            "started_at": began,
            "ended_at": ended,
            "stage": "train",
            "first_step": first,
            "step": last,
            "steps_total": STEPS,
            "epoch": last * 40 // STEPS,
            "epochs_total": 40,
            "samples": 64 * last,
            "step_s": 6.8,
            "metrics": {"loss": loss_at(last), "dice": dice_at(last)},
            "heartbeat_at": ended,
        }
        self.add(SessionRow, row | more)
        return self._session

    def attempt(
        self,
        folder: Path,
        session: int,
        number: str,
        began: datetime,
        ended: datetime | None,
        first: int,
        last: int,
        **more: Any,
    ) -> Path:
        self._attempt += 1
        place = folder / "attempts" / number
        place.mkdir(parents=True, exist_ok=True)
        row = {
            "id": self._attempt,
            "session_id": session,
            "number": int(number.split(".")[1]),
            "stage": "train",
            "folder": str(place),
            "ranks": 2,
            "first_step": first,
            "last_step": last,
            "made_progress": True,
            "outcome": "suspended" if ended else None,
            "cause": "",
            "started_at": began,
            "ended_at": ended,
        }
        self.add(Attempt, row | more)
        self._curve(place, began, ended or self.now, first, last)
        return place

    def _curve(self, place: Path, began: datetime, ended: datetime, first: int, last: int) -> None:
        records, log = [], []
        for step in range(first + 20, last + 1, 20):
            at = began + (ended - began) * ((step - first) / max(1, last - first))
            noise = self.random.gauss(0, 0.035)
            values = {
                "loss": [round(loss_at(step) * math.exp(noise), 6), 20],
                "grad_norm": [round(1.4 + 3 * abs(noise) + 600 / (step + 300), 5), 20],
                "lr": [lr_at(step), 20],
            }
            records.append({"s": step, "e": step * 40 // STEPS + 1, "t": at.timestamp(), "f": step - 20, "v": values})
            if step % 600 == 0:
                records.append(
                    {
                        "s": step,
                        "e": step * 40 // STEPS,
                        "t": at.timestamp(),
                        "v": {
                            "dice": round(dice_at(step) + self.random.gauss(0, 0.004), 5),
                            "val_loss": round(loss_at(step) * 1.12 + 0.02, 5),
                        },
                    }
                )
            log.append(
                LOG.format(
                    epoch=step * 40 // STEPS + 1, step=step, loss=values["loss"][0], dice=dice_at(step), lr=lr_at(step)
                )
            )
        (place / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in records))
        (place / "rank0.log").write_text(f"device cuda:0, 2 ranks, resumed at step {first}\n" + "".join(log))
        (place / "rank1.log").write_text("device cuda:1, 2 ranks\n")
        (place / "torchrun.log").write_text("")

    def checkpoint(
        self, folder: Path, run_id: str, session: int, at: datetime, step: int, state: str = "verified", **more: Any
    ) -> None:
        place = folder / "checkpoints" / "train" / f"step-{step:08d}"
        if state == "verified":
            place.mkdir(parents=True, exist_ok=True)
        row = {
            "run_id": run_id,
            "session_id": session,
            "stage": "train",
            "step": step,
            "final": False,
            "path": str(place),
            "bytes": int(1.32 * GIB),
            "state": state,
            "save_duration_s": 11.4,
            "blocking_s": 0.082,
            "created_at": at,
            "verified_at": at,
            "metrics": {"dice": dice_at(step), "loss": loss_at(step)},
            "measured": {"dice": step},
        }
        self.add(Checkpoint, row | more)

    def event(self, run_id: str, session: int | None, at: datetime, kind: str, **facts: Any) -> None:
        self.add(
            EventRow, {"run_id": run_id, "session_id": session, "at": at, "kind": kind, "phase": "", "facts": facts}
        )

    def telemetry(self, session: int, began: datetime, ended: datetime, *, seconds: int = 600) -> None:
        rows = []
        minutes = int((ended - began).total_seconds() // 60)
        for span_s, start, count in ((60, began, minutes), (0, ended - timedelta(seconds=seconds), seconds)):
            for index in range(count):
                wave = self.random.random()
                dip = 0.25 if index % 47 < 3 else 1.0  # an evaluation between two epochs
                values = {
                    "host.cpu": 38 + 9 * wave,
                    "host.cores": 4,
                    "host.mem_used": 14.2 * GIB + GIB * wave / 2,
                    "host.mem_total": 29 * GIB,
                }
                for gpu in (0, 1):
                    wave = self.random.random()
                    values |= {
                        f"gpu{gpu}.util": 96 * dip - 5 * wave,
                        f"gpu{gpu}.mem_used": (12.9 + 0.4 * wave + gpu / 8) * GIB,
                        f"gpu{gpu}.mem_total": 15 * GIB,
                        f"gpu{gpu}.power_w": 68 * dip - 4 * wave,
                        f"gpu{gpu}.power_limit_w": 70.0,
                        f"gpu{gpu}.temp_c": 71 + 3 * wave,
                        f"rank{gpu}.step_s": 6.6 + 0.5 * wave,
                        f"rank{gpu}.data_wait": 0.03 + 0.05 * wave + (0.2 if dip < 1 else 0),
                        f"rank{gpu}.cpu": 92 + 4 * wave,
                        f"rank{gpu}.rss": (3.1 + gpu / 10) * GIB,
                    }
                rows.append(
                    {
                        "session_id": session,
                        "at": start + timedelta(seconds=index * (span_s or 1)),
                        "span_s": span_s,
                        "values": {k: round(v, 3) for k, v in values.items()},
                    }
                )
        self.add(Sample, *rows)


def loss_at(step: int) -> float:
    return round(0.12 + 0.95 * math.exp(-step / 3800) + 0.2 * math.exp(-step / 15000), 5)


def dice_at(step: int) -> float:
    return round(0.91 * (1 - math.exp(-(step + 500) / 5200)), 5)


def lr_at(step: int) -> float:
    return round(1e-3 * (1 + math.cos(math.pi * min(1.0, step / STEPS))), 7)


def surface(home: Home) -> None:
    """A run in its fourth session: a crash, a memory rung, a remedy, a changed plan; live in this process."""
    run_id, folder = "surface-unet3d-1", home.run("surface-unet3d", age=timedelta(days=6, hours=2))
    began, step = home.now - timedelta(days=6, hours=2), 0
    for number in (1, 2, 3):
        ended, last = began + timedelta(hours=9), step + PER_SESSION
        session = home.session(run_id, number, began, ended - timedelta(seconds=30), step, last)
        if number == 2:
            middle, at = step + 1_900, began + timedelta(hours=3.7)
            home.attempt(
                folder,
                session,
                "2.1",
                began + timedelta(seconds=40),
                at,
                step,
                middle,
                outcome="crashed",
                cause="rank 1: RuntimeError: NCCL communicator was aborted",
            )
            home.attempt(
                folder, session, "2.2", at + timedelta(minutes=2), ended - timedelta(minutes=1), middle - 60, last
            )
            rung = {
                "run_id": run_id,
                "session_id": session,
                "plan_hash": "5f1c",
                "stage": "train",
                "device": "Tesla T4",
                "world_size": 2,
                "up": False,
            }
            home.add(
                RungRow,
                rung
                | {
                    "at": began + timedelta(hours=6),
                    "step": step + 3_100,
                    "rung": "microbatch/2",
                    "why": "rank 0: OutOfMemoryError",
                    "changes_result": False,
                    "settings": {"settings": {"microbatch": 8}},
                },
            )
            home.add(
                RungRow,
                rung
                | {
                    "at": began + timedelta(hours=7.5),
                    "step": step + 3_800,
                    "rung": "skip",
                    "why": "the loss was no number",
                    "changes_result": True,
                    "settings": {"skip": True},
                },
            )
        else:
            home.attempt(
                folder, session, f"{number}.1", began + timedelta(seconds=40), ended - timedelta(minutes=1), step, last
            )
        home.telemetry(session, began, ended, seconds=0 if number < 3 else 60)
        for share in range(1, 10):
            at_step = step + PER_SESSION * share // 9
            kept = at_step in (4_600, 13_800, 13_288)
            home.checkpoint(
                folder,
                run_id,
                session,
                began + timedelta(hours=share) - timedelta(seconds=50),
                at_step,
                "verified" if kept else "dropped",
            )
        home.event(
            run_id,
            session,
            began + timedelta(minutes=2),
            "forecast",
            stage="train",
            end_at=_iso(home.now + timedelta(days=2.2 + 0.4 / number)),
            earliest_at=_iso(home.now + timedelta(days=1.6)),
            latest_at=_iso(home.now + timedelta(days=3.4)),
            steps_left=STEPS - step,
            sessions=6 - number,
        )
        began, step = began + timedelta(days=1.9), last
    home.event(
        run_id,
        None,
        began - timedelta(hours=5),
        "plan_changed",
        what="only settings without effect on the result",
        changed=[
            {"key": "checkpoint.every", "old": "60m", "new": "30m"},
            {"key": "session.wall", "old": "8h 30m", "new": "9h"},
        ],
    )
    began, last = home.now - timedelta(hours=4, minutes=12), step + 2_190
    live = {
        "phase": "training",
        "reason": "",
        "why": "",
        "boot_id": process_identity.boot_id(),
        "supervisor_pid": os.getpid(),
        "supervisor_started_ticks": process_identity.start_ticks(os.getpid()),
        "heartbeat_at": home.now,
        "wall_boottime_s": boottime_s() + 3600 * 4.8,
        "pool": "kaggle",
    }
    session = home.session(run_id, 4, began, None, step, last, **live)
    home.attempt(folder, session, "4.1", began + timedelta(seconds=38), None, step, last)
    home.telemetry(session, began, home.now)
    for minutes in range(30, 250, 30):
        at_step = step + 2_190 * minutes // 252
        kept = minutes >= 180
        home.checkpoint(
            folder,
            run_id,
            session,
            began + timedelta(minutes=minutes),
            at_step,
            "verified" if kept else "dropped",
            best="dice:max" if minutes == 240 else "",
        )
    for index, (kind, facts) in enumerate(
        (
            ("attached", {}),
            (
                "exactness",
                {
                    "data": "keyed",
                    "deterministic": "not asked for: cuDNN may choose other kernels in another session",
                    "memory": "two allocations were refused in steps that came through",
                },
            ),
            (
                "forecast",
                {
                    "stage": "train",
                    "end_at": _iso(home.now + timedelta(days=2.1)),
                    "earliest_at": _iso(home.now + timedelta(days=1.9)),
                    "latest_at": _iso(home.now + timedelta(days=2.8)),
                    "steps_left": STEPS - step,
                    "sessions": 2,
                },
            ),
        )
    ):
        home.event(run_id, session, began + timedelta(seconds=60 + index), kind, **facts)
    home.add(
        Charge,
        {
            "session_id": session,
            "pool": "kaggle",
            "accelerator": "Tesla T4",
            "factor": 1.0,
            "started_at": home.now - timedelta(hours=4),
            "used_s": 15_100.0,
            "why": "",
        },
    )


def furnish(home_folder: Path, *, now: datetime | None = None) -> Engine:
    """The run of `surface`, and others: finished, failed, queued, one that has just begun."""
    home = Home(home_folder, now=now)
    home.add(
        Pool,
        {
            "name": "kaggle",
            "total_s": 108_000.0,
            "resets": "Sat 00:00 UTC",
            "reserve_s": 3600.0,
            "updated_at": home.now,
        },
    )
    surface(home)
    for name, state, days, steps, phase, why in (
        ("camouflage-edgenext", "finished", 21, STEPS, "finished", ""),
        ("vqa-student", "failed", 12, 7_300, "failed", "rank 0: FileNotFoundError: data/vivqa/train.json"),
        ("cloud-removal-glfcr", "active", 9, 15_700, "suspended", "the session's time limit"),
        ("timeseries-lstm", "active", 4, 4_100, "cut_off", "nothing of the session was running any more"),
    ):
        folder, run_id = (
            home.run(
                name,
                age=timedelta(days=days),
                state=state,
                why=why if state == "failed" else "",
                finished_at=home.now - timedelta(days=days - 2) if state == "finished" else None,
            ),
            f"{name}-1",
        )
        began = home.now - timedelta(days=days)
        ended = began + timedelta(hours=9)
        session = home.session(run_id, 1, began, ended, 0, steps, phase=phase, why=why)
        home.attempt(
            folder,
            session,
            "1.1",
            began,
            ended,
            0,
            steps,
            outcome={"finished": "finished", "failed": "crashed"}.get(phase, "suspended"),
        )
        home.checkpoint(folder, run_id, session, ended - timedelta(minutes=1), steps, final=state == "finished")
        if state == "active":
            home.add(
                Resume,
                {
                    "run_id": run_id,
                    "state": "due",
                    "due_at": home.now + timedelta(hours=3.3 if name.startswith("cloud") else 0.4),
                    "created_at": home.now,
                    "ranks": 2,
                    "reason": "quota",
                    "priority": 10 if name.startswith("cloud") else 0,
                },
            )
    return home.engine


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
