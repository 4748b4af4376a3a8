"""The units under a real systemd, and what the daemon tells it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PROGRAMS, wait_until
from systemd_machine import Machine, environment, needs_systemd

from kgorch.system import sd_notify, systemd_units

ROOT = Path(__file__).parents[2]
HERE = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


@pytest.fixture
def machine() -> Iterator[Machine]:
    needs_systemd()
    made = Machine()
    yield made
    made.close()


@pytest.fixture
def stand_in(machine: Machine) -> Machine:
    """A booted machine whose kgorch.service is ours but for the program that it starts."""
    machine.unit(
        "kgorch.service", systemd_units.unit_text("kgorch.service", "system", machine.disk / "home", account="root")
    )
    command = f'ExecStart=\nExecStart="{sys.executable}" "{PROGRAMS / "stands_in.py"}" "{machine.disk}"'
    machine.unit("kgorch.service.d/test.conf", f"[Service]\n{command}\nWatchdogSec=3\n{environment(HERE)}")
    machine.boot()
    machine.systemctl("start", "kgorch")
    return machine


def _training(machine: Machine) -> int:
    return int((machine.disk / "training.pid").read_text())


def test_systemctl_start_returns_when_the_daemon_says_that_it_is_ready(stand_in):
    state, pid = stand_in.show("kgorch", "SubState", "MainPID")
    assert state == "running" and int(pid) > 0
    wait_until(lambda: stand_in.show("kgorch", "StatusText") == ["looks after one training"], within_s=20)


def test_a_daemon_that_hangs_is_begun_anew_and_training_does_not_notice(stand_in):
    before = stand_in.main_pid("kgorch")
    (stand_in.disk / "hang").touch()
    wait_until(
        lambda: stand_in.show("kgorch", "Result") == ["watchdog"] or stand_in.main_pid("kgorch") != before, within_s=30
    )
    (stand_in.disk / "hang").unlink()
    wait_until(lambda: stand_in.show("kgorch", "SubState", "NRestarts") == ["running", "1"], within_s=60)
    assert stand_in.main_pid("kgorch") != before
    assert stand_in.is_alive(_training(stand_in))
    printed = wait_until(lambda: (text := stand_in.journal("-u", "kgorch")) and "Fatal Python error" in text and text)
    assert "stands_in.py" in printed, "where it hung"


def test_kill_9_of_the_daemon_leaves_training_alive_and_its_temporary_files_in_place(stand_in):
    training = _training(stand_in)
    stand_in.kill(stand_in.main_pid("kgorch"))
    wait_until(lambda: stand_in.show("kgorch", "SubState", "NRestarts") == ["running", "1"], within_s=60)
    assert stand_in.is_alive(training)
    kept, lost = ((stand_in.disk / name).read_text() for name in ("in_tmpdir", "in_tmp"))
    root = ["cat", f"/proc/{training}/root{kept}"]
    assert stand_in.run(*root, check=False).returncode == 0
    assert stand_in.run("cat", f"/proc/{training}/root{lost}", check=False).returncode != 0, (
        "if PrivateTmp keeps /tmp over a restart, TMPDIR in hardening.system.conf is needed no longer"
    )


def test_a_stop_waits_for_the_last_save_and_leaves_no_failure(stand_in):
    assert not (stand_in.disk / "saved").exists()
    stand_in.systemctl("stop", "kgorch")
    assert (stand_in.disk / "saved").exists()
    assert stand_in.show("kgorch", "ActiveState", "Result") == ["inactive", "success"]


def test_a_reboot_waits_for_the_last_save_and_begins_the_daemon_again(stand_in):
    stand_in.systemctl("enable", "kgorch")
    (stand_in.disk / "training.pid").unlink()
    stand_in.reboot(graceful=True)
    assert (stand_in.disk / "saved").exists()
    wait_until(lambda: stand_in.show("kgorch", "SubState") == ["running"], within_s=30)


def test_the_journal_has_the_fields_and_no_secrets(stand_in):
    of_run = wait_until(lambda: stand_in.journal("KGORCH_RUN=surface-demo", "-o", "verbose"), within_s=20)
    assert "KGORCH_SESSION=3" in of_run and "in two lines" in of_run and "SYSLOG_IDENTIFIER=kgorch" in of_run
    assert "PRIORITY=6" in of_run and "stands_in.py" in of_run
    everything = wait_until(lambda: "long long" in (text := stand_in.journal("-u", "kgorch")) and text, within_s=20)
    assert "https://example.org/x?***" in everything and "hidden" not in everything
    assert not (stand_in.disk / "logs").exists()


def test_the_unit_closes_what_it_says_it_closes(stand_in):
    training = _training(stand_in)
    status = stand_in.run("cat", f"/proc/{training}/status").stdout
    held = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert held["NoNewPrivs"] == "1" and held["Seccomp"] == "2" and int(held["CapBnd"], 16) == 0
    mounts = stand_in.run("cat", f"/proc/{training}/mountinfo").stdout
    usr = next(line for line in mounts.splitlines() if line.split()[4] == "/usr")
    assert usr.split()[5].startswith("ro")


# ── the texts ──


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Path]:
    """Both units of both managers, over a state folder whose name asks for quoting."""
    for manager in ("user", "system"):
        texts = {
            unit: systemd_units.unit_text(unit, manager, tmp_path / 'a "home" of 100%', account="root")
            for unit in systemd_units.UNITS
        }
        systemd_units.install(tmp_path / manager, texts)
    return {manager: tmp_path / manager for manager in ("user", "system")}


def _analyze(*words: str | Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    if subprocess.run(["which", "systemd-analyze"], capture_output=True).returncode:
        pytest.skip("no systemd here: apt-get install systemd")
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    return subprocess.run(["systemd-analyze", *map(str, words)], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("manager", ["user", "system"])
@pytest.mark.parametrize("unit", ["kgorch.service", "kgorch@data-plan.toml.service"])
def test_systemd_finds_nothing_to_complain_about_in_the_units(written, manager, unit, tmp_path):
    done = _analyze("verify", f"--{manager}", "--man=no", written[manager] / unit, runtime=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# measured with systemd 252: 3.1 and 6.6; a user's manager cannot close more without a user namespace
@pytest.mark.parametrize(("manager", "at_most"), [("system", 3.2), ("user", 6.7)])
@pytest.mark.parametrize("unit", ["kgorch.service", "kgorch@data-plan.toml.service"])
def test_the_units_stay_as_closed_as_they_are(written, manager, at_most, unit, tmp_path):
    words = ("security", "--offline=true", "--no-pager", f"--threshold={round(at_most * 10)}")
    done = _analyze(*words, written[manager] / unit, runtime=tmp_path)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


# ── what the daemon tells ──


@pytest.fixture(params=["path", "abstract"])
def listening(request, tmp_path, monkeypatch) -> Iterator[socket.socket]:
    address = str(tmp_path / "notify") if request.param == "path" else f"\0kgorch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(address)
        there.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        yield there


def test_each_word_to_systemd_is_one_datagram_of_one_line(listening):
    sd_notify.ready()
    sd_notify.status("two\nlines")
    sd_notify.watchdog()
    sd_notify.stopping()
    told = [listening.recv(1000) for _ in range(4)]
    assert told == [b"READY=1", b"STATUS=two lines", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "@nobody-listens-here", "vsock:2:1", "/" + "x" * 200])
def test_that_nobody_listens_is_no_error(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    sd_notify.ready()
    monkeypatch.delenv("NOTIFY_SOCKET")
    sd_notify.watchdog()


def test_the_watchdog_is_fed_twice_as_often_as_asked_and_only_by_the_one_watched():
    mine = {"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}
    assert sd_notify.watchdog_interval_s(mine) == 30.0
    assert sd_notify.watchdog_interval_s({"WATCHDOG_USEC": "60000000"}) == 30.0
    assert sd_notify.watchdog_interval_s({**mine, "WATCHDOG_PID": "1"}) is None, (
        "inherited from somebody who is watched"
    )
    for told in ("", "0", "soon", "-5"):
        assert sd_notify.watchdog_interval_s({**mine, "WATCHDOG_USEC": told}) is None
