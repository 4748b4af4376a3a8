"""Takes the checkpoints of a foreign program into the run, as they are completed, and hands the newest one back at a start."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kgorch.checkpoint import foreign_contents
from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.core.checkpoint.foreign_checkpoint import (
    PROVEN_S,
    CompletenessRule,
    ForeignCandidate,
    Handed,
    Unchanged,
    Wholeness,
)
from kgorch.core.codes import EventKind
from kgorch.errors import UNWRITABLE, KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry, Message
from kgorch.protocol.snapshot_messages import CheckpointWritten, SaveFailure
from kgorch.system.clock import boottime_s
from kgorch.worker.foreign import checkpoint_copy, file_formats
from kgorch.worker.foreign.candidates import scan
from kgorch.worker.foreign.checkpoint_copy import ChangedMeanwhile, Described
from kgorch.worker.foreign.checkpoint_labels import CheckpointLabels, ProgramPosition, Saved
from kgorch.worker.foreign.claim import Claim

LOOK_S, LOOK_SHARE = 1.0, 0.02
"""Seconds between two looks at the disk, and the largest share of the time that looks take."""

MAX_TAKEN = 100
TRIES = 3
"""Copies of a checkpoint that fail before it is left alone until it changes: a full disk is full at the next look, too."""

ROOM_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries to copy the last checkpoint on a full disk, as in worker/save_coordinator.py."""

ROOM_S = sum(ROOM_PAUSES_S)
"""Seconds after the beginning of the first try in which a further one may begin: a large copy takes minutes."""


class Taken(NamedTuple):
    """A checkpoint that was copied.

    Attributes:
        at_s: instant at which the copy began.
        written_s: when its newest file was written, Unix time.
        is_at_end: the program had ended by then.
    """

    path: str
    step: int
    bytes: int
    at_s: float
    written_s: float
    is_at_end: bool


class _Beside(NamedTuple):
    """Folders that one is compared with: whether the program has written to one of them later, and the files of each."""

    is_followed: bool
    files: frozenset[tuple[str, ...]]


class CheckpointWatch:
    """Of one start of one program.

    Args:
        pattern: the plan's place of checkpoints.
        send: hands a message to the supervisor.
        position: where the program is.

    Attributes:
        step: of the checkpoint that was taken or handed back last; -1 for none.
        newest: its folder among the run's checkpoints; None for none.
        written_ns: when the newest file of what was taken was written (Unix time, nanoseconds); older ones are not taken.
        copy_s: the longest time that a copy took, seconds.
        skipped_errno: number of the system's error for which `finish` could not copy the newest one; 0 for none.
        taken: what was copied, the last MAX_TAKEN of it.
    """

    def __init__(
        self, launch: LaunchSpec, pattern: str, send: Callable[[Message], None], position: Callable[[], ProgramPosition]
    ) -> None:
        assert launch.foreign is not None
        self._launch, self._pattern, self._send, self._position = launch, pattern, send, position
        self._root = Path(launch.workdir)
        self._rule = CompletenessRule(launch.foreign["incomplete"], launch.foreign["settled_s"])
        self._claim: Claim | None = None
        self._watched: dict[str, Unchanged] = {}
        self._excluded: set[str] = set()  # signatures, as in _left: of an earlier run, or copied
        self._left: set[str] = set()  # no progress while the program runs, and its result where it ends by itself
        self.written_ns = 0
        self._earlier_files: frozenset[str] = frozenset()
        self._failures: dict[str, int] = {}  # by signature
        self._reported: set[str] = set()
        self._shapes: set[str] = set()  # of the paths of checkpoints that were taken or handed
        self._handed = Handed()
        self._logged: int | None = None  # where the log was, at the newest copy
        self._examined: dict[tuple[str, _Beside], tuple[Wholeness, str]] = {}  # by signature
        self._labels = CheckpointLabels(launch, send)
        self._number: int | None = 0  # in the name of the newest one
        self._has_ended = False
        self._next_look_s = 0.0
        self._copying: threading.Thread | None = None
        self.step, self.copy_s, self.skipped_errno = -1, 0.0, 0
        self._seen_s = 0.0  # instant at which what was taken was first seen as it is; 0 for what was handed back
        self.newest: Path | None = None
        self.taken: deque[Taken] = deque(maxlen=MAX_TAKEN)

    # Before the program starts

    def begin(self, claims: Path) -> str:
        """Claim the place, take in what an earlier attempt left there, and put the newest checkpoint back.

        Returns: the path that is handed to the program; empty where there is no checkpoint.
        Raises: KgorchError (another run uses the place; a checkpoint cannot be read); OSError.
        """
        launch = self._launch
        checkpoint_copy.clear_leftovers(Path(launch.checkpoints))
        claim = self._claim = Claim(launch, claims, self._pattern)
        checkpoint_copy.clear_restores(launch, self._pattern)
        self._observe()
        if claim.is_new:
            claim.take(item.candidate for item in self._watched.values())
            if claim.before:
                what = (
                    f"{len(claim.before)} checkpoints lay at {self._pattern} before this run came: they are left alone"
                )
                self._note(f"{what}, and are not handed to the program")
        self._excluded, self.written_ns = set(claim.before), claim.taken_ns
        handed = ""
        contents = None
        if launch.resume:
            folder = Path(launch.resume)
            manifest, contents = foreign_contents.read_contents(folder, self._pattern)
            self.step, self.newest, handed = manifest.step, folder, contents.path
            own = {name: value for name, value in manifest.metrics.items() if manifest.measured.get(name) == self.step}
            self._logged = contents.logged
            self._number = number = foreign_checkpoint.number_of(contents.path, self._pattern, logged=None)
            if number == self.step:  # else its epochs may be counted otherwise than the log's
                self._labels.add(folder, Saved(self.step, number, False, None, 0), own)
            self._earlier_files = frozenset(contents.files.values()) if contents.is_folder else frozenset()
            if contents.path in self._watched and foreign_contents.is_same(
                self._root / contents.path, contents, manifest
            ):
                self.written_ns = max(self.written_ns, self._watched[contents.path].candidate.newest_ns)
        if not claim.is_new and (saved := self._salvage(claim.handed)):
            self._hand(saved)
            return saved
        if contents and self.newest and checkpoint_copy.restore(launch, self.newest, contents, self._pattern):
            self._observe()
        if contents and contents.path in self._watched:
            candidate = self._watched[contents.path].candidate
            self._excluded.add(candidate.signature)
            self.written_ns = max(self.written_ns, candidate.newest_ns)
        self._hand(handed)
        return handed

    def _hand(self, path: str) -> None:
        """Remember what the program is handed. Raises: OSError."""
        assert self._claim
        self._shapes.add(foreign_checkpoint.shape_of(path))
        self._handed = Handed(path, self.step) if path else Handed()
        self._claim.note_taken(self.written_ns, self._handed)

    def _salvage(self, handed: Handed) -> str:
        """Take in what an earlier attempt completed and nobody copied, for all was killed; the rest is moved out of sight.

        Args:
            handed: to the program of that attempt.
        Returns: the path of the checkpoint that was taken; empty for none.
        """
        complete = self._claim.complete if self._claim else ""
        for item in self._eligible():
            candidate = item.candidate
            is_result = candidate.signature == complete
            if not is_result and (why := self._examine(candidate)[1] or self._anew(candidate, handed)):
                aside = checkpoint_copy.move_aside(self._root / candidate.path)
                self._skip(candidate, f"{why}; it is now {aside}")
            elif not self._copy(candidate):
                self._seen_s = 0.0
                return candidate.path
        return ""

    # While the program runs

    def look(self, *, now: bool = False) -> None:
        """Look at the disk when it is time, and have what is complete copied beside the program. Args: now: do not wait."""
        now_s = boottime_s()
        if self._copying and not self._copying.is_alive():
            self._copying = None
        if self._copying or (now_s < self._next_look_s and not now):
            return
        self._note_log()
        self._observe()
        eligible, took_s = self._eligible(excluded=self._left), boottime_s() - now_s
        is_fresh = any(
            boottime_s() - item.since_s < PROVEN_S for item in eligible
        )  # it may be overwritten before LOOK_S
        self._next_look_s = boottime_s() + max(1.1 * PROVEN_S if is_fresh else LOOK_S, took_s / LOOK_SHARE)
        complete = foreign_checkpoint.newest_complete(
            eligible, self._rule, boottime_s(), wholeness_of=self._wholeness_of
        )
        if complete and (why := self._anew(complete, self._handed)):
            self._leave(complete, why)
        elif complete and self._failures.get(complete.signature, 0) < TRIES:
            self._copying = threading.Thread(target=self._copy, args=(complete,), name="copy", daemon=True)
            self._copying.start()

    def see(self) -> None:
        """Just before the program is asked to stop: what lies there by now it has saved by itself. Also while a copy is made."""
        self._watched = foreign_checkpoint.observe(self._watched, scan(self._root, self._pattern), boottime_s())

    def has_saved_since(self, at_s: float) -> bool:
        """Whether the newest checkpoint was first seen after an instant (boottime): the program's answer to a stop then."""
        return self._seen_s >= at_s

    # After its end

    def finish(self, *, is_clean: bool, was_stopped: bool = False) -> str:
        """Take the newest checkpoint after the program has ended.

        Args:
            is_clean: it ended by itself, with exit status 0: all that it wrote is complete, unless the format of a file proves
                it cut off. Otherwise what had not settled while it lived is taken only where its files prove it whole.
            was_stopped: it was asked to end, so that its newest checkpoint is not the end of the training.

        Returns: why the newest one was not taken, also where it could not be copied (`skipped_errno`); empty where it was, or
            there is no newer one than before.
        """
        if self._copying:
            self._copying.join()
            self._copying = None
        self._has_ended = True
        self._label(self._position())
        self._note_log()
        self._observe()
        now_s, skipped, is_result = boottime_s(), "", is_clean and not was_stopped
        for item in self._eligible(excluded=() if is_result else self._left, with_problems=True):
            candidate = item.candidate
            error = None
            if why := self._why_incomplete(item, now_s, is_clean=is_clean):
                self._skip(candidate, why)
                if candidate.problem and foreign_checkpoint.shape_of(candidate.path) not in self._shapes:
                    continue  # named otherwise than the checkpoints, as a logger's folder at `out/*`
            elif not is_result and (why := self._anew(candidate, self._handed)):
                self._leave(candidate, why)
                continue
            elif error := self._copy_result(candidate) if is_result and not skipped else self._copy(candidate):
                why = f"it could not be copied: {error}"
            else:
                break
            if not skipped:
                skipped = f"{candidate.path} is not taken: {why}"
                self.skipped_errno = getattr(error, "errno", None) or 0
        return skipped

    def _why_incomplete(self, item: Unchanged, now_s: float, *, is_clean: bool) -> str:
        """Why a checkpoint that the program has left at its end is not taken; empty where it is."""
        if item.candidate.problem:
            return f"it {item.candidate.problem}"
        wholeness, why = self._examine(item.candidate)
        is_in_time = now_s - item.since_s >= self._rule.wait_for(wholeness)
        return why if wholeness is Wholeness.TORN or not (is_clean or is_in_time) else ""

    def _copy_result(self, candidate: ForeignCandidate) -> OSError | KgorchError | None:
        """Copy the result of the training. Where the disk is full, wait for room: there is nothing else to do.

        One that was changed meanwhile is copied as it is then.
        """
        until_s = boottime_s() + ROOM_S
        self._note_complete(candidate)
        error = self._copy(candidate)
        for pause_s in ROOM_PAUSES_S:
            is_changed, left_s = isinstance(error, ChangedMeanwhile), until_s - boottime_s()
            is_full = isinstance(error, OSError) and error.errno in UNWRITABLE
            if not (is_full or is_changed) or left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            if is_changed:
                self._observe()
                item = self._watched.get(candidate.path)
                if not item or self._why_incomplete(item, boottime_s(), is_clean=True):
                    break
                candidate = item.candidate
                self._note_complete(candidate)
            error = self._copy(candidate)
        return error

    def _note_complete(self, candidate: ForeignCandidate) -> None:
        if self._claim:
            with contextlib.suppress(OSError):
                self._claim.note_complete(candidate.signature)

    def finalize(self) -> int | None:
        """Make the newest checkpoint the final one of its stage, and report it. Returns its step; None where there is none."""
        if self.newest is None:
            return None
        began_s = time.monotonic()
        final = checkpoint_copy.finalize(self._launch, self.newest)
        self._send(
            CheckpointWritten(
                self._launch.attempt, str(final), self.step, 0, 0.0, took_s=time.monotonic() - began_s, final=True
            )
        )
        return self.step

    def close(self) -> None:
        """Give the place up for other runs."""
        if self._claim:
            self._claim.release()
            self._claim = None

    def describe(self) -> str:
        """What lies at the place, for an error."""
        self._observe()
        names = [item.candidate.path for item in self._watched.values()]
        return f"found there: {', '.join(sorted(names)[:5])}" if names else "found there: nothing"

    # Parts

    def _observe(self) -> None:
        self.see()
        position = self._position()
        for item in self._watched.values():
            is_written = boottime_s() - item.since_s >= PROVEN_S  # and not being written
            if is_written and item.candidate.newest_ns > self.written_ns:
                self._labels.note(item.candidate.newest_ns, position)
            if item.candidate.problem and item.candidate.signature not in self._excluded:
                self._skip(item.candidate, f"it {item.candidate.problem}")

    def _eligible(self, *, excluded: Iterable[str] = (), with_problems: bool = False) -> list[Unchanged]:
        excluded, after_ns = self._excluded.union(excluded), self.written_ns
        return foreign_checkpoint.eligible(
            self._watched, self._rule, after_ns=after_ns, excluded=excluded, with_problems=with_problems
        )

    def _wholeness_of(self, candidate: ForeignCandidate) -> Wholeness:
        key = candidate.signature, self._beside(candidate)
        if key not in self._examined:
            signatures = {item.candidate.signature for item in self._watched.values()}
            self._examined = {other: value for other, value in self._examined.items() if other[0] in signatures}
            self._examined[key] = self._examine(candidate)
        return self._examined[key][0]

    def _beside(self, candidate: ForeignCandidate) -> _Beside:
        """The other folders of this run that lie there, where no earlier checkpoint tells which files one has."""
        if not candidate.is_folder or self._earlier_files:
            return _Beside(False, frozenset())
        before = self._claim.before if self._claim else frozenset[str]()
        found = (item.candidate for item in self._watched.values())
        others = [
            other
            for other in found
            if other.path != candidate.path and other.is_folder and not other.problem and other.signature not in before
        ]
        is_followed = any(other.newest_ns > candidate.newest_ns for other in others)
        return _Beside(is_followed, frozenset(other.files for other in others))

    def _examine(self, candidate: ForeignCandidate) -> tuple[Wholeness, str]:
        """What its files say, and why it is not certain that the program had completed this one; empty where it is."""
        folder = self._root / candidate.path if candidate.is_folder else (self._root / candidate.path).parent
        proofs = {name: file_formats.is_whole(folder, name) for name in candidate.files}
        if torn := [name for name, whole in proofs.items() if whole is False]:
            return Wholeness.TORN, f"{torn[0]!r:.200} is cut off"
        if missing := foreign_checkpoint.lacks_files(candidate, self._earlier_files):
            return Wholeness.LACKING, f"it lacks {missing[0]!r:.200}, which the checkpoint before it has"
        if self._rule.incomplete:
            return Wholeness.WHOLE, ""
        ended = "the program was ended soon after it was written, and"
        if unknown := [name for name, whole in proofs.items() if whole is None]:
            return Wholeness.UNKNOWN, f"{ended} nothing proves its {unknown[0]!r:.200} whole"
        if candidate.is_folder and not self._earlier_files:
            beside = self._beside(candidate)
            if not beside.is_followed:
                return Wholeness.UNKNOWN, f"{ended} there is no whole one to compare its files with"
            lacking = (foreign_checkpoint.lacks_files(candidate, files) for files in beside.files)
            if missing := next((names for names in lacking if names), []):
                return Wholeness.UNKNOWN, f"{ended} it lacks {missing[0]!r:.200}, which another one has"
        return Wholeness.WHOLE, ""

    def _anew(self, candidate: ForeignCandidate, handed: Handed) -> str:
        """Why a checkpoint is no progress, though it is newer: the program trains anew. Empty where it is progress."""
        if not foreign_checkpoint.has_started_over(candidate, handed, self._pattern):
            return ""
        did = f"was handed {handed.path} and has saved {candidate.path}"
        return f"the program {did}: it seems to have started over; that is no progress"

    def _tell_anew(self, candidate: ForeignCandidate, logged: int, before: int) -> None:
        """It is taken all the same: a program may count its steps anew in each launch."""
        did = f"was handed {self._handed.path}, of step {before} of its log, and has saved {candidate.path} at step {logged}"
        do = "correct stage.foreign.again and checkpoint, unless it counts its steps anew in each launch"
        what = f"the program {did}: it seems to train anew; {do}"
        self._send(JournalEntry(self._launch.attempt, EventKind.EXACTNESS, {"training": what}))
        print(f"kgorch: {what}", flush=True)

    def _note_log(self) -> None:
        """Keep what the log has said since a checkpoint was handed back, in the claim, too: it may be all that is left."""
        if not self._handed.path or not self._claim:
            return
        before, now = self._handed.history, self._position().history
        later = [entry for entry in now if not before or entry[0] > before[-1][0]]
        history = foreign_checkpoint.passings([*before, *later], self._handed.step)
        if history != list(before):
            self._handed = self._handed._replace(history=history)
            with contextlib.suppress(OSError):
                self._claim.note_taken(self.written_ns, self._handed)

    def _leave(self, candidate: ForeignCandidate, why: str) -> None:
        """Take no more notice of a checkpoint while the program runs, and say so once."""
        self._left.add(candidate.signature)
        if self._handed.path not in self._reported:
            self._reported.add(self._handed.path)
            do = "correct stage.foreign.again, or give stage.foreign.step where the numbers in its names are no steps"
            self._note(f"{why}. {do}")

    def _copy(self, candidate: ForeignCandidate) -> OSError | KgorchError | None:
        """Copy a checkpoint and report it. Returns the error where it could not be. Also called in a thread of its own."""
        launch, position, began_s, taken_s = self._launch, self._position(), time.monotonic(), boottime_s()
        since_ns = time.time_ns()
        place = self._labels.note(candidate.newest_ns, position)
        self._label(position)
        logged = foreign_checkpoint.logged_at(position.history, candidate.newest_ns)
        number = foreign_checkpoint.number_of(candidate.path, self._pattern, logged=logged)
        step = foreign_checkpoint.step_of(number, logged=logged, taken=self.step)
        processes = max(1, (launch.foreign or {}).get("processes", 1))
        is_next = number is not None and self._number is not None and number == self._number + 1
        saved = Saved(step, number, is_next, place, since_ns)
        own = self._labels.measured(saved, position, is_last=self._has_ended)
        # Where it is not known at which step a metric was printed, or not yet its last value at this one, that counts as another
        # step: the checkpoint does not compete by it.
        known = {name: at for name, at in position.measured.items() if at != step}
        measured = {name: known.get(name, max(self.step, 0)) for name in position.metrics}
        counts_steps = (
            logged is not None and abs(step - logged) <= 1
        )  # epochs may be counted from 0 in one and from 1 in the other
        described = Described(
            step,
            {**position.metrics, **own},
            {**measured, **dict.fromkeys(own, step)},
            processes,
            logged if counts_steps else None,
        )
        try:
            folder, size = checkpoint_copy.copy_in(launch, candidate, described, lambda: self._is_unchanged(candidate))
        except ChangedMeanwhile as error:
            return error  # the program writes to it: the next look sees it unchanged, or newer
        except (OSError, KgorchError) as error:
            self._failures[candidate.signature] = self._failures.get(candidate.signature, 0) + 1
            self._send(SaveFailure(launch.attempt, -1, step, f"{candidate.path} could not be copied: {error}"))
            return error
        took_s = time.monotonic() - began_s
        watched = self._watched.get(candidate.path)
        self.step, self.newest, self._seen_s = step, folder, watched.since_s if watched else taken_s
        if self._handed.path and logged is not None and self._logged is not None and logged < self._logged:
            self._tell_anew(candidate, logged, self._logged)
        self._handed, self._logged = Handed(), described.logged
        self._labels.add(folder, saved, own)
        self._number = number
        self.copy_s = max(self.copy_s, took_s)
        self.taken.append(Taken(candidate.path, step, size, taken_s, candidate.newest_ns / 1e9, self._has_ended))
        self._excluded.add(candidate.signature)
        self._shapes.add(foreign_checkpoint.shape_of(candidate.path))
        self.written_ns = candidate.newest_ns
        if candidate.is_folder:
            self._earlier_files = frozenset(candidate.files)
            self._examined = {}
        if self._claim:
            with contextlib.suppress(OSError):
                self._claim.note_taken(candidate.newest_ns, self._handed)
        self._send(CheckpointWritten(launch.attempt, str(folder), step, size, 0.0, took_s=took_s))
        return None

    def _label(self, position: ProgramPosition) -> None:
        """Before a further copy is made and reported, at which retention may delete what no metric speaks for.

        Not in the main thread while the program runs: a busy disk must not delay a stop.
        """
        self._labels.update(position, is_last=self._has_ended)

    def _is_unchanged(self, candidate: ForeignCandidate) -> bool:
        found = {other.path: other.signature for other in scan(self._root, self._pattern)}
        # one that the program has deleted meanwhile, as old ones are, was complete when it was read
        return found.get(candidate.path, candidate.signature) == candidate.signature

    def _skip(self, candidate: ForeignCandidate, why: str) -> None:
        if candidate.path not in self._reported:
            self._reported.add(candidate.path)
            facts = {"checkpoint": candidate.path, "why": why}
            self._send(JournalEntry(self._launch.attempt, EventKind.FOREIGN_SKIPPED, facts))
            print(f"kgorch: {candidate.path} is not taken: {why}", flush=True)

    def _note(self, what: str) -> None:
        self._send(JournalEntry(self._launch.attempt, EventKind.FOREIGN_NOTE, {"what": what}))
        print(f"kgorch: {what}", flush=True)
