"""The table `[nodes]` of a plan: which machines a session with `nodes` in a stage runs on, and how something is started on them."""

from __future__ import annotations

import ipaddress
import re
from typing import Self

from pydantic import field_validator, model_validator

from kgorch.plan.diagnostics import problem_at
from kgorch.plan.plan_table import PlanTable

HOST, SHELL, WORDS = "{host}", "{command}", "{words}"
"""In `start`: the machine's name; the command as one word, quoted for a shell; the command as words of their own."""

SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}", "--export=ALL", "{words}")

HOST_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?"
"""Of a machine's name; a leading dash would be an option of ssh or srun."""


class NodesSection(PlanTable):
    """`[nodes]`: the machines of a session over several nodes. Within a Slurm allocation nothing of it is needed.

    Attributes:
        hosts (list[str] | None): names of the machines, the first one is this machine; None for those of the Slurm allocation.
        start (list[str] | None): command that runs a command on a machine: "{host}" is its name, "{command}" the command as one
            word for a shell, "{words}" the command as separate words; None for Slurm's srun.
        address (str | None): IP address of this machine at which the others reach it; None for that of the first host's name.
    """

    hosts: list[str] | None = None
    start: list[str] | None = None
    address: str | None = None

    @field_validator("start")
    @classmethod
    def _check_start(cls, value: list[str] | None) -> list[str] | None:
        if value and ("\0" in "".join(value) or not all(value)):
            raise ValueError("expected words that are not empty, without NUL")
        if value is not None and not any(SHELL in word for word in value) and WORDS not in value:
            raise ValueError(
                f'expected "{SHELL}" or "{WORDS}" among its words, for example ["ssh", "{HOST}", "{SHELL}"]'
            )
        return value

    @field_validator("hosts")
    @classmethod
    def _check_names(cls, value: list[str] | None) -> list[str] | None:
        if wrong := [host for host in value or () if not re.fullmatch(HOST_PATTERN, host)]:
            raise ValueError(f"expected names or addresses of machines; one is {wrong[0]!r:.80}")
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
