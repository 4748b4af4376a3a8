"""plan.toml: what a person wrote, validated, handed on as plain values.

An error names the file, the line, the key, what was expected and found, and the nearest known key.
"""

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
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from orchestrator.core import hang, health, memory, notices, room, trend, windows
from orchestrator.core.memory import Rung
from orchestrator.core.naming import NAME
from orchestrator.errors import KgorchError, PlanError, nearest
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
SNAPSHOT_S = 2.0
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
Read = TypeVar("Read", bound=BaseModel)


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


Seconds = Annotated[float, BeforeValidator(seconds), Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(size), Field(gt=0)]
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


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
    `quick_test_of`: another stage, whose entry, ranks, args and weights this one takes over, as far as it gives none itself; it
    does one step of it, evaluates two batches, saves, and is done.
    """

    name: Name
    entry: str
    quick_test_of: Name | None = None
    ranks: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    args: dict[str, Any] = {}
    weights: Annotated[
        Weights | None, BeforeValidator(lambda value: {"file": value} if isinstance(value, str) else value)
    ] = None

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
        if not (value.endswith(".py") or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value)):
            raise ValueError('expected "module:function" or the path of a script, "train.py"')
        return value


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
            raise ValueError(f"the margin ({self.margin:g} s) takes the whole session ({self.wall:g} s)")
        return self


class Keep(_Part):
    """`every = 10` keeps each tenth for good; `best = "dice:max"` or `"loss:min"`."""

    last: Annotated[int, Field(ge=1)] = 3
    every: Annotated[int, Field(ge=1)] | None = None
    best: Annotated[str, StringConstraints(pattern=r"^[^:]+:(min|max)$")] | None = None


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
            raise ValueError(f"the reserve ({self.reserve:g} s) takes the whole quota ({self.hours:g} h)")
        return self


class PlatformPart(_Part):
    """What is otherwise than the platform's profile says (platforms/profile.py).

    `name`: which profile that is. `metadata`: base URL of the server that is asked for spot notices.
    """

    name: Name | None = None
    wall: Seconds | None = None
    began: Literal["container", "job", "boot", "start"] | None = None
    metadata: Annotated[str, StringConstraints(pattern=r"^https?://[^/]")] | None = None

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in BY_NAME:
            raise ValueError(f"unknown platform{nearest(value, BY_NAME)}; known: {', '.join(sorted(BY_NAME))}")
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
                raise ValueError(f"there is no notice {kind!r}{nearest(kind, notices.KINDS)}; known: {known}")
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

    `climb`: how long there must be room before a rung is undone.
    """

    microbatch: Annotated[int, Field(ge=1)] | None = None
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
        return memory.Settings(microbatch=self.microbatch)


class HangPart(_Part):
    """Time-outs by place (core/hang.py); what is not named is learned from what was seen."""

    start: Seconds | None = None
    first_step: Seconds | None = None
    step: Seconds | None = None
    evaluation: Seconds | None = None
    save: Seconds | None = None
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
    ended and launched again; None for never.
    """

    nan: list[str | dict[str, Any]] = list(health.DEFAULT)
    spike: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    hang: Annotated[HangPart | None, BeforeValidator(_hang)] = HangPart()

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
    def hang_s(self) -> dict[str, float] | None:
        """The time-outs that the plan names; None where it wants no watch."""
        return None if self.hang is None else self.hang.model_dump(exclude_none=True)


class ResumePart(_Part):
    """Read-only folders in which the state of earlier sessions may lie; without `sources`, where the platform puts it."""

    sources: list[str] | None = None

    @field_validator("sources")
    @classmethod
    def _are_folders(cls, value: list[str] | None) -> list[str] | None:
        for source in value or []:
            if not source or "**" in source.removesuffix("**"):
                raise ValueError(
                    f'expected folders or globs such as "/data/**", with ** at the end alone; found {source!r}'
                )
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
                raise ValueError(f"{str(path)!r} lies in {str(inside[0])!r}, which is cached already")
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
    def _quick_tests_take_over(cls, document: Any) -> Any:
        stages = document.get("stage") if isinstance(document, dict) else None
        if not isinstance(stages, list):
            return document
        named = {
            stage["name"]: stage for stage in stages if isinstance(stage, dict) and isinstance(stage.get("name"), str)
        }
        return document | {"stage": [_taken_over(stage, named) for stage in stages]}

    @model_validator(mode="after")
    def _stages_differ(self) -> Plan:
        names = [stage.name for stage in self.stage]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two stages are named {twice[0]!r}")
        return self

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
        essence = self.model_dump(mode="json", include={"stage", "seed"} | asked, exclude_none=True)
        return hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:16]


def _taken_over(stage: Any, named: Mapping[str, Any]) -> Any:
    """The stage as it is, or a quick test with what it takes from the stage that it tests. Raises: ValueError."""
    tested = stage.get("quick_test_of") if isinstance(stage, dict) else None
    if not isinstance(tested, str):
        return stage
    found = named.get(tested)
    if found is None or found is stage or "quick_test_of" in found:
        others = [name for name, other in named.items() if other is not stage and "quick_test_of" not in other]
        raise ValueError(
            f"stage {stage.get('name')!r}: quick_test_of names no stage to be tested{nearest(tested, others)}; "
            f"those of the plan: {', '.join(others) or 'none'}"
        )
    return {key: found[key] for key in ("entry", "ranks", "args", "weights") if key in found} | stage


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[Plan, str]:
    """The plan at `path` and its text.

    Raises: PlanError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the plan {path} cannot be read", str(error), next_step="`kgorch init` writes a commented plan.toml"
        ) from None
    return parse(text, str(path), overrides), text


def parse(text: str, where: str, overrides: Sequence[str] = ()) -> Plan:
    """A plan out of TOML; `overrides` are `session.wall=30s`, later ones winning.

    Raises: PlanError.
    """
    document = read_toml(text, where, PlanError)
    for override in overrides:
        _set(document, override)
    return validated(
        Plan,
        document,
        text,
        where,
        PlanError,
        what="a plan",
        next_step="`kgorch init` writes a plan with every key explained",
    )


def read_toml(text: str, where: str, refusal: type[KgorchError]) -> dict[str, Any]:
    """Raises: `refusal`."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise refusal(
            f"{where} is not TOML",
            str(error) or "nested too deep",
            next_step="mend it there; text stands in quotes, a table's name in brackets: toml.io tells the rest",
        ) from None


def validated(
    model: type[Read],
    document: dict[str, Any],
    text: str,
    where: str,
    refusal: type[KgorchError],
    *,
    what: str,
    next_step: str,
) -> Read:
    """The document as a `model`. `text`: what it was read from, for the numbers of lines.

    Raises: `refusal` with a line for each problem.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        facts = [_explained(problem, text, where, model) for problem in error.errors()[:8]]
        raise refusal(f"{where} is not {what}", *facts, next_step=next_step) from None
    except RecursionError:
        raise refusal(f"{where} is nested too deep") from None


def _set(document: dict[str, Any], override: str) -> None:
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
    at: Any = document
    *path, last = key.strip().split(".")
    for step in path:
        if isinstance(at, dict) and isinstance(at.get(step), list):  # stage.train.args: the stage of that name
            at = at[step]
        elif isinstance(at, list):
            at = next((item for item in at if isinstance(item, dict) and item.get("name") == step), None)
            if at is None:
                raise PlanError(f"--set {override!r}: there is no {step!r}", next_step="name a stage of the plan")
        else:
            at = at.setdefault(step, {})
        if not isinstance(at, dict | list):
            raise PlanError(f"--set {override!r}: {step!r} holds no keys")
    if isinstance(at, list):
        raise PlanError(f"--set {override!r}: name the stage, as in stage.NAME.args.epochs=3")
    at[last] = value


def _explained(problem: Mapping[str, Any], text: str, where: str, root: type[BaseModel]) -> str:
    """One problem as `plan.toml:7: session.wal: unknown key (did you mean 'wall'?)`."""
    path = [
        part
        for part in problem["loc"]
        if not (isinstance(part, str) and part.startswith(("function-", "literal[", "constrained-", "lax-")))
    ]
    keys = [part for part in path if not isinstance(part, str) or part not in ("str", "int", "float", "dict[str,any]")]
    dotted = ".".join(str(part) for part in keys) or "the whole file"
    line = _line_of(text, keys)
    if problem["type"] == "extra_forbidden":
        known = _keys_at(keys[:-1], root)
        said = f"unknown key{nearest(str(keys[-1]), known)}; known here: {', '.join(known)}"
    elif problem["type"] == "missing":
        said = "missing; it must be given"
    elif "mirror_options" in keys or (keys[:1] == ["notify"] and keys[1:2] != ["on"]):
        said = str(problem["msg"])  # what was found may be a secret
    else:
        said = f"{problem['msg'].removeprefix('Value error, ')}; found {_short(problem['input'])}"
    return f"{where}:{line}: {dotted}: {said}" if line else f"{where}: {dotted}: {said}"


def _keys_at(path: Sequence[Any], root: type[BaseModel]) -> list[str]:
    model = root
    inner: dict[str, type[BaseModel]] = {
        "stage": Stage,
        "weights": Weights,
        "session": SessionPart,
        "checkpoint": CheckpointPart,
        "keep": Keep,
        "quota": QuotaPart,
        "memory": MemoryPart,
        "health": HealthPart,
        "hang": HangPart,
        "resume": ResumePart,
        "data": DataPart,
        "platform": PlatformPart,
        "notify": NotifyPart,
        "forecast": ForecastPart,
    }
    for part in path:
        model = inner.get(str(part), model)
    return list(model.model_fields)


def _line_of(text: str, path: Sequence[Any]) -> int | None:
    """The line on which a key stands, found by reading the TOML's headers; None when it came by --set or inline."""
    header: list[Any] = []
    counts: dict[str, int] = {}
    best = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\[?\s*([\w.\-]+)\s*\]\]?", line):
            name = match[1]
            header = list(name.split("."))
            if line.lstrip().startswith("[["):
                header.append(counts.get(name, 0))
                counts[name] = counts.get(name, 0) + 1
            if header == list(path[: len(header)]):
                best = number
        elif (match := re.match(r"\s*([\w\-.\"]+)\s*=", line)) and path:
            here = header + [part.strip('"') for part in match[1].split(".")]
            if here == list(path[: len(here)]):
                return number
    return best


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


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
            continue
        module, _, function = stage.entry.partition(":")
        path = _module_file(module, workdir)
        if path is None:
            raise PlanError(
                f"stage {stage.name!r}: there is no module {module!r}",
                f"looked in {workdir} and among what is installed",
                next_step="mend the stage's entry",
            )
        names = _names_in(path)
        if names is not None and function not in names:
            raise PlanError(
                f"stage {stage.name!r}: {path} has no {function!r}{nearest(function, names)}",
                next_step="mend the stage's entry",
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
