"""Checks that a training is deterministic: the same steps twice from one checkpoint, and the two saves compared bit by bit.

Each of the two trainings has folders of its own under the run's `replay`, which is removed afterwards. The run's checkpoints are
only read, its outputs are copied. Files that the script writes elsewhere are not protected.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import Engine

from kgorch import untrusted_io
from kgorch.checkpoint import safetensors_header
from kgorch.checkpoint.folder import list_checkpoints, read_checkpoint, read_json_file
from kgorch.checkpoint.manifest import Manifest, shard_names
from kgorch.checkpoint.safetensors_header import Span
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.codes import RankOutcome
from kgorch.core.session.attempt_outcome import AttemptEnd, first_cause
from kgorch.db.rows import RunInfo
from kgorch.errors import ReplayFailed
from kgorch.hardware import devices, gpu_locks
from kgorch.hardware.gpu_locks import GpuLocks
from kgorch.launch import attempts, launcher, rungs
from kgorch.launch.rungs import RungScope
from kgorch.plan import Plan
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Heartbeat, Message
from kgorch.protocol.run_files import CACHE_FOLDER, KEEPER_SOCKET
from kgorch.snapshots import keeper_client
from kgorch.system.paths import home_of_folder
from kgorch.system.sockets.control_socket import ControlSocket, Reply

TIMES = ("first", "second")
MEASURED = 10
"""Tensors whose difference is measured; the others that differ are only named."""

REPORT_EVERY_S = 10.0
"""Seconds between two lines of progress."""

KEEPER_S = 10.0
"""Seconds that the keeper may take to end."""

CHUNK_BYTES = 1 << 20
_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "C64": "c8", "I64": "i8", "I32": "i4", "I16": "i2",
          "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "u1"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that the two trainings have computed differently.

    Attributes:
        shard: name of its file.
        elements: how many differ; None where it was not measured.
        max_abs: the largest absolute difference; None where it was not measured, or is no number.
    """

    tensor: str
    shard: str
    elements: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The comparison of the two saves, with the names of its fields in --json (docs/json.md).

    Attributes:
        tensors, bytes: that were compared.
        differing: tensors that differ.
        other: what else differs, as sentences.
    """

    stage: str
    from_step: int
    to_step: int
    ranks: int
    tensors: int
    bytes: int
    differing: list[Difference]
    other: list[str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs: the training is deterministic."""
        return not self.differing and not self.other


def replay(
    engine: Engine, run: RunInfo, plan: Plan, checkpoint: Path, steps: int, say: Callable[[str], None]
) -> ReplayResult:
    """Train `steps` steps from a checkpoint twice, and compare. The caller holds the run's lock.

    Args:
        say: takes lines of progress.
    Raises: CheckpointBroken, CheckpointUnreadable; GpusUnavailable; ReplayFailed when the training does not come to its end.
    """
    manifest = verify_checkpoint(checkpoint)
    scratch = Path(run.folder) / "replay"
    # the folder first: trainings that a killed replay has left there hold locks of the GPUs until they are ended
    with _scratch_folder(scratch) as received, _locked_gpus(run, plan) as gpus:
        saves = []
        for which in TIMES:
            say(f"{which} time: step {manifest.step} to {manifest.step + steps} of {manifest.stage}")
            launch = _launch_spec(engine, run, plan, checkpoint, scratch / which, gpus.environ)
            launch = replace(launch, stop_at=manifest.step + steps)
            _train(launch, gpus, lambda step, which=which: say(f"{which} time: step {step}"), received)  # type: ignore[misc]
            saves.append(_last_save(launch))
        say("comparing")
        return _compare(manifest, launch.ranks, *saves)


@contextlib.contextmanager
def _locked_gpus(run: RunInfo, plan: Plan) -> Iterator[GpuLocks]:
    """The GPUs of the two trainings, as a session of the run would lock them. Raises: GpusUnavailable."""
    try:
        locks = gpu_locks.acquire(home_of_folder(run.folder), run, gpu_locks.resource_request(plan))
    except gpu_locks.GpusUnavailable as error:
        next_step = "wait until they are free (kgorch queue lists who waits), then the same again"
        raise gpu_locks.GpusUnavailable(error.what, *error.facts, next_step=next_step) from None
    try:
        yield locks
    finally:
        locks.release()


@contextlib.contextmanager
def _scratch_folder(scratch: Path) -> Iterator[list[int]]:
    """Remove the folder and end its processes before and after the block, also after Ctrl-C or SIGTERM.

    Yields: the signals that have come; they raise SystemExit, too.
    """
    received: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        _clear(scratch)
        yield received
    finally:
        _clear(scratch)
        for number, handler in former.items():
            signal.signal(number, handler)


def _clear(scratch: Path) -> None:
    for which in TIMES:
        launcher.kill(scratch / which / "attempt")
        keeper_client.end(scratch / which, timeout_s=KEEPER_S)
    shutil.rmtree(scratch, ignore_errors=True)


def _launch_spec(
    engine: Engine, run: RunInfo, plan: Plan, checkpoint: Path, place: Path, environ: Mapping[str, str]
) -> LaunchSpec:
    """The stage as its next attempt would begin it, in folders below `place`.

    Args:
        environ: in which its GPUs are visible.
    Raises: ReplayFailed when the plan does not have the stage any more.
    """
    name = read_checkpoint(checkpoint).stage
    stage = next((item for item in plan.stage if item.name == name), None)
    if stage is None:
        raise ReplayFailed(f"the plan has no stage {name!r} any more")
    if stage.foreign:
        raise ReplayFailed(
            f"stage {stage.name!r} is a program of [stage.foreign], which is not trained step by step",
            next_step=f"kgorch checkpoints verify {run.name}    (compares the bytes)",
        )
    own = place / "checkpoints" / stage.name
    own.mkdir(parents=True)
    # the stage may read checkpoints of earlier ones
    for other in Path(run.checkpoints).iterdir():
        if other.name != stage.name:
            own.with_name(other.name).symlink_to(other.absolute())
    for folder in ("outputs", CACHE_FOLDER):
        if (source := Path(run.folder, folder)).exists():
            shutil.copytree(source, place / folder, symlinks=True)
    ranks = devices.rank_count(stage.ranks, environ)
    scope = RungScope(stage.name, devices.model_name(environ), ranks)
    launch = attempts.next_launch(engine, run, plan, scope, rungs.launch_settings(engine, run, plan, scope))
    return replace(
        launch,
        attempt=f"replay-{place.name}",
        folder=str(place / "attempt"),
        socket=str(place / "control.sock"),
        keeper=str(place / KEEPER_SOCKET),
        checkpoints=str(own),
        output=str(place / "outputs"),
        cached=str(place / CACHE_FOLDER),
        resume=str(checkpoint),
        snapshot_s=None,
        quick=False,  # a quick test would end before the steps are done
    )


def _train(launch: LaunchSpec, gpus: GpuLocks, say: Callable[[int], None], received: list[int]) -> None:
    """Run the training to its end.

    Args:
        say: takes the step that it has reached, now and then.
        received: signals that have come. Their exception may come in a callback that drops it, so the list is checked, too.
    Raises: ReplayFailed.
    """
    folder, last_report_s = Path(launch.folder), time.monotonic()

    def on_message(message: Message, _: Reply) -> None:
        nonlocal last_report_s
        if isinstance(message, Heartbeat) and message.step and time.monotonic() > last_report_s + REPORT_EVERY_S:
            last_report_s = time.monotonic()
            say(message.step)

    channel = ControlSocket(Path(launch.socket), on_message)
    try:
        process = launcher.start(launch, gpus)
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if received:
                raise SystemExit(128 + received[0])
    finally:
        channel.close()
    records = launcher.records(folder, launch.ranks)
    if len(records) != launch.ranks or {record.outcome for record in records} - {
        RankOutcome.FINISHED,
        RankOutcome.SUSPENDED,
    }:
        end = AttemptEnd(launch.ranks, records, launcher.describe_exit(folder), False, 0, False)
        raise ReplayFailed("the repeated training failed", first_cause(end))


def _last_save(launch: LaunchSpec) -> Path:
    """Raises: ReplayFailed."""
    checkpoints = list_checkpoints(Path(launch.checkpoints))
    if not checkpoints:
        raise ReplayFailed("the repeated training saved nothing", next_step="see that the script calls session.track()")
    return checkpoints[0]


def _compare(start: Manifest, ranks: int, first: Path, second: Path) -> ReplayResult:
    """Compare two checkpoints. `start`: of the checkpoint from which both were trained."""
    one, two = read_checkpoint(first), read_checkpoint(second)
    differing: list[Difference] = []
    tensors = size = 0
    other = [
        f"{name}: {where}"
        for name in sorted(one.files.keys() | two.files.keys())
        if name.endswith(".json")
        and (where := _first_difference(_content(first, one, name), _content(second, two, name)))
    ]
    if one.position != two.position:
        other.append(f"position: {one.position} and {two.position}")
    for name in shard_names(one):
        left, right = safetensors_header.read(first, name), safetensors_header.read(second, name)
        tensors, size = tensors + len(left), size + sum(span.size for span in left.values())
        for tensor in sorted(left.keys() | right.keys()):
            if tensor not in left or tensor not in right or left[tensor][:2] != right[tensor][:2]:
                other.append(f"{name}: {tensor!r:.200} is another tensor, or only in one of them")
            elif not _same(first / name, left[tensor], second / name, right[tensor]):
                apart = (
                    _apart(first / name, left[tensor], second / name, right[tensor])
                    if len(differing) < MEASURED
                    else ()
                )
                differing.append(Difference(tensor, name, *apart))
    return ReplayResult(start.stage, start.step, one.step, ranks, tensors, size, differing, other)


def _content(folder: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """A JSON file of the state, without the hashes in it: they differ wherever a tensor does."""
    if name not in manifest.files:
        return {}
    return {key: value for key, value in read_json_file(folder, manifest, name).items() if key != "files"}


def _first_difference(one: Any, two: Any, at: str = "") -> str:
    """The place of the first value that differs; empty when none does."""
    if one == two:
        return ""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return next(_first_difference(one[key], two[key], f"{at}.{key}") for key in one if one[key] != two[key])
    return at.removeprefix(".") or "all of it"


def _same(path: Path, span: Span, other: Path, placed: Span) -> bool:
    with (
        untrusted_io.open_file(path.parent, path.name) as left,
        untrusted_io.open_file(other.parent, other.name) as right,
    ):
        return all(
            untrusted_io.read_at(left, span.start + done, min(CHUNK_BYTES, span.size - done))
            == untrusted_io.read_at(right, placed.start + done, min(CHUNK_BYTES, span.size - done))
            for done in range(0, span.size, CHUNK_BYTES)
        )


def _apart(path: Path, span: Span, other: Path, placed: Span) -> tuple[int | None, float | None]:
    """How many elements differ, and by how much at most; None where numpy knows no such type."""
    if span.dtype not in _NUMPY:
        return None, None
    import numpy

    def read(place: Path, at: Span) -> Any:
        with untrusted_io.open_file(place.parent, place.name) as file:
            array = numpy.frombuffer(untrusted_io.read_at(file, at.start, at.size), _NUMPY[span.dtype])
        return (array.astype("u4") << 16).view("f4") if span.dtype == "BF16" else array

    one, two = read(path, span), read(other, placed)
    width = f"V{one.itemsize}"
    elements = int(numpy.count_nonzero(one.view(width) != two.view(width)))
    wide = "c16" if span.dtype == "C64" else "f8"
    with numpy.errstate(all="ignore"):
        most = float(numpy.abs(one.astype(wide) - two.astype(wide)).max())
    return elements, most if math.isfinite(most) else None
