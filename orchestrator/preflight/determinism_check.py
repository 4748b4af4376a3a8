"""Whether a training is exact: the same steps twice from one checkpoint, and what the two save compared bit by bit.

Each time has folders of its own under the run's `replay`, which goes when it is over: the run's checkpoints are read
only, its outputs copied. What the script writes elsewhere, it writes there.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import Engine

from db.records import RunInfo
from orchestrator import untrusted_io
from orchestrator.checkpoint import safetensors_header
from orchestrator.checkpoint.folder import list_checkpoints, read_checkpoint, read_json_file
from orchestrator.checkpoint.manifest import Manifest, shard_names
from orchestrator.checkpoint.safetensors_header import Span
from orchestrator.checkpoint.verify import verify_checkpoint
from orchestrator.core.attempt_outcome import Ended, first_cause
from orchestrator.core.codes import RankOutcome
from orchestrator.errors import ReplayFailed
from orchestrator.hardware import devices
from orchestrator.launch import launcher, rungs
from orchestrator.launch.rungs import Place
from orchestrator.plan import Plan
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.messages import Heartbeat, Message
from orchestrator.protocol.run_files import KEEPER_SOCKET
from orchestrator.snapshots import keeper_client
from orchestrator.system.sockets.control_socket import ControlSocket, Reply

TIMES = ("first", "second")
MEASURED = 10
"""Of so many tensors that differ it is said by how much."""
SAY_EVERY_S, KEEPER_S = 10.0, 10.0
CHUNK_BYTES = 1 << 20
_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "C64": "c8", "I64": "i8", "I32": "i4", "I16": "i2",
          "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "u1"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that came out in two ways. `elements`: how many differ; `max_abs`: by how much at most, where that is a number."""

    tensor: str
    shard: str
    elements: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """`differing`: tensors, by name; `other`: what else differs, in words."""

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
        return not self.differing and not self.other


def replay(
    engine: Engine, run: RunInfo, plan: Plan, checkpoint: Path, steps: int, say: Callable[[str], None]
) -> Replayed:
    """Train `steps` steps from a checkpoint twice; the run's lock is the caller's.

    Raises: CheckpointBroken, CheckpointUnreadable; ReplayFailed when the training does not come to its end.
    """
    described = verify_checkpoint(checkpoint)
    scratch = Path(run.folder) / "replay"
    with _cleared(scratch) as asked:
        saves = []
        for which in TIMES:
            say(f"{which} time: step {described.step} to {described.step + steps} of {described.stage}")
            launch = _launch(engine, run, plan, described, checkpoint, scratch / which, steps)
            _train(launch, lambda step, which=which: say(f"{which} time: step {step}"), asked)  # type: ignore[misc]
            saves.append(_saved(launch))
        say("comparing")
        return _compared(described, launch.ranks, *saves)


@contextlib.contextmanager
def _cleared(scratch: Path) -> Iterator[list[int]]:
    """Nothing of it lives or lies there before and after, also after a Ctrl-C or a SIGTERM, which are noted in what it gives."""
    asked: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        asked.append(number)
        raise SystemExit(128 + number)

    kept = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        _clear(scratch)
        yield asked
    finally:
        _clear(scratch)
        for number, handler in kept.items():
            signal.signal(number, handler)


def _clear(scratch: Path) -> None:
    for which in TIMES:
        launcher.kill(scratch / which / "attempt")
        keeper_client.end(scratch / which, timeout_s=KEEPER_S)
    shutil.rmtree(scratch, ignore_errors=True)


def _launch(
    engine: Engine, run: RunInfo, plan: Plan, described: Manifest, checkpoint: Path, place: Path, steps: int
) -> LaunchSpec:
    """The stage as its next attempt would begin it, in folders of its own; earlier stages' checkpoints are linked there."""
    stage = next((item for item in plan.stage if item.name == described.stage), None)
    if stage is None:
        raise ReplayFailed(f"the plan has no stage {described.stage!r} any more")
    own = place / "checkpoints" / stage.name
    own.mkdir(parents=True)
    for other in Path(run.checkpoints).iterdir():
        if other.name != stage.name:
            own.with_name(other.name).symlink_to(other.absolute())
    shutil.copytree(Path(run.folder) / "outputs", place / "outputs", symlinks=True)
    ranks = devices.rank_count(stage.ranks)
    memory = rungs.standing(engine, run, plan, Place(stage.name, devices.model_name(), ranks))
    return LaunchSpec(
        run=run.name,
        run_id=run.id,
        stage=stage.name,
        attempt=f"replay-{place.name}",
        folder=str(place / "attempt"),
        entry=stage.entry,
        args=stage.args | dict(memory.settings.arguments),
        workdir=run.workdir,
        ranks=ranks,
        socket=str(place / "control.sock"),
        keeper=str(place / KEEPER_SOCKET),
        checkpoints=str(own),
        output=str(place / "outputs"),
        plan_hash=run.plan_hash,
        seed=plan.seed,
        resume=str(checkpoint),
        settings=memory.settings.as_dict(),
        schedule=memory.schedule,
        ladder=list(plan.memory.ladder),
        deterministic=plan.deterministic,
        stop_at=described.step + steps,
    )


def _train(launch: LaunchSpec, say: Callable[[int], None], asked: list[int]) -> None:
    """`asked`: signals; an exception of theirs that came in some callback was lost, so they are looked at besides."""
    folder, said_s = Path(launch.folder), time.monotonic()

    def heard(message: Message, _: Reply) -> None:
        nonlocal said_s
        if isinstance(message, Heartbeat) and message.step and time.monotonic() > said_s + SAY_EVERY_S:
            said_s = time.monotonic()
            say(message.step)

    channel = ControlSocket(Path(launch.socket), heard)
    try:
        process = launcher.start(launch)
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if asked:
                raise SystemExit(128 + asked[0])
    finally:
        channel.close()
    records = launcher.records(folder, launch.ranks)
    if len(records) != launch.ranks or {record.outcome for record in records} - {
        RankOutcome.FINISHED,
        RankOutcome.SUSPENDED,
    }:
        ended = Ended(launch.ranks, records, launcher.ending(folder), False, 0, False)
        raise ReplayFailed("the training did not come to its end", first_cause(ended))


def _saved(launch: LaunchSpec) -> Path:
    found = list_checkpoints(Path(launch.checkpoints))
    if not found:
        raise ReplayFailed("the training has saved nothing", next_step="see that the script calls session.track()")
    return found[0]


def _compared(begun: Manifest, ranks: int, first: Path, second: Path) -> Replayed:
    one, two = read_checkpoint(first), read_checkpoint(second)
    differing: list[Difference] = []
    tensors = size = 0
    other = [
        f"{name}: {where}"
        for name in sorted(one.files.keys() | two.files.keys())
        if name.endswith(".json") and (where := _first_difference(_told(first, one, name), _told(second, two, name)))
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
    return Replayed(begun.stage, begun.step, one.step, ranks, tensors, size, differing, other)


def _told(folder: Path, described: Manifest, name: str) -> dict[str, Any]:
    """What a JSON file says of the state; the hashes in it follow from the rest."""
    if name not in described.files:
        return {}
    return {key: value for key, value in read_json_file(folder, described, name).items() if key != "files"}


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
