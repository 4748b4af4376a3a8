"""The model of plan.toml: its stages, and one section per table."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kgorch.core.memory.memory_ladder import Rung
from kgorch.plan.diagnostics import problem_at
from kgorch.plan.nodes import NodesSection
from kgorch.plan.plan_table import PlanTable
from kgorch.plan.quantities import Name
from kgorch.plan.sections import (
    CheckpointSection,
    DataSection,
    ForecastSection,
    HealthSection,
    MemorySection,
    NotifySection,
    PlatformSection,
    QuotaSection,
    RemoteSection,
    ResumeSection,
    SessionSection,
)
from kgorch.plan.stages import StageSection, inherit_quick_tests
from kgorch.plan.track import TrackSection

_NEWER_STAGE_KEYS = ("argv", "flags", "launcher", "integration")
"""Keys of a stage that count in the hash only where they differ from their defaults: plans from before they existed keep their
hash. Of `foreign` only `first` changes what is trained."""


class Plan(PlanTable):
    """A validated plan. It is immutable; durations are in seconds, sizes in bytes.

    Attributes:
        name (str): of the run that it starts or continues.
        stage (list[StageSection]): in the order in which they run; their names differ.
        seed (int): of all random generators; rank r gets seed + r. Below 2**31, as every library takes it.
        deterministic (str): "warn" chooses PyTorch's deterministic algorithms and reports operations that have none;
            "strict" fails at one; "off" changes nothing.
    """

    name: Name
    stage: Annotated[list[StageSection], Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    deterministic: Literal["off", "warn", "strict"] = "off"
    session: SessionSection = SessionSection()
    quota: QuotaSection = QuotaSection()
    checkpoint: CheckpointSection = CheckpointSection()
    memory: MemorySection = MemorySection()
    health: HealthSection = HealthSection()
    resume: ResumeSection = ResumeSection()
    data: DataSection = DataSection()
    platform: PlatformSection = PlatformSection()
    notify: NotifySection = NotifySection()
    track: TrackSection = TrackSection()
    forecast: ForecastSection = ForecastSection()
    remote: RemoteSection = RemoteSection()
    nodes: NodesSection = NodesSection()

    @model_validator(mode="before")
    @classmethod
    def _inherit_quick_tests(cls, values: Any) -> Any:
        stages = values.get("stage") if isinstance(values, dict) else None
        return values | {"stage": inherit_quick_tests(stages)} if isinstance(stages, list) else values

    @field_validator("stage")
    @classmethod
    def _check_names(cls, value: list[StageSection]) -> list[StageSection]:
        names = [stage.name for stage in value]
        if repeated := [number for number, name in enumerate(names) if name in names[:number]]:
            raise problem_at(f"two stages are named {names[repeated[0]]!r}", (repeated[0], "name"))
        return value

    def rungs_of(self, stage: str) -> list[Rung]:
        """The rungs of the memory ladder that apply to a stage.

        A rung that sets an argument applies to the stages that are given this argument; if none is, to all.
        """
        own = next((item.args for item in self.stage if item.name == stage), {})
        others = {name for item in self.stage if item.name != stage for name in item.args}
        return [rung for rung in self.memory.rungs if all(name in own or name not in others for name in rung.arguments)]

    @property
    def launchers(self) -> set[str]:
        """Of the stages whose script attaches; a foreign program is started by its agent."""
        return {stage.launcher for stage in self.stage if stage.foreign is None}

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of all that the result of the training depends on: stages, seed, determinism.

        Time limits, checkpoint intervals and the like are left out, for they may change between sessions of a run; so are the
        keys of a stage that only checks use. `deterministic` counts only where it is set, because plans from before it
        existed must keep their hash: it is stored in checkpoints.
        """
        include = {"stage", "seed"} | ({"deterministic"} if self.deterministic != "off" else set())
        exclude = {"stage": {"__all__": {"inputs", "preflight", "foreign", "nodes", *_NEWER_STAGE_KEYS}}}
        dump = self.model_dump(mode="json", include=include, exclude=exclude, exclude_none=True)
        for stage, values in zip(self.stage, dump["stage"], strict=True):
            for key in _NEWER_STAGE_KEYS:
                if (value := getattr(stage, key)) != StageSection.model_fields[key].default:
                    values[key] = value
            if stage.foreign and stage.foreign.first:
                values["first"] = stage.foreign.first
        return hashlib.sha256(json.dumps(dump, sort_keys=True).encode()).hexdigest()[:16]
