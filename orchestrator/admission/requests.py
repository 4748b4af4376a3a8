"""The requests that admission takes, and the values that its steps share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sqlalchemy import Engine

from kgorch.checkpoint.manifest import Manifest
from kgorch.db.rows import RunInfo
from kgorch.plan import Plan
from kgorch.platforms.profile import Profile
from kgorch.system.paths import home_of_folder


class ImportWatcher(Protocol):
    """Receives what a search of the sources and an import have to tell, as it happens."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def copy_progress(self, done_bytes: int, total_bytes: int) -> None: ...

    def checkpoint_copied(self, manifest: Manifest, folder: Path) -> None:
        """`folder`: of the source."""


class _SilentWatcher:
    def note(self, text: str) -> None:
        pass

    def copy_progress(self, done_bytes: int, total_bytes: int) -> None:
        pass

    def checkpoint_copied(self, manifest: Manifest, folder: Path) -> None:
        pass


SILENT = _SilentWatcher()


@dataclass(frozen=True, slots=True)
class Consent:
    """What the user allows in advance that is refused otherwise.

    Attributes:
        changes: changes of the plan that only the user can know to be right (--accept-changes).
        plan: settings and plans out of a source's database (--accept-plan). They decide what is executed, and nobody can tell who
            wrote them: on Kaggle every attached data set is a source.
        extend: train a finished run longer, by a plan with more to do (--extend).
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
        profile: of the detected platform; plan and configuration may name another.
    """

    engine: Engine
    home: Path
    profile: Profile


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A plan to start, now or by the daemon.

    Attributes:
        plan_text: TOML.
        where: path of the plan's file.
        overrides: `KEY=VALUE` of the command line.
        fresh: begin a new run although there may be one of this name.
        run_id: the run to resume, if there are several of the name.
        required: fail unless there is a run to resume. The plan may say so, too ([resume] required).
        new_id: id of the run, if it begins with this start; None for a random one.
    """

    plan_text: str
    where: Path
    overrides: Sequence[str] = ()
    fresh: bool = False
    run_id: str | None = None
    consent: Consent = NO_CONSENT
    required: bool = False
    new_id: str | None = None

    @property
    def workdir(self) -> Path:
        """The plan's folder: the training is started there."""
        return self.where.absolute().parent


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A run to resume by the plan that is stored with it.

    Attributes:
        name: of the run; None for the newest one that is not finished.
        by_user: False for the daemon, which does not resume a run that a user has stopped.
    """

    name: str | None
    by_user: bool = True
    consent: Consent = NO_CONSENT


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run that a session is opened for. `profile`: of the platform that the plan names, else of the detected one."""

    engine: Engine
    run: RunInfo
    plan: Plan
    profile: Profile

    @property
    def home(self) -> Path:
        return home_of_folder(self.run.folder)
