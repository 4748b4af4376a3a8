"""A place with the folders of a Kaggle session: what is attached below an input folder, and what a session leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kaggle_machine
import pytest
from harness import PROGRAMS, processes_of

from kgorch.core.remote.place_values import SessionOrder
from kgorch.core.remote.record_values import SessionRecord
from kgorch.plan import parse
from kgorch.remote import bootstrap, bundle, session_record


@dataclass
class Sessions:
    """Sessions of one run, each with folders of its own.

    Attributes:
        folder: where all of it lies. run_id: of the run. extra_env: variables of the next sessions.
    """

    folder: Path
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    extra_env: dict[str, str] = field(default_factory=dict)
    bundle: Any = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def plan(self, program: str = "learns.py", **args: Any) -> bundle.BundleSource:
        """A plan of one stage around a program of tests/programs, two ranks, in a folder of its own."""
        work = self.folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        for path in PROGRAMS.glob("*.py"):
            shutil.copy(path, work)
        given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
        text = f'name = "test"\n[[stage]]\nname = "train"\nentry = "{program}"\nranks = 2\nargs = {{ {given} }}\n'
        text += '[checkpoint]\nevery = "1s"\n[session]\nmargin = "2s"\n'
        (work / "plan.toml").write_text(text)
        return bundle.BundleSource(parse(text, "plan.toml"), text, [], work)

    def make_bundle(self, program: str = "learns.py", **args: Any) -> Any:
        self.bundle = bundle.build(self.plan(program, **args), self.folder / "bundles")
        return self.bundle

    def order(self, number: int = 1, **changes: Any) -> SessionOrder:
        values = {
            "name": f"kgorch-test-{number}", "nonce": uuid.uuid4().hex, "run": "test", "run_id": self.run_id, "number": number,
            "bundle": f"me/{self.bundle.name}", "source": "", "expected_step": -1, "session_s": 100, "timeout_s": 160,
            "accelerator": "", "internet": False,
        }  # fmt: skip
        return SessionOrder(**(values | changes))

    def after(self, order: SessionOrder, **changes: Any) -> SessionOrder:
        """The next session, from what that one has recorded; its output is attached."""
        record = self.record(order)
        following = self.order(order.number + 1, source=order.name, expected_step=record.step, **changes)
        self.attach(following, self.output(order), order.name)
        return following

    def input(self, order: SessionOrder) -> Path:
        """With the bundle, where Kaggle mounts a data set."""
        place = self.folder / f"input-{order.number}"
        target = place / "datasets" / "me" / order.bundle.rpartition("/")[2]
        if self.bundle and not target.exists():
            shutil.copytree(self.bundle.folder, target)
        return place

    def attach(self, order: SessionOrder, output: Path, name: str) -> Path:
        return Path(shutil.copytree(output, self.input(order) / "notebooks" / "me" / name, symlinks=True))

    def output(self, order: SessionOrder) -> Path:
        return self.folder / f"output-{order.number}"

    def start(
        self, order: SessionOrder, script: str = "", *, in_machine: bool = False, python: str | Path = sys.executable
    ) -> subprocess.Popen[str]:
        """The pushed script, as a place runs it."""
        path = self.folder / f"{order.name}.py"
        path.write_text(script or bootstrap.render(order))
        self.output(order).mkdir(exist_ok=True)
        words, env = [str(python), str(path)], {**kaggle_machine.environ(), **self.extra_env}
        if in_machine:
            words = kaggle_machine.command(self.folder / "root", self.input(order), self.output(order), words)
        else:
            env = {key: value for key, value in env.items() if not key.startswith("KAGGLE_")}
            env |= {"KGORCH_REMOTE_INPUT": str(self.input(order)), "KGORCH_REMOTE_OUTPUT": str(self.output(order))}
        self.started.append(
            subprocess.Popen(
                words, cwd=self.output(order), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return self.started[-1]

    def run(self, order: SessionOrder, script: str = "", **options: Any) -> tuple[SessionRecord, str]:
        """A session from start to end: exit status 0 whatever happened, its record, and what it printed."""
        process = self.start(order, script, **options)
        printed = process.communicate(timeout=200)[0]
        assert process.returncode == 0, printed
        return self.record(order), printed

    def record(self, order: SessionOrder) -> SessionRecord:
        found = session_record.read(self.output(order) / "kgorch-session.json")
        assert (found.nonce, found.run_id, found.number) == (order.nonce, order.run_id, order.number)
        return found


@pytest.fixture
def sessions(tmp_path):
    made = Sessions(tmp_path / "place")
    made.folder.mkdir()
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            for home in made.folder.glob("output-*/kgorch"):
                for other in processes_of(home):
                    os.kill(other.pid, signal.SIGKILL)
    shutil.rmtree(f"/tmp/kgorch-{made.run_id}", ignore_errors=True)
