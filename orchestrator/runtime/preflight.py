"""What can be seen of a machine before a plan is started on it, and what to do about it. Nothing is started, PyTorch is looked
at, never loaded; only an empty file is written and taken away again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from db import runs
from orchestrator import manifest
from orchestrator.core import quota as core
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, PlanError
from orchestrator.plan import Plan, check_entries
from orchestrator.platforms.profile import Profile
from orchestrator.runtime import claims, devices, gpus, machine, pools
from orchestrator.runtime.ledger import Terms, terms_of

PASS, WARN, FAIL = "pass", "warn", "fail"


class Line(NamedTuple):
    """`do`: what to type or change; empty where nothing is to be done."""

    name: str
    verdict: str
    said: str
    do: str = ""


def lines(
    engine: Engine, home: Path, profile: Profile, plan: Plan, workdir: Path, *, elsewhere: bool = False
) -> list[Line]:
    """`elsewhere`: it is another machine's GPUs that are meant."""
    found = machine.described(home)
    looks: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("software", lambda: _software(found)),
        ("gpus", lambda: _gpus(home, found, plan, elsewhere=elsewhere)),
        ("memory", lambda: _memory(found)),
        ("paths", lambda: _paths(home, plan, workdir)),
        ("checkpoint", lambda: _checkpoint(engine, plan)),
        ("ports", _ports),
        ("platform", lambda: _platform(plan, profile)),
        ("quota", lambda: _quota(engine, plan, profile)),
    ]
    told: list[Line] = []
    for name, look in looks:
        try:
            told += look()
        except OSError as error:  # what cannot be looked at is said, and the rest is looked at
            told.append(Line(name, WARN, f"cannot be looked at: {error}"))
    return told


def _software(found: dict[str, Any]) -> Iterator[Line]:
    wanted = importlib.metadata.metadata("kgorch")["Requires-Python"] or ">=3.11"
    least = tuple(int(part) for part in re.findall(r"\d+", wanted)[:2])
    here = ".".join(str(part) for part in sys.version_info[:3])
    verdict = PASS if sys.version_info[:2] >= least else FAIL
    yield Line("python", verdict, here, "" if verdict == PASS else f"install a Python {wanted}")
    if found["torch"] is None:
        yield Line("torch", FAIL, "not installed", "pip install torch")
        return
    cuda = cuda_of_torch()
    yield Line("torch", PASS, f"{found['torch']}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}")
    if not found["gpus"]:
        return
    if cuda is None:
        yield Line("cuda", WARN, "there are GPUs that this torch cannot use", "install a torch built for CUDA")
    elif (driver := driver_cuda()) is None:
        yield Line(
            "cuda", WARN, f"the driver {found['driver']} does not say which CUDA it takes", "see what nvidia-smi says"
        )
    else:
        fits = driver[0] >= int(cuda.split(".")[0])  # minor versions are compatible within a major one
        said = f"the driver {found['driver']} takes CUDA up to {driver[0]}.{driver[1]}"
        yield Line("cuda", PASS if fits else FAIL, said, "" if fits else "update the driver, or install an older torch")


def cuda_of_torch() -> str | None:
    """As torch's version.py has it; None for a build without CUDA, or where nobody can say."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    with contextlib.suppress(OSError):
        match = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.M)
        return match[1] if match else None
    return None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver takes: major, minor."""

    def ask() -> int:
        with gpus.opened() as nvml:
            return int(nvml.nvmlSystemGetCudaDriverVersion_v2())

    with contextlib.suppress(gpus.DriverSilent):
        told = gpus.asked(ask)
        return None if told is None else (told // 1000, told % 1000 // 10)
    return None


def _gpus(home: Path, found: dict[str, Any], plan: Plan, *, elsewhere: bool) -> Iterator[Line]:
    names = ", ".join(gpu["name"] for gpu in found["gpus"]) or "none"
    try:
        count = devices.visible_gpus()
    except gpus.DriverSilent as error:
        yield Line("gpus", FAIL, str(error), "see what nvidia-smi says")
        return
    ranks = max(devices.ranks_for(stage.ranks) for stage in plan.stage)
    if count < (plan.session.gpus or 0):
        wanted = f"the plan needs {plan.session.gpus}; visible: {count} ({names})"
        if elsewhere:
            yield Line(
                "gpus", WARN, f"{wanted}: its ranks are probed here all the same", "kgorch check there, before a start"
            )
        else:
            yield Line("gpus", FAIL, wanted, "switch the accelerator on, or take session.gpus out of the plan")
    elif count and ranks > count:
        yield Line("gpus", WARN, f"{ranks} ranks share {count} ({names})", 'ranks = "auto" starts one a GPU')
    else:
        yield Line("gpus", PASS, f"{count} visible ({names}); {ranks} ranks at most")
    universe = claims.visible()
    free, shared = claims.states(home, universe)
    if universe and free < len(universe):
        busy = len(universe) - free - shared
        said = f"{busy} of {len(universe)} belong to other runs" + (f", {shared} are shared" if shared else "")
        yield Line("gpus taken", WARN, said, "kgorch queue shows who waits for what")


def _memory(found: dict[str, Any]) -> Iterator[Line]:
    bounded = ", bounded by a control group" if found["cgroup_bounds"] else ""
    yield Line("memory", PASS, f"{_gib(found['memory_free'])} of {_gib(found['memory_total'])} free{bounded}")
    if found["shm_free"] is not None and found["shm_free"] < 64 << 20:
        said = f"/dev/shm has {_gib(found['shm_free'])} free: loading workers hand batches over there"
        yield Line("shared memory", WARN, said, "give the container more (--shm-size), or num_workers = 0")


def _paths(home: Path, plan: Plan, workdir: Path) -> Iterator[Line]:
    try:
        check_entries(plan, workdir)
        yield Line("entries", PASS, ", ".join(dict.fromkeys(stage.entry for stage in plan.stage)))
    except PlanError as error:
        yield Line("entries", FAIL, "; ".join((error.what, *error.facts)), error.next_step or "")
    folders = {"state folder": home}
    if plan.checkpoint.dir:
        folders["checkpoints"] = workdir / plan.checkpoint.dir
    if plan.checkpoint.mirror and "://" not in plan.checkpoint.mirror:
        folders["mirror"] = workdir / plan.checkpoint.mirror
    for name, folder in folders.items():
        if name == "mirror" and not folder.is_dir():
            yield Line(name, FAIL, f"there is no folder {folder}", "make it, or correct checkpoint.mirror")
        else:
            yield _writable(name, folder)
    for number, stage in enumerate(plan.stage):
        for key, value in stage.args.items():
            if isinstance(value, str) and (workdir / value).exists() and not os.access(workdir / value, os.R_OK):
                yield Line(f"stage {number + 1}", FAIL, f"{key} = {value!r} cannot be read", "see its permissions")


def _writable(name: str, folder: Path) -> Line:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return Line(name, PASS, f"{folder} can be written")
    except OSError as error:
        return Line(name, FAIL, f"{there} cannot be written: {error.strerror}", "name another folder, or free this one")


def disk_free(folder: Path) -> int | None:
    """Bytes of the disk that `folder` lies on, or will; None where that cannot be told."""
    try:
        return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    except OSError:
        return None


def _checkpoint(engine: Engine, plan: Plan) -> Iterator[Line]:
    """Of the run of this name that is not finished: what a start would go on from."""
    known = runs.newest(engine, plan.name)
    if known is None or known.state == "finished":
        yield Line("checkpoint", PASS, "none: a start begins a new run")
        return
    for stage in reversed(plan.stage):
        for folder, described in manifest.newest_readable(Path(known.checkpoints) / stage.name):
            try:
                manifest.verify(folder)
            except (CheckpointBroken, CheckpointUnreadable) as error:
                yield Line("checkpoint", WARN, str(error.what), "the one before it is used; kgorch checkpoints list")
                continue
            yield Line("checkpoint", PASS, f"{stage.name}, step {described.step}, read back; a start goes on from it")
            return
    yield Line("checkpoint", PASS, f"the run {known.name} has none yet: its stage begins")


def _ports() -> Iterator[Line]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
        socket.getaddrinfo(socket.gethostname(), None)  # gloo looks for its own address that way
        yield Line("ports", PASS, "ranks can meet on this machine")
    except socket.gaierror:
        name = socket.gethostname()
        yield Line("ports", WARN, f"the host's name {name!r} has no address", f"add it to /etc/hosts: 127.0.0.1 {name}")
    except OSError as error:
        yield Line("ports", FAIL, f"no port of 127.0.0.1 can be opened: {error}", "see what bounds this container")


def _platform(plan: Plan, profile: Profile) -> Iterator[Line]:
    wall_s = plan.session.wall or profile.wall_s
    said = f"{profile.name}; sessions of {timedelta(seconds=wall_s)}" if wall_s else f"{profile.name}; no wall is known"
    yield Line("platform", PASS, said)


def _quota(engine: Engine, plan: Plan, profile: Profile) -> Iterator[Line]:
    terms = terms_of(plan, profile)
    if terms is None:
        return
    left_s = quota_left_s(engine, terms)
    said = f"{left_s / 3600:.1f} of {terms.quota.total_s / 3600:g} h left in {terms.quota.pool!r}"
    verdict = PASS if left_s > 0 else WARN
    yield Line("quota", verdict, said, "" if left_s > 0 else "a start waits in the queue until hours are renewed")


def quota_left_s(engine: Engine, terms: Terms) -> float:
    now = datetime.now(UTC)
    used = [
        *pools.uses(engine, terms.quota, now),
        *(one.unwritten for one in pools.living(engine, terms.quota.pool, now)),
    ]
    return max(0.0, terms.quota.usable_s - core.used_s(terms.quota, used, now))


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / (1 << 30):.1f} GiB"
