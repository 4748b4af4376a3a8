"""The local place keeps the contract, with real processes."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil
import pytest
from harness import wait_until

from kgorch.core.remote.place_values import PlaceError, Pushed, RemoteStatus, SessionOrder, Trouble
from kgorch.remote.places.local import place as local_place
from kgorch.remote.places.local.place import LocalPlace


@pytest.fixture
def place(tmp_path):
    made = LocalPlace(tmp_path / "place")
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "kgorch-bundle.json").write_text("{}")
    assert made.store_bundle(folder, "bundle-1") == "bundle-1" == made.store_bundle(folder, "bundle-1")
    assert made.is_bundle_ready("bundle-1") and not made.is_bundle_ready("bundle-2")
    yield made
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            process.kill()


def order(number: int = 1, *, source: str = "", timeout_s: int = 60, nonce: str = "aa") -> SessionOrder:
    name = f"kgorch-ink-{number:03d}"
    return SessionOrder(name, nonce, "ink", "r1", number, "bundle-1", source, -1, 30, timeout_s, "", False)


def ended(place: LocalPlace, number: int = 1) -> RemoteStatus:
    name = order(number).name
    return wait_until(lambda: (seen := place.look(name).status).is_over and seen, within_s=60)


def refused(call, *args) -> Trouble:
    with pytest.raises(PlaceError) as error:
        call(*args)
    return error.value.trouble


def test_a_session_runs_over_its_inputs_and_its_output_is_the_next_ones_input(place, tmp_path):
    write = (
        "import os; from pathlib import Path\n"
        "into, out = Path(os.environ['KGORCH_REMOTE_INPUT']), Path(os.environ['KGORCH_REMOTE_OUTPUT'])\n"
        "assert not [name for name in os.environ if name.startswith('KAGGLE_') or name == 'KGORCH_HOME']\n"
        "names = sorted(str(path.relative_to(into)) for path in into.rglob('*') if path.is_file())\n"
        "(out / 'kgorch').mkdir(); (out / 'kgorch' / 'state').write_text(' '.join(names)); print('done')\n"
    )
    os.environ["KAGGLE_KEY"] = "secret"
    try:
        assert place.push(order(), write) == Pushed(
            1, order().name, (tmp_path / "place/sessions" / order().name).as_uri()
        )
    finally:
        del os.environ["KAGGLE_KEY"]
    assert ended(place) is RemoteStatus.COMPLETE and list(place.log(order().name)) == ["done\n"]
    place.push(order(2, source=order().name), write)
    assert ended(place, 2) is RemoteStatus.COMPLETE
    [state] = place.collect(order(2).name, tmp_path / "here", ("kgorch/*",))
    inputs = f"datasets/local/bundle-1/kgorch-bundle.json notebooks/local/{order().name}/kgorch/state"
    assert state == tmp_path / "here/kgorch/state" and state.read_text() == inputs
    assert place.collect(order(2).name, tmp_path / "here", ("nothing",)) == []


def test_a_name_can_be_pushed_once_and_is_found_by_its_nonce(place):
    assert place.find_push(order()) is None and refused(place.look, order().name) is Trouble.ABSENT
    place.push(order(), "")
    assert refused(place.push, order(), "") is Trouble.REFUSED
    assert place.find_push(order()).version == 1
    assert refused(place.find_push, order(nonce="bb")) is Trouble.REFUSED
    assert ended(place) is RemoteStatus.COMPLETE


def test_one_session_runs_at_a_time_and_only_a_complete_one_is_attached(place):
    place.push(order(), "import time; time.sleep(2); raise SystemExit(3)")
    assert refused(place.push, order(2), "") is Trouble.SLOTS and place.running() == 1
    assert ended(place) is RemoteStatus.ERROR and place.running() == 0
    assert refused(place.push, order(2, source=order().name), "") is Trouble.REFUSED
    place.delete(order().name)
    place.delete(order().name)
    assert refused(place.look, order().name) is Trouble.ABSENT


def test_at_its_limit_nothing_of_a_session_stays_alive(place, tmp_path):
    escape = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)  # {tmp_path}'], start_new_session=True)\n"
        "time.sleep(99)\n"
    )
    place.push(order(timeout_s=2), escape)
    assert ended(place) is RemoteStatus.CANCELLED
    # the process that wrote the end may live for a moment; ended, it has no words
    wait_until(
        lambda: not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])],
    )


def test_a_session_that_was_pushed_and_never_started_is_started_by_a_look(place, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(LocalPlace, "_start", lambda self, session: None)
        place.push(order(), "")
        assert place.look(order().name).status is RemoteStatus.QUEUED
    assert ended(place) is RemoteStatus.COMPLETE


def test_a_session_that_starts_while_it_is_looked_at_is_not_dead(place, monkeypatch):
    """Its process takes the lock and leaves its mark just after the look has found the lock free."""
    is_locked = local_place.is_locked

    def started_now(path):
        found = is_locked(path)
        start(place, path.parent)
        wait_until((path.parent / "started").exists)
        return found

    start = LocalPlace._start
    monkeypatch.setattr(LocalPlace, "_start", lambda self, session: None)
    place.push(order(), "import time; time.sleep(3)")
    with monkeypatch.context() as late:
        late.setattr(local_place, "is_locked", started_now)
        assert place.look(order().name).status is RemoteStatus.QUEUED
    assert place.look(order().name).status is RemoteStatus.RUNNING
    assert ended(place) is RemoteStatus.COMPLETE


def test_a_session_whose_process_was_killed_is_an_error(place, tmp_path):
    place.push(order(), "import time; time.sleep(99)")
    wait_until(lambda: place.look(order().name).status is RemoteStatus.RUNNING)
    module = "kgorch.remote.places.local.session_process"

    def with_its_script() -> psutil.Process | None:  # a look may have started one in vain
        for one in psutil.process_iter(["cmdline"]):
            line = one.info["cmdline"] or [""]
            with contextlib.suppress(psutil.Error):
                if module in line and str(tmp_path) in line[-1] and one.children():
                    return one
        return None

    wait_until(with_its_script).send_signal(signal.SIGKILL)
    assert ended(place) is RemoteStatus.ERROR


@pytest.mark.parametrize("name", ["../evil", "", ".hidden", "a/b", "a b"])
def test_a_name_leads_out_of_no_folder(place, name):
    assert refused(place.look, name) is Trouble.REFUSED
