"""What a run asks of its place: the plan's [remote], with what the place's profile adds."""

from __future__ import annotations

from dataclasses import dataclass

from kgorch.core.remote.place_profiles import PLACES, PlaceProfile
from kgorch.errors import PlanError
from kgorch.plan import Plan

NO_ACCELERATOR = ("", "none")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run at a place.

    Attributes:
        place: its name.
        accelerator, internet, datasets, competitions, session_s: as in SessionOrder.
        keep: number of the newest good sessions that stay at the place.
        poll_s: least seconds between two requests.
        stages: of the plan, in its order.
        profile: of the place.
    """

    place: str
    accelerator: str
    internet: bool
    datasets: tuple[str, ...]
    competitions: tuple[str, ...]
    session_s: int
    keep: int
    poll_s: float
    stages: tuple[str, ...]
    profile: PlaceProfile

    @property
    def has_accelerator(self) -> bool:
        return self.accelerator not in NO_ACCELERATOR


def settings_of(plan: Plan) -> RunSettings:
    """The settings by the plan. Raises: PlanError where it names no place."""
    section = plan.remote
    if section.on is None:
        raise PlanError(
            f"the plan of {plan.name!r} names no place to run at",
            next_step='[remote] on = "kaggle", or kgorch remote start PLAN --on kaggle',
            error_code="KG701",
        )
    profile = PLACES[section.on]
    return RunSettings(
        place=section.on,
        accelerator=profile.accelerator if section.accelerator is None else section.accelerator,
        internet=section.internet,
        datasets=tuple(section.datasets),
        competitions=tuple(section.competitions),
        session_s=round(section.session or profile.session_s),
        keep=section.keep,
        poll_s=section.poll or profile.poll_s,
        stages=tuple(stage.name for stage in plan.stage),
        profile=profile,
    )
