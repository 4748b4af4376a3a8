"""What the agent of a foreign program is told besides the plan: processes, when to stop, where runs claim their places."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.core.codes import EventKind
from kgorch.db import sessions
from kgorch.db.rows import RunInfo
from kgorch.plan import StageSection
from kgorch.protocol.run_files import FOREIGN_FOLDER
from kgorch.system.paths import home_of_folder

COPY_S = 1.0
"""Seconds for a copy before one was made; the agent adds what its own copies take."""


def launch_values(engine: Engine, run: RunInfo, stage: StageSection, processes: int) -> dict[str, Any] | None:
    """The value of LaunchSpec.foreign; None for a program that attaches.

    Args:
        processes: that the launcher starts.
    Raises: SQLAlchemyError.
    """
    if stage.foreign is None:
        return None
    section = stage.foreign.as_launch()
    grace_s = section["stop"].get("grace_s", 0.0)
    stops = [
        facts
        for facts in sessions.facts_of_kind(engine, run.id, EventKind.FOREIGN_STOPPED)
        if facts["stage"] == stage.name
    ]
    stops_s = foreign_checkpoint.stop_times_s(stops, grace_s=grace_s)
    lead_s = foreign_checkpoint.stop_lead_s(stops_s, grace_s=grace_s, copy_s=COPY_S)
    claims = str(home_of_folder(run.folder) / FOREIGN_FOLDER)
    return section | {"processes": processes, "lead_s": lead_s, "claims": claims}
