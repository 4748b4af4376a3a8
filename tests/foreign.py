"""Runs of programs that save and resume by themselves: tests/programs/public, unmodified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Kgorch, wait_until

from kgorch.checkpoint.folder import read_manifest
from kgorch.checkpoint.foreign_contents import read_contents

PUBLIC = Path(__file__).parent / "programs" / "public"


@dataclass
class ForeignPlan:
    """A plan with one foreign stage, written beside its program.

    Attributes:
        stage: keys of [[stage]], as TOML values in Python.
        foreign: keys of [stage.foreign].
        extra: TOML after it.
    """

    stage: dict[str, Any]
    foreign: dict[str, Any]
    name: str = "test"
    extra: str = ""
    session: dict[str, Any] = field(default_factory=lambda: {"margin": "1s"})

    def write(self, kgorch: Kgorch) -> Path:
        for path in PUBLIC.iterdir():
            shutil.copy(path, kgorch.folder)
        lines = [f'name = "{self.name}"', "[session]", *(_pair(*item) for item in self.session.items()), "[[stage]]"]
        lines += ['name = "train"', *(_pair(*item) for item in self.stage.items())]
        lines += ["[stage.foreign]", *(_pair(*item) for item in self.foreign.items()), self.extra]
        path = kgorch.folder / "plan.toml"
        path.write_text("\n".join(lines) + "\n")
        return path


def _pair(key: str, value: Any) -> str:
    return f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(_pair(*item) for item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def counts(count: int = 40, *, pause: float = 0.1, **foreign: Any) -> ForeignPlan:
    """counts.py without a launcher: the quickest of them, for it imports nothing."""
    section = {
        "checkpoint": "state/state.json",
        "incomplete": ["*.tmp"],
        "stop": {"signal": "SIGTERM", "grace": "3s"},
        "step": {"log": r"step (\d+) of (\d+)"},
        "metrics": {"loss": {"log": r"loss ([\d.]+)"}},
    } | foreign
    words = ["-c", f"COUNTS_PAUSE={pause} exec {sys.executable} counts.py {count} state"]
    return ForeignPlan({"entry": "sh", "argv": words, "launcher": "none"}, section)


def shell_plan(script: str, **foreign: Any) -> ForeignPlan:
    """A plan that runs a line of shell."""
    section = {
        "checkpoint": "state/state.json",
        "incomplete": ["*.tmp"],
        "stop": {"signal": "SIGTERM", "grace": "2s"},
        "step": {"log": r"step (\d+)"},
    }
    return ForeignPlan({"entry": "sh", "argv": ["-c", script], "launcher": "none"}, section | foreign)


def saved_steps(kgorch: Kgorch) -> list[int]:
    """Steps of the run's verified checkpoints, as the database has them."""
    return [row["step"] for row in kgorch.look("checkpoints", "list")]


def wait_for_checkpoint(kgorch: Kgorch, above: int = -1, within_s: float = 240) -> int:
    """The step of the first verified checkpoint above that one."""
    found: int = wait_until(
        lambda: kgorch.try_status() and max((step for step in saved_steps(kgorch) if step > above), default=0),
        within_s=within_s,
        what=lambda: f"a checkpoint above {above}: {kgorch.try_status()}\n{kgorch.logs()}",
    )
    return found


def contents_of(folder: Path) -> dict[str, bytes]:
    """The program's own files in one of the run's checkpoints, by their names in it."""
    _, contents = read_contents(folder, None)
    return {name: (folder / stored).read_bytes() for stored, name in contents.files.items()}


def newest(kgorch: Kgorch) -> Path:
    """The folder of the newest checkpoint."""
    return max(kgorch.checkpoints(), key=lambda path: (read_manifest(path).step, read_manifest(path).final))


def alone(folder: Path, *command: str, env: dict[str, str] | None = None) -> None:
    """Run a program as its authors do, in a folder of its own, to its end."""
    folder.mkdir()
    for path in PUBLIC.iterdir():
        shutil.copy(path, folder)
    subprocess.run(
        command, cwd=folder, env={**os.environ, **(env or {})}, check=True, stdout=subprocess.DEVNULL, timeout=240
    )
