"""What a foreign program prints belongs to the step at which it was printed, also where it counts anew."""

from __future__ import annotations

from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.foreign.program_status import ProgramStatus

STEP = {"log": r"step (\d+)", "file": None, "key": None}
METRICS = {"dice": {"log": r"dice ([\d.]+)", "file": None, "key": None}}


def test_a_metric_of_a_step_that_the_program_has_gone_back_before_is_none_of_that_step(tmp_path):
    folder, log = str(tmp_path), tmp_path / "log"
    launch = LaunchSpec("run", "1", "train", "1.1", folder, "train.py", folder, 1, "", folder, folder, "", foreign={})
    status = ProgramStatus(launch, {"step": STEP, "metrics": METRICS}, log)
    log.write_text("step 100\ndice 0.9\n")
    status.read(lambda message: None)
    assert (status.position().measured, status.position().values) == ({"dice": 100}, {100: {"dice": 0.9}})
    with log.open("a") as file:
        file.write("step 1\n")
    status.read(lambda message: None)
    status.close()
    assert (status.position().measured, status.position().values) == ({}, {})
    assert status.position().metrics == {"dice": 0.9}


def test_the_last_words_are_a_line_with_words(tmp_path):
    """Of a rank that was killed they were the line of hyphens or equals signs at the end of torchrun's report."""
    folder, log = str(tmp_path), tmp_path / "log"
    launch = LaunchSpec("run", "1", "train", "1.1", folder, "train.py", folder, 1, "", folder, folder, "", foreign={})
    status = ProgramStatus(launch, {"step": STEP, "metrics": METRICS}, log)
    log.write_text("traceback : Signal 9 (SIGKILL) received by PID 24779\n============\n  ---\n\n")
    status.read(lambda message: None, is_last=True)
    assert status.last_words == "'traceback : Signal 9 (SIGKILL) received by PID 24779'"
    with log.open("a") as file:
        file.write("Fehler: überlauf\n====\n")
    status.read(lambda message: None, is_last=True)
    status.close()
    assert status.last_words == "'Fehler: überlauf'"
