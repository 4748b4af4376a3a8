"""What is done to a world: one function a fault, all real. Each says what it did and where the log must tell of it.

A function returns once the fault itself is over (a disk is free again, a frozen process goes on); what it leaves is for the run to
recover from. Raises Refused where this machine does not allow it, or the world has no such thing just now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kgorch.checkpoint.folder import list_checkpoints
from kgorch.checkpoint.manifest import MANIFEST_NAME
from storm import looking
from storm.invariants import Trace
from storm.machine import Refused
from storm.world import World

Deed = Callable[[World, random.Random], Trace]
DEEDS: dict[str, Deed] = {}

CUT = ("session", "^cut_off: ")
KILLED = ("attempt", r"crashed: (rank [\d, ]+ was killed|all ranks were killed)")
NODE_LOST = ("event node_lost", "")
IN_A_SAVE_S = 3.0
"""How long a save is waited for that is to be met in its midst."""


def deed(function: Deed) -> Deed:
    DEEDS[function.__name__] = function
    return function


def _one(world: World, role: str, chance: random.Random) -> psutil.Process:
    found = sorted(world.of_role(role), key=lambda process: process.pid)
    if not found:
        raise Refused(f"there is no {role}")
    return chance.choice(found)


# Processes


@deed
def kill_rank(world: World, chance: random.Random) -> Trace:
    ranks = world.ranks()
    if not ranks:
        raise Refused("there is no rank")
    rank = chance.choice(sorted(ranks))
    told = rf"crashed: (rank ([\d, ]*\b)?{rank}\b[\d, ]* was killed|all ranks were killed)"
    trace = world.trace("kill_rank", f"SIGKILL to rank {rank}", ("attempt", told))
    world.kill(ranks[rank])
    return trace


@deed
def kill_torchrun(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_torchrun", "SIGKILL to torchrun", ("attempt", "torchrun was ended by SIGKILL"))
    world.kill(_one(world, "torchrun", chance))
    return trace


@deed
def kill_shim(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_shim", "SIGKILL to the shim", ("attempt", "the shim was killed"))
    world.kill(_one(world, "shim", chance))
    return trace


@deed
def kill_keeper(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_keeper", "SIGKILL to the keeper")
    world.kill(_one(world, "keeper", chance))
    return trace


@deed
def kill_standby(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_standby", "SIGKILL to the standby")
    world.kill(_one(world, "standby", chance))
    return trace


@deed
def kill_supervisor(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_supervisor", "SIGKILL to the supervisor", ("event adopted", ""), CUT)
    world.kill(_one(world, "supervisor", chance))
    return trace


@deed
def kill_supervisor_and_rank(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_supervisor_and_rank", "SIGKILL to supervisor, then a rank", CUT, KILLED)
    supervisor, rank = _one(world, "supervisor", chance), _one(world, "rank", chance)
    world.kill(supervisor)
    time.sleep(chance.random())
    world.kill(rank)
    return trace


@deed
def kill_everything(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_everything", "SIGKILL to all at once", CUT)
    world.kill_everything()
    return trace


@deed
def kill_all_but_keeper(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_all_but_keeper", "SIGKILL to all but the keeper", CUT)
    world.kill_everything(but=("keeper",))
    return trace


@deed
def kill_in_a_save(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_in_a_save", "SIGKILL to all in the midst of a save", CUT)
    world.weather.set(slow_ms=chance.choice([20, 60, 150]))  # so that there is a midst
    world.ask("save")
    world.until(lambda: list(_saves_under_way(world)), within_s=IN_A_SAVE_S)
    time.sleep(chance.random() * 0.4)
    _one(world, "rank", chance)  # refused where the wall came first
    world.kill_everything()
    world.weather.calm()
    return trace


def _saves_under_way(world: World) -> list[Path]:
    return [path for root in _roots(world) for path in root.glob("step-*.tmp-*")]


@deed
def kill_while_starting(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_while_starting", "SIGKILL to a rank, and to its successor as it starts", KILLED)
    before = _one(world, "rank", chance)
    world.kill(before)
    world.until(lambda: before.pid not in {item.pid for item in world.of_role("rank")}, within_s=20)
    world.until(lambda: world.of_role("rank"), within_s=40)
    time.sleep(2 * chance.random())
    world.kill(_one(world, "rank", chance))
    return trace


@deed
def kill_loading_process(world: World, chance: random.Random) -> Trace:
    said = ("attempt", r"(?i)dataloader worker|was killed|all ranks were killed")
    trace = world.trace("kill_loading_process", "SIGKILL to a loading process", said)
    world.kill(_one(world, "loader", chance))
    return trace


@deed
def kill_daemon(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_daemon", "SIGKILL to the daemon")
    world.kill(_one(world, "daemon", chance))
    return trace


@deed
def terminate_rank(world: World, chance: random.Random) -> Trace:
    """Rank 0 takes it for the machine's word that the end comes; another one alone does not speak for all."""
    victim = _one(world, "rank", chance)
    said = [("session", "^(suspended|cut_off|finished): ")] if looking.role_of(victim)[1] == "0" else []
    trace = world.trace("terminate_rank", "SIGTERM to a rank", *said)
    world.kill(victim, number=signal.SIGTERM)
    return trace


@deed
def terminate_torchrun(world: World, chance: random.Random) -> Trace:
    trace = world.trace("terminate_torchrun", "SIGTERM to torchrun", ("session", "^(suspended|cut_off): "))
    world.kill(_one(world, "torchrun", chance), number=signal.SIGTERM)
    return trace


@deed
def terminate_supervisor(world: World, chance: random.Random) -> Trace:
    trace = world.trace("terminate_supervisor", "SIGTERM to the supervisor", ("session", "^suspended: SIGTERM"))
    world.kill(_one(world, "supervisor", chance), number=signal.SIGTERM)
    return trace


@deed
def freeze_one(world: World, chance: random.Random) -> Trace:
    """A process that gets no processor for a while: a machine that swaps."""
    victim = chance.choice(sorted(world.processes(), key=lambda process: process.pid) or [None])
    if victim is None:
        raise Refused("nothing runs")
    trace = world.trace("freeze_one", f"SIGSTOP to {' '.join(_words(victim))[-60:]}")
    _freeze([victim], 1 + 4 * chance.random())
    return trace


@deed
def freeze_everything(world: World, chance: random.Random) -> Trace:
    """A virtual machine that is paused."""
    trace = world.trace("freeze_everything", "SIGSTOP to all")
    _freeze(world.processes(), 1 + 6 * chance.random())
    return trace


def _words(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline()]
    except psutil.NoSuchProcess:
        return []


def _freeze(victims: list[psutil.Process], for_s: float) -> None:
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
    time.sleep(for_s)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()


@deed
def reboot(world: World, chance: random.Random) -> Trace:
    """All processes and what lies in memory go, the disk stays, and the boot is another one."""
    trace = world.trace("reboot", "reboot", CUT)
    world.kill_everything()
    world.weather.new_boot()
    for path in (world.folder / "tmp").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return trace


# The second node


def _of_node(world: World) -> list[psutil.Process]:
    found = [process for process in world.processes() if looking.node_of(process)]
    if not found:
        raise Refused("there is no second node")
    return found


@deed
def kill_node(world: World, chance: random.Random) -> Trace:
    victims = _of_node(world)
    trace = world.trace("kill_node", "SIGKILL to everything on the second node", NODE_LOST, KILLED)
    for victim in victims:  # frozen first: what the supervisor starts there anew is not killed with them
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
    world.kill(*_of_node(world))
    return trace


@deed
def kill_agent(world: World, chance: random.Random) -> Trace:
    trace = world.trace("kill_agent", "SIGKILL to the second node's agent", NODE_LOST)
    world.kill(_one(world, "agent", chance))
    return trace


@deed
def freeze_node(world: World, chance: random.Random) -> Trace:
    """A node that swaps."""
    trace = world.trace("freeze_node", "SIGSTOP to everything on the second node")
    _freeze(_of_node(world), 1 + 5 * chance.random())
    return trace


# A person


@deed
def stop_by_person(world: World, chance: random.Random) -> Trace:
    trace = world.trace("stop_by_person", "kgorch stop", ("session", "^suspended: stopped by the user"))
    _wait(world.run("stop").process, 90)
    world.wants_start = True
    return trace


@deed
def stop_and_kill(world: World, chance: random.Random) -> Trace:
    said = ("session", "^(suspended|cut_off): ")
    trace = world.trace("stop_and_kill", "kgorch stop, and SIGKILL to all in its midst", said)
    world.run("stop")
    time.sleep(0.2 + 1.5 * chance.random())
    world.kill_everything()
    world.wants_start = True
    return trace


def _wait(process: subprocess.Popen[bytes], for_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(for_s)


# Disks


@deed
def disk_full(world: World, chance: random.Random) -> Trace:
    """A training that writes a table of its own may end of it, too."""
    said = r"No space left|no room|full"
    places = ("event save_failed", said), ("event launch_failed", said), ("attempt", said)
    trace = world.trace("disk_full", "the disk is full", *places)
    disk = world.kept or world.disk
    disk.fill(leaving=chance.choice([0, 4096, 40_000]))
    _save_in_vain(world, chance)
    disk.free_again()
    return trace


def _save_in_vain(world: World, chance: random.Random) -> None:
    """Asked for twice, as one may be under way just now; an evaluation may come before it."""
    for _ in range(2):
        world.ask("save")
        time.sleep(0.5)
        world.until(lambda: "saving" not in world.ask("ping"), within_s=20)
        time.sleep(1.5 * chance.random())


@deed
def disk_full_at_start(world: World, chance: random.Random) -> Trace:
    trace = world.trace("disk_full_at_start", "the disk is full at a start", CUT)
    world.kill_everything()
    world.disk.fill(leaving=chance.choice([0, 4096, 100_000]))
    world.look_after()
    time.sleep(2 + 4 * chance.random())
    world.disk.free_again()
    return trace


@deed
def disk_goes_read_only(world: World, chance: random.Random) -> Trace:
    said = "Read-only|EROFS"
    places = ("event save_failed", "attempt", "event keeper_not_started")  # the last: where the keeper has just gone
    trace = world.trace("disk_goes_read_only", "the disk goes read-only", *((place, said) for place in places))
    world.weather.set(read_only=1)
    _save_in_vain(world, chance)
    world.weather.calm()
    return trace


@deed
def disk_read_only_at_start(world: World, chance: random.Random) -> Trace:
    trace = world.trace("disk_read_only_at_start", "the disk is read-only at a start", CUT)
    world.kill_everything()
    world.disk.remount("ro")
    world.look_after()
    time.sleep(2 + 3 * chance.random())
    world.disk.remount("rw")
    return trace


@deed
def disk_slow(world: World, chance: random.Random) -> Trace:
    trace = world.trace("disk_slow", "each flush takes long")
    world.weather.set(slow_ms=chance.choice([200, 600, 1500]))
    world.ask("save")
    time.sleep(2 + 2 * chance.random())
    world.weather.calm()
    return trace


# What lies on them


def _roots(world: World) -> list[Path]:
    """Where checkpoints lie."""
    inside = list(world.kgorch.home.glob("runs/*/*/checkpoints/*"))
    return [path for path in (*inside, *world.kgorch.folder.glob("kept/test-*/*")) if path.is_dir()]


def _see_that_there_are(world: World, count: int) -> str:
    """So many checkpoints of the stage that trains, saved for it where they are not there yet. Returns: it. Raises: Refused."""
    for _ in range(8):
        world.note_promised()
        now = looking.standing(world.kgorch.home)
        good = [Path(path) for path in world.promised if path not in world.damaged and Path(path).is_dir()]
        if now and sum(path.parent.name == now.stage for path in good) >= count:
            return now.stage
        world.ask("save")
        time.sleep(1.5)
    raise Refused(f"there are not {count} checkpoints")


def _newest_of_two(world: World) -> Path:
    """The newest checkpoint, with all else dead, so that it has to be read; a whole one stays. Raises: Refused."""
    stage = _see_that_there_are(world, 2)
    world.kill_everything()
    found = [folder for root in _roots(world) if root.name == stage for folder in list_checkpoints(root)]
    return max(found, key=lambda folder: folder.name)


def _damaged(world: World, name: str, how: str, damage: Callable[[Path], None]) -> Trace:
    folder = _newest_of_two(world)
    world.damaged.add(str(folder))
    trace = world.trace(
        name,
        f"{how} {folder.name}",
        ("event checkpoint_quarantined", folder.name),
        ("event checkpoint_skipped", folder.name),
    )
    damage(folder)
    return trace


def _some_file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(
        sorted(path for path in folder.iterdir() if path.name != MANIFEST_NAME and path.stat().st_size)
    )


@deed
def flip_checkpoint(world: World, chance: random.Random) -> Trace:
    def damage(folder: Path) -> None:
        path = _some_file(folder, chance)
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)

    return _damaged(world, "flip_checkpoint", "a bit flipped in", damage)


@deed
def truncate_checkpoint(world: World, chance: random.Random) -> Trace:
    def damage(folder: Path) -> None:
        path = chance.choice([_some_file(folder, chance), folder / MANIFEST_NAME])
        os.truncate(path, chance.randrange(path.stat().st_size))

    return _damaged(world, "truncate_checkpoint", "a file cut short in", damage)


@deed
def delete_checkpoint_file(world: World, chance: random.Random) -> Trace:
    return _damaged(
        world, "delete_checkpoint_file", "a file deleted in", lambda folder: _some_file(folder, chance).unlink()
    )


@deed
def delete_manifest(world: World, chance: random.Random) -> Trace:
    return _damaged(
        world, "delete_manifest", "the manifest deleted in", lambda folder: (folder / MANIFEST_NAME).unlink()
    )


@deed
def socket_removed(world: World, chance: random.Random) -> Trace:
    trace = world.trace("socket_removed", "the supervisor's socket is removed")
    for path in world.kgorch.home.glob("runs/*/*/control.sock"):
        path.unlink(missing_ok=True)
    return trace


@deed
def keepers_socket_removed(world: World, chance: random.Random) -> Trace:
    trace = world.trace("keepers_socket_removed", "the keeper's socket is removed")
    for path in world.kgorch.home.glob("runs/*/*/keeper.sock"):
        path.unlink(missing_ok=True)
    return trace


HOLDS = "import sqlite3, sys, time; d = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)"
HOLDS += "; d.execute('BEGIN EXCLUSIVE'); time.sleep(float(sys.argv[2])); d.execute('ROLLBACK')"


@deed
def database_locked(world: World, chance: random.Random) -> Trace:
    """By another program, which is in the midst of a transaction."""
    trace = world.trace("database_locked", "another program holds the database")
    for_s = chance.choice([1, 4, 8])
    subprocess.run([sys.executable, "-c", HOLDS, str(world.kgorch.home / "kgorch.db"), str(for_s)], check=False)
    return trace


@deed
def database_log_deleted(world: World, chance: random.Random) -> Trace:
    """What a copy of the database without its -wal is: the newest transactions are gone, or all."""
    return _database_lost(world, "database_log_deleted", ["kgorch.db-wal", "kgorch.db-shm"])


@deed
def database_deleted(world: World, chance: random.Random) -> Trace:
    return _database_lost(world, "database_deleted", ["kgorch.db", "kgorch.db-wal", "kgorch.db-shm"])


@deed
def database_damaged(world: World, chance: random.Random) -> Trace:
    """Its head is no database's any more; with a log beside it, which may hold the head and save it all, or without."""
    logs, nonsense = chance.choice([[], ["kgorch.db-wal", "kgorch.db-shm"]]), chance.randbytes(4096)

    def damage() -> None:
        with open(world.kgorch.home / "kgorch.db", "r+b") as file:
            file.write(nonsense)

    trace = _database_lost(world, "database_damaged", logs, damage)
    return dataclasses.replace(trace, what="kgorch.db is overwritten with nonsense")


def _database_lost(world: World, name: str, files: list[str], damage: Callable[[], None] = lambda: None) -> Trace:
    """The run must go on from its checkpoints, under whatever paths where it is another database: only how far they reach is
    promised. What is left of the log is looked at afterwards: it may be all, or what lay in the file before its log."""
    _see_that_there_are(world, 1)
    before = world.trace(name, f"{' '.join(files)} deleted")
    world.kill_everything()
    for file in files:
        (world.kgorch.home / file).unlink(missing_ok=True)
    damage()
    left = world.trace(name, before.what)
    if left.events < before.events:
        world.forget_paths()
    return dataclasses.replace(left, promised=before.promised)


@deed
def database_restarted(world: World, chance: random.Random) -> Trace:
    return _database_stopped(world, "database_restarted", chance, 0.0)


@deed
def database_away(world: World, chance: random.Random) -> Trace:
    return _database_stopped(world, "database_away", chance, 2 + 8 * chance.random())


def _database_stopped(world: World, name: str, chance: random.Random, for_s: float) -> Trace:
    if world.server is None:
        raise Refused("there is no PostgreSQL")
    number = chance.choice([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
    trace = world.trace(name, f"PostgreSQL is stopped by {number.name} for {for_s:.0f} s")
    world.server.stop(number)
    time.sleep(for_s)
    world.server.start()
    return trace


# The rest of the machine


@deed
def clock_forward(world: World, chance: random.Random) -> Trace:
    return _clock_put(world, "clock_forward", chance.choice([90, 3600, 40 * 86400]))


@deed
def clock_back(world: World, chance: random.Random) -> Trace:
    return _clock_put(world, "clock_back", -chance.choice([90, 3600, 40 * 86400]))


def _clock_put(world: World, name: str, seconds: int) -> Trace:
    """It stays there. Of supervisors and daemon; ranks keep no instants."""
    trace = world.trace(name, f"the wall clock is put by {seconds:+d} s")
    world.clock_moved = True
    world.weather.set(clock_s=seconds)
    return trace


@deed
def driver_lost(world: World, chance: random.Random) -> Trace:
    assert world.driver
    trace = world.trace("driver_lost", "a GPU falls off the bus, as NVML says")
    world.driver.set(chance.randrange(2), lost=1)
    time.sleep(2 + 2 * chance.random())
    world.driver.heal()
    return trace


@deed
def driver_hangs(world: World, chance: random.Random) -> Trace:
    assert world.driver
    function = chance.choice(
        ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetHandleByIndex_v2"]
    )
    trace = world.trace("driver_hangs", f"{function} hangs")
    world.driver.fail(function, "hang")
    time.sleep(3 + 3 * chance.random())
    world.driver.heal()
    return trace


@deed
def memory_limited(world: World, chance: random.Random) -> Trace:
    """A rank may not have what half of its batch asks for, from here on: its allocator fails for real."""
    rank = _one(world, "rank", chance)
    said = ("event out_of_memory", "can't allocate memory|MemoryError|bad_alloc"), ("attempt", "out_of_memory")
    trace = world.trace("memory_limited", "a rank's memory is limited", *said)
    share = 12 // world.episode.ranks * 16 << 20
    with contextlib.suppress(psutil.NoSuchProcess):
        held = min(_data_bytes(rank) for _ in range(20))
        rank.rlimit(resource.RLIMIT_DATA, (held + int(0.75 * share), resource.RLIM_INFINITY))
    return trace


def _data_bytes(process: psutil.Process) -> int:
    """Of private writable memory, which RLIMIT_DATA counts."""
    time.sleep(0.01)
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        return int(lines["VmData"].split()[0]) << 10
    except (OSError, KeyError):
        raise psutil.NoSuchProcess(process.pid) from None


@deed
def source_fails(world: World, chance: random.Random) -> Trace:
    """A network's folder whose reads fail for a while, as a mount that has lost its server."""
    said = ("attempt", "Input/output error")
    trace = world.trace("source_fails", "reads of the source fail", said, may_fail=True)
    attempt = world.kgorch.attempt()
    world.weather.set(source_fails=1)
    world.until(lambda: world.kgorch.attempt() != attempt, within_s=15)
    world.weather.calm()
    return trace
