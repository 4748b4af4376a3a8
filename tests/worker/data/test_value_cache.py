"""session.cached: computed once by rank 0, agreed by all, and trusted only as far as a stranger's file may be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ranks

from kgorch.errors import KgorchError
from kgorch.protocol.run_files import MAX_CACHED_BYTES
from kgorch.worker.data import value_cache
from kgorch.worker.telemetry.progress_marker import ProgressMarker

FOUND = "found {'sizes': [[256, 256], [256, 256], [256, 256]], 'key': '%s'}"


def run(folder: Path, keys: str, **args) -> ranks.Attempt:
    return ranks.run(folder, "caches.py", 2, {"keys": keys, **args}, cached=str(folder / "cached"))


def test_of_two_ranks_one_computes_and_the_next_session_none_until_the_key_changes(tmp_path):
    for keys, told, said in (("a", ["0 a"], "a"), ("a_b_b", ["0 a", "0 b"], "aabb")):
        found = run(tmp_path, keys)
        assert found.codes == [0, 0], found.said()
        for rank in range(2):
            assert found.lines(rank, starting="found") == [FOUND % key for key in said], "a log goes on"
        assert (tmp_path / "outputs" / "computed").read_text().splitlines() == told


def test_what_fails_on_the_first_rank_ends_the_others_as_its_consequence(tmp_path):
    found = run(tmp_path, "a", fails=True)
    assert found.codes == [1, 1]
    told = [json.loads((tmp_path / f"rank{rank}.status.json").read_text())["error"] for rank in (0, 1)]
    assert told[0]["message"] == "the list is gone" and not told[0]["is_collateral"]
    assert told[1]["is_collateral"] and told[1]["place"] == "wait"


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nowhere = value_cache.ValueStore(None)
    nowhere.write("headers", "k", b"1")
    assert nowhere.read("headers", "k") is None and not list(tmp_path.iterdir())


@pytest.fixture
def store(tmp_path) -> value_cache.ValueStore:
    return value_cache.ValueStore(tmp_path / "cached")


def kept(tmp_path: Path) -> Path:
    return tmp_path / "cached" / "headers.json"


def test_what_was_written_is_read_under_the_same_key_alone(store, tmp_path):
    key = value_cache.key_of({"list": ["a.csv", 12, 1.5], "b": None})
    store.write("headers", key, b'{"a":[1,2]}')
    assert store.read("headers", key) == b'{"a":[1,2]}'
    assert key == value_cache.key_of({"b": None, "list": ["a.csv", 12, 1.5]})
    for other in ({"list": ["a.csv", 13, 1.5], "b": None}, {"list": ["a.csv", 12, 1.5], "b": 0}, [], None):
        assert store.read("headers", value_cache.key_of(other)) is None
    assert [path.name for path in (tmp_path / "cached").iterdir()] == ["headers.json"]


def _as_written(value: bytes, **changed: object) -> bytes:
    return json.dumps(value_cache._head("k", value) | changed).encode() + b"\n" + value


HOSTILE = {
    "cut off": _as_written(b'{"a":1}')[:-1],
    "another byte": _as_written(b'{"a":1}')[:-2] + b"2}",
    "more behind it": _as_written(b'{"a":1}') + b" ",
    "another format": _as_written(b"1", format="pickle"),
    "a newer version": _as_written(b"1", version=2),
    "another key": _as_written(b"1", key="other"),
    "fields besides": _as_written(b"1", path="../../x"),
    "no line before it": b'{"a":1}',
    "an endless line": b"{" * 5000,
    "no JSON": _as_written(b"cos\nsystem\n(S'id'\ntR."),
    "very deep": _as_written(b"[" * 5000 + b"]" * 5000),
    "a key twice": _as_written(b'{"a":1,"a":2}'),
    "very many values": _as_written(b"[" + b"1," * (5 << 20) + b"1]"),
    "empty": b"",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_broken_or_hostile_file_is_as_none_at_all(content, store, tmp_path):
    kept(tmp_path).parent.mkdir()
    kept(tmp_path).write_bytes(content)
    assert store.read("headers", "k") is None
    store.write("headers", "k", b"1")
    assert store.read("headers", "k") == b"1"


def test_a_link_a_pipe_and_a_huge_file_are_not_read(store, tmp_path):
    kept(tmp_path).parent.mkdir()
    (tmp_path / "elsewhere").write_bytes(_as_written(b"1"))
    kept(tmp_path).symlink_to(tmp_path / "elsewhere")
    assert store.read("headers", "k") is None
    kept(tmp_path).unlink()
    os.mkfifo(kept(tmp_path))
    assert store.read("headers", "k") is None
    kept(tmp_path).unlink()
    with open(kept(tmp_path), "wb") as file:
        file.truncate(MAX_CACHED_BYTES + 1)
    assert store.read("headers", "k") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1, 2}, "cannot be stored as JSON"),
        (float("nan"), "cannot be stored as JSON"),
        ("x" * (64 << 20), "67108866 bytes of JSON, more than 67108864"),
        ([0] * (5 << 20), "values in one document"),
    ],
    ids=["a set", "no number", "64 MiB", "very many"],
)
def test_a_value_that_could_not_be_read_again_is_refused_at_once(value, text):
    with pytest.raises(KgorchError, match=text) as refused:
        value_cache.value_of("headers", value)
    assert refused.value.next_step


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 200, "a\n", "ü"])
def test_a_name_is_a_plain_file_name(name):
    with pytest.raises(KgorchError, match="expected letters"):
        value_cache.check_name(name)


def test_progress_is_told_now_and_then_with_the_time_that_is_left(monkeypatch, capsys):
    now, told = [100.0], []
    monkeypatch.setattr(value_cache.time, "monotonic", lambda: now[0])
    progress = value_cache.ProgressLog(ProgressMarker(), lambda kind, facts: told.append((kind, facts)))
    for done in range(1001):
        progress.to("headers", done, 1000)
        now[0] += 0.25
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 25 and lines[0] == "headers: 40 of 1000 in 10 s, 240 s left"
    assert lines[-1] == "headers: 1000 of 1000 in 250 s"
    assert [facts["done"] for _, facts in told] == ["40", "280", "520", "760", "1000"]
    assert told[0] == ("reading", {"what": "headers", "done": "40", "total": "1000", "left_s": "240"})
