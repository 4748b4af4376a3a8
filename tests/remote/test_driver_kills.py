"""kill -9 of the process that drives a run, before and after each commit and each act: no session is pushed twice, two are never at
once, and none begins from scratch by mistake."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter

import pytest
from driven import Driven

from kgorch.core.codes import RemoteState
from kgorch.db import remote
from kgorch.remote.places.local.place import LocalPlace

COMMITS = ("save", "save_unless_last", "close", "save_bundle")
ACTS = ("account", "store_bundle", "is_bundle_ready", "push", "find_push", "look", "collect", "delete", "_start")
IN_FAST_SUITE = 5


class KillPoints:
    """Kills this process at the `at`-th of the points before and after each commit and each act."""

    def __init__(self, at: int) -> None:
        self._left = at

    def around(self, call):
        def instrumented(*args, **kwargs):
            self._pass()
            answer = call(*args, **kwargs)
            self._pass()
            return answer

        return instrumented

    def _pass(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_visit(driven: Driven, at: int) -> bool:
    """A visit in a process of its own. Returns: whether it was killed."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return True
        assert os.WEXITSTATUS(status) == 0, "the visit raised"
        return False
    code = 1
    try:
        points = KillPoints(at)
        for name in COMMITS:
            setattr(remote, name, points.around(getattr(remote, name)))
        for name in ACTS:
            setattr(LocalPlace, name, points.around(getattr(LocalPlace, name)))
        driven.visit()
        code = 0
    finally:
        os._exit(code)


def check(driven: Driven) -> None:
    """What holds of the place, and of what its sessions have noted of themselves."""
    rows, place = driven.rows(), driven.home / "places" / "local"
    begun = [line for line in driven.diary_lines() if line["what"] == "begin"]
    assert max(Counter(line["number"] for line in begun).values()) == 1, "a session was started twice"
    ends = {line["number"]: line["at"] for line in driven.diary_lines() if line["what"] == "end"}
    for former, later in itertools.pairwise(begun):
        assert ends[former["number"]] < later["at"], "two sessions at once"
        assert later["source"], "from scratch, though there is a verified state"
    names = {path.name for path in (place / "sessions").glob("kgorch-*")}
    # the first one is removed after the third; a kill may come before it, or before its row says so
    assert {row.name for row in rows[1:]} <= names <= {row.name for row in rows}
    assert [(row.state, row.reached_step) for row in rows] == [
        (RemoteState.COLLECTED, 9),
        (RemoteState.COLLECTED, 19),
        (RemoteState.DONE, 29),
    ]
    assert all(row.version == 1 and row.url for row in rows)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.soak] if seed >= IN_FAST_SUITE else []) for seed in range(100)]
)
def test_a_driver_that_is_killed_at_any_point_pushes_nothing_twice_and_loses_no_step(seed, tmp_path):
    chance, driven, kills = random.Random(seed), Driven(tmp_path), []
    driven.begin()

    def visit() -> None:
        # the first push takes 16 points; a visit on a slow machine goes on to the next session
        at = chance.randint(1, 16) if not kills else chance.choice([0, chance.randint(1, 24), chance.randint(1, 60)])
        kills.append(killed_visit(driven, at))

    driven.carry(visit=visit, within_s=240)
    assert kills[0]
    check(driven)


@pytest.mark.parametrize("at", range(1, 17))
def test_a_kill_at_each_point_of_the_first_visit(at, tmp_path):
    driven = Driven(tmp_path)
    driven.begin()
    was_killed = killed_visit(driven, at)
    assert was_killed, "the visit up to the push has fewer points"
    driven.carry()
    check(driven)
