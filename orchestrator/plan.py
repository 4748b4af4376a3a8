"""plan.toml: what a person wrote, validated, handed on as plain values. How a mistake is told: document.py."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from orchestrator import document
from orchestrator.core import hang, health, memory, notices, room, trend, windows
from orchestrator.core.memory import Rung
from orchestrator.core.names import NAME
from orchestrator.document import misplaced
from orchestrator.errors import PlanError, nearest
from orchestrator.platforms.detect import BY_NAME

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
LONGEST_S = 10 * 365 * 86400.0
SNAPSHOT_S = 2.0
FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def seconds(value: Any) -> Any:
    """`"90s"`, `"1h 30m"`, `45` (seconds) as seconds. Raises ValueError."""
    if isinstance(value, str):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|[smhd])", value)
        if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*(ms|[smhd])|\s", "", value):
            raise ValueError('expected a duration such as "30s", "90m" or "1h 30m"')
        return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError('expected a duration such as "30s", "90m" or "1h 30m"')
    return float(value)


def size(value: Any) -> Any:
    """`"15GiB"`, `"500 MB"`, `1024` (bytes) as bytes. Raises ValueError."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)", value.strip())
        if not match:
            raise ValueError('expected a size such as "500MB" or "15GiB"')
        return int(float(match[1]) * _UNITS_BYTES[match[2]])
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError('expected a size such as "500MB" or "15GiB"')
    return value


def _lasting(value: Any) -> Any:
    """A duration that a plan may hold. Raises ValueError."""
    lasts_s = seconds(value)
    if not 0 < lasts_s <= LONGEST_S:
        raise ValueError('expected a duration above 0 and at most 10 years, such as "90m"')
    return lasts_s


def _filling(value: Any) -> Any:
    """A size that is not nothing. Raises ValueError."""
    count = size(value)
    if count <= 0:
        raise ValueError('expected a size above 0, such as "15GiB"')
    return count


Seconds = Annotated[float, BeforeValidator(_lasting)]
Bytes = Annotated[int, BeforeValidator(_filling)]


def _name(value: str) -> str:
    if not re.fullmatch(NAME, value):
        raise ValueError("expected 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit")
    return value


Name = Annotated[str, AfterValidator(_name)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Weights(_Part):
    """Weights that a stage begins with: `file` into a tracked module, or a part of one (`into = "model.encoder"`).

    `prefix`: only the file's names that begin so are taken, without it. Not `strict`: what fits is taken, the rest told.
    """

    file: str
    into: str | None = None
    prefix: str = ""
    strict: bool = True

    @field_validator("file")
    @classmethod
    def _is_named_as_one(cls, value: str) -> str:
        if not value.endswith(WEIGHTS):
            raise ValueError(f"expected a file of weights ({', '.join(WEIGHTS)})")
        return value


class Stage(_Part):
    """One program of the run: `module:function`, called with `args`, or a script path, given them as flags.

    `weights`: what it begins with when there is nothing to resume; a path, or a table of `Weights`.
    `inputs`: names of args that name files or folders which must exist, and hold something, before a session starts.
    `preflight`: `module:function`, called before a session starts with those args that it names (runtime/inputs.py).
    `quick_test_of`: another stage, whose entry, ranks, each of its args, weights, inputs and preflight this one takes over, as far
    as it gives none itself (with an entry of its own no args); it does one step of it, evaluates two batches, saves, and is done.
    """

    name: Name
    entry: str
    quick_test_of: Name | None = None
    ranks: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    args: dict[str, Any] = {}
    weights: Annotated[
        Weights | None, BeforeValidator(lambda value: {"file": value} if isinstance(value, str) else value)
    ] = None
    inputs: list[str] = []
    preflight: str | None = None

    @field_validator("args")
    @classmethod
    def _can_be_told(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=True)
        except TypeError:
            raise ValueError("expected text, numbers, true, false, lists and tables (a date goes in quotes)") from None
        return value

    @field_validator("entry")
    @classmethod
    def _is_an_entry(cls, value: str) -> str:
        if not (value.endswith(".py") or re.fullmatch(FUNCTION, value)):
            raise ValueError('expected "module:function" or the path of a script, "train.py"')
        return value

    @field_validator("preflight")
    @classmethod
    def _is_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(FUNCTION, value):
            raise ValueError('expected "module:function"')
        return value

    @model_validator(mode="after")
    def _inputs_are_paths_in_args(self) -> Stage:
        for number, name in enumerate(self.inputs):
            if name not in self.args:
                given = ", ".join(self.args) or "none"
                text = f"args has no {document.shown(name)}{nearest(name, self.args)}; given: {given}"
                raise misplaced(text, ("inputs", number))
            if not self.paths_of(name):
                text = (
                    f"expected the path of a file or folder, or a list of them; found {document.shown(self.args[name])}"
                )
                raise misplaced(text, ("args", name))
        return self

    def paths_of(self, name: str) -> list[str]:
        """The paths that an argument names, as the plan writes them; empty where it names none."""
        value = self.args[name]
        paths = value if isinstance(value, list) else [value]
        return paths if all(isinstance(path, str) and path for path in paths) else []


class SessionPart(_Part):
    """How long a session may last; without `wall`, what the platform says.

    `priority`: of runs that wait for the same machine the highest begins first. `share`: others may use its devices, too.
    `gpus`: so many at least must be visible, or no session begins.
    """

    wall: Seconds | None = None
    margin: Seconds | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    share: bool = False
    gpus: Annotated[int, Field(ge=1, le=1024)] | None = None

    @model_validator(mode="after")
    def _leaves_time(self) -> SessionPart:
        if self.wall is not None and self.margin is not None and self.margin >= self.wall:
            raise misplaced(f"the margin ({self.margin:g} s) takes the whole session ({self.wall:g} s)", ("margin",))
        return self


class Keep(_Part):
    """`every = 10` keeps each tenth for good; `best = "dice:max"` or `"loss:min"`."""

    last: Annotated[int, Field(ge=1)] = 3
    every: Annotated[int, Field(ge=1)] | None = None
    best: str | None = None

    @field_validator("best")
    @classmethod
    def _is_a_metric_and_its_end(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^:]+:(min|max)", value):
            raise ValueError('expected a reported metric and which end of it is best, "accuracy:max" or "loss:min"')
        return value


class CheckpointPart(_Part):
    """`mirror`: a folder, or an fsspec URL that `mirror_options` go with, to which verified checkpoints are copied."""

    dir: str | None = None
    every: Literal["auto"] | Seconds = "auto"
    snapshot: Literal["auto", "off"] | Seconds = "auto"
    memory: Annotated[int, BeforeValidator(size), Field(ge=0)] | None = None
    keep: Keep = Keep()
    disk: Bytes | None = None
    mirror: Annotated[str, Field(min_length=1)] | None = None
    mirror_options: dict[str, Any] = {}

    @property
    def snapshot_s(self) -> float | None:
        """Seconds between two snapshots in memory at least; None for none between saves."""
        if self.snapshot == "off":
            return None
        return SNAPSHOT_S if self.snapshot == "auto" else self.snapshot


class QuotaPart(_Part):
    """Accelerator hours that may be used in a window of time (core/quota.py); without `hours`, what the platform says.

    `resets`: "Sat 00:00 UTC", "monthly 1 00:00 Europe/Berlin", "rolling 7d", "never". `reserve`: what of it stays unused.
    `pool`: runs of the same pool spend the same hours. `factor`: hours that an hour of a session costs.
    """

    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    resets: str | None = None
    reserve: Seconds | None = None
    pool: Name | None = None
    factor: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] | None = None

    @field_validator("resets")
    @classmethod
    def _is_a_window(cls, value: str | None) -> str | None:
        if value is not None:
            windows.parse(value)
        return value

    @model_validator(mode="after")
    def _leaves_hours(self) -> QuotaPart:
        if self.hours is not None and self.reserve is not None and self.reserve >= self.hours * 3600:
            raise misplaced(f"the reserve ({self.reserve:g} s) takes the whole quota ({self.hours:g} h)", ("reserve",))
        return self


class PlatformPart(_Part):
    """What is otherwise than the platform's profile says (platforms/profile.py).

    `name`: which profile that is. `metadata`: base URL of the server that is asked for spot notices.
    """

    name: Name | None = None
    wall: Seconds | None = None
    began: Literal["container", "job", "boot", "start"] | None = None
    metadata: str | None = None

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in BY_NAME:
            raise ValueError(f"unknown platform{nearest(value, BY_NAME)}; known: {', '.join(sorted(BY_NAME))}")
        return value

    @field_validator("metadata")
    @classmethod
    def _is_a_server(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/\s]", value):
            raise ValueError('expected a server\'s address such as "http://127.0.0.1:8080"')
        return value


class NotifyPart(_Part):
    """Who is told of what: a command, and webhook or Apprise URLs. `${NAME}` in them is taken from the environment."""

    on: list[str] = ["suspended", "failed", "finished", "quota", "save failed"]
    command: list[Annotated[str, Field(max_length=4096)]] = []
    urls: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=8)] = []

    @field_validator("on")
    @classmethod
    def _are_kinds(cls, value: list[str]) -> list[str]:
        for kind in value:
            if kind not in notices.KINDS:
                known = ", ".join(notices.KINDS)
                raise ValueError(f"there is no notice {kind!r:.60}{nearest(kind, notices.KINDS)}; known: {known}")
        return value

    @field_validator("command", "urls")
    @classmethod
    def _can_be_used(cls, value: list[str], info: ValidationInfo) -> list[str]:
        for word in value:
            if "\0" in word or (word == value[0] and not word.strip()):
                raise ValueError('expected a program and its arguments, as ["notify-send", "{title}", "{text}"]')
            if info.field_name == "urls" and not re.match(r"\$\{\w+\}|[A-Za-z][\w+.-]*://", word):
                raise ValueError(
                    'expected URLs such as "https://hooks.example.org/${HOOK}" or "discord://${ID}/${TOKEN}"'
                )
        return value


class ForecastPart(_Part):
    """`target`: the metric value whose date is foretold, "dice >= 0.72"."""

    target: str | None = None

    @field_validator("target")
    @classmethod
    def _is_a_target(cls, value: str | None) -> str | None:
        if value is not None:
            trend.parse_target(value)
        return value


class MemoryPart(_Part):
    """Where to begin, and what may change when memory runs out, in this order (core/memory.py); an empty list for nothing.

    `microbatch`: "auto" for what the last `kgorch check` on this machine measured, else a rank's whole share.
    `climb`: how long there must be room before a rung is undone.
    """

    microbatch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    ladder: list[str | dict[str, Any]] = list(memory.DEFAULT)
    climb: Literal["off"] | Seconds = room.CLIMB_AFTER_S

    @property
    def climb_after_s(self) -> float | None:
        return None if self.climb == "off" else self.climb

    @field_validator("ladder")
    @classmethod
    def _are_rungs(cls, value: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        names = [memory.parse_rung(rung).name for rung in value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the rung {twice[0]!r} stands there twice")
        return value

    @property
    def rungs(self) -> list[memory.Rung]:
        return [memory.parse_rung(rung) for rung in self.ladder]

    @property
    def settings(self) -> memory.Settings:
        """Where to begin."""
        return memory.Settings(microbatch=None if self.microbatch == "auto" else self.microbatch)


class HangPart(_Part):
    """Time-outs by place (core/hang.py); what is not named is learned from what was seen."""

    start: Seconds | None = None
    first_step: Seconds | None = None
    step: Seconds | None = None
    evaluation: Seconds | None = None
    save: Seconds | None = None
    data: Seconds | None = None
    end: Seconds | None = None


def _hang(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("auto", "off"):
            raise ValueError(f'expected "auto", "off" or a table of time-outs ({", ".join(hang.PLACES)})')
        return {} if value == "auto" else None
    return value


class HealthPart(_Part):
    """`nan`: what is done, in this order, when a loss or a weight is no number (core/health.py); an empty list for nothing.

    `spike`: a loss so many robust deviations above the last ones is a trouble, too. `hang`: when ranks that do not move are
    ended and launched again; None for never. `collective_timeout`: that of the process group, after which a rank that waits for
    another one in a collective fails; by default there is none (worker/ranks/process_group.py).
    """

    nan: list[str | dict[str, Any]] = list(health.DEFAULT)
    spike: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    hang: Annotated[HangPart | None, BeforeValidator(_hang)] = HangPart()
    collective_timeout: Literal["off"] | Seconds = "off"

    @field_validator("nan")
    @classmethod
    def _are_remedies(cls, value: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        for remedy in value:
            health.parse_remedy(remedy)
        return value

    @property
    def remedies(self) -> list[health.Remedy]:
        return [health.parse_remedy(remedy) for remedy in self.nan]

    @property
    def collective_timeout_s(self) -> float | None:
        return None if self.collective_timeout == "off" else self.collective_timeout

    @property
    def hang_s(self) -> dict[str, float] | None:
        """The time-outs that the plan names; None where it wants no watch."""
        return None if self.hang is None else self.hang.model_dump(exclude_none=True)


class ResumePart(_Part):
    """Read-only folders in which the state of earlier sessions may lie; without `sources`, where the platform puts it.

    `required`: there must be state to go on with, here or there; only --fresh begins a new run.
    """

    sources: list[str] | None = None
    required: bool = False

    @field_validator("sources")
    @classmethod
    def _are_folders(cls, value: list[str] | None) -> list[str] | None:
        for source in value or []:
            if not source or "**" in source.removesuffix("**"):
                raise ValueError('expected folders or globs such as "/data/**", with ** at the end alone')
        return value


class DataPart(_Part):
    """Files and folders to copy to a local disk beside the training, relative to the plan's folder.

    `cache = "auto"`: those that a stage's args name and that lie on another disk, once the training waits for its data.
    `into`: where; default: below the temporary folder. `reserve`: bytes of that disk that stay free.
    """

    cache: Literal["auto"] | list[Annotated[str, Field(min_length=1)]] = []
    into: Annotated[str, Field(min_length=1)] | None = None
    reserve: Bytes = 5 << 30

    @field_validator("cache")
    @classmethod
    def _lie_apart(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            return value
        paths = [PurePosixPath(os.path.normpath(source)) for source in value]
        for path in paths:
            if ".." not in path.parts and path == PurePosixPath("."):
                raise ValueError("the plan's folder itself holds what training writes; name the folder of the data")
            if inside := [other for other in paths if other is not path and path.is_relative_to(other)]:
                raise ValueError(f"{str(path)!r:.120} lies in {str(inside[0])!r:.120}, which is cached already")
        return value


class Plan(_Part):
    name: Name
    stage: Annotated[list[Stage], Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    deterministic: Literal["off", "warn", "strict"] = "off"
    session: SessionPart = SessionPart()
    quota: QuotaPart = QuotaPart()
    checkpoint: CheckpointPart = CheckpointPart()
    memory: MemoryPart = MemoryPart()
    health: HealthPart = HealthPart()
    resume: ResumePart = ResumePart()
    data: DataPart = DataPart()
    platform: PlatformPart = PlatformPart()
    notify: NotifyPart = NotifyPart()
    forecast: ForecastPart = ForecastPart()

    @model_validator(mode="before")
    @classmethod
    def _quick_tests_take_over(cls, given: Any) -> Any:
        stages = given.get("stage") if isinstance(given, dict) else None
        if not isinstance(stages, list):
            return given
        named = {
            stage["name"]: stage for stage in stages if isinstance(stage, dict) and isinstance(stage.get("name"), str)
        }
        return given | {"stage": [_taken_over(stage, number, named) for number, stage in enumerate(stages)]}

    @field_validator("stage")
    @classmethod
    def _stages_differ(cls, value: list[Stage]) -> list[Stage]:
        names = [stage.name for stage in value]
        if twice := [number for number, name in enumerate(names) if name in names[:number]]:
            raise misplaced(f"two stages are named {names[twice[0]]!r}", (twice[0], "name"))
        return value

    def rungs_of(self, stage: str) -> list[Rung]:
        """The ladder as far as it is meant for a stage: an argument that only other ones are given is theirs."""
        mine = next((item.args for item in self.stage if item.name == stage), {})
        theirs = {name for item in self.stage if item.name != stage for name in item.args}
        return [
            rung for rung in self.memory.rungs if all(name in mine or name not in theirs for name in rung.arguments)
        ]

    @property
    def hash(self) -> str:
        """Of what the training's bits hang on: stages, seed, determinism. Walls and cadence may change between sessions.

        A plan that asks for no determinism has the hash that it had before plans could.
        """
        asked = {"deterministic"} if self.deterministic != "off" else set()
        looked_at = {"stage": {"__all__": {"inputs", "preflight"}}}
        essence = self.model_dump(mode="json", include={"stage", "seed"} | asked, exclude=looked_at, exclude_none=True)
        return hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:16]


_TAKEN_OVER = ("entry", "ranks", "args", "weights", "inputs", "preflight")


def _taken_over(stage: Any, number: int, named: Mapping[str, Any]) -> Any:
    """The stage as it is, or a quick test with what it takes from the stage that it tests. Raises: PydanticCustomError."""
    tested = stage.get("quick_test_of") if isinstance(stage, dict) else None
    if not isinstance(tested, str):
        return stage
    found = named.get(tested)
    if found is None or found is stage or "quick_test_of" in found:
        others = [name for name, other in named.items() if other is not stage and "quick_test_of" not in other]
        raise misplaced(
            f"{document.shown(tested)} names no stage to be tested{nearest(tested, others)}; "
            f"those of the plan: {', '.join(others) or 'none'}",
            ("stage", number, "quick_test_of"),
        )
    taken = {key: found[key] for key in _TAKEN_OVER if key in found} | stage
    args, given = found.get("args"), stage.get("args")
    if "entry" not in stage and isinstance(args, dict) and isinstance(given, dict):
        taken["args"] = args | given
    if (
        "inputs" not in stage
        and isinstance(inputs := taken.get("inputs"), list)
        and isinstance(taken.get("args"), dict)
    ):
        taken["inputs"] = [name for name in inputs if isinstance(name, str) and name in taken["args"]]
    return taken


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[Plan, str]:
    """The plan at `path` and its text.

    Raises: PlanError.
    """
    try:
        text = document.read(path, "plan", PlanError, next_step=NEXT_STEP)
    except FileNotFoundError:
        raise PlanError(f"there is no plan {path}{_beside(path)}", next_step=NEXT_STEP) from None
    return parse(text, str(path), overrides), text


NEXT_STEP = "kgorch init --print    (a plan with every key explained; kgorch init writes one)"


def _beside(path: Path) -> str:
    """The plan that was meant, of those that lie in the same folder."""
    try:
        others = [other.name for other in path.absolute().parent.glob("*.toml")]
    except OSError:
        return ""
    return nearest(path.name, others)


def parse(text: str, where: str, overrides: Sequence[str] = ()) -> Plan:
    """A plan out of TOML; `overrides` are `session.wall=30s`, later ones winning.

    Raises: PlanError.
    """
    found = document.parsed(text, where, PlanError)
    given = {_set(found, override): override for override in overrides}
    return document.validated(
        Plan, found, text, where, PlanError, what="a plan", next_step="kgorch explain {key}", overrides=given
    )


def _set(found: dict[str, Any], override: str) -> document.Place:
    """Change one value. Where it is."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise PlanError(
            f"--set {override!r}: expected KEY=VALUE",
            next_step="for example --set session.wall=30s --set stage.train.args.epochs=3",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word or 30s: text
    except RecursionError:
        raise PlanError(f"--set {override:.200}: nested too deep", next_step="give a plain value") from None
    at: Any = found
    place: document.Place = ()
    *path, last = key.strip().split(".")
    for step in path:
        if isinstance(at, dict) and isinstance(at.get(step), list):  # stage.train.args: the stage of that name
            at = at[step]
            place += (step,)
        elif isinstance(at, list):
            names = [item.get("name") if isinstance(item, dict) else None for item in at]
            if step not in names:
                known = ", ".join(str(name) for name in names if name) or "none"
                raise PlanError(
                    f"--set {override!r}: there is no stage {step!r}{nearest(step, [str(name) for name in names])}",
                    next_step=f"name a stage of the plan: {known}",
                )
            at = at[names.index(step)]
            place += (names.index(step),)
        else:
            at = at.setdefault(step, {})
            place += (step,)
        if not isinstance(at, dict | list):
            above = ".".join(path[: path.index(step) + 1])
            raise PlanError(
                f"--set {override!r}: {above} is a value, not a table", next_step=f"--set {above}=VALUE, or another key"
            )
    if isinstance(at, list):
        raise PlanError(f"--set {override!r}: name the stage", next_step="--set stage.NAME.args.epochs=3")
    at[last] = value
    return (*place, last)


def check_entries(plan: Plan, workdir: Path) -> None:
    """See that every entry is there, without importing it: an import of the person's code may take PyTorch along;
    every file of starting weights, and all data to be cached.

    Raises: PlanError naming the stage, the entry and the nearest name.
    """
    for source in plan.data.cache if plan.data.cache != "auto" else ():
        if not (workdir / source).exists():
            raise PlanError(
                f"data.cache: there is no {workdir / source}", next_step="give it relative to the plan's folder"
            )
    for stage in plan.stage:
        if stage.weights and not (workdir / stage.weights.file).is_file():
            raise PlanError(
                f"stage {stage.name!r}: there is no file of weights {workdir / stage.weights.file}",
                next_step="give weights relative to the plan's folder",
            )
        if stage.entry.endswith(".py"):
            if not (workdir / stage.entry).is_file():
                raise PlanError(
                    f"stage {stage.name!r}: there is no script {workdir / stage.entry}",
                    next_step="give entry relative to the plan's folder",
                )
        else:
            _check_function(stage.name, "entry", stage.entry, workdir)
        if stage.preflight:
            _check_function(stage.name, "preflight", stage.preflight, workdir)


def _check_function(stage: str, key: str, value: str, workdir: Path) -> None:
    """Raises: PlanError."""
    module, _, function = value.partition(":")
    path = _module_file(module, workdir)
    if path is None:
        raise PlanError(
            f"stage {stage!r}: there is no module {module!r}",
            f"looked in {workdir} and among what is installed",
            next_step=f"mend the stage's {key}",
        )
    names = _names_in(path)
    if names is not None and function not in names:
        raise PlanError(
            f"stage {stage!r}: {path} has no {function!r}{nearest(function, names)}",
            next_step=f"mend the stage's {key}",
        )


def _module_file(module: str, workdir: Path) -> Path | None:
    """Where a module lies: under the plan's folder first, else as installed; only its top package is looked up."""
    top, *rest = module.split(".")
    roots = [workdir / top]
    try:
        if (spec := importlib.util.find_spec(top)) is not None:
            roots += [Path(place) for place in spec.submodule_search_locations or []] or [
                Path(spec.origin or "").with_suffix("")
            ]
    except (ImportError, ValueError):
        pass
    for root in roots:
        base = root.joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _names_in(path: Path) -> set[str] | None:
    """Names bound at the top of a module; None when that cannot be told (`import *`, a syntax error)."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            if any(alias.name == "*" for alias in node.names):
                return None
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
