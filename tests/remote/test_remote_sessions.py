"""The pushed script, executed: it verifies what is attached before it trains, and leaves an output that the next session can use.

The place is played by folders, and by namespaces where the tests run as root (tests/kaggle_machine.py); script, pip, kgorch and
the ranks are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import kaggle_machine
import psutil
import pytest
from harness import Kgorch, processes_of, wait_until

from kgorch.remote import bootstrap, wheels
from kgorch.remote.session import installation
from kgorch.remote.session.program import OrderSession
from kgorch.system.clock import boottime_s

STARTS_S = 240.0
"""Seconds that an installation and the first start of two ranks may take on a busy machine."""


def test_a_chain_of_sessions_ends_with_the_bits_of_an_uncut_run(sessions, tmp_path):
    in_machine = kaggle_machine.is_available()
    source = sessions.plan(epochs=8, sleep=0.0)
    alone = Kgorch(source.workdir, tmp_path / "alone")
    alone("start", "plan.toml")

    sessions.make_bundle(epochs=8, sleep=0.5)
    first = sessions.order(session_s=300, timeout_s=350)
    began_s = boottime_s()
    process = sessions.start(first, in_machine=in_machine)
    home = sessions.output(first) / "kgorch"
    wait_until(lambda: list(home.glob("runs/*/*/checkpoints/*/step-*/manifest.json")), within_s=STARTS_S)
    script(process).send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    record = sessions.record(first)
    assert (process.returncode, record.outcome, record.exit_code, record.stage) == (0, "suspended", 10, "train"), (
        printed
    )
    assert 0 < record.step < 48
    [(wall_s,)] = query(home, "select fixed_wall_boottime_s from sessions")
    assert 299 < wall_s - began_s < 310, "counted from the session's start, and not from kgorch's"
    output = sessions.output(first)
    assert (output / record.checkpoint / "manifest.json").exists() and (output / "kgorch.log").stat().st_size
    assert sorted(path.name for path in output.iterdir()) == ["kgorch", "kgorch-session.json", "kgorch.log"]
    kept = [path.name for path in output.glob("kgorch/runs/*/*/checkpoints/*/*")]
    assert kept == [Path(record.checkpoint).name], "the newest alone: no best is asked for, and no stage is finished"
    kinds = {stat.S_IFMT(path.lstat().st_mode) for path in output.rglob("*")}
    assert kinds == {stat.S_IFREG, stat.S_IFDIR} and not list(output.rglob("lock"))
    assert not list(output.glob("kgorch/kgorch.db-*")), "the database is one file"

    sessions.make_bundle(epochs=8, sleep=0.0)
    second = sessions.after(first)
    ended, printed = sessions.run(second, in_machine=in_machine)
    assert (ended.outcome, ended.step, ended.run_id) == ("finished", 48, sessions.run_id), printed
    assert f"found step {record.step} of stage train" in printed and "verified" in printed
    there = Kgorch(source.workdir, sessions.output(second) / "kgorch")
    assert there.export() == alone.export()
    assert [entry["phase"] for entry in there.history()] == ["suspended", "finished"]


def script(process):
    """The process of the script itself, which in a machine of its own is a grandchild."""
    own = psutil.Process(process.pid)
    return next(one for one in [own, *own.children(recursive=True)] if one.name().startswith("python"))


def query(home, text):
    with contextlib.closing(sqlite3.connect(home / "kgorch.db")) as database:
        return database.execute(text).fetchall()


# Nothing is trained from inputs that are not those that were expected


def without_its_checkpoint(output: Path, record: dict) -> None:
    shutil.rmtree(output / record["checkpoint"])


def with_a_shorter_file(output: Path, record: dict) -> None:
    [shard, *_] = (output / record["checkpoint"]).glob("rank*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)


def with_another_run(output: Path, record: dict) -> None:
    (output / "kgorch-session.json").write_text(json.dumps({**record, "run_id": "f" * 12}))


def of_the_session_itself(output: Path, record: dict) -> None:
    (output / "kgorch-session.json").write_text(json.dumps({**record, "number": 2}))


def with_a_record_that_is_none(output: Path, record: dict) -> None:
    (output / "kgorch-session.json").write_text('{"run_id": [')


def as_a_link(output: Path, record: dict) -> None:
    outside = output.parents[3] / "elsewhere"
    output.rename(outside)
    output.symlink_to(outside)


@pytest.fixture
def output(tmp_path, sessions):
    """What a session has left, with a checkpoint of step 18."""
    folder, checkpoint = tmp_path / "left", "kgorch/runs/test/1/checkpoints/train/step-00000018"
    (folder / checkpoint).mkdir(parents=True)
    (folder / checkpoint / "rank0.safetensors").write_bytes(b"weights")
    manifest = {"run_id": sessions.run_id, "position": {"step": 18}, "files": {"rank0.safetensors": {"bytes": 7}}}
    (folder / checkpoint / "manifest.json").write_text(json.dumps(manifest))
    record = {"run_id": sessions.run_id, "number": 1, "checkpoint": checkpoint, "step": 18}
    (folder / "kgorch-session.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without_its_checkpoint, "No such file"),
        (with_a_shorter_file, "has not the size"),
        (with_another_run, "of run 'ffffffffffff'"),
        (of_the_session_itself, "session 2"),
        (with_a_record_that_is_none, "Expecting value"),
        (as_a_link, "no output is attached"),
        (None, "no output is attached"),
    ],
)
def test_a_session_whose_state_is_not_what_was_expected_trains_nothing(sessions, output, change, what):
    sessions.make_bundle()
    order = sessions.order(2, source="kgorch-test-1", expected_step=18)
    if change:
        attached = sessions.attach(order, output, order.source)
        change(attached, json.loads((output / "kgorch-session.json").read_text()))
    record, _ = sessions.run(order)
    assert (record.outcome, record.step, record.exit_code) == ("no_state", -1, -1)
    assert what in record.message and "expected the output of" in record.message
    assert not (sessions.output(order) / "kgorch").exists(), "kgorch was not even started"


def test_a_session_does_not_go_on_from_an_older_step_than_was_expected(sessions, output):
    sessions.make_bundle()
    order = sessions.order(2, source="kgorch-test-1", expected_step=24)
    sessions.attach(order, output, order.source)
    record, _ = sessions.run(order)
    assert record.outcome == "no_state" and "its newest checkpoint is of step 18" in record.message


def change_a_byte(folder):
    content = bytearray((folder / "f0001").read_bytes())
    content[1000] ^= 1
    (folder / "f0001").write_bytes(content)


def change_the_marker(folder):
    marker = json.loads((folder / "kgorch-bundle.json").read_text())
    marker["overrides"] = ["stage.train.entry=evil.py"]
    (folder / "kgorch-bundle.json").write_text(json.dumps(marker))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (change_a_byte, "does not match the bundle's hash"),
        (change_the_marker, "another bundle, or a changed one"),
        (lambda folder: (folder / "f0002").unlink(), "f0002, cannot be copied"),
        (lambda folder: (folder / "kgorch-bundle.json").write_text("[]"), "is no table"),
        (shutil.rmtree, "there is none"),
    ],
)
def test_a_bundle_that_is_broken_or_absent_trains_nothing(sessions, change, what):
    made = sessions.make_bundle()
    order = sessions.order()
    change(sessions.input(order) / "datasets" / "me" / made.name)
    sessions.bundle = None  # it is attached as it is now
    record, _ = sessions.run(order)
    assert record.outcome == "no_bundle" and what in record.message


def test_a_bundle_in_the_output_of_an_earlier_session_is_not_taken(sessions):
    made = sessions.make_bundle()
    order = sessions.order()
    place = sessions.input(order)
    (place / "datasets").rename(place / "notebooks")
    (place / "notebooks" / "kgorch-session.json").write_text("{}")
    sessions.bundle = None
    record, _ = sessions.run(order)
    assert record.outcome == "no_bundle" and made.name in record.message


# Whatever happens, status 0 and a record


def test_a_training_that_fails_is_recorded_with_its_traceback(sessions):
    sessions.make_bundle("crashes.py", at=2)
    record, printed = sessions.run(sessions.order())
    assert (record.outcome, record.exit_code) == ("failed", 20), printed
    assert "the loss went wrong at step 2" in record.message
    assert not Path(tempfile.gettempdir(), f"kgorch-{sessions.run_id}").exists(), "nothing of it stays on the machine"


LATE = """
guard = watch
def watch(session):
    while not os.path.exists({!r}):
        time.sleep(0.1)
    session.began = time.monotonic() - session.order["session_s"]
    guard(session)

main("""
"""The guard begins at the session's time, which is now, however long the installation took."""


def test_a_kgorch_that_hangs_is_ended_before_the_places_limit_and_its_checkpoint_kept(sessions):
    sessions.make_bundle(epochs=1000, sleep=0.1)
    order = sessions.order(session_s=400, timeout_s=430)
    late = sessions.folder / "late"
    process = sessions.start(order, bootstrap.render(order).replace("\nmain(", LATE.format(str(late))))
    home = sessions.output(order) / "kgorch"
    wait_until(lambda: list(home.glob("runs/*/*/checkpoints/*/step-*/manifest.json")), within_s=STARTS_S)
    wait_until(lambda: query(home, "select 1 from checkpoints where state = 'verified'"))
    os.kill(query(home, "select supervisor_pid from sessions")[0][0], signal.SIGSTOP)
    late.touch()
    printed = process.communicate(timeout=90)[0]
    assert process.returncode == 0, printed
    record = sessions.record(order)
    assert (record.outcome, record.exit_code) == ("error", -signal.SIGKILL)
    assert record.step > 0 and "it was asked to" in record.message and "it was killed" in record.message
    assert not processes_of(home), "the ranks that outlive their supervisor, too"


def test_an_end_that_hangs_is_cut_off_with_a_record_and_status_0(sessions):
    sessions.make_bundle()
    order = sessions.order(session_s=200, timeout_s=202)
    (late := sessions.folder / "late").touch()
    hanging = LATE.format(str(late)).replace("main(", "def tidy(output, home):\n    time.sleep(600)\n\nmain(")
    sessions.bundle = None
    record, _ = sessions.run(order, bootstrap.render(order).replace("\nmain(", hanging))
    assert record.outcome == "error" and record.message == "the session's end took too long and was cut off"


def test_sigterm_saves_and_a_sigkill_leaves_the_last_interim_record(sessions):
    sessions.make_bundle(epochs=1000, sleep=0.1)
    order = sessions.order()
    script = bootstrap.render(order).replace("RECORD_INTERVAL_S = 60.0", "RECORD_INTERVAL_S = 0.5")
    process = sessions.start(order, script)
    record = sessions.output(order) / "kgorch-session.json"
    wait_until(lambda: record.exists() and sessions.record(order).step > 0, within_s=STARTS_S)
    interim = sessions.record(order)
    assert (interim.outcome, interim.message) == ("error", "the session did not end by itself")
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 0, printed
    record = sessions.record(order)
    assert (record.outcome, record.exit_code) == ("suspended", 10)
    assert record.step >= interim.step and record.message == "the place ended the session (SIGTERM)"


def test_an_installation_that_fails_is_recorded_with_what_pip_said(sessions, monkeypatch):
    def broken_wheel(into):
        path = into / "kgorch-0.1.0-py3-none-any.whl"
        path.write_bytes(b"no archive")
        return path

    monkeypatch.setattr(wheels, "own_wheel", broken_wheel)
    sessions.make_bundle()
    record, printed = sessions.run(sessions.order())
    assert record.outcome == "error" and "kgorch could not be installed on Python 3." in record.message
    assert "install_environment: pip failed; install_target: pip failed" in record.message
    assert "kgorch-0.1.0-py3-none-any.whl" in printed


def test_without_virtual_environments_kgorch_is_installed_in_a_folder(tmp_path):
    """Debian's Python may lack `venv`: an image could, too. The dependencies lie in this Python here."""
    (tmp_path / "wheels").mkdir()
    wheels.own_wheel(tmp_path / "wheels")

    def run(command, env):
        if "--python" in command:  # the first way, with a pip from before 22.3
            return 2
        return subprocess.run(command, env=env, cwd=tmp_path).returncode

    python, folder = installation.install(tmp_path, run)
    program = "import kgorch; print(kgorch.__file__)"
    env = installation.environment(folder)
    done = subprocess.run([python, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert python == sys.executable and done.stdout.startswith(folder)


def test_a_bug_or_a_folder_that_cannot_be_read_is_recorded(sessions):
    sessions.make_bundle()
    order = sessions.order()
    record, _ = sessions.run(order, bootstrap.render(order).replace("def unpack(", "def unpacked("))
    assert record.outcome == "error" and "NameError" in record.message
    sessions.extra_env = {"PATH": "/nonexistent"}
    sessions.bundle = None
    other = replace(order, number=2, name="kgorch-test-2")
    sessions.input(other).parent.mkdir(exist_ok=True)
    record, _ = sessions.run(other)
    assert record.outcome == "no_bundle" and "there is none" in record.message


def test_a_python_that_is_too_old_is_recorded(sessions):
    sessions.make_bundle()
    order = sessions.order()
    record, _ = sessions.run(
        order, bootstrap.render(order).replace("OLDEST_PYTHON = (3, 11)", "OLDEST_PYTHON = (9, 0)")
    )
    assert record.outcome == "error" and "kgorch needs Python 3.11" in record.message


def test_a_work_folder_that_somebody_else_has_planted_is_not_used(sessions, tmp_path):
    sessions.bundle = type("Bundle", (), {"name": "none"})
    session = OrderSession(asdict(sessions.order()))
    usual = session.make_work_folder()
    assert usual == session.make_work_folder(), "the same one in the next session"
    usual.rmdir()
    usual.symlink_to(tmp_path)
    session.work = session.make_work_folder()
    assert session.work not in (usual, tmp_path) and not list(tmp_path.glob("kgorch*"))
    session.remove_work_folder()
    assert not session.work.exists()
    usual.unlink()
