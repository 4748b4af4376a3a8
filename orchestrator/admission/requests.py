"""What is asked of admission, and what its steps share: one value each, where eleven parameters went through five functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from db.records import RunInfo
from orchestrator.plan import Plan
from orchestrator.platforms.profile import Profile
from orchestrator.system.paths import home_of_folder


@dataclass(frozen=True, slots=True)
class Consent:
    """What the user allows in advance that is refused otherwise.

    Attributes:
        changes: changes of the plan that only the user can know to be right.
        plan: settings and plans that a database from elsewhere keeps. They decide what runs, and nobody can tell whose they are: on
            Kaggle every attached data set is a source.
        extend: train a finished run longer, by a plan with more to do.
    """

    changes: bool = False
    plan: bool = False
    extend: bool = False


NO_CONSENT = Consent()


@dataclass(frozen=True, slots=True)
class LocalState:
    """The state of kgorch on this machine.

    Attributes:
        engine: its database.
        home: its state folder.
        profile: of the platform that was detected; plan and configuration may name another.
    """

    engine: Engine
    home: Path
    profile: Profile


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A start of a plan, now or by the daemon.

    Attributes:
        plan_text: TOML.
        where: the plan's file.
        overrides: `KEY=VALUE` of the command line.
        fresh: begin a new run, whatever there is of this name.
        run_id: which run to go on with, where there are several of the name.
        required: there must be a run to go on with. The plan may say so, too.
    """

    plan_text: str
    where: Path
    overrides: Sequence[str] = ()
    fresh: bool = False
    run_id: str | None = None
    consent: Consent = NO_CONSENT
    required: bool = False

    @property
    def workdir(self) -> Path:
        """The plan's folder: the training is started there."""
        return self.where.absolute().parent


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run that a session is opened for. `profile`: as the plan names it, else the detected one."""

    engine: Engine
    run: RunInfo
    plan: Plan
    profile: Profile

    @property
    def home(self) -> Path:
        return home_of_folder(self.run.folder)
