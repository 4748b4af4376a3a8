"""The situations that tests begin in."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from harness import Kgorch, processes_of, wait_until
from sqlalchemy import Engine

from kgorch.db.engine import open_database
from kgorch.system import host_memory

if TYPE_CHECKING:
    from postgres import PostgresServer

if os.environ.get("KGORCH_TEST_GPU") != "1" and Path("/dev/nvidiactl").exists():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests want two ranks on the CPU; `make gpu` has those for a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin for each other on cores that others use took minutes
hypothesis.settings.register_profile(
    "kgorch", deadline=None
)  # how long an example takes is the machine's load, not the code's
hypothesis.settings.load_profile("kgorch")


LONG_S = 600
"""Time-out of a test that may take minutes."""


def pytest_xdist_auto_num_workers() -> int:
    """Three a core, for they wait more than they compute. Each takes some 1.5 GB with the sessions that it runs."""
    return max(2, min(3 * len(os.sched_getaffinity(0)), host_memory.free_bytes() // (2 << 30)))


@pytest.hookimpl(trylast=True)  # after the tests that -m leaves out are gone
def pytest_collection_finish() -> None:
    """Leave modules and tests out of later collections of garbage: with them each full one takes 0.3 s, and some tests make 40."""
    gc.collect()
    gc.freeze()


MANY_OBJECTS = 100_000


@pytest.fixture(autouse=True, scope="module")
def no_old_objects_in_collections() -> None:
    """Leave out what tests have imported since, and what libraries keep: one test took 31 s with that, 3 s without."""
    if len(gc.get_objects(generation=2)) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for several processes.

    Files with tests that run sessions lie between the others: those wait, these compute, and each process gets both. pytest-xdist
    gives each process a block of neighbours. The longest tests come first in each, so that none begins when the others are done.
    """
    if not hasattr(config, "workerinput"):  # pytest-xdist's
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: tuple[list[list[pytest.Item]], ...] = ([], [])
    for tests in files.values():
        runs_sessions = any("kgorch" in getattr(item, "fixturenames", ()) for item in tests)
        kinds[runs_sessions].append(tests)
    places = [(number / len(kind), tests) for kind in kinds for number, tests in enumerate(kind)]
    ordered = [item for _, tests in sorted(places, key=lambda place: place[0]) for item in tests]

    longest = sorted(filter(is_long, ordered), key=limit_s, reverse=True)
    others = [item for item in ordered if not is_long(item)]
    processes: int = config.workerinput["workercount"]
    items.clear()
    for number in range(processes):
        block = longest[number::processes]
        size = (len(ordered) - len(items)) // (processes - number)
        items += [*block, *others[: size - len(block)]]
        del others[: size - len(block)]


def is_long(item: pytest.Item) -> bool:
    """Whether it takes minutes on a busy machine."""
    return item.get_closest_marker("slow") is not None or limit_s(item) >= LONG_S


def limit_s(item: pytest.Item) -> float:
    """The test's own time-out; 0 for the usual one."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker and marker.args else 0.0


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A process group that a test has made, as `attach` does, is not the next one's."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = open_database(tmp_path / "home")
    yield made
    made.dispose()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, one for each process of pytest; each test takes a database of its own from it."""
    from postgres import IS_INSTALLED, PostgresServer  # its driver is no requirement of `make gpu`

    if not IS_INSTALLED:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    made = PostgresServer()
    yield made
    made.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same test on both databases: `open_database` opens this kind, in processes that the test starts, too."""
    if request.param == "postgresql":
        monkeypatch.setenv("KGORCH_DATABASE", request.getfixturevalue("postgres").new_database())
        monkeypatch.setenv("KGORCH_MACHINE", "here")
    return str(request.param)


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
