"""Checkpoints of a foreign program are copied when complete, kept as checkpoints of the run, and put back at their place."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from harness import wait_until

from kgorch.checkpoint.folder import read_manifest
from kgorch.checkpoint.foreign_contents import CONTENTS_NAME, read_contents
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.core.checkpoint.log_order import LogLength, LogLine, LogOrder
from kgorch.core.codes import EventKind
from kgorch.errors import CheckpointBroken, KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry
from kgorch.protocol.snapshot_messages import CheckpointWritten, SaveFailure
from kgorch.system.clock import boottime_s
from kgorch.worker.foreign import checkpoint_copy, checkpoint_watch
from kgorch.worker.foreign.checkpoint_labels import ProgramPosition
from kgorch.worker.foreign.checkpoint_watch import CheckpointWatch
from kgorch.worker.foreign.claim import Claim

PATTERN = "out/checkpoint-*"


class Site:
    """A plan's folder, the run's checkpoints, and what the agent sent."""

    def __init__(self, root: Path, *, run: str = "1", home: Path | None = None, **foreign) -> None:
        self.root, self.claims = root, (home or root) / "claims"
        self.store = root / f"store-{run}" / "train"
        section = {"processes": 2, "incomplete": [], "settled_s": 0.3} | foreign
        self.launch = LaunchSpec(
            "run", run, "train", "1.1", str(root / "attempt"), "train.py", str(root / "work"), 1, "", str(self.store), "", "",
            foreign=section,
        )  # fmt: skip
        (root / "work").mkdir(exist_ok=True, parents=True)
        self.sent: list = []
        self.position = ProgramPosition([], {"loss": 0.5})

    def watch(self, resume: Path | None = None, pattern: str = PATTERN, step: int | None = None) -> CheckpointWatch:
        launch = replace(self.launch, resume=str(resume) if resume else None)
        if step is not None:
            self.position = self.position._replace(history=[(0, step)])
        return CheckpointWatch(launch, pattern, self.sent.append, lambda: self.position)

    def save(self, name: str, *, content: bytes = b"weights", extra: bool = True) -> Path:
        folder = self.root / "work" / "out" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub" / "weights.bin").write_bytes(content)
        if extra:
            (folder / "state.json").write_text('{"step": 1}')
        return folder

    def written(self) -> list[Path]:
        return [Path(message.path) for message in self.sent if isinstance(message, CheckpointWritten)]

    def skipped(self) -> dict[str, str]:
        notes = [message.facts for message in self.sent if isinstance(message, JournalEntry)]
        return {facts["checkpoint"]: facts["why"] for facts in notes if "checkpoint" in facts}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def taken(watch: CheckpointWatch, step: int) -> Path:
    def look() -> bool:
        watch.look(now=True)
        return watch.step == step

    wait_until(look, within_s=20, what=f"step {step}")
    if watch._copying:
        watch._copying.join()  # it reports what it has taken
    assert watch.newest
    return watch.newest


def left_by_a_session(site: Site, step: int) -> Path:
    """The copy of the checkpoint of that step, which a session has taken."""
    watch = site.watch()
    watch.begin(site.claims)
    site.save(f"checkpoint-{step}")
    folder = taken(watch, step)
    watch.close()
    return folder


def test_a_complete_checkpoint_becomes_one_of_the_run_with_hashes_and_the_programs_names(site):
    watch = site.watch()
    assert watch.begin(site.claims) == ""
    site.save("checkpoint-500")
    folder = taken(watch, 500)
    manifest = verify_checkpoint(folder)
    assert (manifest.step, manifest.run_id, manifest.world_size, manifest.metrics) == (500, "1", 2, {"loss": 0.5})
    _, contents = read_contents(folder, PATTERN)
    assert contents.path == "out/checkpoint-500" and sorted(contents.files.values()) == [
        "state.json",
        "sub/weights.bin",
    ]
    assert site.written() == [folder] and folder.name == "step-00000500"


def printed(site: Site, **steps: tuple[int, float]) -> None:
    """Metrics that the program has printed: of each the step, and the value."""
    metrics, measured, values = dict(site.position.metrics), dict(site.position.measured), dict(site.position.values)
    for name, (step, value) in steps.items():
        metrics[name], measured[name] = value, step
        values[step] = {**values.get(step, {}), name: value}
    site.position = site.position._replace(metrics=metrics, measured=measured, values=values)
    logged(site, *(step for step, _ in steps.values()))


def logged(site: Site, *steps: int) -> None:
    """Steps that the program's log has come to."""
    history = [*site.position.history, *((time.time_ns(), step) for step in steps)]
    site.position = site.position._replace(history=history)


def competes_by(folder: Path, name: str) -> float | None:
    """The metric that was measured on the weights of a checkpoint, as core/checkpoint/retention.py sees it."""
    manifest = read_manifest(folder)
    return manifest.metrics[name] if manifest.measured.get(name) == manifest.step else None


def proven() -> bytes:
    """A file whose format proves it whole."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("data", "weights")
    return file.getvalue()


def takes_nothing(watch: CheckpointWatch) -> bool:
    """In as much time as a checkpoint waits that its files prove whole."""
    for _ in range(3):
        watch.look(now=True)
        time.sleep(0.6)
    return watch.step == -1


def test_folders_that_are_written_more_often_than_they_settle_prove_each_other_whole(site):
    """None was ever taken: of the first one nothing says which files it has to have."""
    site.launch.foreign["settled_s"] = 600.0
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-40", content=proven())
    assert takes_nothing(watch)
    begun = site.root / "work" / "out" / "checkpoint-80"
    begun.mkdir()
    (begun / "state.json").write_text("{}")
    assert taken(watch, 40)
    site.save("checkpoint-80", content=proven())
    assert taken(watch, 80)


def test_a_file_that_is_overwritten_every_second_is_taken_in_between(site):
    """Looks a second apart saw another one each time."""
    watch = site.watch()
    watch.begin(site.claims)
    until_s, ended = time.monotonic() + 20, threading.Event()

    def overwrites():
        while not ended.wait(0.9) and time.monotonic() < until_s:
            site.save("checkpoint-40", content=proven(), extra=False)

    program = threading.Thread(target=overwrites)
    program.start()
    try:
        while watch.step < 0 and time.monotonic() < until_s:
            watch.look()
            time.sleep(0.05)
    finally:
        ended.set()
        program.join()
    assert watch.step == 40


def test_what_had_been_written_before_a_stop_was_not_saved_by_it_though_it_is_copied_later(site):
    """`kgorch check` said that a wall would lose nothing."""
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-40")
    watch.see()
    asked_s = boottime_s()
    assert taken(watch, 40) and not watch.has_saved_since(asked_s)
    site.save("checkpoint-80")
    assert taken(watch, 80) and watch.has_saved_since(asked_s)


def written_at(folder: Path, at_s: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (at_s, at_s))


@pytest.mark.parametrize(
    ("begun", "taken_path", "skipped"),
    [
        (["state.json"], "out/checkpoint-80", ["out/checkpoint-120"]),
        ([], "out/checkpoint-40", ["out/checkpoint-80"]),
        (["state.json", "optimizer.json"], "", ["out/checkpoint-120", "out/checkpoint-80", "out/checkpoint-40"]),
    ],
)
def test_after_a_kill_the_newest_folder_is_taken_that_has_all_files_of_another_one(site, begun, taken_path, skipped):
    """And after which the program has begun another one: the newest may be incomplete, whatever lies beside it."""
    watch = site.watch()
    watch.begin(site.claims)
    for step in (40, 80):
        written_at(site.save(f"checkpoint-{step}", content=proven()), 1e9 + step)
    for name in begun:
        path = site.root / "work" / "out" / "checkpoint-120" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    watch.close()
    watch = site.watch()
    assert watch.begin(site.claims) == taken_path
    assert list(site.skipped()) == skipped


def test_what_lay_there_before_the_run_does_not_prove_a_folder_whole(tmp_path):
    site = Site(tmp_path, settled_s=600.0)
    written_at(site.save("checkpoint-9", content=proven()), time.time() + 1000)
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-10", content=proven())
    assert takes_nothing(watch)


def test_a_metric_that_is_printed_after_the_copy_is_that_of_the_checkpoint_at_its_step(site):
    site.launch = replace(site.launch, best={"metric": "dice", "highest": True, "value": None})
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1000")
    first = taken(watch, 1000)
    printed(site, dice=(1000, 0.91), loss=(1050, 0.3))
    site.save("checkpoint-1100")
    second = taken(watch, 1100)
    assert (competes_by(first, "dice"), competes_by(second, "dice")) == (0.91, None)
    assert read_manifest(second).metrics["dice"] == 0.91 and read_manifest(second).measured["dice"] == 1000
    assert competes_by(second, "loss") is None
    assert site.written() == [first, first, second], "the supervisor learns of it"
    assert verify_checkpoint(first).step == 1000
    printed(site, dice=(1100, 0.8))
    watch.finish(is_clean=True)
    assert competes_by(second, "dice") == 0.8 and site.written()[3:] == [second]


def test_a_metric_that_is_printed_before_the_save_or_superseded_before_the_copy_is_that_of_the_checkpoint(site):
    watch = site.watch()
    watch.begin(site.claims)
    printed(site, dice=(1000, 0.91), loss=(1000, 0.5))
    printed(site, loss=(1020, 0.2))
    site.save("checkpoint-1000")
    folder = taken(watch, 1000)
    assert (competes_by(folder, "dice"), competes_by(folder, "loss")) == (0.91, 0.5)
    assert site.written() == [folder]


def test_a_metric_that_is_printed_again_and_again_at_a_step_counts_with_its_last_value_once_the_log_has_left_it(site):
    site.launch = replace(site.launch, best={"metric": "dice", "highest": True, "value": None})
    watch = site.watch()
    watch.begin(site.claims)
    printed(site, dice=(1000, 0.1))
    site.save("checkpoint-1000")
    first = taken(watch, 1000)
    assert competes_by(first, "dice") is None
    for value in (0.5, 0.91):
        printed(site, dice=(1000, value))
        watch.look(now=True)
    assert site.written() == [first]
    logged(site, 1001)
    site.save("checkpoint-1100")
    second = taken(watch, 1100)
    assert competes_by(first, "dice") == 0.91 and site.written() == [first, first, second]
    printed(site, dice=(1200, 0.7))
    site.save("checkpoint-1200")
    watch.finish(is_clean=True)
    assert competes_by(watch.newest, "dice") == 0.7, "nothing follows"


@pytest.mark.parametrize(("name", "log"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_epochs_may_be_counted_from_0_or_1_in_names_and_in_the_log(site, name, log):
    """Each begins with a line, is measured, and is saved; the next one begins before the copy."""
    watch = site.watch()
    watch.begin(site.claims)
    lengths, lines, copies = [LogLength(0, 0, 0)], [], []
    for epoch in range(3):
        value, began_ns = 0.5 + epoch / 10, time.time_ns()
        lines += [LogLine(20 * epoch + 10, epoch + log, frozenset(), began_ns)]
        lines += [LogLine(20 * epoch + 20, epoch + log, frozenset({"dice"}), began_ns)]
        lengths.append(LogLength(20 * epoch + 20, began_ns, began_ns + 10**8))
        printed(site, dice=(epoch + log, value))
        folder = site.save(f"checkpoint-{epoch + name}")
        for path in [*folder.rglob("*"), folder]:
            os.utime(path, ns=(began_ns + 10**7, began_ns + 10**7))
        logged(site, epoch + log + 1)
        site.position = site.position._replace(order=LogOrder(lengths, lines, metrics=frozenset({"dice"})))
        before = watch.step
        wait_until(lambda before=before: watch.look(now=True) or watch.step > before, within_s=20)
        watch.look(now=True)
        copies.append(watch.newest)
    watch.finish(is_clean=True)
    assert [competes_by(folder, "dice") for folder in copies] == [0.5, 0.6, 0.7]


def test_a_value_at_the_same_step_of_a_second_training_is_not_that_of_a_checkpoint_of_the_first(site):
    """A program that trains one fold after another."""
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1")
    folder = taken(watch, 1)
    logged(site, 1, 2, 3)
    printed(site, dice=(1, 0.9))
    logged(site, 2)
    watch.finish(is_clean=True)
    assert competes_by(folder, "dice") is None


def test_a_disk_that_fails_where_copies_lie_loses_no_label(site, monkeypatch):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1")
    folder = taken(watch, 1)
    printed(site, dice=(1, 0.9), loss=(2, 0.5))
    failing = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: _fail() if path == folder else failing(path, **how))
    watch._label(site.position)
    assert competes_by(folder, "dice") == 0.9


def _fail():
    raise OSError(errno.EIO, "Input/output error")


def test_a_checkpoint_does_not_compete_by_a_metric_whose_step_is_not_known(site):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1")
    first = taken(watch, 1)
    site.save("checkpoint-2")
    second = taken(watch, 2)
    assert read_manifest(first).metrics == read_manifest(second).metrics == {"loss": 0.5}
    assert (read_manifest(first).measured, read_manifest(second).measured) == ({"loss": 0}, {"loss": 1})


def test_a_metric_of_the_checkpoint_that_was_handed_back_is_added_unless_the_program_has_started_over(site):
    folder = left_by_a_session(site, 500)
    again = site.watch(folder)
    again.begin(site.claims)
    site.position = site.position._replace(history=[(1, 3), (2, 500)])
    printed(site, dice=(500, 0.9))
    again.finish(is_clean=False)
    again.close()
    assert competes_by(folder, "dice") is None
    site.position = site.position._replace(history=[(1, 500)])
    third = site.watch(folder)
    third.begin(site.claims)
    third.finish(is_clean=False)
    assert competes_by(folder, "dice") == 0.9


def test_one_that_is_still_being_written_is_not_taken_before_it_rests(site):
    watch = site.watch()
    watch.begin(site.claims)
    for number in range(6):
        site.save("checkpoint-1", content=bytes(number + 1))
        watch.look(now=True)
        assert not site.store.exists() or not list(site.store.iterdir())
    taken(watch, 1)


def test_the_newest_is_put_back_on_another_machine_and_nothing_is_copied_where_it_lies_already(site, tmp_path):
    folder = left_by_a_session(site, 1)
    place = site.root / "work" / "out" / "checkpoint-1"
    inode = (place / "state.json").stat().st_ino
    assert site.watch(folder).begin(site.claims) == "out/checkpoint-1"
    assert (place / "state.json").stat().st_ino == inode
    there = Site(tmp_path / "there")
    shutil.copytree(site.store, there.store)
    assert there.watch(there.store / folder.name).begin(there.claims) == "out/checkpoint-1"
    restored = there.root / "work" / "out" / "checkpoint-1"
    assert (restored / "sub" / "weights.bin").read_bytes() == b"weights" and (restored / "state.json").exists()
    assert [path.name for path in restored.parent.iterdir()] == ["checkpoint-1"]


def test_a_program_that_starts_over_does_not_replace_what_the_run_has_reached(site):
    folder = left_by_a_session(site, 500)
    again = site.watch(folder)
    assert again.begin(site.claims) == "out/checkpoint-500"
    site.save("checkpoint-100", content=b"anew")
    for _ in range(4):
        again.look(now=True)
        time.sleep(0.3)
    again.finish(is_clean=True, was_stopped=True)
    assert (again.step, again.newest, site.written()) == (500, folder, [folder])
    [note] = [message.facts["what"] for message in site.sent if isinstance(message, JournalEntry)]
    assert "was handed out/checkpoint-500 and has saved out/checkpoint-100" in note
    again.close()
    third = site.watch(folder)
    assert third.begin(site.claims) == "out/checkpoint-500"
    assert not (site.root / "work" / "out" / "checkpoint-100").exists()
    site.save("checkpoint-600")
    taken(third, 600)


def test_a_program_that_starts_over_and_ends_by_itself_is_taken_at_its_word(site):
    folder = left_by_a_session(site, 500)
    again = site.watch(folder)
    again.begin(site.claims)
    site.save("checkpoint-100", content=b"anew")
    assert again.finish(is_clean=True) == "" and again.step == 501


def test_what_was_left_while_the_program_ran_is_its_result_where_it_ends_by_itself(site):
    pattern = "out/best-*.pt"
    (site.root / "work" / "out").mkdir()
    watch = site.watch(pattern=pattern)
    watch.begin(site.claims)
    archive(site.root / "work" / "out" / "best-0.53.pt")
    folder = taken(watch, 53)
    watch.close()
    again = site.watch(folder, pattern=pattern)
    again.begin(site.claims)
    archive(site.root / "work" / "out" / "best-0.41.pt", b"better")

    def left() -> bool:
        again.look(now=True)
        return any("has saved out/best-0.41.pt" in str(getattr(message, "facts", "")) for message in site.sent)

    wait_until(left)
    assert again.finish(is_clean=False) == again.finish(is_clean=True, was_stopped=True) == "" and again.step == 53
    assert again.finish(is_clean=True) == "" and again.step == 54
    assert read_contents(again.newest, pattern)[1].path == "out/best-0.41.pt"


def test_what_lies_in_the_place_of_a_restored_checkpoint_is_moved_aside_and_not_lost(site):
    folder = left_by_a_session(site, 1)
    site.save("checkpoint-1", content=b"torn")
    shutil.rmtree(site.claims)  # another machine's state folder
    assert site.watch(folder).begin(site.claims) == "out/checkpoint-1"
    out = site.root / "work" / "out"
    assert (out / "checkpoint-1" / "sub" / "weights.bin").read_bytes() == b"weights"
    assert (out / ".kgorch-aside" / "checkpoint-1.0" / "sub" / "weights.bin").read_bytes() == b"torn"


@pytest.mark.parametrize("linked", ["out", "out/old"])
def test_a_copy_is_put_back_through_links_of_the_plans_words_and_of_no_other(site, linked):
    pattern, work = "out/*/last.pt", site.root / "work"
    (work / "out" / "old").mkdir(parents=True)
    watch = site.watch(pattern=pattern)
    watch.begin(site.claims)
    archive(work / "out" / "old" / "last.pt")
    folder = taken(watch, 1)
    watch.close()
    shutil.rmtree(site.claims)  # another machine's state folder
    shutil.rmtree(work / linked)
    elsewhere = site.root / "other_project"
    (elsewhere / "old").mkdir(parents=True)
    (work / linked).symlink_to(elsewhere)
    (elsewhere / "last.pt").write_text("precious")
    again = site.watch(folder, pattern=pattern)
    if linked == "out":
        assert again.begin(site.claims) == "out/old/last.pt" and (elsewhere / "old" / "last.pt").exists()
    else:
        with pytest.raises(CheckpointBroken, match=r"a link leads from .*out/old to another folder"):
            again.begin(site.claims)
    assert (elsewhere / "last.pt").read_text() == "precious" and not (elsewhere / ".kgorch-aside").exists()


def test_checkpoints_from_before_the_run_are_neither_taken_nor_handed_back(site):
    site.save("checkpoint-9")
    watch = site.watch()
    assert watch.begin(site.claims) == ""
    [note] = [message for message in site.sent if isinstance(message, JournalEntry)]
    assert note.kind == EventKind.FOREIGN_NOTE and "1 checkpoints lay at out/checkpoint-*" in note.facts["what"]
    watch.finish(is_clean=True)
    assert watch.newest is None and not site.written()
    site.save("checkpoint-10")
    watch.finish(is_clean=True)
    assert watch.step == 10


def test_another_runs_checkpoints_at_the_same_place_are_not_this_runs(site):
    mine = site.watch()
    mine.begin(site.claims)
    site.save("checkpoint-1")
    folder = taken(mine, 1)
    mine.close()
    other = Site(site.root, run="2")
    theirs = other.watch()
    theirs.begin(site.claims)
    site.save("checkpoint-2", content=b"the other's")
    taken(theirs, 2)
    with pytest.raises(KgorchError, match="written by run 'run' now"):
        site.watch(folder).begin(site.claims)
    theirs.close()
    again = site.watch(folder)
    assert again.begin(site.claims) == "out/checkpoint-1"
    again.finish(is_clean=True)
    assert again.step == 1


def archive(path: Path, content: bytes = b"x", *, cut: int = 0) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", content * 5000)
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])


def test_what_was_completed_and_not_copied_before_all_was_killed_is_taken_at_the_next_start(site):
    pattern = "out/ckpt.pt"
    path = site.root / "work" / "out" / "ckpt.pt"
    path.parent.mkdir()
    watch = site.watch(pattern=pattern, step=10)
    watch.begin(site.claims)
    archive(path)
    folder = taken(watch, 10)
    watch.close()
    archive(path, b"y")
    again = site.watch(folder, pattern=pattern)
    assert again.begin(site.claims) == "out/ckpt.pt"
    assert (again.step, again.newest) == (11, site.store / "step-00000011")


SLOTS = "out/slot-*.pt"


def save_slot(site: Site, number: int, *, logged: int | None = None) -> str:
    """One of two slots that a program writes in turn. Args: logged: the step that its log is at then."""
    path = site.root / "work" / "out" / f"slot-{number}.pt"
    path.parent.mkdir(exist_ok=True)
    archive(path, os.urandom(4))
    if logged is not None:
        site.position = site.position._replace(history=[*site.position.history, (time.time_ns(), logged)])
    return str(path.relative_to(site.root / "work"))


def killed(site: Site, watch: CheckpointWatch) -> None:
    """Everything is killed; the next start has an empty log."""
    watch.close()
    site.position = site.position._replace(history=[])


def test_a_slot_that_nobody_has_copied_is_progress_after_a_kill_of_a_program_that_was_handed_none(site):
    watch = site.watch(pattern=SLOTS)
    watch.begin(site.claims)
    save_slot(site, 1, logged=20)
    folder = taken(watch, 20)
    newer = save_slot(site, 0, logged=30)
    killed(site, watch)
    again = site.watch(folder, pattern=SLOTS)
    assert again.begin(site.claims) == newer and again.step == 21


@pytest.mark.parametrize(
    ("before", "after", "is_progress"), [([20, 25], 30, True), ([2, 5], 10, False), ([2], 10, False), ([], 10, False)]
)
def test_a_slot_that_nobody_has_copied_is_judged_by_what_the_log_had_said_when_it_was_saved(
    tmp_path, monkeypatch, before, after, is_progress
):
    site = Site(tmp_path, settled_s=60.0)
    watch = site.watch(pattern=SLOTS)
    watch.begin(site.claims)
    first = save_slot(site, 1, logged=20)
    folder = taken(watch, 20)
    killed(site, watch)
    again = site.watch(folder, pattern=SLOTS)
    assert again.begin(site.claims) == first
    monkeypatch.setattr(foreign_checkpoint, "PROVEN_S", 60.0)  # it is not copied before the kill
    for step in before:
        site.position = site.position._replace(history=[*site.position.history, (time.time_ns(), step)])
        again.look(now=True)
    newer = save_slot(site, 0, logged=after)
    again.look(now=True)
    site.position = site.position._replace(history=[*site.position.history, (time.time_ns(), 40)])
    again.look(now=True)
    killed(site, again)
    third = site.watch(folder, pattern=SLOTS)
    assert third.begin(site.claims) == (newer if is_progress else first)
    assert (site.root / "work" / newer).exists() is is_progress


def test_what_a_log_says_is_noted_in_the_claim_also_when_its_oldest_entries_are_dropped(site, monkeypatch):
    monkeypatch.setattr(foreign_checkpoint, "MAX_PASSINGS", 3)
    folder = left_by_a_session(site, 500)
    again = site.watch(folder)
    again.begin(site.claims)
    for step in (3, 600, 4, 700, 5):
        logged(site, step)
        again.look(now=True)
    again.close()
    claim = Claim(site.launch, site.claims, PATTERN)
    assert [step for _, step in claim.handed.history] == [4, 700, 5]
    claim.release()


def test_one_that_a_kill_has_torn_is_never_handed_back(site):
    pattern = "out/ckpt.pt"
    path = site.root / "work" / "out" / "ckpt.pt"
    path.parent.mkdir()
    watch = site.watch(pattern=pattern, step=10)
    watch.begin(site.claims)
    archive(path)
    folder, whole = taken(watch, 10), path.read_bytes()
    archive(path, cut=100)
    watch.finish(is_clean=False)
    assert watch.step == 10 and "is cut off" in site.skipped()["out/ckpt.pt"]
    watch.close()
    again = site.watch(folder, pattern=pattern)
    assert again.begin(site.claims) == "out/ckpt.pt"
    assert path.read_bytes() == whole and len(site.written()) == 1


def test_one_that_stays_torn_is_not_taken_however_long_it_rests(site):
    pattern = "out/ckpt.pt"
    path = site.root / "work" / "out" / "ckpt.pt"
    path.parent.mkdir()
    watch = site.watch(pattern=pattern, step=10)
    watch.begin(site.claims)
    archive(path, cut=100)
    for _ in range(4):
        watch.look(now=True)
        time.sleep(0.3)
    for is_clean in (False, True):
        assert "is cut off" in watch.finish(is_clean=is_clean)
    assert watch.newest is None and not site.written() and "is cut off" in site.skipped()["out/ckpt.pt"]
    archive(path)
    taken(watch, 10)


def test_a_folder_that_rests_before_its_last_file_is_written_is_taken_with_it(site):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1")
    taken(watch, 1)
    site.save("checkpoint-2", extra=False)
    for _ in range(4):
        watch.look(now=True)
        time.sleep(0.3)
    assert "it lacks 'state.json'" in watch.finish(is_clean=False) and watch.step == 1
    site.save("checkpoint-2")
    _, contents = read_contents(taken(watch, 2), PATTERN)
    assert "state.json" in contents.files.values()


def test_a_folder_that_lacks_a_file_after_a_kill_is_not_taken(tmp_path):
    site = Site(tmp_path, settled_s=60.0)
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1")
    watch.finish(is_clean=True)
    site.save("checkpoint-2", extra=False)
    watch.finish(is_clean=False)
    assert watch.step == 1 and "it lacks 'state.json'" in site.skipped()["out/checkpoint-2"]


def test_the_final_one_has_a_name_of_its_own_and_the_same_bytes(site):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-3")
    watch.finish(is_clean=True)
    assert watch.finalize() == 3
    final = site.store / "step-00000003-final"
    assert verify_checkpoint(final).final and site.sent[-1].final and site.sent[-1].path == str(final)
    assert read_contents(final, PATTERN)[1] == read_contents(site.store / "step-00000003", PATTERN)[1]


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(checkpoint_copy, "SPARE_BYTES", 1 << 60)
    monkeypatch.setattr(checkpoint_watch, "ROOM_PAUSES_S", (0.0, 0.0))


def test_the_last_checkpoint_that_finds_no_room_does_not_make_an_earlier_one_the_result(site, full_disk, monkeypatch):
    watch = site.watch()
    with monkeypatch.context() as room:
        room.setattr(checkpoint_copy, "SPARE_BYTES", 0)
        watch.begin(site.claims)
        site.save("checkpoint-90")
        taken(watch, 90)
    site.save("checkpoint-100")
    assert "out/checkpoint-100 is not taken: it could not be copied: [Errno 28] no room" in watch.finish(is_clean=True)
    assert (watch.step, watch.skipped_errno) == (90, errno.ENOSPC)
    assert len([message for message in site.sent if isinstance(message, SaveFailure)]) == 3
    monkeypatch.setattr(checkpoint_copy, "SPARE_BYTES", 0)
    assert watch.finish(is_clean=True) == "" and watch.step == 100


def test_the_last_checkpoint_waits_for_room_where_the_program_has_ended_by_itself(site, full_disk, monkeypatch):
    def room_is_made(pause_s: float) -> None:
        monkeypatch.setattr(checkpoint_copy, "SPARE_BYTES", 0)

    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-100")
    monkeypatch.setattr(checkpoint_watch.time, "sleep", room_is_made)
    assert "no room" in watch.finish(is_clean=True, was_stopped=True), "a stop does not wait: the wall is near"
    assert watch.finish(is_clean=True) == "" and watch.step == 100


def test_no_further_try_is_made_once_the_time_for_them_is_over(site, full_disk, monkeypatch):
    """The first copy of a large checkpoint may fail after minutes."""
    monkeypatch.setattr(checkpoint_watch, "ROOM_S", 0.0)
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-100")
    watch.finish(is_clean=True)
    assert len([message for message in site.sent if isinstance(message, SaveFailure)]) == 1


def test_a_result_that_a_process_changes_while_it_is_copied_is_copied_as_it_is_then(site, monkeypatch):
    def changed_meanwhile(candidate: object) -> bool:
        if not changes:
            return is_unchanged(candidate)
        site.save("checkpoint-100", content=changes.pop())
        return is_unchanged(candidate)

    monkeypatch.setattr(checkpoint_watch, "ROOM_PAUSES_S", (0.0, 0.0))
    changes = [b"the final weights"]
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-100")
    is_unchanged = watch._is_unchanged
    monkeypatch.setattr(watch, "_is_unchanged", changed_meanwhile)
    assert watch.finish(is_clean=True) == "" and watch.step == 100
    assert b"the final weights" in [path.read_bytes() for path in watch.newest.iterdir()]


def test_a_result_that_found_no_room_is_taken_at_the_next_start_though_nothing_proves_it_whole(
    site, full_disk, monkeypatch
):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-90")
    site.save("checkpoint-100", content=b"result")
    assert "no room" in watch.finish(is_clean=True)
    watch.close()
    monkeypatch.setattr(checkpoint_copy, "SPARE_BYTES", 0)
    again = site.watch()
    assert again.begin(site.claims) == "out/checkpoint-100" and again.step == 100
    site.save("checkpoint-110")
    again.close()
    third = site.watch(again.newest)
    assert third.begin(site.claims) == "out/checkpoint-100" and list(site.skipped())[-1] == "out/checkpoint-110"


def test_a_claim_of_an_earlier_version_is_read(site):
    left_by_a_session(site, 1)
    [path] = site.claims.glob("*.json")
    document = json.loads(path.read_text())
    assert document.pop("complete") == ""
    path.write_text(json.dumps(document))
    claim = Claim(site.launch, site.claims, PATTERN)
    assert not claim.is_new and claim.taken_ns and claim.complete == ""
    claim.release()


def test_the_last_checkpoint_with_a_link_in_it_does_not_make_an_earlier_one_the_result(site):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-90")
    taken(watch, 90)
    folder = site.root / "work" / "out" / "checkpoint-100"
    folder.mkdir()
    (folder / "latest").symlink_to("model.bin")
    told = watch.finish(is_clean=True)
    assert (
        told == "out/checkpoint-100 is not taken: it holds the link 'latest', which is not followed"
        and watch.step == 90
    )
    site.save("checkpoint-110")
    assert watch.finish(is_clean=True) == "" and watch.step == 110, "a newer one is the result"


def test_what_is_named_otherwise_than_the_checkpoints_and_can_never_be_one_is_passed_over(site):
    watch = site.watch(pattern="out/*")
    watch.begin(site.claims)
    site.save("checkpoint-90")
    folder = taken(watch, 90)
    logs = site.root / "work" / "out" / "wandb"
    logs.mkdir()
    (logs / "latest-run").symlink_to("run-1")
    assert watch.finish(is_clean=True) == "" and watch.newest == folder
    assert list(site.skipped()) == ["out/wandb"]
    watch.close()
    again = site.watch(folder, pattern="out/*")
    assert again.begin(site.claims) == "out/checkpoint-90"
    (site.root / "work" / "out" / "checkpoint-100").mkdir()
    (site.root / "work" / "out" / "checkpoint-100" / "latest").symlink_to("x")
    assert "out/checkpoint-100 is not taken" in again.finish(is_clean=True), "it is named as the one that was handed"


def test_a_full_disk_is_a_failed_save_and_is_not_tried_for_ever(site, full_disk):
    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-3")
    for _ in range(5):
        watch.finish(is_clean=True)
    failures = [message for message in site.sent if isinstance(message, SaveFailure)]
    assert failures and "no room for" in failures[0].error and not list(site.store.iterdir())


def forged(site: Site, **changes) -> Path:
    """A checkpoint of the run that says something else of itself than it was written with, with the right hashes."""
    import xxhash

    watch = site.watch()
    watch.begin(site.claims)
    site.save("checkpoint-1")
    folder = taken(watch, 1)
    document = json.loads((folder / CONTENTS_NAME).read_text()) | changes
    content = json.dumps(document).encode()
    (folder / CONTENTS_NAME).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][CONTENTS_NAME] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    verify_checkpoint(folder)
    watch.close()
    return folder


@pytest.mark.parametrize("path", ["./out/checkpoint-1", "out//checkpoint-1", "out/checkpoint-1/"])
def test_a_copy_whose_place_was_written_otherwise_is_handed_back(site, path):
    folder = forged(site, path=path)
    shutil.rmtree(site.root / "work" / "out")
    assert read_contents(folder, None)[1].path == "out/checkpoint-1"
    assert site.watch(folder).begin(site.claims) == "out/checkpoint-1"
    assert (site.root / "work" / "out" / "checkpoint-1" / "state.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"path": ""},
        {"path": "."},
        {"path": "../outside"},
        {"path": "/etc/cron.d/x"},
        {"path": "train.py"},
        {"path": "out/checkpoint-1/../../train.py"},
        {"path": "out/checkpoint-1/x"},
        {"path": "out/.checkpoint-1"},
        {"path": 3},
        {"is_folder": "yes"},
        {"is_folder": False},
        {"files": {"f0": "../../train.py", "f1": "state.json"}},
        {"files": {"f0": "/etc/passwd", "f1": "state.json"}},
        {"files": {"f0": "a", "f1": "a/b"}},
        {"files": {"f0": "a", "f1": "a"}},
        {"files": {"f0": "a", "f1": "./a"}},
        {"files": {"f0": "a\0", "f1": "b"}},
        {"files": {"f0": "a"}},
        {"files": {"f0": "a", "f1": "b", "f2": "c"}},
        {"files": []},
    ],
)
def test_a_hostile_checkpoint_names_no_place_but_one_of_the_plans(site, changes):
    (site.root / "work" / "train.py").write_text("print()")
    folder = forged(site, **changes)
    before = {path: path.stat().st_mtime_ns for path in (site.root / "work").rglob("*")}
    with pytest.raises(CheckpointBroken, match=CONTENTS_NAME):
        site.watch(folder).begin(site.claims)
    assert {path: path.stat().st_mtime_ns for path in (site.root / "work").rglob("*")} == before


def test_a_sparse_file_larger_than_the_disk_is_refused_before_it_is_read(site, monkeypatch):
    monkeypatch.setattr(checkpoint_watch, "ROOM_PAUSES_S", ())
    watch = site.watch()
    watch.begin(site.claims)
    folder = site.save("checkpoint-1")
    os.truncate(folder / "sub" / "weights.bin", 1 << 43)
    watch.finish(is_clean=True)
    assert watch.newest is None
    assert any("no room for" in message.error for message in site.sent if isinstance(message, SaveFailure))


def test_what_a_kill_has_left_of_a_restore_is_cleared_by_the_next_attempt(site, monkeypatch):
    folder = left_by_a_session(site, 500)
    out = site.root / "work" / "out"
    shutil.rmtree(out / "checkpoint-500")

    def killed_halfway(folder: Path, contents: object, target: Path) -> None:
        target.mkdir()
        (target / "state.json").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as kill:
        kill.setattr(checkpoint_copy, "unpack", killed_halfway)
        if (child := os.fork()) == 0:
            try:
                site.watch(folder).begin(site.claims)
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [path.name[:8] for path in out.iterdir()] == [".kgorch-"]
    site.launch = replace(site.launch, attempt="1.2")
    assert site.watch(folder).begin(site.claims) == "out/checkpoint-500"
    assert [path.name for path in out.iterdir()] == ["checkpoint-500"]


def test_of_restores_only_those_of_the_run_in_its_own_folder_are_cleared(site, tmp_path):
    elsewhere, work = tmp_path / "elsewhere", site.root / "work"
    (work / "out").mkdir()
    elsewhere.mkdir()
    others = [
        work / "out" / ".kgorch-restore-2-1.1",
        work / ".kgorch-restore-1-1.1",
        elsewhere / ".kgorch-restore-1-1.1",
    ]
    for path in others:
        path.mkdir()
    link = work / "out" / ".kgorch-restore-1-1.0"
    link.symlink_to(elsewhere)
    (work / "linked").symlink_to(elsewhere)
    for pattern in (PATTERN, "linked/checkpoint-*"):
        watch = site.watch(pattern=pattern)
        watch.begin(site.claims)
        watch.close()
    assert all(path.is_dir() for path in [*others, link])
    site.watch(pattern="checkpoint-*").begin(site.claims)
    assert [path.exists() for path in others] == [True, False, True]


def test_a_copy_that_a_kill_has_left_is_cleared(site):
    (site.store / "step-00000004.tmp-1.0").mkdir(parents=True)
    site.watch().begin(site.claims)
    assert not list(site.store.iterdir())
