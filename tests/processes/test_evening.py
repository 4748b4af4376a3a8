"""The daemon as a unit of a real systemd: stopped, killed, rebooted, and still the same bits. Nobody types anything between."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.parametrize("graceful", [True, False])
def test_after_a_reboot_and_after_a_power_cut_training_goes_on_by_itself(person, graceful):
    person("queue", "add", str(person.plan(ranks=1, args=ENDLESS, every="1s")))
    wait_until(lambda: (s := person.try_status()) and s["checkpoint"] and s["checkpoint"]["verified"])
    before = person.status()
    person.machine.reboot(graceful=graceful)
    wait_until(lambda: len(person.history()) == 2)
    person.wait_for_step(before["checkpoint"]["step"] + 5)
    first, second = person.history()
    assert first["phase"] == ("suspended" if graceful else "cut off")
    assert second["stages"][0]["first_step"] >= before["checkpoint"]["step"]


@pytest.mark.timeout(700)
def test_an_evening_of_short_sessions_under_a_quota_ends_with_the_bits_of_an_uninterrupted_run(person, tmp_path):
    """Sessions of 20 s, 60 s of quota in any 90 s, a kill -9 of the daemon in the first, a power cut in the second."""
    training = {"epochs": 40, "sleep": 0.15}
    alone = Kgorch(tmp_path, tmp_path / "home")
    alone("start", str(alone.plan(ranks=1, args=training | {"sleep": 0.0}, every="600s")))
    steps = alone.status()["step"]

    quota = '[quota]\nhours = 0.016667\nresets = "rolling 1.5m"\n'
    person("queue", "add", str(person.plan(ranks=1, args=training, wall="20s", every="2s", extra=quota)))
    person.wait_for_step(10)
    person.machine.kill(person.machine.main_pid("kgorch"))
    wait_until(lambda: len(person.history()) == 2, within_s=90)
    first = wait_until(lambda: (stages := person.history()[1]["stages"]) and stages[0]["first_step"])
    person.wait_for_step(first + 20)
    person.machine.reboot()
    wait_until(lambda: person.status()["state"] == "finished", within_s=450, what="the run's end")

    assert person.status()["step"] == steps
    assert person.export() == alone.export()
    sessions = person.history()
    assert len(sessions) >= 5 and sum(entry["phase"] == "cut off" for entry in sessions) == 1
