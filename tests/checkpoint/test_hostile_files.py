"""Manifests, JSON and shard headers from anywhere: read as what they say, or refused with a word; never more memory than
their sizes allow, never a path outside the folder. Some 90,000 cases;
tests/worker/checkpoint/test_hostile_state.py has 35,000 more."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import safetensors
import sharded
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgorch import untrusted_io
from kgorch.admission.source_run import ImportCandidate
from kgorch.checkpoint import safetensors_header
from kgorch.checkpoint.export import export_safetensors
from kgorch.checkpoint.folder import read_checkpoint, write_durably, write_manifest
from kgorch.checkpoint.manifest import FILE_PATTERN, MAX_WORLD_SIZE, FileEntry, Manifest, Position, parse_manifest
from kgorch.checkpoint.sharding import read_sharding
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.health.training_health import HealthIssue
from kgorch.core.session.attempt_outcome import AttemptEnd, failed_step, first_cause, verdict
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from kgorch.launch import launcher

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))
"""How much longer: `make soak`."""

MANY = settings(max_examples=2500, deadline=None, database=None)

hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**40, 1e308, float("nan"), float("inf"), -0.0, 1.5]),
    st.text(max_size=8),
    st.sampled_from(
        ["..", "/etc/passwd", "a/b", "\0", "\ud800", "x" * 2000, "9" * 5000, "__proto__", "1", "\x1b[2J", ""]
    ),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=3),
)


def _places(value, at=()):
    """The way to every value of a document."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*at, key))


def _with(document, at, value):
    if not at:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return changed


def _renamed(document, at, name):
    """The document with one of its keys called otherwise."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    if isinstance(inner, dict):
        inner[name] = inner.pop(at[-1])
    return changed


_edits = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=4)


def _spliced(content: bytes, edits) -> bytes:
    for at, length, put in edits:
        at %= len(content) + 1
        content = content[:at] + put + content[at + length :]
    return content


# Manifests

MANIFEST = {
    "format": "kgorch-checkpoint", "version": 1, "run": "ink", "run_id": "a1", "stage": "train",
    "position": {"loop": 0, "epoch": 1, "batch": 2, "step": 3, "samples": 4},
    "world_size": 2, "created_at": "2026-11-20T10:00:00+00:00", "final": False, "plan_hash": "h",
    "metrics": {"loss": 0.5}, "versions": {"torch": "2.9"},
    "files": {"rank0.safetensors": {"bytes": 7, "xxh3_128": "0" * 32}, "state.json": {"bytes": 2, "xxh3_128": "1" * 32}},
    "changes": [{
        "step": 3, "rung": "set crop=64", "why": "memory ran out", "at": "2026-11-20T10:00:00+00:00", "device": "cpu", "world": 1,
        "up": False, "changes_result": True, "settings": {"settings": {"arguments": {"crop": 64}}, "begins_anew": True},
    }],
}  # fmt: skip


def _is_manifest_or_refused(content: bytes) -> None:
    try:
        found = parse_manifest(content)
    except (ValueError, CheckpointUnreadable) as error:
        assert str(error)
        return
    assert 1 <= found.world_size <= MAX_WORLD_SIZE and 0 <= found.step < 2**63
    assert all(FILE_PATTERN.fullmatch(name) and 0 <= entry.bytes < 2**63 for name, entry in found.files.items())
    json.dumps([found.run, found.stage, *found.metrics, *found.versions], ensure_ascii=False).encode()
    for change in ImportCandidate.of(
        Path("/nowhere"), found
    ).changes:  # what a search keeps of it, to be shown and compared
        assert isinstance(json.loads(change.arguments), dict)
        assert change.anew_at is None or change.anew_at <= datetime.now(UTC)


def test_the_manifest_that_the_cases_begin_with_is_one():
    found = parse_manifest(json.dumps(MANIFEST).encode())
    assert found.position == Position(0, 1, 2, 3, 4)
    [change] = ImportCandidate.of(Path("/nowhere"), found).changes
    assert change.arguments == '{"crop": 64}' and change.anew_at


@settings(MANY, max_examples=700)
@given(hostile)
def test_any_value_in_any_place_of_a_manifest_is_taken_or_refused(value):
    for at in _places(MANIFEST):
        _is_manifest_or_refused(json.dumps(_with(MANIFEST, at, value)).encode())
        if at and isinstance(value, str):
            _is_manifest_or_refused(json.dumps(_renamed(MANIFEST, at, value)).encode())


@pytest.mark.slow
@settings(MANY, max_examples=5_000 * FUZZ)
@given(_edits)
def test_a_manifest_with_changed_bytes_is_taken_or_refused(edits):
    _is_manifest_or_refused(_spliced(json.dumps(MANIFEST).encode(), edits))


# Records of how a rank and torchrun ended

RECORD = {
    "rank": 1, "outcome": "failed", "at": "2026-11-20T10:00:00+00:00", "at_s": 12.5, "began": True,
    "error": {
        "type": "builtins.RuntimeError", "message": "out of memory", "memory": "host", "step": 3, "traceback": "…",
        "trouble": {"kind": "loss", "rank": 1, "step": 3, "what": "loss is nan", "call": 0, "since": 2},
    },
}  # fmt: skip
LEFT = {"pid": 1, "started_ticks": 5, "torchrun": 7, "status": -9, "kernel_kills": 1, "at": "", "at_s": 2.5}


def _ends_in_an_event(folder: Path, records: int, told: dict[str, dict] = launcher.NO_FILES) -> None:
    found = launcher.records(folder, 2, told)
    kills, killed = launcher.kernel_kills(folder, told), launcher.was_sigkilled(folder, told)
    status = launcher.describe_exit(folder, told)
    ended = AttemptEnd(2, found, status, False, 0, False, kernel_kills=kills, was_sigkilled=killed)
    assert len(found) <= records and verdict(ended)
    json.dumps(first_cause(ended), ensure_ascii=False).encode()
    assert failed_step(ended, 5) < 2**63


def test_the_record_that_the_cases_begin_with_is_one(tmp_path):
    [found] = launcher.records(tmp_path, 2, {"rank1.status.json": RECORD})
    assert (found.rank, found.error_type, found.step, found.at_s) == (1, "builtins.RuntimeError", 3, 12.5)
    assert found.trouble == HealthIssue("loss", 1, 3, "loss is nan", since=2)


def test_a_signal_that_has_no_name_is_told_by_its_number(tmp_path):
    assert launcher.describe_exit(tmp_path, {"exit.json": {"status": -9}}) == "torchrun was ended by SIGKILL"
    assert launcher.describe_exit(tmp_path, {"exit.json": {"status": -40}}) == "torchrun was ended by signal 40"


@settings(MANY, max_examples=400)
@given(hostile)
def test_any_value_in_any_place_of_a_record_is_taken_or_passed_over(value):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for at in _places(RECORD):
            record = _with(RECORD, at, value)
            (folder / "rank1.status.json").write_text(json.dumps(record))
            _ends_in_an_event(folder, 1)
            if isinstance(record, dict):
                _ends_in_an_event(Path("/nowhere"), 1, {"rank0.status.json": record})
        for at in _places(LEFT):
            left = json.dumps(_with(LEFT, at, value))
            (folder / "exit.json").write_text(left)
            (folder / "shim.json").write_text(left)
            _ends_in_an_event(folder, 1)
            launcher.torchrun_pid(folder)
            launcher.shim_environment(folder)


@settings(MANY, max_examples=25)
@given(hostile, st.sampled_from(list(_places(LEFT))))
def test_whatever_an_attempt_has_left_ending_it_signals_nobody(value, at):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("exit.json", "shim.json"):
            (folder / file).write_text(json.dumps(_with(LEFT, at, value)))
        assert launcher.kill(folder)


@pytest.mark.parametrize(
    "told", [{}, {"pid": 0}, {"pid": -1, "started_ticks": 0}, {"pid": 2**70}, {"pid": os.getpid()}]
)
def test_an_attempt_that_runs_and_whose_file_lies_is_not_ended_by_ending_another(tmp_path, told):
    (tmp_path / "shim.json").write_text(json.dumps(told))
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not launcher.kill(tmp_path, patience_s=0.1), "we live, and it is said that it does"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        "[" * 101 + "]" * 101,
        "[" * 10**6,
        '{"a":' * 10**5,
        '["\\"", "[[[[", [' + "[" * 100,
        '{"a": 1}x',
        "1e999999999999" * 2,
        "9" * 5000,
        "\ufeff{}",
    ],
)
def test_json_that_is_ambiguous_deep_or_endless_is_refused(text):
    with pytest.raises(ValueError):
        untrusted_io.parse_json(text.encode())
    with pytest.raises(ValueError):
        untrusted_io.parse_json(text.encode("utf-16"))


def test_brackets_in_text_are_no_nesting_and_a_hundred_levels_are_allowed():
    value = ['\\"[' * 500, "\\", {"}": "\\\\"}]
    assert untrusted_io.parse_json(json.dumps(value).encode()) == value
    assert untrusted_io.parse_json(b"[" * 100 + b"]" * 100)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    deep: list = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(OSError, match="nested deeper"):
        write_durably(tmp_path / "state.json", json.dumps(deep).encode())
    with pytest.raises(OSError, match="read again"):
        write_manifest(tmp_path, Manifest("run", "id", "tr\nain", Position(), 1, "2026-11-20T10:00:00+00:00"))
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_figure_never_makes_a_checkpoint_unreadable(tmp_path):
    odd = Manifest(
        "run", "id", "train", Position(), 1, "2026-11-20T10:00:00+00:00", metrics={"f\ud800\n": float("nan")}
    )
    write_manifest(tmp_path, odd)
    assert list(read_checkpoint(tmp_path).metrics) == ["f\\ud800\n"]


# Shards


def _shard(header, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


HEADER = {
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "I64", "shape": [0, 4], "data_offsets": [26, 26]},
    "mask": {"dtype": "BOOL", "shape": [2], "data_offsets": [26, 28]},
}


def _spans_of(content: bytes) -> dict[str, safetensors_header.Span]:
    descriptor = os.memfd_create("shard")
    with FileIO(descriptor, "rb") as file:
        os.write(descriptor, content)
        return safetensors_header.read_open(file, Path("rank0.safetensors"))


def _is_shard_or_refused(content: bytes) -> None:
    """What is taken fills the file exactly, and the library reads the same from it."""
    try:
        found = _spans_of(content)
    except CheckpointBroken as error:
        assert "rank0.safetensors is not a shard" in str(error)
        return
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    assert sum(span.size for span in found.values()) == len(content) - begin
    by_library = dict(safetensors.deserialize(content))
    assert by_library.keys() == found.keys()
    for name, span in found.items():
        assert (by_library[name]["dtype"], tuple(by_library[name]["shape"])) == (span.dtype, span.shape)
        assert bytes(by_library[name]["data"]) == content[span.start : span.start + span.size]


def test_a_shard_is_read_as_the_library_reads_it():
    content = _shard(HEADER, bytes(28))
    assert _spans_of(content)["mask"] == safetensors_header.Span("BOOL", (2,), len(content) - 2, 2)
    _is_shard_or_refused(content)


@settings(MANY, max_examples=900)
@given(hostile)
def test_any_value_in_any_place_of_a_shards_header_is_taken_or_refused(value):
    for at in _places(HEADER):
        _is_shard_or_refused(_shard(_with(HEADER, at, value), bytes(28)))
        if at and isinstance(value, str):
            _is_shard_or_refused(_shard(_renamed(HEADER, at, value), bytes(28)))


@pytest.mark.slow
@settings(MANY, max_examples=4_000 * FUZZ)
@given(_edits)
def test_a_shard_with_changed_bytes_is_taken_or_refused(edits):
    _is_shard_or_refused(_spliced(_shard(HEADER, bytes(28)), edits))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"b": {"dtype": "BF16", "shape": [], "data_offsets": [20, 22]}}, "expected"),
        ({"b": {"dtype": "BF16", "shape": [1], "data_offsets": [25, 27]}}, "begins at byte"),
        ({"mask": {"dtype": "BOOL", "shape": [1], "data_offsets": [26, 27]}}, "the file at"),
        ({"mask": {"dtype": "BOOL", "shape": [2**70], "data_offsets": [26, 28]}}, "not a shape"),
        ({"empty": {"dtype": "I64", "shape": [0, 2**62, 2**62], "data_offsets": [26, 26]}}, "not a shape"),
        ({"b": {"dtype": "object", "shape": [], "data_offsets": [24, 26]}}, "unknown dtype"),
        ({"__metadata__": {"x": 1}}, "no table of texts"),
    ],
)
def test_a_header_that_lies_is_told_what_is_wrong(change, said):
    with pytest.raises(CheckpointBroken, match=said):
        _spans_of(_shard(HEADER | change, bytes(28)))


# Sharded tensors

SHARDED = sharded.documents(
    {"w": sharded.array((5, 4)), "b": sharded.array((3,), "uint8"), "plain": sharded.array((2,))},
    {"w": (2, 2), "b": (3,)},
)


def _is_sharded_tensor_or_refused(root: Path, contents: dict) -> None:
    """What is taken has pieces that cover each tensor exactly, which lie in their shards as they are listed."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = sharded.write(Path(name), contents)
        try:
            found = read_sharding(folder, read_checkpoint(folder))
        except CheckpointBroken as error:
            assert "has an invalid sharding.json" in str(error) or "is broken" in str(error)
            return
        for path, tensor in found.tensors.items():
            counts = np.zeros(tensor.shape, dtype=int)
            for file, region in found.pieces[path]:
                counts[region.slices] += 1
                span = safetensors_header.read(folder, file)[path]
                assert (span.dtype, span.shape) == (tensor.dtype, region.shape)
            assert (counts == 1).all()
        out = Path(name) / "out.safetensors"
        export_safetensors(folder, out, None)
        assert safetensors.safe_open(out, "numpy").keys()


def test_the_sharded_checkpoint_that_the_cases_begin_with_is_one(tmp_path):
    found = read_sharding(folder := sharded.write(tmp_path / "folder", SHARDED), read_checkpoint(folder))
    assert {path: len(pieces) for path, pieces in found.pieces.items()} == {"w": 4, "b": 3}
    _is_sharded_tensor_or_refused(tmp_path, SHARDED)


@pytest.mark.parametrize("name", ["sharding.json", "rank1.json"])
@settings(MANY, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=hostile)
def test_any_value_in_any_place_of_a_sharding_is_taken_or_refused(tmp_path, name, value):
    for at in _places(SHARDED[name]):
        changed = [_with(SHARDED[name], at, value)]
        if at and isinstance(value, str):
            changed.append(_renamed(SHARDED[name], at, value))
        for document in changed:
            _is_sharded_tensor_or_refused(tmp_path, SHARDED | {name: document})


def _changed(**pieces) -> dict:
    """The contents with other pieces of ranks: rank → path → piece, or None for none."""
    contents = copy.deepcopy(SHARDED)
    for rank, changes in pieces.items():
        for path, piece in changes.items():
            contents[f"{rank}.json"]["pieces"].pop(path, None)
            if piece:
                contents[f"{rank}.json"]["pieces"][path] = piece
    return contents


def _holder(path: str, offset: list[int]) -> str:
    """The rank that has the piece at this offset."""
    ranks = (name.removesuffix(".json") for name in SHARDED if name.startswith("rank") and name.endswith(".json"))
    return next(rank for rank in ranks if SHARDED[f"{rank}.json"]["pieces"].get(path, [None])[0] == offset)


@pytest.mark.parametrize(
    ("offset", "piece", "said"),
    [
        ([0, 0], None, "its rank lists no such piece|no piece covers"),
        ([3, 2], [[3, 1], [2, 2]], "no piece covers|overlap"),
        ([3, 2], [[0, 0], [3, 2]], "overlap|no piece covers"),
        ([3, 2], [[3, 2], [3, 2]], "exceeds the shape"),
        ([3, 2], [[3, 2], [2, 0]], "is empty"),
        ([3, 2], [[3, 2, 0], [2, 2, 1]], "exceeds the shape"),
        ([3, 2], [[3, 2]], "not a piece"),
        ([3, 2], [[-3, 2], [2, 2]], "not a piece"),
        ([3, 2], [[2**70, 2], [2, 2]], "not a piece"),
    ],
)
def test_a_piece_that_lies_is_refused_with_the_name_of_its_tensor(tmp_path, offset, piece, said):
    folder = sharded.write(tmp_path / "folder", _changed(**{_holder("w", offset): {"w": piece}}))
    for deed in (verify_checkpoint, lambda place: export_safetensors(place, tmp_path / "out", None)):
        with pytest.raises(CheckpointBroken, match=rf"invalid sharding(.|\n)*'w'(.|\n)*({said})|({said})(.|\n)*'w'"):
            deed(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "F64"}, "expected F64"),
        ({"dtype": "object"}, "unknown dtype"),
        ({"shape": [2**62, 2**62]}, "not a shape"),
        ({"shape": [5, 4, 1]}, "exceeds the shape"),
        ({"shape": [50, 4]}, "no piece covers index 5"),
        ({"mesh": 1}, "on mesh 1 of 1"),
        ({"placements": ["S(0)", "R"]}, "2 placements on mesh 0"),
        ({"placements": ["S(2)"]}, "not a placement"),
        ({"placements": ["P"]}, "not a placement"),
    ],
)
def test_a_layout_that_lies_is_refused_with_the_name_of_its_tensor(tmp_path, change, said):
    contents = copy.deepcopy(SHARDED)
    contents["sharding.json"]["tensors"]["w"] |= change
    folder = sharded.write(tmp_path / "folder", contents)
    with pytest.raises(CheckpointBroken, match=rf"'w'(.|\n)*{re.escape(said)}"):
        read_sharding(folder, read_checkpoint(folder))


# Folders


def _checkpoint(root: Path, tree: object, header=HEADER, body: bytes = bytes(28)) -> Path:
    folder = root / "step-00000001"
    folder.mkdir()
    files = {}
    for name, content in {"rank0.safetensors": _shard(header, body), "state.json": json.dumps(tree).encode()}.items():
        (folder / name).write_bytes(content)
        files[name] = FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())
    at = "2026-11-20T10:00:00+00:00"
    write_manifest(folder, Manifest("run", "id", "train", Position(), 1, at, files=files))
    return folder


@pytest.mark.parametrize("name", ["manifest.json", "rank0.safetensors", "state.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_what_is_no_file_holds_nobody_up_and_is_refused(tmp_path, name, kind):
    folder = _checkpoint(tmp_path, {})
    path = folder / name
    path.rename(tmp_path / name)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / name)
    for deed in (verify_checkpoint, lambda place: export_safetensors(place, tmp_path / "out", None)):
        with pytest.raises(CheckpointBroken):
            deed(folder)


def test_a_pipe_that_takes_a_files_place_after_it_was_looked_at_is_refused_too(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Path, "lstat", lambda path: os.lstat(path.with_name("file")))
    with pytest.raises(OSError, match="not a regular file"):
        untrusted_io.open_file(tmp_path, "pipe")


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"$tensor": "nowhere"}},
        {"a": {"$tensor": 3}},
        {"a": {"$tensor": ["b"]}},
        {"x" * 2000: {"$tensor": "b"}},
        {"\ud800": {"$tensor": "b"}},
        {"": {"$tensor": "b"}},
        {"__metadata__": {"$tensor": "b"}},
        {"a.b": {"$tensor": "b"}, "a": {"b": {"$tensor": "b"}}},
    ],
)
def test_an_export_of_a_state_whose_names_are_hostile_is_refused_and_leaves_nothing(tmp_path, tree):
    folder = _checkpoint(tmp_path, {"model": tree})
    with pytest.raises(CheckpointBroken, match="cannot be exported"):
        export_safetensors(folder, tmp_path / "out", "model")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_an_export_larger_than_the_disk_is_refused_before_it_is_written(tmp_path):
    body = 1 << 30
    header = {"big": {"dtype": "U8", "shape": [body], "data_offsets": [0, body]}}
    folder = _checkpoint(tmp_path, {}, header, b"")
    os.truncate(folder / "rank0.safetensors", len(_shard(header, b"")) + body)  # sparse
    tree = json.dumps({"model": {f"copy{number}": {"$tensor": "big"} for number in range(100_000)}}).encode()
    (folder / "state.json").write_bytes(tree)
    files = {
        path.name: FileEntry(path.stat().st_size, xxhash.xxh3_128(tree).hexdigest())
        for path in (folder / "state.json", folder / "rank0.safetensors")
    }
    write_manifest(folder, Manifest("run", "id", "train", Position(), 1, "2026-11-20T10:00:00+00:00", files=files))
    with pytest.raises(KgorchError, match="no room for 107374182400000 bytes"):
        export_safetensors(folder, tmp_path / "out", "model")


def test_huge_sizes_take_no_memory_and_no_file_outside_the_folder_is_opened(tmp_path):
    """In a process that may take 900 MB in all, and that writes down what it opens."""
    program = """
import json, os, resource, struct, sys; from pathlib import Path
from kgorch import untrusted_io
from kgorch.checkpoint import safetensors_header
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
import concurrent.futures.thread  # verify's, before opens are counted
root, opened, counting = Path(sys.argv[1]), set(), False
sys.addaudithook(lambda event, args: counting and event == "open" and isinstance(args[0], (str, Path)) and opened.add(str(args[0])))
resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))
valid = json.loads(sys.stdin.read())
def put(name, content, size=0):
    (root / name).write_bytes(content)
    os.truncate(root / name, max(size, len(content)))
def refused(deed):
    global counting
    counting = True
    try: deed()
    except (CheckpointBroken, CheckpointUnreadable): return
    finally: counting = False
    raise SystemExit("taken: " + str(deed))
verify = lambda: verify_checkpoint(root)
header = lambda: safetensors_header.read(root, "rank0.safetensors")
for length in (2**64 - 1, 2**63, 2**40 - 8, 200 << 20, 30 << 20):
    put("rank0.safetensors", struct.pack("<Q", length), 2**40); refused(header)
table = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (2**50, 2**50)
put("rank0.safetensors", struct.pack("<Q", len(table)) + table); refused(header)
many = b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(200_000)) + b"}"
put("rank0.safetensors", struct.pack("<Q", len(many)) + many); refused(header)
put("manifest.json", b"{", 2**40); refused(verify)
for bomb in (b"[" * (4 << 20), b"[]," * (1 << 20), b'{"a":' * (1 << 19), b'"' * (4 << 20), b'"' + b"\\\\" * (2 << 20)):
    put("manifest.json", bomb[: 4 << 20]); refused(verify)
bombs = [b"[" + item * (20 << 20) + item[:2] + b"]" for item in (b"[],", b"{},")] + [b"[" * (60 << 20)]
for bomb in [*bombs, b'["' + b'\\\\"' * (30 << 20) + b'"']:
    try: untrusted_io.parse_json(bomb)
    except ValueError: pass
    else: raise SystemExit("taken: a bomb")
for name in ("../outside", "/etc/hostname", "a/../../outside", "..", "./outside", "sub/inner"):
    put("manifest.json", json.dumps(valid | {"files": {name: {"bytes": 1, "xxh3_128": "0" * 32}}}).encode()); refused(verify)
for change in ({"world_size": 10**9}, {"world_size": 10**30}, {"position": {"step": 2**63}}, {"metrics": {"x": 10**400}}):
    put("manifest.json", json.dumps(valid | change).encode()); refused(verify)
strangers = [path for path in opened if not path.startswith(str(root) + "/")]
assert not strangers and len(opened) >= 2, opened
"""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, input=json.dumps(MANIFEST), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
