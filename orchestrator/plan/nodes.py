"""The table `[nodes]` of a plan: which machines a session with `nodes` in a stage runs on, and how something is started on them."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from kgorch.plan.diagnostics import problem_at
from kgorch.plan.plan_table import PlanTable

HOST, SHELL, WORDS = "{host}", "{command}", "{words}"
"""In `start`: the machine's name; the command as one word, quoted for a shell; the command as words of their own."""

SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}", "--export=ALL", "{words}")

Word = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00]*$")]
Host = Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]


class NodesSection(PlanTable):
    """`[nodes]`: the machines of a session over several nodes. Within a Slurm allocation nothing of it is needed.

    Attributes:
        hosts (list[str] | None): names of the machines, the first one is this machine; None for those of the Slurm allocation.
        start (list[str] | None): command that runs a command on a machine: "{host}" is its name, "{command}" the command as one
            word for a shell, "{words}" the command as separate words; None for Slurm's srun.
        address (str | None): IP address of this machine at which the others reach it; None for that of the first host's name.
    """

    hosts: list[Host] | None = None
    start: list[Word] | None = None
    address: str | None = None

    @field_validator("start")
    @classmethod
    def _check_start(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not any(SHELL in word for word in value) and WORDS not in value:
            raise ValueError(
                f'expected "{SHELL}" or "{WORDS}" among its words, for example ["ssh", "{HOST}", "{SHELL}"]'
            )
        return value

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                is_any = ipaddress.ip_address(value).is_unspecified
            except ValueError:
                is_any = True
            if is_any:
                raise ValueError("expected an IP address of this machine, such as 10.0.0.1")
        return value

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        hosts = self.hosts
        if hosts is not None and (not hosts or len(set(hosts)) < len(hosts)):
            raise problem_at("expected different machines, the first one is this machine", ("hosts",))
        return self
