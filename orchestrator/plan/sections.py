"""The tables of a plan beside its stages, `[session]` to `[forecast]`: their keys, bounds and defaults.

A default of None means that something else decides: the platform's profile, or a measurement. kgorch's own defaults stand
with the rules that they belong to, in core/.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kgorch.core.health import training_health
from kgorch.core.limits import quota_windows
from kgorch.core.memory import memory_ladder, memory_pressure
from kgorch.core.metrics import metric_trend
from kgorch.core.remote import place_profiles
from kgorch.core.session import hang_detection, notification_policy
from kgorch.errors import nearest
from kgorch.plan.diagnostics import problem_at
from kgorch.plan.plan_table import PlanTable
from kgorch.plan.quantities import Bytes, BytesOrZero, Name, Seconds
from kgorch.platforms.detect import BY_NAME

DEFAULT_SNAPSHOT_INTERVAL_S = 0.5
"""Least time between two snapshots in host memory. The ranks take them more rarely where they cost too much."""


class SessionSection(PlanTable):
    """`[session]`: how long a session may last, and what it needs of the machine.

    Attributes:
        wall (float | None): hard time limit of a session in seconds; None for the platform's.
        margin (float | None): seconds reserved before the wall beside the time that a save takes.
        priority (int): among runs that wait for the same machine the highest starts first.
        share (bool): True lets other runs that share use its GPUs at the same time.
        gpus (int | None): least number of visible GPUs; with fewer no session starts, so that no quota is spent on the CPU.
    """

    wall: Seconds | None = None
    margin: Seconds | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    share: bool = False
    gpus: Annotated[int, Field(ge=1, le=1024)] | None = None

    @model_validator(mode="after")
    def _check_margin(self) -> SessionSection:
        if self.wall is not None and self.margin is not None and self.margin >= self.wall:
            raise problem_at(
                f"the margin ({self.margin:g} s) must be shorter than the session ({self.wall:g} s)", ("margin",)
            )
        return self


class KeepSection(PlanTable):
    """`checkpoint.keep`: which checkpoints are not deleted.

    Attributes:
        last (int): number of the newest ones.
        every (int | None): each tenth checkpoint for 10, for good; None for none.
        best (str | None): the best by a reported metric: "dice:max", "loss:min".
    """

    last: Annotated[int, Field(ge=1)] = 3
    every: Annotated[int, Field(ge=1)] | None = None
    best: str | None = None

    @field_validator("best")
    @classmethod
    def _check_best(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^:]+:(min|max)", value):
            raise ValueError('expected a reported metric and min or max, such as "accuracy:max" or "loss:min"')
        return value


class CheckpointSection(PlanTable):
    """`[checkpoint]`: when checkpoints and snapshots are taken, where they are stored and how much they may use.

    Attributes:
        dir (str | None): folder relative to the plan's; None for the state folder.
        every (float | "auto"): seconds between two checkpoints; "auto" for an interval that follows from their cost.
        snapshot (float | "auto" | "off"): least seconds between two snapshots in host memory.
        memory (int | None): bytes of host memory for snapshots, all ranks together; None for a share of what is free.
        keep (KeepSection): which checkpoints are not deleted.
        disk (int | None): bytes for all checkpoints together; None for no limit.
        mirror (str | None): folder or fsspec URL to which verified checkpoints are copied.
        mirror_options (dict): keyword arguments of the URL's fsspec file system.
    """

    dir: str | None = None
    every: Literal["auto"] | Seconds = "auto"
    snapshot: Literal["auto", "off"] | Seconds = "auto"
    memory: BytesOrZero | None = None
    keep: KeepSection = KeepSection()
    disk: Bytes | None = None
    mirror: Annotated[str, Field(min_length=1)] | None = None
    mirror_options: dict[str, Any] = {}

    @property
    def snapshot_s(self) -> float | None:
        """Least seconds between two snapshots in host memory; None for none between saves."""
        if self.snapshot == "off":
            return None
        return DEFAULT_SNAPSHOT_INTERVAL_S if self.snapshot == "auto" else self.snapshot


class QuotaSection(PlanTable):
    """`[quota]`: accelerator hours that may be used in a window of time (core/limits/quota.py).

    Attributes:
        hours (float | None): None for the platform's quota, if it has one.
        resets (str | None): "Sat 00:00 UTC", "monthly 1 00:00 Europe/Berlin", "rolling 7d", "never".
        reserve (float | None): seconds of the hours that stay unused.
        pool (str | None): runs of the same pool use the same hours; None for the platform's name.
        factor (float | None): hours that one hour of a session costs.
    """

    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    resets: str | None = None
    reserve: Seconds | None = None
    pool: Name | None = None
    factor: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] | None = None

    @field_validator("resets")
    @classmethod
    def _check_window(cls, value: str | None) -> str | None:
        if value is not None:
            quota_windows.parse(value)
        return value

    @model_validator(mode="after")
    def _check_reserve(self) -> QuotaSection:
        if self.hours is not None and self.reserve is not None and self.reserve >= self.hours * 3600:
            raise problem_at(
                f"the reserve ({self.reserve:g} s) must be less than the quota ({self.hours:g} h)", ("reserve",)
            )
        return self


class PlatformSection(PlanTable):
    """`[platform]`: where the machine differs from the platform's profile (platforms/profile.py).

    Attributes:
        name (str | None): the profile to start from; None for the detected one.
        wall (float | None): seconds that a session may last there.
        began (str | None): from when these count: the container's first process, the batch job, the boot, our own start.
        metadata (str | None): base URL of the server that is asked for preemption notices.
    """

    name: Name | None = None
    wall: Seconds | None = None
    began: Literal["container", "job", "boot", "start"] | None = None
    metadata: str | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and value not in BY_NAME:
            raise ValueError(f"unknown platform{nearest(value, BY_NAME)}; known: {', '.join(sorted(BY_NAME))}")
        return value

    @field_validator("metadata")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/\s]", value):
            raise ValueError('expected the URL of a server such as "http://127.0.0.1:8080"')
        return value


class NotifySection(PlanTable):
    """`[notify]`: which events are reported, and where. `${NAME}` in a command or URL is an environment variable.

    Attributes:
        on (list[str]): kinds of events (core/session/notification_policy.py).
        command (list[str]): program and arguments, run without a shell.
        urls (list[str]): webhook or Apprise URLs, at most 8: each has a thread of its own.
    """

    # the ends of sessions, and what a user may have to act on; "saved" would come with every checkpoint
    on: list[str] = ["suspended", "failed", "finished", "quota", "save_failed", "remote"]
    command: list[Annotated[str, Field(max_length=4096)]] = []
    urls: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=8)] = []

    @field_validator("on")
    @classmethod
    def _check_kinds(cls, value: list[str]) -> list[str]:
        value = [kind.replace(" ", "_") for kind in value]  # "cut off": in plans of before codes, kept with their runs
        for kind in value:
            if kind not in notification_policy.KINDS:
                kinds = ", ".join(notification_policy.KINDS)
                raise ValueError(
                    f"unknown event {kind!r:.60}{nearest(kind, notification_policy.KINDS)}; known: {kinds}"
                )
        return value

    @field_validator("command", "urls")
    @classmethod
    def _check_targets(cls, value: list[str], info: ValidationInfo) -> list[str]:
        for word in value:
            if "\0" in word or (word == value[0] and not word.strip()):  # no program can be given a null byte
                raise ValueError('expected a program and its arguments, as ["notify-send", "{title}", "{text}"]')
            if info.field_name == "urls" and not re.match(r"\$\{\w+\}|[A-Za-z][\w+.-]*://", word):
                raise ValueError(
                    'expected URLs such as "https://hooks.example.org/${HOOK}" or "discord://${ID}/${TOKEN}"'
                )
        return value


class ForecastSection(PlanTable):
    """`[forecast]`: what is predicted beside the end of the run.

    Attributes:
        target (str | None): value of a metric whose date is predicted, "dice >= 0.72".
    """

    target: str | None = None

    @field_validator("target")
    @classmethod
    def _check_target(cls, value: str | None) -> str | None:
        if value is not None:
            metric_trend.parse_target(value)
        return value


class MemorySection(PlanTable):
    """`[memory]`: the microbatch to start with, and what changes when memory runs out (core/memory/memory_ladder.py).

    Attributes:
        microbatch (int | "auto" | None): samples of one forward and backward on one rank; "auto" for what the last
            `kgorch check` on this machine measured; None for a rank's whole share of the batch.
        ladder (list): the rungs, taken in this order; empty for none.
        climb (float | "off"): seconds with free memory after which a rung is undone.
    """

    microbatch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    ladder: list[str | dict[str, Any]] = list(memory_ladder.DEFAULT)
    climb: Literal["off"] | Seconds = memory_pressure.CLIMB_AFTER_S

    @property
    def climb_after_s(self) -> float | None:
        """Seconds with free memory after which a rung is undone; None for never."""
        return None if self.climb == "off" else self.climb

    @field_validator("ladder")
    @classmethod
    def _check_rungs(cls, value: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        names = [memory_ladder.parse_rung(rung).name for rung in value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the rung {repeated[0]!r} is listed twice")
        return value

    @property
    def rungs(self) -> list[memory_ladder.Rung]:
        return [memory_ladder.parse_rung(rung) for rung in self.ladder]

    @property
    def settings(self) -> memory_ladder.Settings:
        """The settings to start with, before any rung."""
        return memory_ladder.Settings(microbatch=None if self.microbatch == "auto" else self.microbatch)


class HangSection(PlanTable):
    """`health.hang`: seconds without progress after which a rank counts as hung, by place in the training
    (core/session/hang_detection.py).

    None for a time-out that follows from how long the place has taken in this run.
    """

    start: Seconds | None = None
    first_step: Seconds | None = None
    step: Seconds | None = None
    evaluation: Seconds | None = None
    save: Seconds | None = None
    data: Seconds | None = None
    end: Seconds | None = None


def _expand_hang(value: Any) -> Any:
    """`"auto"` is a table without entries, `"off"` is None."""
    if isinstance(value, str):
        if value not in ("auto", "off"):
            raise ValueError(f'expected "auto", "off" or a table of time-outs ({", ".join(hang_detection.PLACES)})')
        return {} if value == "auto" else None
    return value


class HealthSection(PlanTable):
    """`[health]`: what is done about diverged or hanging training.

    Attributes:
        nan (list): remedies for a loss or weight that is not finite, taken in this order; empty for none
            (core/health/training_health.py).
        spike (float | None): a loss this many robust standard deviations above the recent ones is treated alike; None for never.
        hang (HangSection | None): when ranks without progress are killed and launched again; None for never.
        collective_timeout (float | "off"): seconds after which a rank that waits for another one in a collective fails
            (time-out of the process group); "off" for none that a session could reach (worker/ranks/process_group.py).
    """

    nan: list[str | dict[str, Any]] = list(training_health.DEFAULT)
    spike: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    hang: Annotated[HangSection | None, BeforeValidator(_expand_hang)] = HangSection()
    collective_timeout: Literal["off"] | Seconds = "off"

    @field_validator("nan")
    @classmethod
    def _check_remedies(cls, value: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        for remedy in value:
            training_health.parse_remedy(remedy)
        return value

    @property
    def remedies(self) -> list[training_health.Remedy]:
        return [training_health.parse_remedy(remedy) for remedy in self.nan]

    @property
    def collective_timeout_s(self) -> float | None:
        """The time-out in seconds; None where the plan names none."""
        return None if self.collective_timeout == "off" else self.collective_timeout

    @property
    def hang_s(self) -> dict[str, float] | None:
        """The time-outs that the plan gives, in seconds by place; None where hangs are not monitored."""
        return None if self.hang is None else self.hang.model_dump(exclude_none=True)


class ResumeSection(PlanTable):
    """`[resume]`: where state of earlier sessions may be found on a new machine.

    Attributes:
        sources (list[str] | None): folders, or globs such as "/data/**", that are only read; None for the platform's.
        required (bool): True fails a start that finds no state to resume from; `kgorch start --fresh` alone starts anew.
    """

    sources: list[str] | None = None
    required: bool = False

    @field_validator("sources")
    @classmethod
    def _check_globs(cls, value: list[str] | None) -> list[str] | None:
        for source in value or []:
            # folders are searched to the bottom anyway, so `/**` at the end is allowed; elsewhere `**` is not implemented
            if not source or "**" in source.removesuffix("**"):
                raise ValueError('expected folders or globs such as "/data/**", with ** at the end alone')
        return value


class RemoteSection(PlanTable):
    """`[remote]`: a place that runs the sessions instead of this machine (core/remote/place_profiles.py).

    Attributes:
        on (str | None): the place; None for this machine, unless `kgorch remote start --on` names one.
        accelerator (str | None): in the place's own words, "none" for none; None for the place's default.
        internet (bool): whether a session may reach the internet.
        datasets (list[str]): further inputs, in the place's own words.
        competitions (list[str]): the same of its competitions.
        session (float | None): seconds after which a session ends by itself; None for the place's default.
        state ("kernel"): how the state comes from one session to the next: its output is attached as an input.
        keep (int): sessions that are kept at the place with their output, the newest good ones.
        poll (float | None): least seconds between two requests for a run; None for the place's default.
    """

    on: str | None = None
    accelerator: Annotated[str, Field(max_length=64)] | None = None
    internet: bool = False
    datasets: list[Annotated[str, Field(min_length=1, max_length=200)]] = []
    competitions: list[Annotated[str, Field(min_length=1, max_length=200)]] = []
    session: Seconds | None = None
    state: str = "kernel"
    keep: Annotated[int, Field(ge=1, le=100)] = 2
    poll: Seconds | None = None

    @field_validator("on")
    @classmethod
    def _check_place(cls, value: str | None) -> str | None:
        if value is not None and value not in place_profiles.PLACES:
            known = ", ".join(sorted(place_profiles.PLACES))
            raise ValueError(f"unknown place{nearest(value, place_profiles.PLACES)}; known: {known}")
        return value

    @field_validator("state")
    @classmethod
    def _check_state(cls, value: str) -> str:
        if value == "dataset":
            raise ValueError('state = "dataset" is not built; "kernel" attaches the output of the session before')
        if value != "kernel":
            raise ValueError('expected "kernel"')
        return value

    @model_validator(mode="after")
    def _check_length(self) -> RemoteSection:
        longest_s = place_profiles.PLACES[self.on].longest_s if self.on else None
        if self.session is not None and longest_s is not None and self.session > longest_s:
            text = (
                f"a session of {self.on} may last {longest_s:g} s at most, to end by itself; found {self.session:g} s"
            )
            raise problem_at(text, ("session",))
        return self


class DataSection(PlanTable):
    """`[data]`: files and folders that are copied to a local disk beside the training.

    Attributes:
        cache (list[str] | "auto"): paths relative to the plan's folder; "auto" for those that a stage's args name and that
            are on another disk, once the training waits for its data.
        into (str | None): folder of the copies; None for one below the temporary folder.
        reserve (int): bytes of that disk that stay free.
    """

    cache: Literal["auto"] | list[Annotated[str, Field(min_length=1)]] = []
    into: Annotated[str, Field(min_length=1)] | None = None
    reserve: Bytes = 5 << 30

    @field_validator("cache")
    @classmethod
    def _check_paths(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            return value
        # by the text alone: whether the folders exist is checked where the plan's folder is known (entries.py)
        paths = [PurePosixPath(os.path.normpath(source)) for source in value]
        for path in paths:
            if ".." not in path.parts and path == PurePosixPath("."):
                raise ValueError("training writes to the plan's folder itself; name the folder of the data")
            if enclosing := [other for other in paths if other is not path and path.is_relative_to(other)]:
                raise ValueError(f"{str(path)!r:.120} is inside {str(enclosing[0])!r:.120}, which is cached already")
        return value
