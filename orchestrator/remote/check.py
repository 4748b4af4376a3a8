"""What a start at a place would do, without doing it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine

from kgorch.admission.requests import StartRequest
from kgorch.core.remote import session_plan
from kgorch.core.remote.session_states import Moment
from kgorch.db import remote, runs
from kgorch.plan import Plan
from kgorch.remote import account_hours, bundle
from kgorch.remote.bundle import BundleSource
from kgorch.remote.code_files import CodeFiles
from kgorch.remote.place import Place
from kgorch.remote.run_settings import RunSettings, settings_of


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be sent. Attributes: run: its name."""

    run: str
    settings: RunSettings
    files: CodeFiles


def preview(plan: Plan, request: StartRequest) -> Preview:
    """Raises: PlanError without a place; KgorchError where the bundle could not be made."""
    source = BundleSource(plan, request.plan_text, list(request.overrides), request.workdir)
    return Preview(plan.name, settings_of(plan), bundle.preview(source))


def view(engine: Engine, report: Preview, place: Place) -> dict[str, Any]:
    """The fields of `kgorch remote check --json`. Raises: PlaceError."""
    settings = report.settings
    account, running = place.account(), place.running()
    quota = place.quota() if settings.has_accelerator else None
    run = runs.newest(engine, report.run)
    history = remote.of_run(engine, run.id) if run else []
    factor = account_hours.factor(history, settings.accelerator)
    moment = Moment(datetime.now(UTC), poll_s=settings.poll_s)
    [first] = [session_plan.next_session([], moment, session_s=settings.session_s)]
    assert first
    planned = session_plan.after_quota(first, quota, settings.session_s, factor, moment)
    return {
        "run": report.run,
        "place": settings.place,
        "account": account.name,
        "means": account.means,
        "running": running,
        "quota": asdict(quota) | {"left_s": quota.left_s} if quota else None,
        "factor": factor,
        "session_s": planned.session_s,
        "waits": planned.why,
        "accelerator": settings.accelerator,
        "internet": settings.internet,
        "datasets": list(settings.datasets),
        "competitions": list(settings.competitions),
        "bundle": {
            "bytes": report.files.bytes,
            "files": [file.path for file in report.files.files],
            "left_out": [f"{item.path}: {item.reason}" for item in report.files.left_out],
        },
    }
