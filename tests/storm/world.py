"""A world: one run with a state folder, a disk and a person of its own; what that person does, and the facts of how it stands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver
import psutil
from harness import Kgorch, processes_of, weekly_reset
from postgres import IS_INSTALLED, PostgresServer
from two_nodes import HOSTS

from kgorch.system import process_identity as identities
from kgorch.system.sockets import control_socket
from storm import looking, programs, stranger
from storm.invariants import Facts, Said, Trace
from storm.machine import Disk, Weather
from storm.reference import Reference, write_plan, write_source
from storm.schedule import Episode

CALM_S, SLOW_S = 0.03, 0.25
"""Seconds a step: while a fault is waited for, and while one is on, so that the run is not over before its faults are."""

EXCUSED = {
    "weathers.py",
    "weathered.py",
    "nested_loader.py",
    "no_compiler.py",
    "plan.toml",
    "source",
    "kept",
    "pace",
    "doubles.txt",
    "__pycache__",
}
"""What may lie in a plan's folder: its own files, and what its program writes there."""

NOT_OURS = re.compile(r"pymp-[^/]+/.*|tmp[a-z0-9_]{8}")
"""What a rank with loading processes that is killed leaves behind: folders of multiprocessing's sockets, and the files by which
PyTorch's DataLoader finds out, when a process of it has died, whether too many are open."""


NOT_TRUSTED = re.compile(r"not trusted with that: ")
"""A stranger's run was found, and what it would have run: who reads it begins a run of their own."""

MOVE_ASIDE = re.compile(r"next: .*\bmv (\S+/kgorch\.db) (\S+):")


@dataclass
class Command:
    """A command of kgorch that runs, or has run."""

    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path
    killed: bool = False
    heeded: bool = False

    def said(self) -> Said:
        text = self.log.read_text(errors="replace")
        return Said("kgorch " + " ".join(self.words), self.process.poll(), text, self.killed)


class World:
    """Made for an episode, below `folder`, which it leaves empty when closed.

    Attributes:
        promised: path → step of each checkpoint that was seen verified. damaged: of them, what a fault has broken.
        patience_s: how long this machine may take to train again. soon_s: then, until what is late is in order: after a full disk
            a log is written late, and processes take their time to end.
        furthest: the step at which a fault met it.
        server: the fleet's PostgreSQL; None without one.
    """

    def __init__(self, folder: Path, episode: Episode, reference: Reference) -> None:
        self.folder, self.episode, self.reference = folder, episode, reference
        self.patience_s, self.soon_s = 90.0 + 8 * reference.took_s, 8.0 + 2 * reference.took_s
        self.promised: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.commands: list[Command] = []
        self.supervisor: Command | None = None
        self.daemon: Command | None = None
        self.clock_moved, self.wants_start, self.stuck, self.furthest = False, True, "", -1
        for name in ("tmp", "person", "work"):
            (folder / name).mkdir(parents=True)
        self.disk = Disk(folder / "home")
        self.kept = Disk(folder / "work" / "kept") if episode.apart else None
        self.weather = Weather.over(folder / "weather")
        self.driver = driver.build(folder) if episode.driver else None
        self.server = PostgresServer(durable=True) if episode.fleet and IS_INSTALLED else None
        self.kgorch = Kgorch(folder / "work", folder / "home", extra_env=self._env(), own_standby=True)
        identities.boot_id = lambda: self.weather.boot.read_text().strip()  # as all its processes have it
        self.marker, self.wants_fresh = folder / "PWNED", False
        self._write_source()
        self._write_plan()
        self._write_stranger()

    def _env(self) -> dict[str, str]:
        found = {"TMPDIR": str(self.folder / "tmp"), "HOME": str(self.folder / "person")}
        # A program's library may have matplotlib make its list of fonts: there, it is no stray.
        found["MPLCONFIGDIR"] = str(self.folder / "weather")
        disk = self.kept or self.disk
        found |= self.weather.env(disk.place, Path("source"))  # as the program opens it
        if self.server:
            url = self.server.new_database()
            looking.DATABASES[self.folder / "home"] = url.replace("postgresql+psycopg:", "postgresql:")
            config = self.folder / "weather" / "fleet.toml"
            config.write_text('[fleet]\nlease = "12s"\n')
            found |= {"KGORCH_DATABASE": url, "KGORCH_MACHINE": "here", "KGORCH_CONFIG": str(config)}
        return found | (self.driver.env if self.driver else {})

    def _write_source(self) -> None:
        if self.episode.source:
            write_source(self.folder / "work" / "source")

    def _write_stranger(self) -> None:
        if self.episode.stranger:
            stage = next(iter(self.reference.digests))
            chance = random.Random(self.episode.name)
            stranger.write(self.folder / "input" / "data" / "kgorch", "test", stage, self.marker, chance)

    def _write_plan(self) -> None:
        episode, extra = self.episode, []
        if episode.stranger:
            extra += ["[resume]", 'sources = ["../input/**"]']
        if episode.quota:
            extra += ["[quota]", "hours = 100", f'resets = "{weekly_reset()}"']
        if episode.daemon:
            extra += ["[notify]", "urls = []"]
        if episode.nodes:
            extra += [HOSTS]
        wall = f"{max(20, round(episode.wall * self.reference.took_s))}s" if episode.wall else None
        every, more = f"{episode.every_ms}ms", "\n".join(extra)
        told = programs.stages(episode, Path(self.reference.data))
        ranks = "1\nnodes = 2" if episode.nodes else str(episode.ranks)
        plan = write_plan(self.kgorch, ranks, told, every=every, wall=wall, extra=more)
        if episode.apart:
            plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "kept"'))
        for path in self.kgorch.folder.glob("*.py"):
            if path.name not in EXCUSED:
                path.unlink()

    # What a person does

    def pace(self, seconds: float) -> None:
        aside = self.kgorch.folder / "pace.new"
        aside.write_text(str(seconds))
        aside.rename(self.kgorch.folder / "pace")

    def run(self, *words: str) -> Command:
        """In the background, its words into a file of their own."""
        log = self.folder / "weather" / f"said{len(self.commands)}.txt"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                self.kgorch.command(*words), cwd=self.kgorch.folder, env=self.kgorch.env(), stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        command = Command(words, process, log)
        self.commands.append(command)
        return command

    def look_after(self) -> None:
        """What a person does who looks: start again what does not run. With a daemon nothing that it does by itself."""
        idle = self.supervisor is None or self.supervisor.process.poll() is not None
        if idle:
            self._heed(self.supervisor, self.daemon)
        if not self.episode.daemon:
            if idle:
                self.supervisor = self.run("start", "plan.toml", *self._fresh())
            return
        self.keep_daemon()
        if idle and (self.wants_start or looking.waits_for_a_person(self.kgorch.home)):
            self.supervisor, self.wants_start = self.run("start", "plan.toml", "--queue", *self._fresh()), False

    def _fresh(self) -> list[str]:
        wants, self.wants_fresh = self.wants_fresh, False
        return ["--fresh"] if wants else []

    def _heed(self, *commands: Command | None) -> None:
        """What an error says is done: a run of our own in place of a stranger's; a database whose log was deleted while it was
        being written back is malformed, and is moved aside."""
        for command in (item for item in commands if item and not item.heeded):
            said = command.said()
            command.heeded = said.code is not None
            if said.code == 2 and NOT_TRUSTED.search(said.text):
                self.wants_fresh = self.wants_start = True
            if said.code == 2 and (told := MOVE_ASIDE.search(said.text)) and Path(told[1]).exists():
                Path(told[1]).rename(told[2])
                self.forget_paths()
                self.wants_start = True

    def keep_daemon(self) -> None:
        """As systemd does."""
        if self.episode.daemon and (self.daemon is None or self.daemon.process.poll() is not None):
            self.daemon = self.run("daemon")

    def ask(self, what: str) -> list[str]:
        """Over the socket, as `kgorch save` and `kgorch stop` do; also where the database cannot be used. The phases answered."""
        sockets = self.kgorch.home.glob("runs/*/*/control.sock")
        return [answer.text for path in sockets if (answer := control_socket.ask(path, what, timeout_s=2.0))]

    # How the run stands

    def is_finished(self) -> bool:
        found = looking.standing(self.kgorch.home)
        return found is not None and found.state == "finished"

    def trains(self) -> tuple[str, int] | None:
        """The attempt that a living supervisor sees training, and its step."""
        found = looking.standing(self.kgorch.home)
        if found and found.supervised and found.phase in ("training", "saving"):
            with contextlib.suppress(ValueError, OSError):
                return str(self.kgorch.attempt()), found.step
        return None

    def train_on(self, steps: int, beyond: int = -1) -> bool:
        """Until one attempt has trained so many steps, and `beyond` that one; what has ended is started again. False: finished,
        or `stuck`."""
        until, since = time.monotonic() + self.patience_s, None
        while time.monotonic() < until:
            self.keep_daemon()
            now = self.trains()
            if now and (since is None or now[0] != since[0] or now[1] < since[1]):
                since = now
            if now and since and now[1] >= since[1] + steps and now[1] > beyond:
                return True
            if now is None:
                if self.is_finished():
                    return False
                self.look_after()
            time.sleep(0.15)
        self.stuck = f"it does not train within {self.patience_s:.0f} s: {self._in_short()}"
        return False

    def note_step(self) -> None:
        """A fault comes now."""
        now = self.trains()
        self.furthest = max(self.furthest, now[1] if now else -1)

    def _in_short(self) -> str:
        last = self.commands[-1].said() if self.commands else None
        return f"{looking.standing(self.kgorch.home)}; said last: {last.text[-400:] if last else ''}"

    def finish(self) -> None:
        """To the end of the run, and of all that ran for it."""
        until = time.monotonic() + 2 * self.patience_s
        while not self.is_finished():
            if time.monotonic() > until:
                self.stuck = self.stuck or f"it does not finish: {self._in_short()}"
                return
            if self.trains() is None:
                self.look_after()
            time.sleep(0.2)
        if self.daemon:
            self.daemon.process.send_signal(signal.SIGTERM)
        self.until(lambda: not processes_of(self.kgorch.home), within_s=60)

    def until(self, condition: Callable[[], Any], *, within_s: float) -> bool:
        """Whether it came true in time."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.1)
        return False

    # Its processes

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.kgorch.home)

    def of_role(self, role: str) -> list[psutil.Process]:
        return [process for process in self.processes() if looking.role_of(process)[0] == role]

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self.processes():
            role, rank = looking.role_of(process)
            if role == "rank" and rank:
                found[int(rank)] = process
        return found

    def kill(self, *victims: psutil.Process, number: int = signal.SIGKILL) -> None:
        """By their ids, and so that what we end is not taken for a crash of its own."""
        pids = {victim.pid for victim in victims}
        for command in self.commands:
            command.killed = command.killed or command.process.pid in pids
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(number)

    def kill_everything(self, *, but: tuple[str, ...] = ()) -> None:
        """SIGKILL to all at once, again until nobody is left; as far as `but` names no role."""
        victims = [process for process in self.processes() if looking.role_of(process)[0] not in but]
        for victim in victims:  # frozen first: none of them sees another's end, as in a power cut
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.suspend()
        self.kill(*victims)
        while left := [process for process in self.processes() if looking.role_of(process)[0] not in but]:
            self.kill(*left)
            time.sleep(0.02)

    # Facts

    def note_promised(self) -> int:
        """Remember what is verified by now; the newest step among what is not damaged."""
        for row in looking.checkpoint_rows(self.kgorch.home):
            if row.state == "verified" and row.path not in self.damaged and Path(row.path).is_dir():
                self.promised[row.path] = row.step
        good = (step for path, step in self.promised.items() if path not in self.damaged and Path(path).is_dir())
        return max(good, default=0)

    def forget_paths(self) -> None:
        """The database is another one: what it promised lies under paths that it may not know."""
        self.promised, self.damaged = {}, set()

    def trace(self, kind: str, what: str, *expects: tuple[str, str], may_fail: bool = False) -> Trace:
        """Of a fault that comes now: to be made before it does."""
        promised, history = self.note_promised(), self.history()
        return Trace(
            kind, what, tuple(expects), sum(len(item["attempts"]) for item in history), len(history), len(self.events()),
            promised, may_fail,
        )  # fmt: skip

    def history(self) -> list[dict[str, Any]]:
        return looking.history(self.kgorch.home)

    def events(self) -> list[dict[str, Any]]:
        return looking.events(self.kgorch.home)

    def facts(self, trace: Trace | None = None, *, over: bool = False) -> Facts:
        self.note_promised()
        told = Facts(
            history=tuple(self.history()),
            events=tuple(self.events()),
            checkpoints=tuple(looking.checkpoints(self.kgorch.home)),
            promised=dict(self.promised),
            damaged=frozenset(self.damaged),
            processes=tuple(looking.processes(self.kgorch.home)),
            doubles=self._read("doubles.txt"),
            charges=tuple(looking.charges(self.kgorch.home)) if over and self.episode.quota else (),
            said=tuple(command.said() for command in self.commands) + tuple(self._supervisors_words()),
            stuck=self.stuck,
            trace=trace,
            over=over and not self.stuck,
            clock_moved=self.clock_moved,
            foreign=tuple(stranger.strays(self.marker, self.kgorch.home)),
        )
        return dataclasses.replace(told, **self._at_the_end()) if over and not self.stuck else told

    def _at_the_end(self) -> dict[str, Any]:
        bits = {}
        ends = [Path(path) for path in self.damaged if path.endswith("-final")]
        lost = {path.parent.name for path in ends if not looking.is_whole(path)}  # nobody has read them since
        for stage, expected in self.reference.digests.items():
            if stage in lost:
                continue
            out = self.folder / "weather" / f"{stage}.safetensors"
            if not out.exists():
                self.run("checkpoints", "export", "test", str(out), "--all", "--stage", stage).process.wait(120)
            bits[stage] = (looking.digest(out) if out.exists() else "nothing exported", expected)
        return {
            "bits": bits,
            "metrics": self._metrics(),
            "inexact": tuple(looking.rungs(self.kgorch.home)),
            "strays": tuple(self._strays()),
        }

    def _metrics(self) -> dict[str, tuple[float, float]]:
        """Not after a disk that took nothing, or a database that was lost: those may cost some of a curve."""
        aim = self.reference.metrics
        if any(fault.kind.startswith(("disk_", "database_")) for fault in self.episode.faults):
            return {}
        told = self.run("metrics", "test", "--json")
        told.process.wait(120)
        ours = looking.metrics(json.loads(told.log.read_text()))
        return {key: (ours.get(key, math.nan), aim.get(key, math.nan)) for key in (ours.keys() | aim.keys()) if aim}

    def _strays(self) -> Iterator[str]:
        for place in (self.folder / "tmp", self.folder / "person"):
            yield from (str(path) for path in _files(place) if not NOT_OURS.fullmatch(str(path.relative_to(place))))
        for path in self.kgorch.folder.iterdir():
            if path.name not in EXCUSED and not path.name.endswith(".lock"):
                yield str(path)

    def _supervisors_words(self) -> Iterator[Said]:
        """Of sessions that the daemon began."""
        for path in self.kgorch.home.glob("runs/*/*/supervisor.log"):
            yield Said("kgorch resume (by the daemon)", None, path.read_text(errors="replace"))

    def _read(self, name: str) -> str:
        try:
            return (self.kgorch.folder / name).read_text()
        except OSError:
            return ""

    def close(self) -> None:
        self.weather.calm()
        self.kill_everything()
        for command in self.commands:
            command.process.wait()
        self.disk.close()
        if self.kept:
            self.kept.close()
        if self.server:
            self.server.remove()
        shutil.rmtree(self.folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]
