"""What a foreign program prints belongs to the step at which it was printed, also where it counts anew."""

from __future__ import annotations

import time

from kgorch.core.checkpoint.foreign_checkpoint import TICK_NS
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.foreign.program_status import ProgramStatus

STEP = {"log": r"step (\d+)", "file": None, "key": None}
METRICS = {"dice": {"log": r"dice ([\d.]+)", "file": None, "key": None}}


def status_of(folder, log):
    launch = LaunchSpec(
        "run",
        "1",
        "train",
        "1.1",
        str(folder),
        "train.py",
        str(folder),
        1,
        "",
        str(folder),
        str(folder),
        "",
        foreign={},
    )
    return ProgramStatus(launch, {"step": STEP, "metrics": METRICS}, log)


def printed(status, log, text):
    """Unix time at which it was written, by the clock of files."""
    with log.open("a") as file:
        file.write(text)
    status.read(lambda message: None)
    return log.stat().st_mtime_ns


def test_of_each_step_it_is_known_when_it_was_not_yet_printed_and_by_when_it_was(tmp_path):
    log = tmp_path / "log"
    status = status_of(tmp_path, log)
    first_ns = printed(status, log, "step 4\ndice 0.5\n")
    time.sleep(0.05)
    before_ns = time.time_ns()
    last_ns = printed(status, log, "dice 0.6\n")
    time.sleep(0.05)
    next_ns = printed(status, log, "step 5\ndice 0.7\n")
    status.close()
    position = status.position()
    assert position.printed["dice"] == [(first_ns, 4), (last_ns, 4), (next_ns, 5)]
    [first, (still_ns, still), last] = position.history
    assert (first, still, last) == ((first_ns, 4), 4, (next_ns, 5))
    assert first_ns < still_ns < next_ns and 0 <= still_ns - (before_ns - 2 * TICK_NS) < 0.04e9


def test_a_metric_of_a_step_that_the_program_has_gone_back_before_is_none_of_that_step(tmp_path):
    log = tmp_path / "log"
    status = status_of(tmp_path, log)
    printed(status, log, "step 100\ndice 0.9\n")
    assert (status.position().measured, status.position().values) == ({"dice": 100}, {100: {"dice": 0.9}})
    printed(status, log, "step 1\n")
    status.close()
    assert (status.position().measured, status.position().values) == ({}, {})
    assert status.position().metrics == {"dice": 0.9} and status.position().printed == {"dice": []}
