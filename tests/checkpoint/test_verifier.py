"""What the background verification reports of a checkpoint that it has read."""

from __future__ import annotations

import itertools
import json
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from sources import checkpoint, state

from kgorch.checkpoint import store, verify
from kgorch.checkpoint.verifier import Verifier
from kgorch.cli import cli
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol.snapshot_messages import CheckpointWritten


class Records:
    """The loop's side: what was verified with its seconds, and what was passed over."""

    def __init__(self):
        self.times, self.passed = {}, []

    def is_known(self, folder):
        return False

    def verified(self, found, folder, took_s, blocking_s, *, rescued=False):
        self.times[found.step] = took_s

    def passed_over(self, place, error, was):
        self.passed.append((place.name, was))


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def verifier(tmp_path, records):
    made = Verifier(SimpleNamespace(id="r1", checkpoints=str(tmp_path)), records, lambda job: job())
    yield made
    made.close()


def written(folder, took_s=2.0):
    return CheckpointWritten("1.1", str(folder), 0, 0, 0.5, took_s)


def test_a_checkpoint_that_lands_after_its_stage_began_anew_is_not_recorded(verifier, records, tmp_path):
    """The keeper was writing it when memory ran out, and it is of more steps than the new beginning has."""
    late, of_another = checkpoint(tmp_path, 500), checkpoint(tmp_path, 7, stage="predict")
    aside = tmp_path / "train~superseded"
    verifier.note_restart("train", datetime(2026, 11, 20, 12, 30, tzinfo=UTC), lambda: late.rename(aside))
    anew = checkpoint(tmp_path, 20, minute=31)
    for folder in (late, of_another, anew):
        verifier.verify(written(folder))
    assert records.times.keys() == {7, 20} and records.passed == [(late.name, None)] and aside.exists()
    assert verifier.unrecorded(tmp_path / "train") == [anew]


def test_the_time_of_a_save_that_nobody_reported_is_not_known(verifier, records, tmp_path):
    checkpoint(tmp_path, 10)
    reported = checkpoint(tmp_path, 20)
    verifier.verify_unrecorded(tmp_path / "train")
    assert records.times == {10: 0.0, 20: 0.0}
    verifier.verify(written(reported))
    assert records.times[20] > 2.0


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The folders of a run's checkpoints of the steps 10, 20 and 30."""
    home = tmp_path / "home"
    monkeypatch.setenv("KGORCH_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    state(home, (10, 20, 30), folder=str(home / "runs/ink/1"), checkpoints=str(home / "runs/ink/1/checkpoints"))
    return sorted(home.glob("runs/ink/1/checkpoints/train/step-*"))


def test_the_time_in_which_the_machine_sleeps_is_no_part_of_what_a_save_takes(verifier, records, tmp_path, monkeypatch):
    hours, read = itertools.count(), time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: read(which) + 3600.0 * next(hours))
    verifier.verify(written(checkpoint(tmp_path, 3)))
    assert 2.0 <= records.times[3] < 600


def test_a_checkpoint_that_retention_drops_while_others_are_read_is_not_called_broken(saved, monkeypatch):
    read = verify.verify_checkpoint

    def drop_and_read(folder):
        store.delete(saved[1], saved[1].parents[1])
        return read(folder)

    monkeypatch.setattr(verify, "verify_checkpoint", drop_and_read)
    done = CliRunner().invoke(cli, ["checkpoints", "verify", "ink"], catch_exceptions=False)
    assert done.stdout.splitlines() == [f"verified\t{saved[0]}", f"verified\t{saved[2]}"]


def test_a_checkpoint_that_cannot_be_read_now_is_told_and_the_others_are_read(saved):
    newer = saved[0] / "manifest.json"
    newer.write_text(newer.read_text().replace('"version": 1', '"version": 99'))
    done = CliRunner().invoke(cli, ["checkpoints", "verify", "ink", "--json"])
    assert isinstance(done.exception, CheckpointUnreadable) and "1 of 3 checkpoints" in str(done.exception)
    found = json.loads(done.stdout)
    assert [entry["verified"] for entry in found] == [False, True, True] and "newer kgorch" in found[0]["why"]
    (saved[1] / "rank0.safetensors").write_bytes(b"x" * 140)
    done = CliRunner().invoke(cli, ["checkpoints", "verify", "ink"])
    assert isinstance(done.exception, CheckpointBroken) and "1 of 3 checkpoints" in str(done.exception)
    words = ("UNREADABLE", "BROKEN", "verified")
    assert done.stdout.splitlines() == [f"{word}\t{folder}" for word, folder in zip(words, saved, strict=True)]
