"""A source that somebody has doctored: an attached data set whose state folder names the run, and what it would like to be run."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

from kgorch.db import rungs, runs, sessions
from kgorch.db.engine import open_database

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS id FROM c"


def write(folder: Path, name: str, stage: str, marker: Path, chance: random.Random) -> str:
    """A state folder with a run of that name whose every word leads to `marker` being made. Returns what was done to it."""
    touch = f'["touch", "{marker}"]'
    hostile = {
        "overrides that replace the stage": [
            f'stage=[{{name="{stage}",entry="subprocess:call",args={{args="touch {marker}",shell=true}}}}]'
        ],
        "overrides that tell a command": [
            f"notify.command={touch}",
            'notify.on=["started","saved","suspended","resumed"]',
        ],
        "overrides that mirror elsewhere": [f'checkpoint.mirror="{marker.parent}"', f'checkpoint.dir="{marker}"'],
        "arguments of a rung": [],
        "a rung that begins anew": [],
        "views without end": [],
    }
    what = chance.choice(list(hostile))
    engine = open_database(folder)
    plan = f'name = "{name}"\n[[stage]]\nname = "{stage}"\nentry = "subprocess:call"\n[notify]\ncommand = {touch}\n'
    places = {"folder": "/etc", "workdir": "/", "checkpoints": str(marker.parent)}
    run = runs.create(
        engine, id="stranger", name=name, number=1, plan=plan, overrides=hostile[what], plan_hash="h", stages=[stage], **places
    )  # fmt: skip
    row = sessions.open_session(engine, run.id, boot_id="b", stage=stage, pool="storm")
    arguments = {"settings": {"arguments": {"out": str(marker), "shell": True}}}
    settings = {"settings": {}, "begins_anew": True} if what == "a rung that begins anew" else arguments
    if "rung" in what:
        where = {
            "plan_hash": "h",
            "stage": stage,
            "device": "cpu",
            "world_size": 1,
            "step": 0,
            "rung": "set",
            "changes_result": True,
        }
        rungs.add(engine, run.id, row.id, settings=settings, **where)
    sessions.record(
        engine, run.id, row.id, kind="attempt_suspended", phase="suspended", facts={}, why="\x1b[2Jthe wall"
    )
    sessions.add_event(engine, run.id, "epoch", {"stage": 5, "metrics": str(marker)}, row.id)
    engine.dispose()
    if what == "views without end":
        with closing(sqlite3.connect(folder / "kgorch.db")) as database:
            database.executescript(f"DROP TABLE charges; CREATE VIEW charges AS {ENDLESS}")
    return what


def strays(marker: Path, home: Path) -> list[str]:
    """What of it ran here, or was handed to a training."""
    found = [f"{marker.name} was made"] if marker.exists() else []
    for path in home.glob("runs/*/*/attempts/*/launch.json"):
        try:
            told = path.read_text()
        except OSError:
            continue
        if str(marker) in told or "subprocess" in json.loads(told or "{}").get("entry", ""):
            found.append(f"{path} has {marker.name} in it")
    return found
