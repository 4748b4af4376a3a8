"""The table `[track]` of a plan: experiment trackers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from kgorch.plan.plan_table import PlanTable


class TrackSection(PlanTable):
    """`[track]`: experiment trackers that are sent the run's metrics (docs/trackers.md). Secrets come from the environment alone.

    Attributes:
        to (list[str]): "tensorboard", "wandb", "mlflow".
        project (str | None): project of Weights & Biases, experiment of MLflow; None for the run's name.
        entity (str | None): user or team of Weights & Biases; None for the login's default.
        folder (str | None): for TensorBoard's files, relative to the plan's; None for `tensorboard` in the run's own folder.
        uri (str | None): MLflow's server, or a local store such as "sqlite:///mlflow.db"; None for $MLFLOW_TRACKING_URI.
        system (bool): whether GPU, memory and host figures are sent, too: one value a minute.
    """

    to: list[Literal["tensorboard", "wandb", "mlflow"]] = []
    project: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    folder: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    uri: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    system: bool = True

    @field_validator("to")
    @classmethod
    def _check_repeated(cls, value: list[str]) -> list[str]:
        if repeated := [name for name in value if value.count(name) > 1]:
            raise ValueError(f"{repeated[0]!r} is named twice")
        return value

    @field_validator("project", "entity")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and (re.search(r"[/\\#?%:]", value) or not value.isprintable()):
            raise ValueError("expected a name without / \\ # ? % : and control characters")
        return value

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, value: str | None) -> str | None:
        # The plan is stored, shown and shared. A password in it would be, too.
        if value is not None and re.search(r"//[^/]*@", value):
            raise ValueError(
                "expected a URI without a user and a password: MLflow reads them from MLFLOW_TRACKING_USERNAME and"
                " MLFLOW_TRACKING_PASSWORD, or a token from MLFLOW_TRACKING_TOKEN"
            )
        return value
