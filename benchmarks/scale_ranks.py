"""scale.py's processes: a real supervisor by a hand-moved clock, and light ones that talk to it as ranks do.

    python benchmarks/scale_ranks.py PLAN [CLOCK]      the supervisor, in place of `kgorch start PLAN`

Real are the supervisor's loop with all its threads, the shim, the channel and the ranks' link, the database, the reader that
verifies what was saved; played are the trainings and time. The clock stands in a shared page, in seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import mmap
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from kgorch.admission.open_session import ReadySession  # noqa: E402
from kgorch.admission.requests import LocalState, StartRequest  # noqa: E402
from kgorch.checkpoint.folder import write_durably, write_manifest  # noqa: E402
from kgorch.checkpoint.manifest import Manifest, Position, checkpoint_folder_name  # noqa: E402
from kgorch.protocol import codec, transport  # noqa: E402
from kgorch.protocol.codec import LineBuffer  # noqa: E402
from kgorch.protocol.launch_spec import LaunchSpec  # noqa: E402
from kgorch.protocol.messages import (  # noqa: E402
    Command,
    Heartbeat,
    Hello,
    JournalEntry,
    Message,
    RankMetrics,
    RankProgress,
    Request,
    Response,
)
from kgorch.protocol.snapshot_messages import CheckpointWritten  # noqa: E402
from kgorch.system.clock import boottime_s  # noqa: E402
from kgorch.system.sockets.control_socket import ask  # noqa: E402

VITALS = ("rss", "rss_peak", "step_s", "data_wait", "cpu", "alloc", "reserved", "peak", "total")
LONGEST = {"start": 5.0, "first_step": 1.0, "step": 0.2, "save": 0.5, "evaluation": 8.0}
EPOCH_S, STEP_S, NOTES_S, STATE_BYTES = 300, 0.2, 60, 1 << 16
NAP_S, HOUR_S = 1e-3, 3600
IDLE = "import time\ntime.sleep(1e6)\n"
"""The training that torchrun starts: it never attaches, light processes speak for its ranks."""


class Clock:
    """Moved by hand, for supervisor and telemetry."""

    def __init__(self, page: Path) -> None:
        with open(page, "r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._began_s, self._began_at = self.now_s(), datetime.now(UTC)

    @classmethod
    def at(cls, page: Path, now_s: float) -> Clock:
        page.write_bytes(struct.pack("d", now_s).ljust(mmap.PAGESIZE, b"\0"))
        return cls(page)

    def now_s(self) -> float:
        return float(struct.unpack_from("d", self._mapped)[0])

    def utc(self) -> datetime:
        return self._began_at + timedelta(seconds=self.now_s() - self._began_s)

    def move(self, seconds: float) -> None:
        struct.pack_into("d", self._mapped, 0, self.now_s() + seconds)


class Waiting(threading.Event):
    """An event that is waited for as long as the clock says."""

    clock: Clock

    def wait(self, timeout: float | None = None) -> bool:
        until_s = None if timeout is None else self.clock.now_s() + timeout
        while not self.is_set() and (until_s is None or self.clock.now_s() < until_s):
            time.sleep(NAP_S)
        return self.is_set()


def supervise(plan: Path, page: Path | None) -> None:
    for name in (
        "cli.commands.training.start",
        "cli.foreground",
        "cli.display.render",
    ):  # what `kgorch start` has loaded by then
        importlib.import_module(f"kgorch.{name}")
    from kgorch.admission import session_start
    from kgorch.cli.lookup import open_state
    from kgorch.db import samples
    from kgorch.hardware import telemetry
    from kgorch.supervisor.loop import Supervisor

    profile, home, engine = open_state()
    opened = session_start.start(LocalState(engine, home, profile), StartRequest(plan.read_text(), plan))
    assert isinstance(opened, ReadySession)
    clock = by_hand(Clock(page), samples, telemetry) if page else None
    Supervisor(engine, opened, clock=clock).run()


def by_hand(clock: Clock, samples: Any, telemetry: Any) -> Clock:
    """Telemetry follows that clock, too."""
    Waiting.clock = clock

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return clock.utc()

    telemetry.time = SimpleNamespace(monotonic=clock.now_s)
    telemetry.threading = SimpleNamespace(Event=Waiting, Thread=threading.Thread)
    telemetry.datetime = samples.datetime = Now
    return clock


# One who stands outside, moves the clock, and speaks for the ranks


class Ranks:
    """Two ranks of a session under such a supervisor, played by one process."""

    def __init__(self, launch: LaunchSpec, clock: Clock) -> None:
        self.launch, self.clock, self.step = launch, clock, 0
        self._lines, self.saves = LineBuffer(), 0
        self._lead, self._other = (self._connected(rank) for rank in range(2))

    def _connected(self, rank: int) -> socket.socket:
        connection = transport.connect(self.launch.socket, timeout_s=60)
        transport.send(connection, Hello(self.launch.attempt, rank, 1, 0, STATE_BYTES, ready=True))
        return connection

    def second(self, number: int) -> None:
        """What two ranks tell in a second, and what is ordered meanwhile."""
        self.clock.move(1.0)
        self.step += int(1 / STEP_S)
        for message in told(self.launch.attempt, 0, number, self.step):
            transport.send(self._lead, message)
        for message in told(self.launch.attempt, 1, number, self.step):
            transport.send(self._other, message)
        if number % NOTES_S == 0:
            transport.send(self._lead, JournalEntry(self.launch.attempt, "told", {"minute": str(number // NOTES_S)}))
        self.wait()

    def wait(self) -> None:
        """Until all that was sent was taken; a save that is ordered is done."""
        transport.send(self._lead, Request("ping"))
        while True:
            for line in self._lines.feed(self._lead.recv(65536)):
                message = codec.decode(line)
                if isinstance(message, Command) and message.what == "save":
                    self._save()
                if isinstance(message, Response):
                    self._swallow()
                    return

    def _swallow(self) -> None:
        """What the other rank was told."""
        self._other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._other.recv(1 << 20)
        self._other.settimeout(60)

    def _save(self) -> None:
        """A checkpoint of next to nothing, as the keeper writes it."""
        place = Path(self.launch.checkpoints, checkpoint_folder_name(self.step, final=False))
        aside = place.with_name(f"{place.name}.tmp-{self.launch.attempt}")
        aside.mkdir(parents=True)
        described = Manifest(
            self.launch.run, self.launch.run_id, self.launch.stage, Position(step=self.step), 2,
            datetime.now(UTC).isoformat(), metrics={"loss": 1.0},
            files={"state.json": write_durably(aside / "state.json", b"{}")},
        )  # fmt: skip
        write_manifest(aside, described)
        aside.rename(place)
        self.saves += 1
        transport.send(self._lead, CheckpointWritten(self.launch.attempt, str(place), self.step, 2, 0.05, 0.4))


def told(attempt: str, rank: int, number: int, step: int) -> list[Message]:
    """What a rank tells once a second, about as long as a real one's."""
    figures = dict.fromkeys(VITALS, 1234567.0 + number) | {"step_s": STEP_S}
    found: list[Message] = [RankProgress(attempt, rank, "step", 0.1, 0.0, LONGEST), RankMetrics(attempt, rank, figures)]
    if rank == 0:
        metrics = {"loss": 1 / (1 + step), "accuracy": 1 - 1 / (1 + number)}
        epoch = number // EPOCH_S
        found.append(Heartbeat(attempt, epoch, step, 32 * step, STEP_S, STEP_S, 10**6, 1000, metrics))
    return found


@contextlib.contextmanager
def supervised(*, by_hand: bool) -> Iterator[tuple[Any, LaunchSpec, Clock]]:
    """A supervisor whose attempt is up: its process (psutil), what the attempt was told, its clock if that is moved by hand."""
    import psutil
    from bounded import living

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "idle.py").write_text(IDLE)
        plan = folder / "plan.toml"
        plan.write_text(
            'name = "hours"\n[[stage]]\nname = "train"\nentry = "idle.py"\nranks = 1\n'
            '[session]\nwall = "100h"\n[health]\nhang = "off"\n[checkpoint.keep]\nlast = 2\n'
        )
        clock = Clock.at(folder / "clock", boottime_s())
        command = [sys.executable, str(Path(__file__)), str(plan), *([str(folder / "clock")] if by_hand else [])]
        with living.started(command, folder, folder / "session") as it:

            def launches() -> list[Path]:
                return list(folder.glob("home/runs/*/*/attempts/*/shim.json"))

            if not it.watch(lambda: bool(launches()), 120):
                sys.exit(f"the supervisor started nothing: {it.said()}")
            yield psutil.Process(it.process.pid), LaunchSpec.read(launches()[0].with_name("launch.json")), clock


def hours(count: int) -> dict[str, Any]:
    """Resident MB at the beginning and after each hour that the clock was moved on; what was told meanwhile."""
    with supervised(by_hand=True) as (process, launch, clock):
        ranks = Ranks(launch, clock)
        began_s, resident = time.monotonic(), []
        for number in range(count * HOUR_S + 1):
            ranks.second(number)
            if number == 60 or (number and number % HOUR_S == 0):
                resident.append(process.memory_info().rss / 1e6)
        return {"mb": resident, "saves": ranks.saves, "took_s": time.monotonic() - began_s}


# Many ranks


def channel(counts: Sequence[int], seconds: float) -> dict[int, dict[str, float]]:
    """With so many ranks: messages heard a second when they speak without a pause, and the supervisor's share of a core when each
    tells once a second, as they do."""
    found = {}
    with supervised(by_hand=False) as (process, launch, clock):
        Ranks(launch, clock).wait()  # training has begun
        for count in counts:
            share = spoken(process, launch, count, seconds, beat_s=1.0)[1]
            found[count] = {
                "a_second": spoken(process, launch, count, seconds / 2, beat_s=0.0)[0],
                "core_percent": share,
            }
    return found


def spoken(process: Any, launch: LaunchSpec, count: int, seconds: float, *, beat_s: float) -> tuple[float, float]:
    """Messages a second until all were taken, and percent of a core."""
    context = get_context("fork")
    begin, pipes = context.Barrier(count + 1), [context.Pipe() for _ in range(count)]
    with tempfile.TemporaryDirectory() as place:
        board = board_of(Path(place), count)
        ranks = [
            context.Process(target=talk, args=(launch, str(board), rank, count, beat_s, seconds, begin, pipe))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        begin.wait()
        began_s, used_s = time.monotonic(), sum(process.cpu_times()[:2])
        messages = sum(mine.recv() for mine, _ in pipes)
        for rank in ranks:
            rank.join()
        ask(Path(launch.socket), "ping", timeout_s=600)  # answered once all before it was taken
        took_s = time.monotonic() - began_s
        return messages / took_s, 100 * (sum(process.cpu_times()[:2]) - used_s) / took_s


def talk(
    launch: LaunchSpec, board: str, rank: int, count: int, beat_s: float, seconds: float, begin: Any, pipe: Any
) -> None:
    from kgorch.worker.ranks import supervisor_link
    from kgorch.worker.ranks.consensus_board import Board

    supervisor_link.BEAT_S = beat_s
    numbers, sent = itertools.count(), [0]

    def now() -> list[Message]:
        number = next(numbers)
        messages = told(launch.attempt, rank, 0, number)
        sent[0] += len(messages)
        return messages

    line = supervisor_link.SupervisorLink(
        launch, Board(board, rank, count), lambda: Hello(launch.attempt, rank, 1, 0, STATE_BYTES, ready=True), now
    )
    begin.wait()
    line.start()
    time.sleep(seconds)
    line.close()
    pipe.send(sent[0])


def agreement(counts: Sequence[int], votes: int) -> dict[int, dict[str, float]]:
    """µs of Board.tick and of Board.vote, in so many processes at once; medians of stretches, of the slowest rank."""
    context, found = get_context("fork"), {}
    for count in counts:
        begin, pipes = context.Barrier(count), [context.Pipe() for _ in range(count)]
        with tempfile.TemporaryDirectory() as place:
            board = board_of(Path(place), count)
            ranks = [
                context.Process(target=agree, args=(str(board), rank, count, votes, begin, pipe))
                for rank, (_, pipe) in enumerate(pipes)
            ]
            for rank in ranks:
                rank.start()
            told = [mine.recv() for mine, _ in pipes]
            for rank in ranks:
                rank.join()
        found[count] = {what: max(one[what] for one in told) for what in ("tick_us", "vote_us")}
    return found


def agree(path: str, rank: int, count: int, votes: int, begin: Any, pipe: Any) -> None:
    from kgorch.worker.ranks.consensus_board import Board

    board, steps = Board(path, rank, count), itertools.count(1)
    begin.wait()

    def stretch_us(times: int, do: Any) -> float:
        began_s = time.perf_counter()
        for _ in range(times):
            do()
        return 1e6 * (time.perf_counter() - began_s) / times

    ticks = [stretch_us(2000, lambda: board.tick(next(steps))) for _ in range(9)]
    begin.wait()
    taken = [stretch_us(max(votes // 9, 1), lambda: board.vote(0)) for _ in range(9)]
    pipe.send({"tick_us": statistics.median(ticks), "vote_us": statistics.median(taken)})
    begin.wait()


def board_of(folder: Path, count: int) -> Path:
    from kgorch.worker.ranks import consensus_board

    path = folder / "board"
    path.write_bytes(bytes(consensus_board.size(count)))
    return path


if __name__ == "__main__":
    supervise(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
