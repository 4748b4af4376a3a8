"""The situations that tests begin in."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from harness import Kgorch, processes_of, wait_until
from sqlalchemy import Engine

from kgorch.db.engine import open_database

if os.environ.get("KGORCH_TEST_GPU") != "1" and Path("/dev/nvidiactl").exists():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests want two ranks on the CPU; `make gpu` has those for a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin for each other on cores that others use took minutes
hypothesis.settings.register_profile(
    "kgorch", deadline=None
)  # how long an example takes is the machine's load, not the code's
hypothesis.settings.load_profile("kgorch")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = open_database(tmp_path / "home")
    yield made
    made.dispose()


@pytest.fixture
def kgorch(tmp_path: Path) -> Iterator[Kgorch]:
    folder = tmp_path / "work"
    folder.mkdir()
    made = Kgorch(folder, tmp_path / "home")
    yield made
    end_all_of(made)


def end_all_of(made: Kgorch) -> None:
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    made.kill_everything()
    for process in made.started:
        if process.stdout and not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="session")
def suspended_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kgorch, Path]:
    """A run that was stopped and saved after a step or two, and a copy of all that it left."""
    place = tmp_path_factory.mktemp("suspended") / "now"
    (place / "work").mkdir(parents=True)
    made = Kgorch(place / "work", place / "home")
    supervisor = made.background("start", str(made.plan(args={"epochs": 20, "pad": 3, "sleep": 1.0})))
    made.wait_for_step(2, within_s=120)
    made("stop")
    assert supervisor.wait(timeout=60) == 10
    wait_until(lambda: not processes_of(made.home))
    end_all_of(made)
    return made, Path(shutil.copytree(place, place.with_name("kept"), ignore=shutil.ignore_patterns("*.sock")))


@pytest.fixture
def suspended(suspended_once: tuple[Kgorch, Path]) -> Iterator[Kgorch]:
    """That run as it was left, in the same place: several tests begin where it stopped. Its plan is `plan.toml`."""
    made, kept = suspended_once
    place = made.home.parent
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    fresh = Kgorch(made.folder, made.home)
    yield fresh
    end_all_of(fresh)
