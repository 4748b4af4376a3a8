"""When a run is finished: its scripts have run to their ends, and their final checkpoints can be read. Then it may be extended."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Kgorch, processes_of, wait_until

LIAR = """
import os, sys
from pathlib import Path
if "kgorch.snapshots.keeper" in sys.orig_argv:  # a disk that keeps other bytes than it was given
    from kgorch.snapshots import checkpoint_writer
    persist, left = checkpoint_writer.persist, Path(os.environ["LIES_LEFT"])
    def lie(*args):
        place, size = persist(*args)
        if place.name.endswith("-final") and (count := int(left.read_text())) > 0:
            left.write_text(str(count - 1))
            shard = max(place.glob("*.safetensors"), key=lambda path: path.stat().st_size)
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content)
        return place, size
    checkpoint_writer.persist = lie
"""


def on_a_disk_that_lies(kgorch: Kgorch, tmp_path: Path, *, times: int) -> None:
    folder = tmp_path / "lies"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LIAR)
    (folder / "left").write_text(str(times))
    paths = [str(folder), *filter(None, [kgorch.env().get("PYTHONPATH")])]
    kgorch.extra_env |= {"PYTHONPATH": ":".join(paths), "LIES_LEFT": str(folder / "left")}


def finals(kgorch: Kgorch) -> list[str]:
    """The verified final checkpoints, by name."""
    rows = kgorch.look("checkpoints", "list", "test")
    return [Path(row["path"]).name for row in rows if row["final"] and row["state"] == "verified"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_what_a_script_does_after_its_training_is_done_in_the_next_session_where_the_wall_cut_it_off(kgorch, ranks):
    plan = kgorch.plan("after_training.py", ranks=ranks, margin="2s", args={"after": 600})
    for wall_s in (20, 40, 80, 160):  # on a machine that is busy a start alone takes longer than the shortest
        first = kgorch("start", str(plan), "--set", f'session.wall="{wall_s}s"', code=10)
        if "step 8, verified" in first.stderr:
            break
    assert "suspended: the session's time limit" in first.stderr and "step 8, verified" in first.stderr, first.stderr
    output = next(kgorch.home.glob("runs/*/*/outputs"))
    assert [path.name for path in sorted(output.iterdir())] == [f"begun{rank}" for rank in range(ranks)]
    kgorch("start", str(plan), code=0)
    assert [path.read_text() for path in sorted(output.glob("begun*"))] == ["xx"] * ranks
    assert len(list(output.glob("done*"))) == ranks
    assert kgorch.status()["step"] == 8 and finals(kgorch) == ["step-00000008-final"]


def test_who_takes_a_session_over_asks_nothing_more_of_ranks_whose_training_is_done(kgorch):
    plan = kgorch.plan("after_training.py", ranks=2, every="1s", args={"after": 30})
    supervisor = kgorch.background("start", str(plan))
    wait_until(lambda: kgorch.try_status() and finals(kgorch), what="the final checkpoint is verified")
    supervisor.kill()
    supervisor.wait()
    kgorch("start", str(plan))
    assert kgorch.status()["state"] == "finished" and kgorch.events("adopted")
    kinds = [event["kind"] for event in kgorch.events()]
    assert not {"checkpoint_due", "save_failed"} & set(kinds[kinds.index("adopted") :]), kinds


def test_work_after_the_training_that_is_killed_or_fails_is_done_again_and_trains_nothing(kgorch):
    plan = kgorch.plan("after_training.py", args={"after": 600})
    supervisor = kgorch.background("start", str(plan))
    output = wait_until(lambda: next(kgorch.home.glob("runs/*/*/outputs/begun0"), None), within_s=90).parent
    kgorch.kill_everything()
    supervisor.wait()
    wait_until(lambda: not processes_of(kgorch.home))
    kgorch("start", str(plan), code=0)
    assert (output / "begun0").read_text() == "xx"
    weights = (output / "done0").read_text()
    assert kgorch.status()["step"] == 8
    failing = kgorch.plan("after_training.py", name="failing", args={"fail": True})
    kgorch("start", str(failing), code=0)
    [session] = kgorch.look("history", "failing")
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["crashed", "finished"]
    assert next(kgorch.home.glob("runs/failing/*/outputs/done0")).read_text() == weights


@pytest.mark.soak  # it is suspended as by the wall, above
def test_a_stop_in_work_after_the_training_loses_nothing(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan("after_training.py", args={"after": 600})))
    wait_until(lambda: next(kgorch.home.glob("runs/*/*/outputs/begun0"), None), within_s=90)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    assert kgorch.status()["phase"] == "suspended"
    kgorch("resume", "test", code=0)


def test_a_final_checkpoint_that_the_disk_has_spoilt_is_written_again_from_memory(kgorch, tmp_path):
    on_a_disk_that_lies(kgorch, tmp_path, times=1)
    kgorch("start", str(kgorch.plan("after_training.py", ranks=2)), code=0)
    assert finals(kgorch) == ["step-00000008-final"] and kgorch.events("save_failed")
    assert len(kgorch.history()[0]["attempts"]) == 1
    kgorch.export()


def test_a_run_trains_its_last_steps_again_rather_than_finish_without_a_final_checkpoint(kgorch, tmp_path):
    on_a_disk_that_lies(kgorch, tmp_path, times=2)
    kgorch("start", str(kgorch.plan("after_training.py")), code=0)
    assert finals(kgorch) == ["step-00000008-final"]
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["crashed", "finished"]
    assert "its final checkpoint is not" in session["attempts"][0]["cause"]


def test_a_run_whose_final_checkpoint_can_never_be_read_back_has_failed(kgorch, tmp_path):
    on_a_disk_that_lies(kgorch, tmp_path, times=1000)
    done = kgorch("start", str(kgorch.plan("after_training.py")), code=20)
    assert "final checkpoint" in done.stderr and kgorch.status()["state"] == "failed"
    assert finals(kgorch) == []


def test_a_training_that_stops_early_is_finished_and_nothing_is_forecast_of_its_other_steps(kgorch):
    """A forecast behind the end judged the others: `history` said that they were off by thousands of percent."""
    kgorch("start", str(kgorch.plan("after_training.py", args={"epochs": 50, "enough": 5, "sleep": 0.3})))
    kinds = [event["kind"] for event in kgorch.events()]
    assert kgorch.status()["state"] == "finished" and kgorch.status()["step"] == 5 and "forecast" not in kinds


def test_a_finished_run_is_trained_longer_to_the_bits_of_one_that_was_that_long(kgorch):
    plan = kgorch.plan("after_training.py", ranks=2, args={"epochs": 3})
    kgorch("start", str(plan), code=0)
    assert "nothing to extend" in kgorch("start", str(plan), "--extend", code=2).stderr
    assert kgorch.status()["state"] == "finished"
    before = kgorch.status("test")["step"]
    longer = kgorch.plan("after_training.py", ranks=2, args={"epochs": 5})
    told = kgorch("start", str(longer), code=0)
    assert "stage.train.args.epochs: 3 → 5" in told.stdout and "--extend" in told.stdout
    assert kgorch.status("test")["step"] == before
    kgorch("start", str(longer), "--extend", code=0)
    assert kgorch.status("test")["step"] * 3 == before * 5 and kgorch.status("test")["state"] == "finished"
    kgorch("start", str(kgorch.plan("after_training.py", name="whole", ranks=2, args={"epochs": 5})), code=0)
    assert kgorch.export("test") == kgorch.export("whole")


def test_an_extension_that_is_killed_before_its_first_save_goes_on_being_one(kgorch):
    plan = kgorch.plan("after_training.py", args={"epochs": 2})
    kgorch("start", str(plan), code=0)
    steps = kgorch.status()["step"]
    plan = kgorch.plan("after_training.py", args={"epochs": 6, "sleep": 0.6}, every="60s")
    supervisor = kgorch.background("start", str(plan), "--extend")
    kgorch.wait_for_step(steps + 2)
    kgorch.kill_everything()
    supervisor.wait()
    wait_until(lambda: not processes_of(kgorch.home))
    kgorch("resume", "test", code=0)
    assert kgorch.status()["step"] == 3 * steps
