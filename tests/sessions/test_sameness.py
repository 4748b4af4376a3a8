"""The first promise: however a run is cut, its final state equals the uninterrupted run's, byte for byte."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import NamedTuple

import pytest
from harness import Kgorch, processes_of, wait_until

pytestmark = pytest.mark.slow

TRAINING = {"epochs": 40, "sleep": 0.0}
STEPS = 40 * 6


class Alone(NamedTuple):
    """A run that nothing cuts: its final state, and how long this machine took for it."""

    state: bytes
    took_s: float


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By the number of ranks. Loading workers make no difference to its state."""
    found: dict[int, Alone] = {}

    def of(ranks: int) -> Alone:
        if ranks not in found:
            folder = tmp_path_factory.mktemp("uninterrupted")
            alone = Kgorch(folder, folder / "home")
            plan, began_s = alone.plan(ranks=ranks, args=TRAINING, every="600s"), time.monotonic()
            alone("start", str(plan), timeout_s=200)
            took_s = time.monotonic() - began_s
            assert alone.status()["step"] == STEPS
            found[ranks] = Alone(alone.export(), took_s)
        return found[ranks]

    return of


@pytest.mark.soak  # test_workloads.py and the storm hold the same after stops, kills and walls
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "workers", "bare"), [(2, 2, False), (4, 0, True)])
def test_a_run_cut_by_walls_has_the_bits_of_an_uninterrupted_one(kgorch, uninterrupted, ranks, workers, bare):
    """Walls of three times what this machine needs for all steps without a sleep; its sleeps need three walls at least."""
    wall_s = min(max(20, round(3 * uninterrupted(ranks).took_s)), 90)
    args = TRAINING | {"sleep": 2.1 * wall_s / STEPS, "workers": workers, "bare": bare}
    plan = kgorch.plan(ranks=ranks, args=args, wall=f"{wall_s}s", every="2s")
    codes = []
    while 0 not in codes:
        codes.append(kgorch("start", str(plan), code=None).returncode)
        machine_is_slow = codes[-1] == 20 and "the wall came before the first step" in kgorch.status()["why"]
        assert codes[-1] in (0, 10) or machine_is_slow, codes
        assert len(codes) < 24
    assert codes.count(10) >= 2, codes
    assert kgorch.export() == uninterrupted(ranks).state


@pytest.mark.soak  # the storm does it at any moment
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (4, 3)])
def test_a_run_killed_at_random_has_the_bits_of_an_uninterrupted_one(kgorch, uninterrupted, ranks, seed):
    chance = random.Random(seed)
    plan = kgorch.plan(ranks=ranks, args=TRAINING | {"sleep": 0.15, "bare": True}, every="700ms")
    victims = ["rank", "torchrun", "shim", "supervisor", "everything"]
    chance.shuffle(victims)
    supervisor, step = None, 0
    for victim in victims:
        if supervisor is None or supervisor.poll() is not None:
            supervisor = kgorch.background("start", str(plan))
        step = wait_until(lambda beyond=step: _trained_beyond(kgorch, beyond), within_s=120)
        time.sleep(chance.random())
        _kill(kgorch, supervisor, victim, ranks, chance)
    kgorch("start", str(plan), code=None, timeout_s=200)
    wait_until(lambda: kgorch.status()["state"] == "finished" and not processes_of(kgorch.home), within_s=120)
    attempts = [attempt["outcome"] for entry in kgorch.history() for attempt in entry["attempts"]]
    assert len(attempts) >= 4, "it was cut, really"
    assert kgorch.status()["step"] == STEPS
    assert kgorch.export() == uninterrupted(ranks).state


@pytest.mark.parametrize("averaged", [False, True])
def test_ranks_that_train_apart_are_told_of_and_those_whose_script_averages_are_not(kgorch, averaged):
    """Without a wrapper each rank trained a model of its own, and a checkpoint was a mixture of both."""
    plan = str(kgorch.plan("apart.py", ranks=2, args={"averaged": averaged}))
    assert ("net: the weights differ between the ranks" in kgorch("check", plan).stdout) is not averaged
    kgorch("start", plan)
    said = kgorch.status()["exactness"].get("weights", "")
    assert said == "" if averaged else said.startswith("net: the weights differ between the ranks")
    assert ("kgorch: net: the weights differ" in kgorch.logs()) is not averaged


def _trained_beyond(kgorch: Kgorch, step: int) -> int:
    """The step at which the run trains, once a supervised attempt has come further than `step`; else 0."""
    found = kgorch.try_status()
    assert found.get("state") != "finished", "it finished before all were killed: give it more steps"
    alive = (
        found.get("session") and found["session"]["supervisor"]["alive"] and found["phase"] in ("training", "saving")
    )
    return found["step"] if alive and found["step"] > step else 0


def _kill(kgorch: Kgorch, supervisor, victim: str, ranks: int, chance: random.Random) -> None:
    if victim == "everything":
        kgorch.kill_everything()
    elif victim == "supervisor":
        supervisor.kill()
    else:
        before = len(kgorch.history()[-1]["attempts"])
        os.kill(kgorch.pids()[f"rank{chance.randrange(ranks)}" if victim == "rank" else victim], signal.SIGKILL)
        wait_until(lambda: len(kgorch.history()[-1]["attempts"]) > before, within_s=90, what="launched again")
        return
    supervisor.wait()
