"""Snapshots: filled by ranks, held and written by a real keeper, read back, killed at any moment."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import wait_until
from safetensors.torch import load_file
from saving import Place, described, save
from torch import nn

from kgorch.checkpoint.export import export_safetensors, export_torch, exporter_for
from kgorch.checkpoint.folder import list_checkpoints, read_checkpoint
from kgorch.checkpoint.manifest import manifest_document, shard_names
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.memory.snapshot_budget import buffer_count
from kgorch.errors import KgorchError
from kgorch.protocol import codec, transport
from kgorch.protocol.snapshot_messages import BufferRequest, CheckpointWritten, SaveFailure, SnapshotReady
from kgorch.snapshots import checkpoint_writer, keeper_client
from kgorch.system.process_identity import start_ticks
from kgorch.worker.checkpoint import restore_source, state_codec
from kgorch.worker.checkpoint import snapshot_writer as saving
from kgorch.worker.checkpoint.snapshot_writer import SnapshotWriter
from kgorch.worker.ranks.consensus_board import SAVE, SLOT, SNAPSHOT, STOP

ROUNDS = int(os.environ.get("KGORCH_SOAK", "25"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SNAPSHOT_PATIENCE_S", 20.0)  # a busy machine passes no snapshot over here
    place = Place(tmp_path)
    place.start_keeper()
    yield place
    place.kill_keeper()


WORDS = [
    b"forget abc", b"forget ", b"forget " + b"9" * 400, b"", b"newest\0",
]  # fmt: skip


def _strange_lines(room: dict, filled: dict) -> list[bytes]:
    """Messages of a form that a keeper knows, with what no rank would say; and lines that are none."""
    rooms = [{"rank": -1}, {"rank": 7}, {"ranks": 0}, {"ranks": 10**9}, {"bytes": -1}, {"bytes": 2**62}, {"bound": -9}]
    fills = [{"slot": 7}, {"slot": -1}, {"number": -5}, {"number": 2**62}, {"rank": 9}, {"files": {"a": []}}]
    fills += [
        {"files": {"a": [0, 2**60]}},
        {"files": {"../a": [0, 1]}},
        {"files": {"a": ["x", 1]}},
        {"files": {"a": 3}},
    ]
    documents = [room | odd for odd in rooms] + [filled | odd for odd in fills]
    documents += [{"v": 1, "message": "Ask", "what": word.decode()} for word in WORDS]
    return [json.dumps(document).encode() for document in documents] + [b"{", b"\xff" * 99, b"[" * 5000, b"null"]


def test_no_line_ends_the_keeper_or_takes_the_snapshot_that_it_holds(place):
    saver, net = place.saver(), nn.Linear(4, 4)
    assert save(saver, {"model": net}, 3, persist=False)
    wait_until(lambda: place.newest() and place.newest().step == 3)
    number = place.newest().number
    room = json.loads(codec.encode(BufferRequest("1.1", "id", "train", str(place.root), 0, 1, 4096)))
    filled = json.loads(codec.encode(SnapshotReady("1.1", 0, number, 0, 3, {}, False, False, 0.0, 0.0)))
    for line in _strange_lines(room, filled):
        with transport.connect(place.folder / "keeper.sock") as peer:
            peer.sendall(line + b"\n")
            peer.settimeout(0.2)
            with suppress(OSError):
                peer.recv(4096)
    assert place.keeper.poll() is None, "it has ended"
    assert (place.newest().step, place.newest().number) == (3, number)
    assert _restored(place, saver, {"model": nn.Linear(4, 4)}) == 3


def _restored(place: Place, saver: SnapshotWriter, tracked) -> int:
    held, descriptors = saver.fetch()
    found = restore_source.SnapshotSource(held, descriptors)
    state_codec.restore(tracked, found.tree | found.own(0)["own"], found.reader(0).fetch)
    return found.manifest.step


SLEEPY = """
import itertools, sys, time
from pathlib import Path
from kgorch.snapshots import keeper

hours, read, keeper.IDLE_S = itertools.count(), time.clock_gettime, 1e9
time.clock_gettime = lambda which: read(which) + 3600.0 * next(hours)
keeper.main(Path(sys.argv[1]))
"""
"""A keeper whose machine sleeps for an hour between any two readings of CLOCK_BOOTTIME."""


def test_the_time_in_which_the_machine_sleeps_is_no_part_of_what_a_save_takes(place, monkeypatch):
    place.kill_keeper()
    place.start_keeper("-c", SLEEPY)
    listener = keeper_client.KeeperListener(place.folder, place.told.append)
    hours, read = itertools.count(), time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: read(which) + 3600.0 * next(hours))
    saver = place.saver()
    assert save(saver, {"model": nn.Linear(4, 4)}, 3) and saver.wait() and saver.blocking_s < 600
    [told] = wait_until(lambda: [message for message in place.told if isinstance(message, CheckpointWritten)])
    assert told.took_s < 600 and told.blocking_s < 600
    listener.close()


def test_a_save_is_put_in_place_whole_and_verifies(place):
    saver, net = place.saver(), nn.Linear(4, 4)
    assert save(saver, {"model": net}, 3)
    expected = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()  # training goes on beside the writing
    assert saver.wait()
    [folder] = list_checkpoints(place.root)
    assert verify_checkpoint(folder).step == 3
    assert torch.equal(restore_source.ShardReader(folder, read_checkpoint(folder), 0).fetch("model.weight"), expected)
    assert [path.name for path in place.root.iterdir()] == ["step-00000003"]


def test_a_snapshot_stays_in_memory_and_the_training_does_not_change_what_was_restored_from_it(place):
    saver, net = place.saver(), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    assert save(saver, {"model": net, "optimizer": optimizer}, 5, persist=False)
    held = wait_until(place.newest)
    assert (held.step, held.stage, held.run_id) == (5, "train", "id")
    assert not place.root.exists()
    expected = net.weight.detach().clone()
    twin = nn.Linear(4, 4)
    other = torch.optim.AdamW(twin.parameters())
    again = place.saver(attempt="1.2")
    assert _restored(place, again, {"model": twin, "optimizer": other}) == 5
    assert torch.equal(twin.weight, expected)
    twin(torch.ones(4)).sum().backward()
    other.step()  # in place on the optimizer's state
    third = nn.Linear(4, 4)
    _restored(place, again, {"model": third, "optimizer": torch.optim.AdamW(third.parameters())})
    assert torch.equal(third.weight, expected)
    assert torch.equal(optimizer.state[net.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])


def test_a_snapshot_outlives_its_rank_and_is_written_when_a_supervisor_asks(place):
    save(place.saver(), {"model": nn.Linear(4, 4)}, 8, persist=False)
    assert wait_until(place.newest).step == 8
    keeper_client.persist(place.folder, timeout_s=20)
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [8]
    keeper_client.persist(place.folder, timeout_s=20)  # nothing to do
    assert len(list(place.root.iterdir())) == 1


def test_a_keeper_that_is_told_to_end_writes_what_only_it_has_and_is_gone(place):
    save(place.saver(), {"model": nn.Linear(4, 4)}, 8, persist=False)
    wait_until(place.newest)
    keeper_client.end(place.folder, timeout_s=20)
    assert start_ticks(place.keeper.pid) is None and place.keeper.wait(timeout=10) == 0
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [8]


IMPATIENT = """
import sys
from pathlib import Path
from kgorch.snapshots import keeper

keeper.IDLE_S, keeper.TRIES = 1.0, 8
keeper.main(Path(sys.argv[1]))
"""


def test_a_keeper_that_is_told_to_end_stays_with_what_the_disk_does_not_take_and_writes_it_later(place):
    place.kill_keeper()
    place.start_keeper("-c", IMPATIENT)
    save(place.saver(), {"model": nn.Linear(4, 4)}, 8, persist=False)
    wait_until(place.newest)
    place.root.parent.write_text("stands for a disk that takes nothing")
    asked_s = time.monotonic()
    keeper_client.end(place.folder, timeout_s=60)
    assert time.monotonic() - asked_s < 30, "it waits for the end of a keeper that goes on"
    time.sleep(2.0)
    assert place.keeper.poll() is None and place.newest().step == 8
    place.root.parent.unlink()
    assert place.keeper.wait(timeout=20) == 0
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [8]


def test_a_keeper_whom_nobody_needs_does_not_bring_back_a_run_that_was_removed(place):
    place.kill_keeper()
    place.start_keeper("-c", IMPATIENT)
    save(place.saver(), {"model": nn.Linear(4, 4)}, 8, persist=False)
    wait_until(place.newest)
    place.keeper.send_signal(signal.SIGSTOP)  # else it may listen anew in the midst of this
    shutil.rmtree(place.folder)
    place.keeper.send_signal(signal.SIGCONT)
    assert place.keeper.wait(timeout=60) == 0
    assert not place.folder.exists()


def test_one_snapshot_that_was_slow_puts_the_next_one_off_for_no_minutes(place, monkeypatch):
    """Found in the tests: a machine that stood still for a second left a training without snapshots for five minutes."""
    saver, tracked, fill = place.saver(), {"model": nn.Linear(4, 4)}, saving.SnapshotBuffer.fill
    save(saver, tracked, 1, persist=False)
    usual_s = saver.interval_s

    def slow_fill(*args):
        time.sleep(0.5)
        return fill(*args)

    monkeypatch.setattr(saving.SnapshotBuffer, "fill", slow_fill)
    save(saver, tracked, 2, persist=False)
    assert saver.blocking_s > 0.5 and saver.interval_s == usual_s < 0.5 / saving.OVERHEAD
    save(saver, tracked, 3, persist=False)
    assert saver.interval_s >= 0.5 / saving.OVERHEAD, "but a state that takes long is copied as rarely as it costs"


def test_of_two_keepers_one_stays(place):
    save(place.saver(), {"model": nn.Linear(4, 4)}, 1, persist=False)
    second = subprocess.run([sys.executable, "-m", "kgorch.snapshots.keeper", str(place.folder)], timeout=20)
    assert second.returncode == 0
    assert wait_until(place.newest).step == 1


def test_a_snapshot_of_which_one_rank_is_missing_is_never_taken_for_whole(place):
    savers = [place.saver(rank, 2) for rank in range(2)]
    net = nn.Linear(4, 4)
    for rank, saver in enumerate(savers):
        save(saver, {"model": net}, 1, persist=False, rank=rank, ranks=2)
    wait_until(lambda: (held := place.newest()) and held.step == 1)
    save(savers[0], {"model": net}, 2, persist=False, rank=0, ranks=2)
    assert place.newest().step == 1
    save(savers[1], {"model": net}, 2, persist=False, rank=1, ranks=2)
    wait_until(lambda: place.newest().step == 2)


def test_an_image_that_is_being_filled_is_not_whole(place):
    """A rank killed while it copies has wiped the stamp: the snapshot that lay there is gone, the other one stands."""
    saver, net = place.saver(), {"model": nn.Linear(4, 4)}
    for step in (1, 2):
        save(saver, net, step, persist=False)
    wait_until(lambda: (held := place.newest()) and held.step == 2)
    saver._images[saver._slot]._stamp(0)
    assert place.newest().step == 1


def test_a_keeper_killed_while_it_writes_holds_up_no_later_save(place):
    """The save under way fails by name; the next one is admitted, and a rank that already told the new keeper gives way."""
    savers, net = [place.saver(rank, 2) for rank in range(2)], nn.Linear(4, 4)
    for saver in savers:
        saver.prepare(1 << 16, torch.device("cpu"))
    os.kill(place.keeper.pid, signal.SIGSTOP)
    save(savers[0], {"model": net}, 1, rank=0, ranks=2)
    assert savers[0].admit(SAVE) == 0
    place.kill_keeper()
    place.start_keeper()
    save(savers[1], {"model": net}, 1, rank=1, ranks=2)  # finds it gone, and gives this one to the new keeper
    assert not savers[0].wait() and not savers[1].wait()
    assert savers[0].admit(SAVE) & SAVE
    assert [type(item) for item in place.told] == [SaveFailure]
    for rank, saver in enumerate(savers):
        save(saver, {"model": net}, 2, rank=rank, ranks=2)
    assert all(saver.wait() for saver in savers)
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [2]


def test_a_snapshot_that_has_grown_while_a_save_is_written_is_passed_over_and_the_save_is_heard_of(place):
    """Found by the benchmark of walls: the save was told as failed, "the keeper is gone", and a second later as verified."""
    saver, small, grown = place.saver(), {"model": nn.Linear(4, 4)}, {"model": nn.Linear(1000, 1000)}
    saver.prepare(1 << 16, torch.device("cpu"))
    os.kill(place.keeper.pid, signal.SIGSTOP)  # a disk that takes its time
    assert save(saver, small, 1)
    assert not save(saver, grown, 2, persist=False)
    assert saver.admit(SAVE) == 0, "it is still waited for"
    os.kill(place.keeper.pid, signal.SIGCONT)
    assert saver.wait() and place.told == []
    assert save(saver, grown, 3) and saver.wait()
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [3, 1]


def test_a_keeper_that_comes_up_with_less_memory_takes_the_save_all_the_same(place):
    saver, net = place.saver(memory_bytes=20 << 20), {"model": nn.Linear(1000, 1000)}
    saver.prepare(4_100_000, torch.device("cpu"))
    assert saver.interval_s is not None
    place.kill_keeper()
    place.start_keeper()
    saver._launch = replace(saver._launch, memory_bytes=6 << 20)
    assert save(saver, net, 1, slot=1) and saver.wait()
    assert saver.interval_s is None
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [1]


def test_a_state_that_grows_beyond_the_plans_memory_goes_through_files(place):
    saver = place.saver(memory_bytes=3 << 20)
    saver.prepare(1 << 20, torch.device("cpu"))
    assert save(saver, {"model": nn.Linear(1000, 1000)}, 1) and saver.wait()
    links = [str(path.readlink()) for path in Path(f"/proc/{place.keeper.pid}/fd").iterdir()]
    assert not any("kgorch-image" in link for link in links)
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [1]


def test_a_snapshot_that_is_forgotten_is_neither_held_nor_written(place):
    saver, net = place.saver(), {"model": nn.Linear(4, 4)}
    for step in (1, 2):
        save(saver, net, step, persist=False)
    newest = wait_until(lambda: (held := place.newest()) and held.step == 2 and held)
    keeper_client.forget(place.folder, newest.number)
    assert place.newest().step == 1
    keeper_client.persist(place.folder, timeout_s=20)
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [1]


def test_an_image_that_is_filled_anew_while_it_is_written_makes_no_checkpoint(tmp_path):
    """It never happens as slots are given; should it, a mixture must not get a name."""
    (tmp_path / "described").write_bytes(json.dumps(manifest_document(described(1))).encode())
    content = (tmp_path / "described").read_bytes()
    image = os.memfd_create("image")
    os.write(image, content + b"[]")
    share = checkpoint_writer.Share(image, {"described": (0, len(content)), "tensors": (len(content), 2)})
    with pytest.raises(OSError, match="filled anew"):
        checkpoint_writer.persist([share], tmp_path / "cp", "1.1", lambda: False)
    assert list((tmp_path / "cp").iterdir()) == []
    checkpoint_writer.persist([share], tmp_path / "cp", "1.1", lambda: True)
    os.close(image)


def test_a_rank_that_missed_the_keeper_once_counts_as_the_others_do(place):
    """Numbers and slots hang on what all ranks did alike, not on whom the keeper's death met."""
    savers, net = [place.saver(rank, 2) for rank in range(2)], nn.Linear(4, 4)
    for rank, saver in enumerate(savers):
        save(saver, {"model": net}, 1, persist=False, rank=rank, ranks=2)
    savers[1]._lose_keeper()
    launch, savers[1]._launch = savers[1]._launch, replace(savers[1]._launch, keeper=str(place.folder / "nowhere"))
    for rank, saver in enumerate(savers):
        assert save(saver, {"model": net}, 2, persist=False, rank=rank, ranks=2) == (rank == 0)
    savers[1]._launch = launch
    for rank, saver in enumerate(savers):
        assert save(saver, {"model": net}, 3, rank=rank, ranks=2)
    assert all(saver.wait() for saver in savers)
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [3]


def test_a_keeper_that_was_killed_is_asked_anew_and_the_save_is_made(place):
    saver, net = place.saver(), {"model": nn.Linear(4, 4)}
    assert save(saver, net, 1) and saver.wait()
    place.kill_keeper()
    place.start_keeper()
    assert save(saver, net, 2) and saver.wait()
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [2, 1]


@pytest.mark.parametrize("memory_bytes", [6 << 20, 0])
def test_a_keeper_killed_while_it_writes_costs_no_stop_its_save_with_one_buffer_or_files(place, memory_bytes):
    saver, net = place.saver(memory_bytes=memory_bytes), {"model": nn.Linear(1000, 1000)}
    saver.prepare(4_100_000, torch.device("cpu"))
    os.kill(place.keeper.pid, signal.SIGSTOP)
    assert save(saver, net, 1)
    place.kill_keeper()
    place.start_keeper()
    assert save(saver, net, 2) and saver.wait()  # for a stop: nothing has waited for the first one
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [2]


def test_a_keeper_whose_socket_was_taken_away_is_found_by_the_ranks_of_the_next_attempt(place):
    """It lives and holds its lock, so no other can come up beside it."""
    saver, net = place.saver(), {"model": nn.Linear(4, 4)}
    assert save(saver, net, 1) and saver.wait()
    (place.folder / "keeper.sock").unlink()
    later = place.saver(attempt="1.2")
    assert save(later, net, 2) and later.wait()
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [2, 1]


def test_without_a_keeper_a_snapshot_is_passed_over_and_a_save_fails_by_name(place, monkeypatch):
    monkeypatch.setattr("kgorch.worker.checkpoint.snapshot_writer.KEEPER_PATIENCE_S", 0.3)
    saver, net = place.saver(), {"model": nn.Linear(4, 4)}
    place.kill_keeper()
    assert not save(saver, net, 1, persist=False)
    assert place.told == []
    assert not save(saver, net, 2)
    assert not saver.wait()
    [failed] = place.told
    assert isinstance(failed, SaveFailure) and failed.step == 2


def test_ranks_that_track_different_tensors_fail_the_save_by_the_tensors_name(place):
    savers = [place.saver(rank, 2) for rank in range(2)]
    save(savers[0], {"model": nn.Linear(4, 4)}, 1, rank=0, ranks=2)
    save(savers[1], {"model": nn.Linear(4, 4, bias=False)}, 1, rank=1, ranks=2)
    assert not savers[0].wait()
    assert "no rank has written model" in savers[0].error
    assert not list_checkpoints(place.root)


def test_a_state_that_grows_is_given_a_larger_image(place):
    saver = place.saver()
    saver.prepare(4096, torch.device("cpu"))
    for step, width in ((1, 8), (2, 600), (3, 601)):
        assert save(saver, {"model": nn.Linear(width, width)}, step)
        assert saver.wait()
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(place.root)] == [3, 2, 1]


@pytest.mark.parametrize(("bound", "count"), [(None, 2), (6 << 20, 1), (0, 0)])
def test_the_plan_bounds_the_memory_and_saves_go_on_in_any_case(place, bound, count):
    saver, net = place.saver(memory_bytes=bound), {"model": nn.Linear(1000, 1000)}
    saver.prepare(4_100_000, torch.device("cpu"))
    assert (saver.interval_s is None) == (count < 2)
    for step in (1, 2, 3):
        assert save(saver, net, step) and saver.wait()
    assert len([verify_checkpoint(folder) for folder in list_checkpoints(place.root)]) == 3
    links = [path.readlink() for path in Path(f"/proc/{place.keeper.pid}/fd").iterdir()]
    assert sum("kgorch-image" in str(link) for link in links) == count


def test_how_many_images_fit_is_said_with_the_reason():
    assert buffer_count(100 << 20, 1 << 30) == (2, "")
    count, why = buffer_count(400 << 20, 1 << 30)
    assert count == 1 and "this host allows 614" in why
    count, why = buffer_count(100 << 20, 1 << 40, 50 << 20)
    assert count == 0 and "checkpoint.memory allows 50" in why


def test_while_one_save_is_on_its_way_a_second_waits_a_snapshot_takes_the_other_slot_and_a_stop_goes_first(place):
    saver = place.saver()
    saver.prepare(1 << 20, torch.device("cpu"))
    first = saver.admit(SAVE)
    assert first & SAVE
    os.kill(place.keeper.pid, signal.SIGSTOP)
    save(saver, {"model": nn.Linear(4, 4)}, 1, slot=1 if first & SLOT else 0)
    assert saver.admit(SAVE) == 0
    other = saver.admit(SNAPSHOT)
    assert other & SNAPSHOT and other & SLOT != first & SLOT
    assert saver.admit(SAVE | SNAPSHOT) & SAVE == 0
    stop = saver.admit(STOP)
    assert stop & SAVE and stop & STOP and stop & SLOT != first & SLOT
    os.kill(place.keeper.pid, signal.SIGCONT)
    assert saver.wait()
    assert saver.admit(SAVE) & SAVE


def test_an_export_loads_into_the_model_and_holds_tied_weights_under_both_names(place, tmp_path):
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    net["b"].weight = net["a"].weight
    saver = place.saver()
    assert save(saver, {"model": net, "optimizer": torch.optim.AdamW(net.parameters())}, 3) and saver.wait()
    [folder] = list_checkpoints(place.root)
    out = tmp_path / "model.safetensors"
    assert export_safetensors(folder, out, "model") == len(net.state_dict())
    loaded = load_file(out)
    assert loaded.keys() == net.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
    with pytest.raises(KgorchError, match="give --only one of: model, optimizer"):
        export_safetensors(folder, out, "ema")


class Holder:
    """Anything with a state_dict."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_export_of_one_name_finds_what_each_rank_has_its_own_of(place, tmp_path, ranks):
    net, savers = nn.Linear(3, 3), [place.saver(rank, ranks) for rank in range(ranks)]
    for rank, saver in enumerate(savers):
        ema = Holder({"weight": torch.full((3,), float(rank)), "decay": 0.9})
        assert save(saver, {"model": net, "ema": ema}, 3, ranks=ranks, rank=rank)
    assert all(saver.wait() for saver in savers)
    [folder] = list_checkpoints(place.root)
    out = tmp_path / "ema.safetensors"
    assert exporter_for(out)(folder, out, "ema") == 1
    assert torch.equal(load_file(out)["value.weight"], torch.zeros(3))
    with pytest.raises(KgorchError, match="give --only one of: ema, model"):
        export_safetensors(folder, out, "net")


@pytest.mark.skipif(torch.__version__ < "2.5", reason="PyTorch 2.4 loads no numpy values with weights_only")
def test_an_export_for_torch_holds_what_the_safetensors_one_holds_and_loads_without_running_code(place, tmp_path):
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    optimizer = torch.optim.AdamW(net.parameters())
    net["b"](net["a"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    odd = {"array": np.arange(3), "number": np.float64(0.5), "bytes": b"\xff", "pair": (1, math.inf)}
    tracked = {"model": net, "optimizer": optimizer, "odd": Holder(odd)}
    saver = place.saver()
    assert save(saver, tracked, 3) and saver.wait()
    [folder] = list_checkpoints(place.root)
    model, everything = tmp_path / "model.pt", tmp_path / "all.pth"
    assert export_torch(folder, model, "model") == 3, "the tied one once"
    export_safetensors(folder, tmp_path / "model.safetensors", "model")
    loaded, same = torch.load(model, weights_only=True), load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == same.keys() and all(torch.equal(loaded[name], same[name]) for name in same)
    assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
    export_torch(folder, everything, None)
    loaded = torch.load(everything, weights_only=True)
    assert loaded.keys() == tracked.keys()
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert loaded["odd"]["value"] == odd | {"array": loaded["odd"]["value"]["array"]}
    assert loaded["odd"]["value"]["array"].tolist() == [0, 1, 2]
    with pytest.raises(KgorchError, match="give --only one of: model, odd, optimizer"):
        export_torch(folder, model, "ema")
    with pytest.raises(KgorchError, match="No such file or directory"):
        export_torch(folder, tmp_path / "nowhere" / "x.pt", "model")
    with pytest.raises(KgorchError, match="ends in one of"):
        exporter_for(tmp_path / "model.onnx")
    assert not list(tmp_path.glob("*.part"))


def test_leftovers_of_killed_saves_and_deletions_are_cleared_and_nothing_else(tmp_path):
    for name in (
        "step-00000003.tmp-1.1",
        "step-00000009-final.dropping",
        "step-00000002",
        "step-00000001.broken",
        "mine",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    checkpoint_writer.clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-00000001.broken", "step-00000002"]
    checkpoint_writer.clear_leftovers(tmp_path / "none")


# kill -9


class Marked(nn.Module):
    """A state that bears its step in every number: a mixture of two is seen at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(30_000)) for _ in range(8)])

    def mark(self, step: int) -> None:
        with torch.no_grad():
            for part in self.parts:
                part.fill_(step)


@contextmanager
def _forked(play):
    pid = os.fork()
    if pid == 0:
        try:
            play()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _train(place: Place, rank: int, attempt: str, first: int, barrier) -> None:
    """Snapshots without end, every third of them a save; the ranks keep step as a training's all-reduce makes them."""
    saver, net = place.saver(rank, 2, attempt), Marked()
    saver.prepare(2_100_000, torch.device("cpu"))
    for step in range(first, 10**9):
        net.mark(step)
        persist = step % 3 == 0 and not saver._is_writing()
        both = barrier.exchange(rank, int(persist))
        save(saver, {"model": net}, step, persist=both == 2, rank=rank, ranks=2, slot=_slot(saver, barrier, rank))


def _slot(saver: SnapshotWriter, barrier, rank: int) -> int:
    return 1 if barrier.exchange(rank, saver.admit(SNAPSHOT) & SLOT if rank == 0 else 0) else 0


class Pipes:
    """An all-reduce (sum) of two processes."""

    def __init__(self) -> None:
        self._ends = [os.pipe(), os.pipe()]

    def exchange(self, rank: int, value: int) -> int:
        os.write(self._ends[rank][1], bytes([value]))
        return value + os.read(self._ends[1 - rank][0], 1)[0]

    def close(self) -> None:
        for end in self._ends:
            os.close(end[0]), os.close(end[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_at_random_moments_loses_no_checkpoint_and_leaves_no_snapshot_that_is_torn(tmp_path):
    """Ranks, keeper or both are killed in the midst of saves; what then bears a name verifies and holds one step alone."""
    chance, place, step = random.Random(0), Place(tmp_path), 0
    verified: set[str] = set()
    from_memory = 0
    place.start_keeper()
    for number in range(ROUNDS):
        pipes = Pipes()
        begin = step + 1
        with (
            _forked(lambda: _train(place, 0, f"1.{number}", begin, pipes)) as first,  # noqa: B023
            _forked(lambda: _train(place, 1, f"1.{number}", begin, pipes)) as second,  # noqa: B023
        ):
            wait_until(lambda: (held := place.newest()) and held.step >= begin, what="a snapshot")  # noqa: B023
            time.sleep(chance.random() * 0.05)
            victim = chance.choice(["rank 0", "rank 1", "keeper", "all"])
            if victim in ("keeper", "all"):
                place.kill_keeper()
            if victim != "keeper":
                os.kill(second if victim == "rank 1" else first, signal.SIGKILL)
        pipes.close()
        if victim in ("keeper", "all"):
            place.start_keeper()
        elif held := place.newest():
            found = restore_source.SnapshotSource(*place.saver(attempt="9.9").fetch())
            fetch = found.reader(0).fetch
            values = {float(value) for name in range(8) for value in fetch(f"model.parts.{name}").unique()}
            assert values == {float(found.manifest.step)}, "a torn snapshot"
            from_memory += 1
            step = held.step
        folders = list_checkpoints(place.root)
        for folder in folders:
            if folder.name not in verified:
                _verify(folder)
                verified.add(folder.name)
        assert verified <= {folder.name for folder in folders}, "a checkpoint that was verified is gone"
        step = max([step, *(int(folder.name[5:]) for folder in folders[:1])])
    place.kill_keeper()
    assert from_memory > ROUNDS // 4 and len(verified) > ROUNDS // 4


def _verify(folder: Path) -> None:
    found = verify_checkpoint(folder)
    for shard in shard_names(found):
        values = {float(value) for tensor in load_file(folder / shard).values() for value in tensor.unique()}
        assert values <= {float(found.step)}, "a mixture of two steps"
    assert json.loads((folder / "state.json").read_text())
    assert replace(found, files={}).step == found.step
