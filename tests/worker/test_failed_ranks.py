"""A rank that has failed leaves its record and ends within seconds, whatever its device waits for; and so does the attempt."""

from __future__ import annotations

import argparse
import json
import sys
import time

import pytest
import ranks

from kgorch.launch import failed_attempt
from kgorch.system.clock import boottime_s
from kgorch.worker import entry


@pytest.mark.parametrize("how", ["metric", "atexit"])
def test_a_rank_that_fails_leaves_its_record_and_ends_though_its_device_does_not(tmp_path, how):
    attempt = ranks.run(tmp_path / how, "waits.py", 1, {"how": how})
    ended_s = boottime_s()
    record = json.loads((attempt.folder / "rank0.status.json").read_text())
    assert attempt.codes == [1] and record["error"]["message"] == "the loss went wrong"
    assert ended_s - record["at_s"] < entry.EXIT_S + 30.0


def test_an_attempt_ends_soon_after_a_rank_has_failed_whatever_the_others_wait_for(kgorch):
    """torchrun gives the others 30 seconds, of which one that hangs in C can make no use."""
    plan = kgorch.plan("waits.py", ranks=2, args={"how": "peer"}, extra="[health]\nhang = 'off'")
    supervisor = kgorch.background("start", str(plan))
    first = kgorch.home / "runs" / "test"
    deadline = time.monotonic() + 120
    while not (ended := sorted(first.glob("*/attempts/1.1/exit.json"))):
        assert time.monotonic() < deadline and supervisor.poll() is None, kgorch.logs()
        time.sleep(0.1)
    came_s = boottime_s()
    record = json.loads((ended[0].parent / "rank1.status.json").read_text())
    assert "waits" in (ended[0].parent / "rank0.log").read_text()
    assert came_s - record["at_s"] < failed_attempt.EXIT_S + 20.0
    kgorch("stop", code=None)
    supervisor.wait(timeout=60)
    attempt = kgorch.history()[0]["attempts"][0]
    assert attempt["cause"].startswith("rank 1: ValueError: the loss went wrong"), attempt


def parsed_by_argparse():
    argparse.ArgumentParser("train.py").parse_args(["--epohcs", "4"])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (parsed_by_argparse, "2: train.py: error: unrecognized arguments: --epohcs 4"),
        (lambda: sys.exit(3), "3"),
        (lambda: sys.exit("no data"), "no data"),
    ],
    ids=["argparse", "a number", "a text"],
)
def test_the_reason_of_a_program_that_refuses_its_arguments_is_in_its_record(program, message):
    with pytest.raises(SystemExit) as ended:
        program()
    assert entry.message_of(ended.value) == message
