"""What goes wrong between Kaggle's real client and its server, and which Trouble it is. Each answer is the stand-in's, by order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from places.conftest import ORDER, script_of
from places.kaggle_server import Fault, KaggleServer

from kgorch.core.remote.place_values import PlaceError, RemoteStatus, Trouble
from kgorch.remote.places.kaggle import place as place_module
from kgorch.remote.places.kaggle.place import KagglePlace

NAME = "kgorch-not-there-001"

METHODS = {
    "GetAcceleratorQuotaStatistics": lambda place: place.quota(),
    "GetKernelSessionStatus": lambda place: place.look(NAME),
    "GetKernel": lambda place: place.find_push(ORDER),
    "SaveKernel": lambda place: place.push(ORDER, script_of(ORDER)),
    "ListKernelSessionOutput": lambda place: place.collect(NAME, place.folder_of_test),
    "GetDatasetStatus": lambda place: place.is_bundle_ready(f"ada/{NAME}"),
    "LogStream": lambda place: list(place.log(NAME)),
}

FAULTS = {
    "429": (Fault("status", 429, headers={"Retry-After": "17"}), Trouble.BUSY),
    "500": (Fault("status", 500), Trouble.UNANSWERED),
    "503 in HTML": (Fault("text", body="<html>Service Unavailable</html>"), Trouble.UNANSWERED),
    "401": (Fault("status", 401), Trouble.LOGIN),
    "400": (Fault("status", 400), Trouble.REFUSED),
    "cut": (Fault("cut"), Trouble.UNANSWERED),
    "a code under HTTP 200": (Fault("body", body={"code": 503, "message": "later"}), Trouble.UNANSWERED),
}


PAIRS = [
    (method, fault)
    for method in METHODS
    for fault in FAULTS
    if method != "LogStream" or FAULTS[fault][0].kind not in ("text", "body")  # a log may hold anything
]


@pytest.fixture(autouse=True)
def without_faults_of_others(server):
    yield
    server.withdraw_faults()


@pytest.mark.parametrize(("method", "fault"), PAIRS)
def test_each_fault_of_each_method_has_its_trouble(place, server, tmp_path, method, fault):
    place.folder_of_test = tmp_path
    order, expected = FAULTS[fault]
    server.order(method, order)
    before = len(server.asked(method))
    with pytest.raises(PlaceError) as error:
        METHODS[method](place)
    assert error.value.trouble is expected, error.value.message
    assert error.value.retry_after_s == (
        17.0 if fault == "429" and method != "LogStream" else error.value.retry_after_s
    )
    assert len(server.asked(method)) == before + 1, "nothing is tried again in here"


def test_what_is_not_there_is_absent_and_a_push_that_is_not_there_is_none(place, server, monkeypatch):
    for status in (403, 404):
        monkeypatch.setattr(server.rules, "absent_status", status)
        with pytest.raises(PlaceError) as absent:
            place.look(NAME)
        assert absent.value.trouble is Trouble.ABSENT
        assert place.find_push(ORDER) is None
        with pytest.raises(PlaceError, match="there is no"):
            place.is_bundle_ready(f"ada/{NAME}")


def test_a_push_whose_answer_was_lost_is_found_by_its_nonce(place, server, order):
    server.order("SaveKernel", Fault("cut", after=True))
    with pytest.raises(PlaceError) as lost:
        place.push(order, script_of(order))
    assert lost.value.trouble is Trouble.UNANSWERED
    assert place.find_push(order).version == 1
    assert server.session(order.name).nonce == order.nonce


def test_a_push_that_was_cut_before_it_arrived_is_not_found(place, server, order):
    server.order("SaveKernel", Fault("cut"))
    with pytest.raises(PlaceError) as cut:
        place.push(order, script_of(order))
    assert cut.value.trouble is Trouble.UNANSWERED and place.find_push(order) is None


def test_a_third_session_is_refused_for_slots_and_one_without_hours_for_quota(place, server, order, monkeypatch):
    order = replace(order, accelerator="NvidiaTeslaT4")
    monkeypatch.setattr(server.rules, "slots", 0)
    with pytest.raises(PlaceError) as slots:
        place.push(order, script_of(order))
    monkeypatch.setattr(server.rules, "slots", 9)
    monkeypatch.setattr(server.rules, "used_s", server.rules.quota_s)
    with pytest.raises(PlaceError) as quota:
        place.push(order, script_of(order))
    assert (slots.value.trouble, quota.value.trouble) == (Trouble.SLOTS, Trouble.QUOTA)
    assert "GPU session count of 0 reached" in slots.value.message and place.find_push(order) is None


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"bundle": "ada/kgorch-no-bundle"}, "ada/kgorch-no-bundle"),
        ({"source": "kgorch-never-001"}, "ada/kgorch-never-001"),
        ({"competitions": ("no-such",)}, "no-such"),
    ],
)
def test_a_push_without_one_of_its_inputs_is_unattached_although_it_runs(place, server, order, changes, left_out):
    order = replace(order, **changes)
    with pytest.raises(PlaceError) as error:
        place.push(order, script_of(order))
    assert error.value.trouble is Trouble.UNATTACHED and left_out in error.value.message
    assert place.find_push(order) is not None and server.wait_for(order.name).exit_code == 0


ANSWERS = {
    "no version": ({"ref": "/code/ada/{name}", "url": "https://www.kaggle.com/code/ada/{name}"}, Trouble.UNANSWERED),
    "version 0": ({"ref": "/code/ada/{name}", "url": "", "versionNumber": 0}, Trouble.UNANSWERED),
    "another kernel": ({"ref": "/code/ada/another", "url": "", "versionNumber": 1}, Trouble.UNANSWERED),
    "nothing": ({}, Trouble.UNANSWERED),
    "a refusal in other words": ({"error": "This kernel is not allowed"}, Trouble.REFUSED),
    "a version as a text": ({"ref": "/code/ada/{name}", "url": "", "versionNumber": "1"}, Trouble.UNANSWERED),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_push_counts_only_when_the_answer_says_so(place, server, order, answer):
    body, expected = ANSWERS[answer]
    filled = {key: value.format(name=order.name) if isinstance(value, str) else value for key, value in body.items()}
    server.order("SaveKernel", Fault("body", body=filled))
    with pytest.raises(PlaceError) as error:
        place.push(order, script_of(order))
    assert error.value.trouble is expected


def test_a_reference_with_its_version_counts_too(place, server, order):
    body = {
        "ref": f"/code/ada/{order.name} v1",
        "url": f"https://www.kaggle.com/code/ada/{order.name}",
        "versionNumber": 1,
    }
    server.order("SaveKernel", Fault("body", body=body))
    assert place.push(order, script_of(order)).version == 1


@pytest.mark.parametrize("word", ["PAUSED", "RUN", "", 7, None])
def test_a_word_for_a_status_that_is_not_known_is_no_end(place, server, order, word):
    server.order("GetKernelSessionStatus", Fault("body", body={"status": word}))
    try:
        assert not place.look(order.name).status.is_over
    except PlaceError as error:
        assert error.trouble is Trouble.UNANSWERED


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Kgorch-Upper-001"}, {"name": "kg"}, {"name": "k" * 51}, {"name": "kgorch--twice"}, {"name": "../other"},
        {"source": "kgorch-own-001", "name": "kgorch-own-001"}, {"nonce": ""}, {"timeout_s": 50}, {"nonce": "another"},
    ],
)  # fmt: skip
def test_an_order_that_would_go_wrong_in_silence_is_refused_before_anything_is_sent(place, server, changes):
    before = len(server.requests)
    with pytest.raises(PlaceError) as error:
        place.push(replace(ORDER, **changes), script_of(ORDER))
    assert error.value.trouble is Trouble.REFUSED and len(server.requests) == before


def test_what_the_client_itself_refuses_is_refused(place, order):
    order = replace(order, datasets=("no-owner",))
    with pytest.raises(PlaceError) as error:
        place.push(order, script_of(order))
    assert error.value.trouble is Trouble.REFUSED and "ataset" in error.value.message


def clients_of(pid: int, folder: Path) -> list[psutil.Process]:
    """Those whose place is in `folder`."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            is_client = "client_process" in " ".join(child.cmdline())
            if is_client and str(folder) in child.environ().get("TMPDIR", ""):
                found.append(child)
    return found


def test_a_server_that_says_nothing_costs_its_deadline_and_the_client_is_killed(server, tmp_path, monkeypatch):
    with KagglePlace(tmp_path / "place", server.environment(tmp_path / "home")) as place:
        place.account()
        [client] = clients_of(os.getpid(), tmp_path)
        monkeypatch.setattr(place_module, "ASK_S", 1.5)
        server.order("GetKernelSessionStatus", Fault("hang"))
        began_s = time.monotonic()
        with pytest.raises(PlaceError, match="did not answer in time") as late:
            place.look(NAME)
        assert late.value.trouble is Trouble.UNANSWERED and time.monotonic() - began_s < 60
        assert not client.is_running()
        monkeypatch.undo()
        assert place.quota() is not None, "the next call has another process"


def test_a_server_that_hangs_at_the_login_costs_the_deadline_too(server, tmp_path, monkeypatch):
    monkeypatch.setattr(place_module, "ASK_S", 15.0)  # with the start of the client
    server.order("IntrospectToken", Fault("hang"))
    with (
        KagglePlace(tmp_path / "place", server.environment(tmp_path / "home")) as place,
        pytest.raises(PlaceError) as late,
    ):
        place.account()
    assert late.value.trouble is Trouble.UNANSWERED


HOLDER = """
import sys
from pathlib import Path
from kgorch.remote.places.kaggle.place import KagglePlace
KagglePlace(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])).look("kgorch-not-there-001")
"""


def test_the_client_ends_when_its_parent_is_killed_although_it_waits_for_the_server(
    server: KaggleServer, tmp_path: Path
):
    environ = server.environment(tmp_path / "home")
    server.order("GetKernelSessionStatus", Fault("hang"))
    asked = len(server.asked("GetKernelSessionStatus"))
    words = [f"{name}={value}" for name, value in environ.items()]
    parent = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "place"), *words])
    while len(server.asked("GetKernelSessionStatus")) == asked:
        assert parent.poll() is None
        time.sleep(0.05)
    [client] = clients_of(parent.pid, tmp_path)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    client.wait(20)


def test_a_session_that_ran_over_its_time_has_nothing(place, server, order, tmp_path):
    order = replace(order, session_s=1, timeout_s=2)
    place.push(order, script_of(order, "import time; open('kgorch.db', 'w').write('x'); time.sleep(60)"))
    server.wait_for(order.name)
    assert place.look(order.name).status is RemoteStatus.CANCELLED
    with pytest.raises(PlaceError) as absent:
        place.collect(order.name, tmp_path)
    assert absent.value.trouble is Trouble.ABSENT
