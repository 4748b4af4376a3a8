"""The user's configuration for all plans: `$KGORCH_CONFIG`, else `$XDG_CONFIG_HOME/kgorch/config.toml`.

It has the tables [platform], [quota] and [notify] of a plan, and [fleet] for machines that share a database (db/location.py). A
key of the plan wins over the same key here, and this over the platform's profile. Each command reads it anew, and it is no part of
a run: neither the stored plan nor its hash contains it.

The state folder cannot be set here, because it must be known before any plan is: $KGORCH_HOME sets it, else the platform does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, field_validator

from kgorch.errors import ConfigError, PlanError
from kgorch.plan.diagnostics import validate
from kgorch.plan.model import Plan
from kgorch.plan.plan_table import PlanTable
from kgorch.plan.quantities import Name, Seconds
from kgorch.plan.sections import NotifySection, PlatformSection, QuotaSection
from kgorch.plan.toml_document import DocumentKind, TomlDocument, parse_toml, read_text
from kgorch.platforms.detect import BY_NAME
from kgorch.platforms.profile import Profile

AnySection = TypeVar("AnySection", PlatformSection, QuotaSection, NotifySection)

CONFIGURATION = DocumentKind(
    noun="configuration",
    error=ConfigError,
    if_unreadable="make it a readable text file in UTF-8, move it away, or set KGORCH_CONFIG to another one",
    if_invalid="a configuration has the tables [platform], [quota] and [notify], with the same keys as in a plan, and [fleet]",
)


class FleetSection(PlanTable):
    """`[fleet]`: the database that several machines share. It is read by db/location.py, and validated here.

    Attributes:
        database (str | None): URL of a PostgreSQL, `postgresql+psycopg://USER@HOST/NAME`; None for SQLite in the state folder.
        machine (str | None): name of this machine, unique in the fleet; None for its host name.
        lease (float): seconds without a sign of life after which a machine counts as dead.
    """

    database: str | None = None
    machine: Name | None = None
    lease: Annotated[Seconds, Field(ge=1.0)] = 300.0

    @field_validator("database")
    @classmethod
    def _check_database(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("postgresql://", "postgresql+psycopg://")):
            raise ValueError("expected postgresql+psycopg://USER@HOST/NAME")
        return value


class UserConfig(PlanTable):
    """A validated configuration; without any key it changes nothing."""

    platform: PlatformSection = PlatformSection()
    quota: QuotaSection = QuotaSection()
    notify: NotifySection = NotifySection()
    fleet: FleetSection = FleetSection()


def load(environ: Mapping[str, str] = os.environ) -> UserConfig:
    """Load the user's configuration; an empty one where there is no file.

    Raises: ConfigError, also where $KGORCH_CONFIG names a file that does not exist: a mistyped path is not ignored.
    """
    variable = environ.get("KGORCH_CONFIG")
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    path = Path(variable).expanduser() if variable else Path(base) / "kgorch" / "config.toml"
    try:
        text = read_text(path, CONFIGURATION)
    except FileNotFoundError:
        if variable:
            raise ConfigError(f"there is no {path}", next_step="set KGORCH_CONFIG to your file, or unset it") from None
        return UserConfig()
    values = parse_toml(text, str(path), CONFIGURATION)
    return validate(UserConfig, TomlDocument(values, text, str(path)), CONFIGURATION)


def apply_to_plan(plan: Plan, config: UserConfig) -> Plan:
    """The plan, with the configuration's value for each key that the plan does not give."""
    sections = {
        "platform": _apply_to_section(plan.platform, config.platform),
        "quota": _apply_to_section(plan.quota, config.quota),
        "notify": _apply_to_section(plan.notify, config.notify),
    }
    return plan.model_copy(update=sections)


def _apply_to_section(section: AnySection, config: AnySection) -> AnySection:
    # by the keys that the plan gives, not by its values: a default that is written out wins, too
    return config.model_copy(update={key: getattr(section, key) for key in section.model_fields_set})


def resolve_platform(section: PlatformSection, detected: Profile) -> Profile:
    """The profile that holds for a plan: the detected or the named one, with the section's values in place of its own.

    Raises: PlanError for a metadata server of a platform that has no preemption notices.
    """
    profile = detected if section.name is None else BY_NAME[section.name]
    if section.metadata and profile.metadata is None:
        candidates = ", ".join(sorted(name for name, other in BY_NAME.items() if other.metadata))
        raise PlanError(
            f"platform.metadata is set, but the platform {profile.name} has no spot notices to ask for",
            next_step=f"name one that has: [platform] name = … ({candidates})",
        )
    return replace(
        profile,
        wall_s=section.wall or profile.wall_s,
        began=section.began or profile.began,
        metadata=section.metadata or profile.metadata,
    )
