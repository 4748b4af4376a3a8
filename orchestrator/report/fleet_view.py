"""The machines of a fleet, in the fields that `kgorch fleet --json` promises (docs/json.md)."""

from __future__ import annotations

from sqlalchemy import Engine

from kgorch.db import fleet, queue, runs
from kgorch.report.json_fields import View, stamp


def view(engine: Engine) -> View | None:
    """None where this machine belongs to no fleet."""
    if fleet.settings(engine) is None:
        return None
    alive, sessions = fleet.alive_machines(engine), fleet.live_sessions(engine)
    due, waiting, _ = queue.counts(engine, fleet.server_now(engine))
    return {
        "database": engine.url.render_as_string(hide_password=True),
        "machine": runs.machine_of(engine),
        "due": due,
        "waiting": waiting,
        "machines": [
            {
                "name": machine.name,
                "host": machine.host,
                "alive": machine.name in alive,
                "seen_at": stamp(machine.seen_at),
                "version": machine.version,
                "home": machine.home,
                "gpus": list(machine.gpus),
                "sessions": [_session(session) for session in sessions if session.machine == machine.name],
            }
            for machine in fleet.machines(engine)
        ],
    }


def _session(session: fleet.FleetSession) -> View:
    return {
        "run": session.run,
        "run_number": session.run_number,
        "session": session.number,
        "phase": session.phase,
        "stage": session.stage,
        "step": session.step,
        "steps_total": session.steps_total,
        "started_at": stamp(session.started_at),
        "leased": session.is_leased,
    }
