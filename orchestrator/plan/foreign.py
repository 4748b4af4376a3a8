"""`[stage.foreign]`: a program that saves and resumes by itself, and what kgorch has to know of it."""

from __future__ import annotations

import re
import signal
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, field_validator, model_validator

from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.plan.diagnostics import problem_at
from kgorch.plan.plan_table import PlanTable
from kgorch.plan.quantities import Seconds

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")
"""Signals that a program can handle. SIGKILL is `stop = "kill"`."""

NAMES = ("{name}", "{checkpoint}", "{number}")
"""What stands for a checkpoint in the text of `latest`."""


class StopSection(PlanTable):
    """How the program is asked to stop; by SIGTERM where the plan does not say.

    Attributes:
        signal (str | None): sent to the ranks of a launcher, else to the program's first process.
        file (str | None): created, empty, and removed again; relative to the plan's folder.
        kill (bool): it is killed without notice; `stop = "kill"` is short for it.
        grace (float): seconds after which a program that goes on is killed. The time that it takes is learned from its stops.
    """

    signal: str | None = None
    file: str | None = None
    kill: bool = False
    grace: Seconds = 60.0

    @field_validator("signal")
    @classmethod
    def _check_signal(cls, value: str | None) -> str | None:
        if value is not None and value not in SIGNALS:
            kill = '; to end it without notice write stop = "kill"' if value == signal.SIGKILL.name else ""
            raise ValueError(f"expected one of {', '.join(SIGNALS)}{kill}")
        return value

    @field_validator("file")
    @classmethod
    def _check_file(cls, value: str | None) -> str | None:
        return None if value is None else checked_place(value)

    @model_validator(mode="after")
    def _check_one(self) -> StopSection:
        ways = [name for name in ("signal", "file", "kill") if getattr(self, name)]
        if len(ways) > 1:
            raise problem_at(f"expected one way to stop the program, found {' and '.join(ways)}", (ways[1],))
        return self


def _as_table(value: Any) -> Any:
    """`stop = "kill"` is short for `stop = { kill = true }`."""
    if isinstance(value, str) and value != "kill":
        raise ValueError('expected "kill", or a table such as { signal = "SIGTERM", grace = "60s" }')
    return {"kill": True} if value == "kill" else value


class ValueSource(PlanTable):
    r"""Where a number is read.

    Attributes:
        log (str | None): regular expression for a line of what the program prints; its first group is the number.
        file (str | None): path of a JSON file, or of a file with a JSON object a line, of which the last counts; relative to
            the plan's folder, with * for the newest of several.
        key (str | None): of the number in the file, dotted; numbers are positions in lists: "log_history.-1.loss".
    """

    log: str | None = None
    file: str | None = None
    key: str | None = None

    @field_validator("log")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            groups = re.compile(value).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"expected a regular expression: {error}") from None
        if not groups:
            raise ValueError(r"expected a group around the number, such as 'step (\d+)'")
        return value

    @field_validator("file")
    @classmethod
    def _check_file(cls, value: str | None) -> str | None:
        return None if value is None else checked_place(value)

    @model_validator(mode="after")
    def _check_form(self) -> ValueSource:
        given = [name for name in ("log", "file", "key") if getattr(self, name) is not None]
        if given not in (["log"], ["file", "key"]):
            raise problem_at('expected log = \'…\' alone, or file = "…" and key = "…"', tuple(given[-1:]))
        return self


class LatestSection(PlanTable):
    """What names the newest checkpoint, where the program finds it by that.

    Attributes:
        file (str | None): a file with its name; relative to the plan's folder.
        link (str | None): a symbolic link to it.
        text (str): of the file: `{name}` stands for the last part of the checkpoint's path, `{checkpoint}` for the whole one,
            `{number}` for the number in it, without zeros before it.
    """

    file: str | None = None
    link: str | None = None
    text: str = "{name}"

    @field_validator("file", "link")
    @classmethod
    def _check_place(cls, value: str | None) -> str | None:
        if value is not None and foreign_checkpoint.WILDCARDS.search(value):
            raise ValueError("expected one path, without wildcards")
        return None if value is None else checked_place(value)

    @field_validator("text")
    @classmethod
    def _check_text(cls, value: str) -> str:
        words = re.findall(r"\{[^{}]*\}", value)
        if not words or set(words) - set(NAMES) or "\0" in value or len(value) > 200:
            raise ValueError(f"expected a text with {' or '.join(NAMES)}")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> LatestSection:
        if (self.file is None) == (self.link is None):
            raise problem_at("expected file or link, one of them", ("file",))
        return self

    @property
    def place(self) -> str:
        return self.file or self.link or ""


def _as_file(value: Any) -> Any:
    """`latest = "out/latest"` is short for `latest = { file = "out/latest" }`."""
    return {"file": value} if isinstance(value, str) else value


class ForeignSection(PlanTable):
    """`[stage.foreign]`.

    Attributes:
        checkpoint (str | None): path of its checkpoints, files or folders, relative to the plan's folder, * for what differs;
            None where it saves none: then a wall loses the stage.
        incomplete (list[str]): names that a checkpoint, or a file in it, has while it is being written. With some a checkpoint
            without such names is complete at once.
        settled (float): seconds for which a checkpoint must be unchanged before it counts as complete, without `incomplete`.
        first (list[str]): words that are added where there is no checkpoint. again (list[str]): where there is one.
        latest (LatestSection | None): what names its newest checkpoint, where it finds it by that.
        stop (StopSection): how it is asked to stop.
        step (ValueSource | None): where its step is read; a second group of `log` is the number of all steps.
        metrics (dict[str, ValueSource]): where its metrics are read, by their names.
    """

    checkpoint: str | None = None
    incomplete: list[str] = []
    settled: Seconds = 10.0
    first: list[str] = []
    again: list[str] = []
    latest: Annotated[LatestSection | None, BeforeValidator(_as_file)] = None
    stop: Annotated[StopSection, BeforeValidator(_as_table)] = StopSection()
    step: ValueSource | None = None
    metrics: dict[str, ValueSource] = {}

    @field_validator("checkpoint")
    @classmethod
    def _check_checkpoint(cls, value: str | None) -> str | None:
        return None if value is None else checked_place(value)

    @field_validator("incomplete")
    @classmethod
    def _check_incomplete(cls, value: list[str]) -> list[str]:
        if wrong := [name for name in value if not name or "/" in name or len(name) > 200]:
            raise ValueError(f'expected names without "/", such as "*.tmp"; one is {wrong[0]!r:.80}')
        return value

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, value: dict[str, ValueSource]) -> dict[str, ValueSource]:
        if len(value) > foreign_checkpoint.MAX_VALUES or any(not 0 < len(name) <= 200 for name in value):
            raise ValueError(f"expected at most {foreign_checkpoint.MAX_VALUES} names of 1 to 200 characters")
        return value

    @model_validator(mode="after")
    def _check_again(self) -> ForeignSection:
        if self.again and self.checkpoint is None:
            raise problem_at(
                "again says how to continue from a checkpoint, and `checkpoint` says nowhere to find one", ("again",)
            )
        return self

    @model_validator(mode="after")
    def _check_latest(self) -> ForeignSection:
        if not self.latest:
            return self
        place = ("latest", "file" if self.latest.file else "link")
        if self.checkpoint is None:
            raise problem_at("latest names the newest checkpoint, and `checkpoint` says nowhere to find one", place)
        parts = self.latest.place.split("/")
        for number in range(len(parts)):
            if foreign_checkpoint.matches(path := "/".join(parts[: number + 1]), self.checkpoint):
                raise problem_at(f"{path} is a checkpoint by `checkpoint`: give that a narrower pattern", place)
        return self

    def as_launch(self) -> dict[str, Any]:
        """The section as LaunchSpec.foreign has it."""
        stop: dict[str, Any] = {"kill": True}
        if not self.stop.kill:
            name = None if self.stop.file else (self.stop.signal or "SIGTERM")
            stop = {"signal": name, "file": self.stop.file, "grace_s": self.stop.grace}
        return {
            **self.model_dump(include={"checkpoint", "incomplete", "first", "again"}),
            "settled_s": self.settled,
            "latest": self.latest.model_dump() if self.latest else None,
            "stop": stop,
            "step": self.step.model_dump() if self.step else None,
            "metrics": {name: source.model_dump() for name, source in self.metrics.items()},
        }


def checked_place(value: str) -> str:
    """A path below the plan's folder, as every other part compares it: "./out//step-*/" is "out/step-*".

    Raises: ValueError for any other.
    """
    path = PurePosixPath(value)
    if not value or "\0" in value or path.is_absolute() or ".." in path.parts or str(path) == "." or len(value) > 1000:
        raise ValueError('expected a path relative to the plan\'s folder, without ".."')
    return str(path)
