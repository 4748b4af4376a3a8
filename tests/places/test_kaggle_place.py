"""Kaggle's real client against the stand-in: each method of the place, what it sends, and what it makes of the answers."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from places.conftest import script_of
from places.kaggle_server import Fault, KaggleServer, Rules

from kgorch.core.remote.place_values import Account, PlaceError, PlaceQuota, RemoteStatus, Trouble
from kgorch.remote import probe
from kgorch.remote.place import RECORD_BYTES, RECORD_NAME
from kgorch.remote.places.kaggle import place as place_module
from kgorch.remote.places.kaggle.place import KagglePlace

SHAPES = Path(__file__).with_name("kaggle_requests.json")

SAVES_STATE = f"""
import json, pathlib, sys
pathlib.Path("kgorch/runs").mkdir(parents=True)
pathlib.Path("kgorch/kgorch.db").write_bytes(b"rows")
pathlib.Path("kgorch/runs/rank0.log").write_text("step 1")
pathlib.Path("{RECORD_NAME}").write_text(json.dumps({{"step": 7}}))
"""


def test_the_account_is_the_one_that_is_logged_in(place, server):
    assert place.account() == Account(server.username, "token")


def test_a_legacy_key_logs_in_too(server, tmp_path):
    with KagglePlace(tmp_path / "place", server.environment(tmp_path / "home", login="key")) as place:
        assert place.account() == Account(server.username, "key")
        assert place.quota() is not None
    assert server.asked("GetAcceleratorQuotaStatistics")[-1].login == "Basic"


def test_the_login_of_the_browser_logs_in_too(server, tmp_path):
    with KagglePlace(tmp_path / "place", server.environment(tmp_path / "home", login="oauth")) as place:
        assert place.account() == Account(server.username, "oauth")
        assert place.quota() is not None
    assert [request.method for request in server.asked()][-2:] == [
        "GenerateAccessToken",
        "GetAcceleratorQuotaStatistics",
    ]


def test_quota_is_what_kaggle_says(place, server):
    server.rules.used_s = 5400.5
    quota = place.quota()
    assert (quota.used_s, quota.reserved_s, quota.allowed_s) == (5400.5, 0.0, 108000.0)
    assert quota.refreshes_at.endswith("T00:00:00+00:00")
    server.rules.used_s = 0.0


def test_a_quota_whose_figures_are_left_out_is_nothing_used(place, server):
    body = {"quotaRefreshTime": "2026-11-28T00:00:00Z", "gpuQuota": {"totalTimeAllowed": "108000s"}}
    server.order("GetAcceleratorQuotaStatistics", Fault("body", body=body))
    assert place.quota() == PlaceQuota(0.0, 0.0, 108000.0, "2026-11-28T00:00:00+00:00")


def test_a_push_starts_the_session_with_all_that_was_ordered(place, server, order):
    made = replace(order, accelerator="NvidiaTeslaT4", internet=True, competitions=("titanic",), timeout_s=55)
    pushed = place.push(made, script_of(made, "import os; print(sorted(os.listdir('/')) if os.getuid() else 'root')"))
    assert pushed.version == 1 and pushed.url.endswith(f"/{server.username}/{made.name}")
    sent = server.asked("SaveKernel")[-1].body
    assert sent["newTitle"] == made.name and sent["slug"] == f"{server.username}/{made.name}"
    assert (sent["kernelType"], sent["isPrivate"], sent["enableInternet"]) == ("script", True, True)
    assert (sent["machineShape"], sent["enableGpu"], sent["sessionTimeoutSeconds"]) == ("NvidiaTeslaT4", True, 55)
    assert (sent["datasetDataSources"], sent["competitionDataSources"]) == ([made.bundle], ["titanic"])
    assert server.wait_for(made.name).status == "COMPLETE"


def test_a_push_is_found_again_by_its_nonce_and_by_no_other(place, pushed):
    order = pushed()
    found = place.find_push(order)
    assert found.version == 1 and found.url.endswith(order.name)
    with pytest.raises(PlaceError) as refused:
        place.find_push(replace(order, nonce="fedcba9876543210"))
    assert refused.value.trouble is Trouble.REFUSED
    assert place.find_push(replace(order, name="kgorch-never-pushed-001")) is None


def test_a_second_push_of_a_session_shows_as_another_version(place, server, pushed):
    order = pushed()
    place.push(order, script_of(order))
    assert place.find_push(order).version == 2
    server.wait_for(order.name)


@pytest.mark.parametrize(("body", "status"), [("", "complete"), ("raise SystemExit(3)", "error")])
def test_how_a_session_is_after_its_end(place, pushed, body, status):
    sighting = place.look(pushed(body).name)
    assert sighting.status is RemoteStatus(status) and sighting.status.is_over
    assert ("code 3" in sighting.message) == (status == "error")


def test_a_session_that_waits_or_runs_is_not_over(place, server, order, monkeypatch):
    monkeypatch.setattr(server.rules, "queue_s", 60.0)
    place.push(order, script_of(order, "import time; time.sleep(60)"))
    assert place.look(order.name).status is RemoteStatus.QUEUED, "the answer is {}, for QUEUED is a default"
    server.start(order.name)
    server.wait_for(order.name, "RUNNING")
    assert place.look(order.name).status is RemoteStatus.RUNNING
    with pytest.raises(PlaceError, match="only a session that is over"):
        place.delete(order.name)
    server.cancel(order.name)


def test_a_session_that_a_person_cancelled_has_nothing(place, server, order, tmp_path):
    place.push(order, script_of(order, SAVES_STATE + "import time; time.sleep(60)"))
    server.wait_for(order.name, "RUNNING")
    server.cancel(order.name)
    server.wait_for(order.name)
    assert place.look(order.name).status is RemoteStatus.CANCELLED
    with pytest.raises(PlaceError) as absent:
        place.collect(order.name, tmp_path)
    assert absent.value.trouble is Trouble.ABSENT


def test_collect_fetches_the_record_and_the_database_alone(place, server, pushed, tmp_path):
    order = pushed(SAVES_STATE)
    files = place.collect(order.name, tmp_path)
    assert {str(file.relative_to(tmp_path)) for file in files} == {RECORD_NAME, "kgorch/kgorch.db"}
    assert json.loads((tmp_path / RECORD_NAME).read_text()) == {"step": 7}
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(file.name for file in files)


def test_collect_of_everything_follows_the_pages_of_the_listing(place, server, pushed, tmp_path, monkeypatch):
    monkeypatch.setattr(server.rules, "page", 3)
    order = pushed("for n in range(8): open(f'part{n}', 'w').write('x' * n)")
    files = place.collect(order.name, tmp_path, ("*",))
    assert {file.name: file.stat().st_size for file in files} == {f"part{n}": n for n in range(8)}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["a", "z"], ids=["listed before the record", "listed after it"])
def test_the_record_is_found_among_more_files_than_kaggle_was_ever_seen_to_keep(
    place, server, pushed, tmp_path, monkeypatch, prefix
):
    monkeypatch.setattr(server.rules, "page", 100)
    order = pushed(SAVES_STATE + f"for n in range(20_050): open(f'{prefix}{{n}}', 'w').close()")
    before = len(server.asked("ListKernelSessionOutput"))
    [file] = place.collect(order.name, tmp_path, (RECORD_NAME,))
    assert json.loads(file.read_text()) == {"step": 7}
    pages = len(server.asked("ListKernelSessionOutput")) - before
    assert pages > 200 if prefix == "a" else pages == 1, "the listing is left where the record was found"


def test_a_file_that_was_cut_is_not_there_and_goes_on_at_the_next_call(place, server, pushed, tmp_path):
    order = pushed("import os; open('kgorch.db', 'wb').write(os.urandom(5 << 20))")
    server.order("File", Fault("half"))
    with pytest.raises(PlaceError) as cut:
        place.collect(order.name, tmp_path)
    assert cut.value.trouble is Trouble.UNANSWERED and not (tmp_path / "kgorch.db").exists()
    [file] = place.collect(order.name, tmp_path)
    assert file.read_bytes() == (server.session(order.name).output / "kgorch.db").read_bytes()
    assert server.asked("File")[-1].body["range"].startswith("bytes="), "the half that had come is not fetched again"
    assert [path.name for path in tmp_path.iterdir()] == ["kgorch.db"]


LARGE = "import os\nfor n in range(3): open(f'part{n}', 'wb').write(os.urandom(8 << 20))"


def test_a_download_may_take_any_time_while_it_makes_progress_and_none_without(
    place, server, pushed, tmp_path, monkeypatch
):
    order = pushed(LARGE)
    place.look(order.name)  # the client's process has logged in
    monkeypatch.setattr(place_module, "STALLED_S", 8.0)
    server.order("File", Fault("slow", seconds=16.0))
    assert len(place.collect(order.name, tmp_path / "slow", ("part*",))) == 3
    server.order("File", Fault("hang", seconds=20.0))
    began_s = time.monotonic()
    with pytest.raises(PlaceError, match="did not answer in time") as stalled:
        place.collect(order.name, tmp_path / "stalled", ("part*",))
    assert stalled.value.trouble is Trouble.UNANSWERED and time.monotonic() - began_s < 18


def test_urls_that_expire_while_other_files_are_fetched_are_listed_anew(place, server, pushed, tmp_path, monkeypatch):
    order = pushed(LARGE)
    monkeypatch.setattr(server.rules, "url_s", 2.0)
    server.order("File", Fault("slow", seconds=3.0))
    before = len(server.asked("ListKernelSessionOutput"))
    files = place.collect(order.name, tmp_path, ("*",))
    assert [file.name for file in files] == ["part0", "part1", "part2"]
    assert all(file.read_bytes() == (server.session(order.name).output / file.name).read_bytes() for file in files)
    assert len(server.asked("ListKernelSessionOutput")) == before + 2
    monkeypatch.setattr(server.rules, "url_s", -1.0)
    with pytest.raises(PlaceError, match="HTTP 403"):
        place.collect(order.name, tmp_path / "never", ("*",))


def test_files_that_came_whole_are_not_fetched_again(place, server, pushed, tmp_path):
    order = pushed(LARGE + "\n" + SAVES_STATE)
    place.collect(order.name, tmp_path, ("part0", RECORD_NAME))
    (tmp_path / RECORD_NAME).write_text("of another session")
    before = len(server.asked("File"))
    assert len(place.collect(order.name, tmp_path, ("part*", RECORD_NAME))) == 4
    assert len(server.asked("File")) == before + 3, "the record, and what was missing"
    assert json.loads((tmp_path / RECORD_NAME).read_text()) == {"step": 7}


@pytest.mark.slow
def test_a_checkpoint_of_more_than_a_gibibyte_is_fetched(place, server, pushed, tmp_path):
    order = pushed("open('model.pt', 'wb').truncate(1100 << 20)")
    [file] = place.collect(order.name, tmp_path, ("model.pt",))
    assert file.stat().st_size == 1100 << 20


def test_what_is_fetched_is_bounded_by_its_sum(place, pushed, tmp_path, monkeypatch):
    order = pushed(LARGE)
    monkeypatch.setattr(place_module, "MAX_BYTES", 20 << 20)
    with pytest.raises(PlaceError, match="part2 has 8388608 bytes, more than 4194304") as refused:
        place.collect(order.name, tmp_path, ("part*",))
    assert refused.value.trouble is Trouble.REFUSED
    monkeypatch.setattr(place_module, "MAX_FILES", 2)
    with pytest.raises(PlaceError, match="more than 2 files"):
        place.collect(order.name, tmp_path, ("part*",))


def test_the_progress_of_a_large_file_is_told_and_one_that_the_disk_cannot_hold_is_not_fetched(
    place, server, pushed, tmp_path, monkeypatch
):
    order, told = pushed(LARGE), list[tuple[int, int]]()
    server.order("File", Fault("slow", seconds=8.0))
    place.collect(order.name, tmp_path / "one", ("part0",), lambda *progress: told.append(progress))
    assert told == sorted(told) and {size for _, size in told} == {8 << 20} and len(told) > 1
    monkeypatch.setattr(place_module, "MAX_BYTES", 1 << 61)
    server.order("File", Fault("huge"))
    with pytest.raises(PlaceError, match=f"part1 has {1 << 60} bytes, and .* are free") as refused:
        place.collect(order.name, tmp_path / "two", ("part1",))
    assert refused.value.trouble is Trouble.REFUSED and not [*tmp_path.glob("two/*")]


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "", "a\nb", "./kgorch.db"])
def test_a_name_that_leads_outside_is_refused_and_nothing_is_written(place, server, pushed, tmp_path, name):
    order = pushed()
    url = "https://www.kaggleusercontent.com/kf/0?x"
    server.order("ListKernelSessionOutput", Fault("body", body={"files": [{"fileName": name, "url": url}]}))
    (tmp_path / "in").mkdir()
    with pytest.raises(PlaceError) as refused:
        place.collect(order.name, tmp_path / "in", ("*",))
    assert refused.value.trouble is Trouble.REFUSED
    assert [path.name for path in tmp_path.rglob("*")] == ["in"]


def test_a_record_that_is_too_large_is_refused(place, pushed, tmp_path):
    order = pushed(f"open('{RECORD_NAME}', 'w').write('x' * {RECORD_BYTES + 1})")
    with pytest.raises(PlaceError, match="bytes, more than"):
        place.collect(order.name, tmp_path)


def test_files_of_the_output_come_over_https_alone(place, server, pushed, tmp_path):
    order = pushed()
    files = [{"fileName": "kgorch.db", "url": "http://169.254.169.254/latest"}]
    server.order("ListKernelSessionOutput", Fault("body", body={"files": files}))
    with pytest.raises(PlaceError, match="not https"):
        place.collect(order.name, tmp_path)


def test_the_log_of_a_session_that_is_over_comes_at_once(place, pushed):
    order = pushed("print('one'); print('two'); import sys; sys.stdout.write('no end')")
    assert list(place.log(order.name)) == ["one", "two", "no end"]
    assert list(place.log(order.name, follow=True)) == ["one", "two", "no end"]


def test_a_log_without_line_feeds_is_given_out_in_pieces(place, monkeypatch):
    bar = "\r 12%|#### | 1234/9999 [00:12<00:01, loss=0.123]"
    events = ({"number": number, "text": bar} for number in range(1, 201))  # the stand-in has all of a log in one event
    monkeypatch.setattr(place, "_client", SimpleNamespace(events=lambda *words, **more: events))
    monkeypatch.setattr(place_module, "LINE_LENGTH", 1000)
    pieces = list(place.log("any"))
    assert len(pieces) > 9 and max(map(len, pieces)) < 1000 + 2 * len(bar) and "".join(pieces) == 200 * bar


def test_a_followed_log_shows_each_line_once_although_the_connection_is_cut(place, server, order, monkeypatch):
    monkeypatch.setattr(place_module, "RECONNECT_S", 0.05)
    server.order("LogStream", Fault("cut", events=2))
    server.order("LogStream", Fault("cut", events=3))
    place.push(order, script_of(order, "import time\nfor n in range(5): print('line', n); time.sleep(0.5)"))
    server.wait_for(order.name, "RUNNING")
    assert list(place.log(order.name, follow=True)) == [f"line {n}" for n in range(5)]


def test_a_log_that_is_not_followed_ends_although_the_session_runs(place, server, order, monkeypatch):
    monkeypatch.setattr(place_module, "QUIET_S", 0.5)
    place.push(order, script_of(order, "import time; print('began'); time.sleep(200)"))
    while not server.session(order.name).log:
        time.sleep(0.02)
    began_s = time.monotonic()
    assert list(place.log(order.name)) == ["began"]
    assert time.monotonic() - began_s < 100
    server.cancel(order.name)


def test_what_is_over_is_deleted_and_deleting_it_again_is_no_error(place, server, pushed):
    order = pushed()
    place.delete(order.name)
    assert order.name not in server.kernels.kernels
    place.delete(order.name)


def test_stop_says_what_a_person_can_do(place, server, order):
    assert f"https://www.kaggle.com/code/{server.username}/{order.name}" in place.stop(order.name)


def test_a_bundle_is_a_private_data_set_that_is_uploaded_once(place, server, tmp_path):
    (tmp_path / "f0001").write_bytes(b"a" * 1000)
    (tmp_path / "f0002").write_bytes(b"")
    reference = place.store_bundle(tmp_path, "kgorch-once-0001")
    assert server.datasets.datasets["kgorch-once-0001"].is_private and place.is_bundle_ready(reference)
    before = len(server.requests)
    assert place.store_bundle(tmp_path, "kgorch-once-0001") == reference
    assert [request.method for request in server.requests[before:]] == ["GetDatasetStatus"]


def test_a_bundle_is_ready_when_kaggle_says_so_and_each_size_is_right(place, server, tmp_path, monkeypatch):
    monkeypatch.setattr(server.rules, "ready_s", 600.0)
    (tmp_path / "f0001").write_bytes(b"a" * 1000)
    reference = place.store_bundle(tmp_path, "kgorch-slow-0001")
    assert not place.is_bundle_ready(reference)
    server.datasets.datasets["kgorch-slow-0001"].ready_at_s = 0.0
    server.order("ListDatasetFiles", Fault("body", body={"datasetFiles": [{"name": "f0001", "totalBytes": 999}]}))
    assert not place.is_bundle_ready(reference)
    assert place.is_bundle_ready(reference)


def kill_client_at_its_second_put(server, folder: str, before: int) -> None:
    while len(server.asked("PUT")) < before + 2:
        time.sleep(0.02)
    [client] = [child for child in psutil.Process().children() if folder in child.environ().get("TMPDIR", "")]
    client.kill()


def test_an_upload_goes_on_in_another_process_where_it_was_killed(server, tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "f0001").write_bytes(os.urandom(400_000))
    server.order("PUT", Fault("half"))
    server.order("PUT", Fault("hang", seconds=60))
    environ = server.environment(tmp_path / "home")
    killer = threading.Thread(
        target=kill_client_at_its_second_put, args=(server, str(tmp_path), len(server.asked("PUT")))
    )
    killer.start()
    with KagglePlace(tmp_path / "place", environ) as place, pytest.raises(PlaceError) as killed:
        place.store_bundle(folder, "kgorch-cut-0001")
    killer.join()
    assert killed.value.trouble is Trouble.UNANSWERED
    starts = len(server.asked("StartBlobUpload"))
    with KagglePlace(tmp_path / "place", environ) as place:
        assert place.is_bundle_ready(place.store_bundle(folder, "kgorch-cut-0001"))
    assert len(server.asked("StartBlobUpload")) == starts, "the same upload"
    assert server.asked("PUT")[-1].body["range"] == "bytes 200000-399999/400000"
    stored = server.datasets.datasets["kgorch-cut-0001"].files["f0001"]
    assert stored.read_bytes() == (folder / "f0001").read_bytes()


def test_a_creation_whose_answer_was_lost_is_found_and_not_repeated(place, server, tmp_path):
    (tmp_path / "f0001").write_bytes(b"a")
    server.order("CreateDataset", Fault("cut", after=True))
    with pytest.raises(PlaceError) as lost:
        place.store_bundle(tmp_path, "kgorch-lost-0001")
    assert lost.value.trouble is Trouble.UNANSWERED
    creations = len(server.asked("CreateDataset"))
    assert place.is_bundle_ready(place.store_bundle(tmp_path, "kgorch-lost-0001"))
    assert len(server.asked("CreateDataset")) == creations


def test_a_bundle_that_another_process_made_meanwhile_counts(place, server, tmp_path):
    (tmp_path / "f0001").write_bytes(b"a")
    place.store_bundle(tmp_path, "kgorch-race-0001")
    server.order("GetDatasetStatus", Fault("status", 404))
    assert place.store_bundle(tmp_path, "kgorch-race-0001").endswith("/kgorch-race-0001")


def test_a_bundle_with_a_folder_or_a_link_is_refused(place, tmp_path):
    with pytest.raises(PlaceError, match="is empty"):
        place.store_bundle(tmp_path, "kgorch-empty-0001")
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(PlaceError, match="no plain file"):
        place.store_bundle(tmp_path, "kgorch-link-0001")


def test_a_look_is_one_request(place, server, pushed):
    name = pushed().name
    place.look(name)
    before = len(server.requests)
    for _ in range(3):
        place.look(name)
    assert [request.method for request in server.requests[before:]] == ["GetKernelSessionStatus"] * 3


def shape(value):
    """Of a JSON value: keys and types, without what differs from call to call."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    return [shape(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__


def test_the_installed_client_asks_as_the_one_that_was_recorded(tmp_path):
    """`KGORCH_RECORD=1` records anew; a change is one of the client's, to be looked at before it is believed."""
    with (
        KaggleServer(tmp_path / "server", rules=Rules(ready_s=0.0)) as server,
        KagglePlace(tmp_path / "place", server.environment(tmp_path / "home")) as place,
    ):
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "f0001").write_text("x")
        reference = place.store_bundle(tmp_path / "bundle", "kgorch-shape-0001")
        assert place.is_bundle_ready(reference)
        first = replace(_order(), bundle=reference, accelerator="NvidiaTeslaT4")
        place.push(first, script_of(first, SAVES_STATE))
        server.wait_for(first.name)
        second = replace(
            first, name="kgorch-demo-shapes-002", source=first.name, competitions=("titanic",), accelerator=""
        )
        place.push(second, script_of(second))
        server.wait_for(second.name)
        place.find_push(second)
        place.collect(first.name, tmp_path / "out")
        list(place.log(first.name))
        place.quota()
        place.delete(second.name)
        shapes = {}
        for request in server.asked():
            shapes.setdefault(request.method, [])
            if shape(request.body) not in shapes[request.method]:
                shapes[request.method].append(shape(request.body))
        assert not server.unknown
    if os.environ.get("KGORCH_RECORD"):
        SHAPES.write_text(json.dumps(shapes, indent=1, sort_keys=True) + "\n")
    assert shapes == json.loads(SHAPES.read_text())


def _order():
    from places.conftest import ORDER

    return replace(ORDER, name="kgorch-demo-shapes-001")


@pytest.mark.slow
def test_a_probe_settles_what_no_documentation_says_and_deletes_its_sessions(place, server, tmp_path, monkeypatch):
    """Against the stand-in it finds the stand-in's rules; `kgorch remote check --probe` asks a real account the same."""
    monkeypatch.setattr(probe, "LIMIT_S", 12)
    monkeypatch.setattr(probe, "SESSION_S", 10)
    found = probe.PlaceProbe(place, tmp_path / "probe", poll_s=0.3).run()
    assert not [finding for finding in found if not finding.agrees]
    said = {finding.question: finding.answer for finding in found}
    assert said["how a script that ends by itself is called"] == "COMPLETE"
    assert said["how a script that ends with status 1 is called"].startswith("ERROR")
    assert said["how a session that ran over its limit is called"] == "CANCEL_ACKNOWLEDGED"
    assert said["what of 600 files and an empty file, a link and a socket is kept"] == "600 files; empty"
    assert "started it without" in said["the output of a session that failed, as an input"]
    assert not [slug for slug in server.kernels.kernels if slug.startswith("kgorch-probe")]
