"""The daemon as a unit of a real systemd: stopped, killed, rebooted, and still the same bits. Nobody types anything between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from harness import Kgorch, wait_until
from systemd_machine import Machine, Person, needs_systemd

pytestmark = pytest.mark.slow

ENDLESS = {"epochs": 10_000, "sleep": 0.05}


@pytest.fixture
def person() -> Iterator[Person]:
    """At a booted machine whose daemon runs, with the machine's own boot id in and outside its sandbox."""
    needs_systemd()
    machine = Machine()
    try:
        machine.boot()
        folder = machine.disk / "work"
        folder.mkdir()
        made = Person(folder, machine.disk / "home", machine=machine)
        made.install()
        daemon = machine.main_pid("kgorch")
        ids = machine.run("cat", f"/proc/{daemon}/root/proc/sys/kernel/random/boot_id", "/run/boot_id").stdout.split()
        assert ids[0] == ids[1]
        yield made
        print(machine.journal("-u", "kgorch")[-5000:])
        print(made.logs(), *(path.read_text() for path in made.home.glob("runs/*/*/supervisor.log")))
        print(made.try_status())
    finally:
        machine.close()


def test_a_stopped_daemon_has_saved_and_the_next_one_goes_on(person):
    person("queue", "add", str(person.plan(ranks=1, args=ENDLESS, every="600s")))
    person.wait_for_step(5)
    person.machine.systemctl("stop", "kgorch")
    saved = person.status()
    assert saved["phase"] == "suspended" and saved["checkpoint"]["verified"]
    assert saved["checkpoint"]["step"] == saved["step"] >= 5
    assert not person.trained_by()
    person.machine.systemctl("start", "kgorch")
    person.wait_for_step(saved["step"] + 5)
    assert [entry["stages"][0]["first_step"] for entry in person.history()] == [0, saved["step"]]


def test_training_outlives_a_kill_9_of_daemon_and_supervisor_and_is_taken_over(person):
    person("queue", "add", str(person.plan(ranks=1, args=ENDLESS)))
    before = person.wait_for_step(5)
    trained_by, daemon = person.trained_by(), person.machine.main_pid("kgorch")
    assert trained_by
    for pid in (daemon, before["session"]["supervisor"]["pid"]):
        person.machine.kill(pid)
    wait_until(lambda: person.machine.main_pid("kgorch") not in (0, daemon), within_s=60)
    after = wait_until(
        lambda: (s := person.status()) and s["session"]["supervisor"]["alive"] and s["step"] > before["step"] + 20 and s
    )
    assert after["session"]["supervisor"]["pid"] != before["session"]["supervisor"]["pid"]
    assert person.trained_by() == trained_by, "the same processes train on"
    assert [len(entry["attempts"]) for entry in person.history()] == [1], "one session, one launch"


@pytest.mark.soak  # the long evening has both in it
@pytest.mark.parametrize("graceful", [True, False])
def test_after_a_reboot_and_after_a_power_cut_training_goes_on_by_itself(person, graceful):
    person("queue", "add", str(person.plan(ranks=1, args=ENDLESS, every="1s")))
    wait_until(lambda: (s := person.try_status()) and s["checkpoint"] and s["checkpoint"]["verified"])
    before = person.status()
    person.machine.reboot(graceful=graceful)
    wait_until(lambda: len(person.history()) == 2)
    person.wait_for_step(before["checkpoint"]["step"] + 5)
    first, second = person.history()
    assert first["phase"] == ("suspended" if graceful else "cut_off")
    assert second["stages"][0]["first_step"] >= before["checkpoint"]["step"]


@pytest.mark.timeout(1500)
@pytest.mark.soak
def test_an_evening_of_short_sessions_under_a_quota_ends_with_the_bits_of_an_uninterrupted_run(person, tmp_path):
    """A kill -9 of the daemon in the first session, a power cut in the second. A wall is two and a half times what this
    machine needs for a whole training that never sleeps; two walls of quota in any three and a half, and more than two walls
    of sleep among the steps: however fast the machine is, the quota is met, and three sessions at least are needed."""
    training = {"epochs": 40, "sleep": 0.0}
    alone = Kgorch(tmp_path, tmp_path / "home")
    began_s = time.monotonic()
    alone("start", str(alone.plan(ranks=1, args=training, every="600s")))
    wall_s = min(max(20, round(2.5 * (time.monotonic() - began_s))), 90)  # more is no machine but a moment
    steps = alone.status()["step"]

    training["sleep"] = 2.2 * wall_s / steps
    quota = f'[quota]\nhours = {2 * wall_s / 3600:.6f}\nresets = "rolling {3.5 * wall_s / 60:.6f}m"\n'
    session = {"wall": f"{wall_s}s", "margin": f"{wall_s // 8}s", "every": "2s"}
    person("queue", "add", str(person.plan(ranks=1, args=training, extra=quota, **session)))
    person.wait_for_step(1, within_s=3 * wall_s)
    person.machine.kill(person.machine.main_pid("kgorch"))
    wait_until(lambda: len(person.history()) == 2, within_s=5 * wall_s)
    first = wait_until(lambda: (stages := person.history()[1]["stages"]) and stages[0]["first_step"])
    person.wait_for_step(first + 2, within_s=3 * wall_s)
    person.machine.reboot()
    wait_until(lambda: person.status()["state"] == "finished", within_s=15 * wall_s, what="the run's end")

    assert person.status()["step"] == steps
    assert person.export() == alone.export()
    sessions = person.history()
    assert len(sessions) >= 3 and sum(entry["phase"] == "cut_off" for entry in sessions) == 1
    ends = [datetime.fromisoformat(entry["ended_at"]) for entry in sessions]
    begins = [datetime.fromisoformat(entry["started_at"]) for entry in sessions]
    pauses_s = [(begin - end).total_seconds() for end, begin in zip(ends, begins[1:], strict=False)]
    assert max(pauses_s) > wall_s / 2, f"it has waited for hours of the quota: {pauses_s}, {wall_s}"
