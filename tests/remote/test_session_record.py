"""The record of a session: what the program writes is read, and anything else is taken as what it says or refused."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.core.remote.record_values import RecordOutcome
from kgorch.remote import session_record

RECORD = {
    "format": 1, "nonce": "00ff00ff00ff00ff", "run": "ink", "run_id": "0123456789ab", "number": 2, "outcome": "suspended",
    "exit_code": 10, "stage": "train", "step": 18, "checkpoint": "kgorch/runs/ink/1/checkpoints/train/step-00000018",
    "bytes": 320639, "gpus": ["Tesla T4", "Tesla T4"], "began_at": "2026-11-24T00:05:05+00:00",
    "ended_at": "2026-11-24T02:05:05+02:00", "message": "asked to end\nsaved",
}  # fmt: skip

hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, -2, -300, 2**31, 2**53 + 1, 2**63, 10**40, float("nan"), float("inf"), 1.5, 0]),
    st.text(max_size=8),
    st.sampled_from(
        [
            "..",
            "/etc/passwd",
            "a/../../b",
            "./a",
            "a//b",
            "\0",
            "\ud800",
            "x" * 4000,
            "\x1b[2J",
            "",
            "-rf",
            "a\nb" * 900,
        ]
    ),
    st.lists(st.integers() | st.text(max_size=3), max_size=70),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=3),
)


def is_record_or_refused(content: bytes) -> None:
    try:
        found = session_record.parse(content)
    except ValueError as error:
        assert str(error)
        return
    path = PurePosixPath(found.checkpoint)
    assert not path.is_absolute() and ".." not in path.parts
    assert -1 <= found.step < 2**63 and found.number >= 1 and len(found.gpus) <= 64
    assert all(line.isprintable() for line in [found.run, *found.gpus, *found.message.split("\n")])
    assert len(found.message) <= 64 << 10


def test_the_record_of_a_session_is_read(tmp_path):
    path = tmp_path / "kgorch-session.json"
    path.write_text(json.dumps(RECORD))
    found = session_record.read(path)
    assert (found.outcome, found.step, found.gpus) == (RecordOutcome.SUSPENDED, 18, ("Tesla T4", "Tesla T4"))
    assert found.ended_at == "2026-11-24T00:05:05+00:00" and found.message == "asked to end\nsaved"


@settings(max_examples=400 * int(os.environ.get("KGORCH_FUZZ", "1")), deadline=None, database=None)
@given(hostile)
def test_any_value_in_any_place_of_a_record_is_taken_or_refused(value):
    for key in RECORD:
        is_record_or_refused(json.dumps({**RECORD, key: value}).encode())
    is_record_or_refused(json.dumps(value).encode())


@settings(max_examples=1500 * int(os.environ.get("KGORCH_FUZZ", "1")), deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=4))
def test_a_record_with_changed_bytes_is_taken_or_refused(edits):
    content = json.dumps(RECORD).encode()
    for at, length, put in edits:
        at %= len(content) + 1
        content = content[:at] + put + content[at + length :]
    is_record_or_refused(content)


@pytest.mark.parametrize("key", RECORD)
def test_a_record_without_one_of_its_fields_is_refused_by_name(key):
    record = copy.deepcopy(RECORD)
    del record[key]
    with pytest.raises(ValueError, match=key):
        session_record.parse(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"checkpoint": "/kaggle/working/x"}, "path within"),
        ({"checkpoint": "kgorch/../../x"}, "path within"),
        ({"step": -1}, "contradict"),
        ({"checkpoint": ""}, "contradict"),
        ({"number": 0}, "contradict"),
        ({"format": 2}, "newer kgorch"),
        ({"outcome": "great"}, "great"),
        ({"nonce": "not hexadecimal"}, "expected text"),
        ({"run": "../ink"}, "expected text"),
    ],
)
def test_a_record_that_leads_out_of_the_output_or_contradicts_itself_is_refused(changes, what):
    with pytest.raises(ValueError, match=what):
        session_record.parse(json.dumps({**RECORD, **changes}).encode())


def test_a_record_that_is_a_link_or_too_large_is_not_read(tmp_path):
    (tmp_path / "real").write_text(json.dumps(RECORD))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="a link"):
        session_record.read(tmp_path / "link")
    Path(tmp_path / "large").write_text(json.dumps({**RECORD, "message": "x" * (65 << 10)}))
    with pytest.raises(ValueError, match="larger"):
        session_record.read(tmp_path / "large")
