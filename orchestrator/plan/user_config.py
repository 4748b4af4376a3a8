"""What a person says once for all plans: `$KGORCH_CONFIG`, else `$XDG_CONFIG_HOME/kgorch/config.toml`.

The tables [platform], [quota] and [notify] as in a plan. A key that the plan gives wins over the same key here, this wins over
the platform's profile. It is read anew by each command and is no part of a run: neither its plan's text nor its hash hold it.

Where state lies is not said here: that must be known before any plan is, so $KGORCH_HOME says it, else the platform.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from orchestrator.errors import ConfigError, PlanError
from orchestrator.plan import diagnostics as document
from orchestrator.plan.model import NotifyPart, Plan, PlatformPart, QuotaPart
from orchestrator.platforms.detect import BY_NAME
from orchestrator.platforms.profile import Profile

Part = TypeVar("Part", PlatformPart, QuotaPart, NotifyPart)


MEND = "make it a text file in UTF-8 that you may read, move it away, or name another by KGORCH_CONFIG"


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    platform: PlatformPart = PlatformPart()
    quota: QuotaPart = QuotaPart()
    notify: NotifyPart = NotifyPart()


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """The person's configuration; an empty one where there is no such file.

    Raises: ConfigError, also for a file that $KGORCH_CONFIG names and that is not there.
    """
    told = environ.get("KGORCH_CONFIG")
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    path = Path(told).expanduser() if told else Path(base) / "kgorch" / "config.toml"
    try:
        text = document.read(path, "configuration", ConfigError, next_step=MEND)
    except FileNotFoundError:
        if told:
            raise ConfigError(f"there is no {path}", next_step="set KGORCH_CONFIG to your file, or unset it") from None
        return Config()
    return document.validated(
        Config,
        document.parsed(text, str(path), ConfigError),
        text,
        str(path),
        ConfigError,
        what="a configuration",
        next_step="its tables are [platform], [quota] and [notify], with the keys that a plan may give there",
    )


def applied(plan: Plan, config: Config) -> Plan:
    """The plan with what the configuration says where the plan says nothing."""
    parts = {
        "platform": _under(plan.platform, config.platform),
        "quota": _under(plan.quota, config.quota),
        "notify": _under(plan.notify, config.notify),
    }
    return plan.model_copy(update=parts)


def _under(said: Part, config: Part) -> Part:
    """Key by key: what was `said`, else what the configuration says."""
    return config.model_copy(update={key: getattr(said, key) for key in said.model_fields_set})


def platform(part: PlatformPart, detected: Profile) -> Profile:
    """The profile that a plan means: another one by name, with what it says otherwise.

    Raises: PlanError for a metadata server of a platform that has none.
    """
    profile = detected if part.name is None else BY_NAME[part.name]
    if part.metadata and profile.metadata is None:
        asked = ", ".join(sorted(name for name, known in BY_NAME.items() if known.metadata))
        raise PlanError(
            f"platform.metadata is given, and the platform {profile.name} has no spot notices to ask for",
            next_step=f"name one that has: [platform] name = … ({asked})",
        )
    return replace(
        profile,
        wall_s=part.wall or profile.wall_s,
        began=part.began or profile.began,
        metadata=part.metadata or profile.metadata,
    )
