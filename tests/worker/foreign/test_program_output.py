"""Steps and metrics out of what a program prints and writes, which may be anything and any amount of it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.core.metrics import metric_curve
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.foreign import program_output
from kgorch.worker.foreign.checkpoint_watch import CheckpointWatch
from kgorch.worker.foreign.program_output import LogTail, ProgramOutput
from kgorch.worker.foreign.program_status import ProgramStatus


def in_log(pattern):
    return {"log": pattern, "file": None, "key": None}


def in_file(path, key):
    return {"log": None, "file": path, "key": key}


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "rank0.log"
    path.touch()
    return path


def launch_in(folder):
    return LaunchSpec(
        run="test", run_id="1", stage="train", attempt="1.1", folder=str(folder), entry="train.py", args={},
        workdir=str(folder), ranks=1, socket="", checkpoints="", output="", plan_hash="",
    )  # fmt: skip


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_steps_their_total_and_metrics_are_read_as_they_are_printed(log, tmp_path):
    output = ProgramOutput(log, tmp_path, in_log(r"step (\d+)/(\d+)"), {"loss": in_log(r"loss ([\d.e-]+|nan)")})
    append(log, "hello\nstep 1/10 loss 0.5\nstep 2/10 lo")
    reading = output.read()
    assert (reading.step, reading.steps_total, reading.values) == (1, 10, [("loss", 0.5, 1)])
    append(log, "ss 2e-1\rstep 3/10 loss nan\n")
    reading = output.read()
    assert reading.step == 3 and [value[::2] for value in reading.values] == [("loss", 2), ("loss", 3)]
    assert reading.values[0][1] == 0.2 and math.isnan(reading.values[1][1])
    append(log, "step 4/10 loss 1")
    assert output.read().step == 3 and output.read(is_last=True).step == 4
    assert output.last_lines[0] == "hello"


@pytest.mark.parametrize(
    ("line", "step"), [("iter:  12,300", 12300), ("iter: 1,234,567", 1234567), ("iter: 12,30", None), ("iter: 7", 7)]
)
def test_a_number_whose_thousands_are_separated_is_read(log, tmp_path, line, step):
    output = ProgramOutput(log, tmp_path, in_log(r"iter:\s*([\d,]+)"), {})
    append(log, f"{line}\n")
    assert output.read().step == step


def test_a_megabyte_without_an_end_of_line_is_cut_and_costs_no_memory(log, tmp_path):
    output = ProgramOutput(log, tmp_path, in_log(r"step (\d+)"), {})
    append(log, "step 1 " + "x" * (1 << 20))
    assert output.read().step == 1
    append(log, "step 2 " * 10_000 + "\nstep 3\n")
    assert output.read().step == 3
    assert max(map(len, output.last_lines)) <= program_output.LINE_BYTES


def test_a_flood_is_skipped_and_a_log_whose_beginning_was_cut_off_is_read_on(log, tmp_path):
    tail = LogTail(log)
    append(log, "line\n" * 1_000_000)
    assert 0 < len(list(tail.lines())) <= program_output.LOOK_BYTES // 5 + 1
    log.write_text("new\nlines\n")
    assert list(tail.lines()) == ["new", "lines"]


def test_where_each_line_ends_is_known_without_what_ends_it(log):
    """A progress bar ends a line as it begins the next one."""
    append(log, "before\n")
    tail, texts = LogTail(log), ["\repoch 1", "\repoch 2 dice 0.5", "\n" + "x" * 5000, "y" * 9 + "\nlast"]
    found = []
    for text in texts:
        append(log, text)
        found += [(line[:7], tail.end) for line in tail.lines()]
    found += [(line[:7], tail.end) for line in tail.lines(is_last=True)]
    ends = [7, 15, 32, 33 + 5000, 33 + 5000 + 9 + 1 + 4]
    assert found == list(zip(["", "epoch 1", "epoch 2", "x" * 7, "last"], ends, strict=True))


def test_the_order_of_what_a_program_prints_and_saves_is_known_from_looks_at_its_log(log, tmp_path):
    launch = launch_in(tmp_path)
    foreign = {"step": in_log(r"epoch (\d+)"), "metrics": {"dice": in_log(r"dice ([\d.]+)")}, "lead_s": 0.0}
    status = ProgramStatus(launch, foreign, log)
    status.watch = CheckpointWatch(
        replace(launch, foreign=foreign | {"incomplete": [], "settled_s": 1}), "*", print, status.position
    )
    saves = []
    for epoch in range(2):
        append(log, f"epoch {epoch}\n")
        status.rest(0.15)
        append(log, f"dice 0.{epoch}\n")
        saves.append(time.time_ns())
        append(log, "later\n")
        status.rest(0.15)
        status.read(lambda _: None)
    status.rest(0.1)
    order = status.position().order
    places = [order.place_of(saved_ns) for saved_ns in saves]
    assert [place.since.step for place in places] == [0, 1]
    assert all(line.metrics == {"dice"} for place in places for line in place.beside)
    assert [line.step for line in order.after(places[0])][-2:] == [1, 1]
    assert ProgramStatus(launch, foreign | {"step": in_file("*.json", "step")}, log).position().order.lines == ()


def test_an_expression_that_backtracks_is_interrupted_and_then_not_used_any_more(log, tmp_path, monkeypatch):
    monkeypatch.setattr(program_output, "MATCH_S", 0.05)
    output = ProgramOutput(log, tmp_path, in_log(r"(a+)+$"), {"loss": in_log(r"loss (\d+)")})
    append(log, ("a" * 40 + "! loss 7\n") * 3)
    began_s = time.monotonic()
    reading = output.read()
    assert time.monotonic() - began_s < 60, "without an end it takes hours"
    assert [value[1] for value in reading.values] == [7.0, 7.0, 7.0]
    [problem] = reading.problems
    assert "took longer than 0.05 s on 3 lines" in problem and "(a+)+$" in problem
    append(log, "a" * 40 + "!\n")
    assert output.read().problems == []


def test_a_machine_that_stands_still_is_no_fault_of_the_expression():
    with program_output._time_limit(0.05):
        time.sleep(0.2)
    with pytest.raises(program_output.MatchTimeout), program_output._time_limit(0.05):
        while True:
            pass


def test_a_json_file_a_line_of_json_and_the_newest_of_several_files_give_their_numbers(log, tmp_path):
    sources = {"acc": in_file("out/*/state.json", "log.-1.acc"), "loss": in_file("metrics.jsonl", "loss")}
    output = ProgramOutput(log, tmp_path, in_file("out/*/state.json", "step"), sources)
    assert output.read().step is None
    for name, step in (("b", 5), ("a", 9)):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "state.json").write_text(
            json.dumps({"step": step, "log": [{"acc": 0}, {"acc": step / 10}]})
        )
        time.sleep(0.02)
    (tmp_path / "metrics.jsonl").write_text('{"loss": 3}\n{"loss": 2.5}\n{"los')
    reading = output.read()
    assert reading.step == 9 and dict(value[:2] for value in reading.values) == {"acc": 0.9, "loss": 2.5}
    assert output.read().values == [], "a file that has not changed says nothing new"


@pytest.mark.parametrize(
    "content", ["", "[", '{"step": "x"}', '{"step": true}', '{"step": {}}', "3", "null", '{"step": 1e999}', "[" * 5000]
)
def test_a_file_that_holds_no_such_number_says_nothing(log, tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    assert ProgramOutput(log, tmp_path, in_file("state.json", "step"), {}).read().step is None


def test_a_link_and_a_pipe_in_the_place_of_a_file_are_not_opened(log, tmp_path):
    import os

    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").write_text('{"step": 3}')
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("link.json", "pipe.json"):
        assert ProgramOutput(log, tmp_path, in_file(name, "step"), {}).read().step is None


def test_a_checkpoint_that_was_written_while_the_log_was_read_is_not_of_the_step_that_was_read(log, tmp_path):
    """A busy machine may hold up the reader between its look at the log and its look at the clock."""
    status = ProgramStatus(launch_in(tmp_path), {"step": in_log(r"step (\d+)"), "metrics": {}}, log)
    written_ns = []
    read = status._output.read

    def held_up(**options):
        reading = read(**options)
        time.sleep(0.02)
        written_ns.append(time.time_ns())
        time.sleep(0.02)
        return reading

    status._output.read = held_up
    append(log, "step 5\n")
    status.read(lambda message: None)
    append(log, "step 9\n")
    status.read(lambda message: None)
    assert foreign_checkpoint.logged_at(status.position().history, written_ns[0]) == 9
    status.close()


class Saved:
    """A checkpoint of the program, as CheckpointWatch has it."""

    step, copy_s = 40, 0.0


@pytest.mark.parametrize(
    ("step", "watch", "lines", "steps"),
    [
        (in_log(r"iter (\d+)"), None, "iter 0: loss 9.5\niter 1: loss 8.5\n", [1]),
        (in_log(r"iter (\d+)"), None, "iter 0: loss 9.5\n", [0]),
        (in_log(r"iter (\d+)"), None, "loss 9.5\n", [0]),
        (in_log(r"iter (\d+)"), Saved, "loss 9.5\niter 41: loss 8.5\n", [41]),
        (None, None, "loss 9.5\nloss 8.5\n", [0]),
        (None, Saved, "loss 9.5\nloss 8.5\n", [40]),
    ],
)
def test_a_metric_is_in_the_curve_also_before_the_first_step_and_without_any(log, tmp_path, step, watch, lines, steps):
    status = ProgramStatus(launch_in(tmp_path), {"step": step, "metrics": {"loss": in_log(r"loss ([\d.]+)")}}, log)
    status.watch = watch
    append(log, lines)
    status.read(lambda message: None)
    status.close()
    records = metric_curve.decode((tmp_path / metric_curve.FILE_NAME).read_text())
    assert [item.step for item in records] == steps
    assert all(item.first >= (watch.step - 1 if watch else 0) for item in records)


def test_of_each_step_the_metrics_that_were_printed_at_it_are_known(log, tmp_path):
    section = {
        "step": in_log(r"step (\d+)"),
        "metrics": {"dice": in_log(r"dice ([\d.]+)"), "loss": in_log(r"loss ([\d.]+)")},
    }
    status = ProgramStatus(launch_in(tmp_path), section, log)
    append(log, "loss 9\nstep 1 loss 3\nstep 2 loss 2\ndice 0.5\n")
    status.read(lambda message: None)
    append(log, "step 3 loss 1\n")
    status.read(lambda message: None)
    position = status.position()
    assert position.values == {1: {"loss": 3}, 2: {"loss": 2, "dice": 0.5}, 3: {"loss": 1}}
    assert position.metrics == {"loss": 1, "dice": 0.5} and position.measured == {"loss": 3, "dice": 2}
    append(log, "step 2\n")
    status.read(lambda message: None)
    assert 3 not in status.position().values, "the program counts anew"
    status.close()


@pytest.mark.parametrize(
    ("place", "known"),
    [("out/checkpoint-*", {"acc": 9}), ("out/other-*", {"acc": 9, "loss": 9}), (None, {"acc": 9, "loss": 9})],
)
def test_a_step_that_is_read_in_a_checkpoint_is_not_that_of_what_is_printed(log, tmp_path, place, known):
    folder = tmp_path / "out" / "checkpoint-9"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"step": 9, "acc": 0.5}')
    sources = {"acc": in_file("out/*/state.json", "acc"), "loss": in_log(r"loss ([\d.]+)")}
    section = {"step": in_file("out/*/state.json", "step"), "metrics": sources, "checkpoint": place}
    status = ProgramStatus(launch_in(tmp_path), section, log)
    status.read(lambda message: None)
    append(log, "loss 3\n")
    status.read(lambda message: None)
    assert status.position().measured == known and status.position().metrics == {"acc": 0.5, "loss": 3}
    status.close()
