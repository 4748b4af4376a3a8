"""Manifests: what is trusted, what is not, and that nothing from elsewhere leads out of its folder."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch import untrusted_io
from kgorch.checkpoint import store
from kgorch.checkpoint.folder import MAX_MANIFEST_BYTES, list_checkpoints, read_checkpoint, write_manifest
from kgorch.checkpoint.json_values import MAX_TEXT_LENGTH
from kgorch.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, Position, checkpoint_folder_name
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol import codec, transport
from kgorch.protocol.codec import MAX_LINE_BYTES, LineBuffer, ProtocolError
from kgorch.protocol.messages import (
    Command,
    DeadlineUpdate,
    DeferredFile,
    Heartbeat,
    Hello,
    JournalEntry,
    RankProgress,
    Request,
    Response,
)
from kgorch.protocol.snapshot_messages import (
    BufferGrant,
    BufferRequest,
    CheckpointWritten,
    PersistResult,
    SaveFailure,
    SnapshotInfo,
    SnapshotReady,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    return _checkpoint(tmp_path, 7)


def _checkpoint(root: Path, step: int, *, final: bool = False) -> Path:
    place = root / checkpoint_folder_name(step, final=final)
    place.mkdir(parents=True)
    files = {}
    for name, content in {"rank0.safetensors": b"weights" * 100, "state.json": b"{}"}.items():
        (place / name).write_bytes(content)
        files[name] = FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())
    at = "2026-11-20T10:00:00+00:00"
    write_manifest(
        place,
        Manifest("run", "id", "train", Position(step=step), 1, at, final=final, metrics={"loss": 0.5}, files=files),
    )
    return place


def test_what_is_written_is_read_again_and_verifies(folder):
    assert verify_checkpoint(folder) == read_checkpoint(folder)
    assert read_checkpoint(folder).metrics == {"loss": 0.5}


def test_a_flipped_bit_is_found_by_verify_and_the_file_is_named(folder):
    content = bytearray((folder / "rank0.safetensors").read_bytes())
    content[13] ^= 4
    (folder / "rank0.safetensors").write_bytes(content)
    assert read_checkpoint(folder)
    with pytest.raises(CheckpointBroken, match=r"rank0\.safetensors: expected xxh3"):
        verify_checkpoint(folder)


CHANGE = {"step": 3, "rung": "skip", "why": "nan", "at": "2026-11-20T10:00:00+00:00", "settings": {"skip": True}}
CHANGE |= {"device": "", "world": 2, "up": False, "changes_result": True}


def _altered(folder: Path, **changes) -> None:
    document = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "..",
        ".hidden",
        "",
        "manifest.json",
        "x" * 200,
        "a\0b",
        "rank0.safetensors\n",
    ],
)
def test_a_name_that_leads_out_of_the_folder_is_refused(folder, name):
    _altered(folder, files={name: {"bytes": 1, "xxh3_128": "0" * 32}})
    with pytest.raises(CheckpointBroken):
        read_checkpoint(folder)


def test_what_somebodys_exception_said_about_a_rung_never_makes_a_checkpoint_unreadable(folder):
    _altered(folder, changes=[CHANGE | {"why": "line\nline\ud800" + "x" * 5000}])
    [change] = read_checkpoint(folder).changes
    assert change.why.startswith("line line") and len(change.why) == MAX_TEXT_LENGTH and change.changes_result


def test_a_link_in_the_place_of_a_file_is_refused(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes((folder / "state.json").read_bytes())
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to(outside)
    with pytest.raises(CheckpointBroken):
        verify_checkpoint(folder)


def test_a_manifest_too_large_to_be_one_is_not_read(folder):
    with open(folder / "manifest.json", "ab") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CheckpointBroken, match="larger than any such file"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"format": "other"},
        {"position": {"step": -1}},
        {"position": {"stp": 1}},
        {"world_size": 2.5},
        {"files": []},
        {"files": {"a": 3}},
        {"created_at": "yesterday"},
        {"metrics": {"x": "y"}},
        {"changes": {}},
        {"changes": [{"step": 3}]},
        {"changes": [CHANGE | {"step": -1}]},
        {"changes": [CHANGE | {"settings": []}]},
        {"changes": [CHANGE | {"at": "soon"}]},
        {"changes": [CHANGE | {"why": 3}]},
    ],
)
def test_a_manifest_of_another_form_is_refused_with_a_word(folder, changes):
    _altered(folder, **changes)
    with pytest.raises(CheckpointBroken, match="is not a manifest"):
        read_checkpoint(folder)


def test_a_manifest_of_a_newer_kgorch_is_not_taken_for_broken(folder):
    _altered(folder, version=3)
    with pytest.raises(CheckpointUnreadable, match="newer kgorch"):
        read_checkpoint(folder)


def test_folders_are_found_newest_first_and_the_unfinished_ones_not_at_all(tmp_path):
    for step, final in [(2, False), (10, False), (10, True), (9, False)]:
        _checkpoint(tmp_path, step, final=final)
    for other in ["step-00000011.tmp-1.1", "step-00000012.broken", "step-x", "other"]:
        (tmp_path / other).mkdir()
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-00000010-final", "step-00000010", "step-00000009", "step-00000002"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)  # without a disk: test_hostile_files.py has many more
@given(st.data())
def test_any_json_in_any_place_is_a_manifest_or_broken(tmp_path_factory, data):
    folder = _checkpoint(tmp_path_factory.mktemp("fuzz"), 1)
    document = json.loads((folder / "manifest.json").read_text())
    key = data.draw(st.sampled_from([*document, None]))
    document = data.draw(_json) if key is None else document | {key: data.draw(_json)}
    (folder / "manifest.json").write_text(json.dumps(document))
    try:
        assert isinstance(verify_checkpoint(folder), Manifest)
    except (CheckpointBroken, CheckpointUnreadable) as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_broken(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointBroken):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "missing", "no manifest", "another run's", "unreadable", "a link"]
)
def test_the_newest_checkpoint_that_can_be_trusted_is_found_and_nothing_is_lost(tmp_path, monkeypatch, damage):
    before, newest = _checkpoint(tmp_path, 1), _checkpoint(tmp_path, 2)
    shard, told = newest / "rank0.safetensors", []
    if damage == "flipped":
        shard.write_bytes(b"X" + shard.read_bytes()[1:])
    elif damage == "truncated":
        os.truncate(shard, 10)
    elif damage == "missing":
        shard.unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "another run's":
        _altered(newest, run_id="other")
    elif damage == "a link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(untrusted_io, "open_file", _failing_but_for(MANIFEST_NAME))
        with pytest.raises(CheckpointUnreadable):
            store.newest_verified(tmp_path, "id", lambda place, error: told.append(place))
        assert newest.is_dir() and before.is_dir() and not told, "what cannot be read now is not given up"
        return
    found = store.newest_verified(tmp_path, "id", lambda place, error: told.append(place))
    assert found is not None and found[0] == before
    left_alone = damage == "another run's"
    assert told == [newest if left_alone else tmp_path / "step-00000002.broken"] and told[0].is_dir()


def _failing_but_for(whole):
    """A disk that reads one file only."""
    opened = untrusted_io.open_file

    def open_file(folder, name):
        if name == whole:
            return opened(folder, name)
        raise OSError(errno.EIO, "the disk fails")

    return open_file


def test_a_manifest_that_is_a_pipe_is_broken_and_not_waited_for(tmp_path):
    folder = _checkpoint(tmp_path, 1)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(CheckpointBroken):
        read_checkpoint(folder)


# Messages

MESSAGES = [
    Hello("1.1", 0, 5, 3, 100, True),
    Heartbeat("1.1", 1, 2, 3, 0.5, 0.1, metrics={"loss": 0.5}),
    RankProgress("1.1", 1, "step", 2.0, 1.0, {"start": 3.0}),
    CheckpointWritten("1.1", "/x", 3, 10, 0.1, 0.2),
    SaveFailure("1.1", 1, 3, "disk"),
    JournalEntry("1.1", "weights_loaded", {"file": "net.pth"}),
    Command("stop", "the wall"),
    DeadlineUpdate(5.0),
    DeadlineUpdate(None),
    Request("stop"),
    Response(True, "x"),
    JournalEntry("1.1", "exactness", {"data": "keyed"}),
    BufferRequest("1.1", "id", "train", "/x", 1, 2, 4096),
    BufferGrant(2, 4096, 7, 1),
    SnapshotReady("1.1", 1, 7, 0, 42, {"rank1.json": [0, 9]}, False, True, 5.0, 0.1),
    PersistResult(7, "disk"),
    SnapshotInfo("1.1", "id", "train", 42, 7, False, 5.0, [{"rank0.json": [0, 9]}]),
    DeferredFile("1.1", "rank0.status.json", {"outcome": "failed", "error": {"type": "OSError"}}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    assert codec.decode(codec.encode(message).rstrip(b"\n")) == message


@pytest.mark.parametrize(("kind", "facts"), [("Attached", {}), ("x" * 41, {}), ("", {}), ("fine", {"number": 1})])
def test_a_note_of_no_kind_or_with_facts_that_are_no_text_is_refused(kind, facts):
    with pytest.raises(ValueError):
        JournalEntry("1.1", kind, facts)
    document = json.loads(codec.encode(JournalEntry("1.1", "fine", {}))) | {"kind": kind, "facts": facts}
    with pytest.raises(ProtocolError):
        codec.decode(json.dumps(document).encode())


def test_a_field_that_a_newer_side_adds_is_passed_over():
    document = json.loads(codec.encode(Request("stop"))) | {"new": 1}
    assert codec.decode(json.dumps(document).encode()) == Request("stop")


@settings(max_examples=200)
@given(st.binary(max_size=200) | _json.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_message_or_a_wire_error(line):
    with pytest.raises(ProtocolError):
        codec.decode(line)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory():
    reader = LineBuffer()
    with pytest.raises(ProtocolError):
        for _ in range(3):
            reader.feed(b"x" * (MAX_LINE_BYTES // 2 + 1))


def test_a_socket_may_lie_deeper_than_a_socket_name_is_long(tmp_path):
    import socket

    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    name, folder = transport.address(deep / "control.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        os.close(folder)
        server.listen()
        with transport.connect(deep / "control.sock") as connection:
            assert connection.getpeername() == name
