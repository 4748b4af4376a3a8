"""Checkpoints in parts: each node's images, and what the supervisor makes of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import wait_until
from saving import Place, save
from torch import nn

from kgorch.checkpoint.manifest import Manifest, manifest_document
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.nodes.partial_saves import PartialSaves
from kgorch.protocol.snapshot_messages import CheckpointWritten, PartWritten, SaveConclusion, SaveFailure
from kgorch.snapshots import checkpoint_parts, keeper_client
from kgorch.snapshots.checkpoint_parts import CheckpointTarget
from kgorch.snapshots.checkpoint_writer import Share

POSITION = {"loop": 1, "epoch": 1, "batch": 2, "step": 7, "samples": 20}
MANIFEST = Manifest(
    run="test", run_id="0" * 32, stage="train", final=False, position=POSITION, world_size=2, divisible=True,
    created_at="2026-01-01T00:00:00+00:00", plan_hash="0" * 16,
)  # fmt: skip


def share(rank: int, tensors: list[str], expected: list[str] | None = None) -> Share:
    """A rank's image of a few bytes."""
    contents = {
        f"rank{rank}.safetensors": b"bytes of a shard" * 10,
        f"rank{rank}.json": json.dumps({"rng": {}, "own": {}, "tensors": tensors}).encode(),
    }
    if expected is not None:
        contents |= {
            "described": json.dumps(manifest_document(MANIFEST)).encode(),
            "tensors": json.dumps(expected).encode(),
            "state.json": b"{}",
        }
    descriptor, spans, start = os.memfd_create("image"), {}, 0
    for name, content in contents.items():
        os.pwrite(descriptor, content, start)
        spans[name] = (start, len(content))
        start += len(content)
    return Share(descriptor, spans)


def write_both(root: Path, expected: list[str] = ["a", "b"]) -> CheckpointTarget:  # noqa: B006
    target = CheckpointTarget(root, "1.1", 7, False)
    checkpoint_parts.write_part([share(0, ["a"], expected)], target, 0, lambda: True)
    checkpoint_parts.write_part([share(1, ["b"])], target, 1, lambda: True)
    return target


def part(node: int, root: Path, **changes: object) -> PartWritten:
    fields = {"attempt": "1.1", "root": str(root), "node": node, "step": 7, "ranks": 1, "all_ranks": 2}
    return PartWritten(**{**fields, "blocking_s": 0.1, "took_s": 0.2, **changes})


class Situation:
    """PartialSaves with what it has told keepers (node, error) and reported."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.reported: list[CheckpointWritten | SaveFailure] = []
        self.all_here = True
        self.saves = PartialSaves(
            lambda node, conclusion: self.told.append((node, conclusion.error)),
            self.reported.append,
            lambda: self.all_here,
        )


def test_two_parts_make_a_checkpoint_that_verifies_and_nothing_else_is_left(tmp_path):
    target = write_both(tmp_path)
    place, size = checkpoint_parts.complete(target, [0, 1])
    manifest = verify_checkpoint(place)
    assert sorted(manifest.files) == [
        "rank0.json",
        "rank0.safetensors",
        "rank1.json",
        "rank1.safetensors",
        "state.json",
    ]
    assert manifest.total_bytes == size
    assert sorted(path.name for path in place.iterdir()) == sorted([*manifest.files, "manifest.json"])
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


@pytest.mark.parametrize("broken", ["missing tensor", "short file", "no part", "strange name", "not json"])
def test_parts_that_do_not_fit_make_no_checkpoint(tmp_path, broken):
    target = write_both(tmp_path, ["a", "b", "c"] if broken == "missing tensor" else ["a", "b"])
    listed = target.temporary / "part1.json"
    if broken == "short file":
        (target.temporary / "rank1.json").write_bytes(b"{")
    elif broken == "no part":
        listed.unlink()
    elif broken == "strange name":
        listed.write_text(json.dumps({"files": {"../x": [1, "0" * 32]}, "tensors": ["b"]}))
    elif broken == "not json":
        listed.write_text("{")
    with pytest.raises(OSError):
        checkpoint_parts.complete(target, [0, 1])
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_leaves_no_file_and_the_others_parts_as_they_are(tmp_path):
    target = CheckpointTarget(tmp_path, "1.1", 7, False)
    for left in ([], ["part1.json", "rank1.json", "rank1.safetensors"]):
        with pytest.raises(OSError, match="filled anew"):
            checkpoint_parts.write_part([share(0, ["a"], ["a", "b"])], target, 0, lambda: False)
        assert sorted(path.name for path in tmp_path.rglob("*.*") if path != target.temporary) == left
        assert target.temporary.exists() == bool(left)
        checkpoint_parts.write_part([share(1, ["b"])], target, 1, lambda: True)


def test_a_keeper_removes_its_part_when_it_is_told_that_the_save_has_failed(tmp_path):
    place = Place(tmp_path)
    place.start_keeper()
    saver = place.saver(0, 2, nodes={"number": 0, "ranks": [1, 1], "address": "", "port": 0})
    temporary = CheckpointTarget(place.root, "1.1", 7, False).temporary
    for _ in range(2):
        assert save(saver, {"model": nn.Linear(4, 4)}, 7, ranks=2)
        wait_until((temporary / "part0.json").exists)
        conclusion = SaveConclusion("1.1", 7, False, "another node has no part")
        wait_until(lambda: keeper_client.conclude(tmp_path, conclusion) or not saver._is_writing())  # noqa: B023
        assert not saver.wait()
        wait_until(lambda: list(place.root.iterdir()) == [])
    place.kill_keeper()


def test_a_save_is_completed_once_all_nodes_have_told_of_their_parts(tmp_path):
    write_both(tmp_path)
    now = Situation()
    now.saves.on_part(part(1, tmp_path))
    assert not now.told
    now.saves.on_part(part(0, tmp_path, blocking_s=0.3))
    [written] = wait_until(lambda: now.reported)
    assert sorted(now.told) == [(0, ""), (1, "")]
    assert isinstance(written, CheckpointWritten) and written.blocking_s == 0.3 and Path(written.path).is_dir()


def test_a_node_whose_part_failed_lets_the_others_go_on_at_once_whoever_comes_first(tmp_path):
    now = Situation()
    now.saves.on_part(part(0, tmp_path))
    now.saves.on_failure(SaveFailure("1.1", -1, 7, "disk full"), 1)
    assert now.told == [(0, "disk full")]
    now.saves.on_failure(SaveFailure("1.1", 1, 9, "no memory"), 1)
    now.saves.on_part(part(0, tmp_path, step=9))
    assert now.told[1][0] == 0 and now.told[1][1]
    # both try the same step again
    write_both(tmp_path)
    now.saves.on_part(part(0, tmp_path))
    now.saves.on_part(part(1, tmp_path))
    assert wait_until(lambda: now.told[2:] and sorted(now.told[2:])) == [(0, ""), (1, "")]


def test_without_all_nodes_nobody_waits_for_a_part(tmp_path):
    now = Situation()
    now.saves.on_part(part(0, tmp_path))
    now.saves.give_up()  # a node was lost
    now.all_here = False
    now.saves.on_part(part(0, tmp_path, step=8))
    assert [node for node, error in now.told if error] == [0, 0]


def test_a_keeper_that_has_nothing_is_not_waited_for(tmp_path):
    now = Situation()
    now.saves.on_part(part(0, tmp_path))
    now.saves.give_up(without=0)
    assert not now.told
    now.saves.give_up(without=1)
    assert [node for node, error in now.told if error] == [0]
