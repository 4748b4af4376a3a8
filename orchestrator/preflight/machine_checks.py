"""What can be seen of a machine before a plan is started on it, and what to do about it. Nothing is started, PyTorch is looked
at, never loaded; what is written (an empty file, copies of databases that lie in sources) is taken away again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import runs
from orchestrator.core import quota as core
from orchestrator.core.codes import RunState
from orchestrator.core.cost_estimate import Reached
from orchestrator.errors import PlanError
from orchestrator.hardware import devices, gpu_locks, inventory, nvml
from orchestrator.launch import attempts, inputs, requirements
from orchestrator.launch.verdicts import FAIL, PASS, WARN, Line
from orchestrator.limits import quota_pools
from orchestrator.limits.quota_ledger import Terms, terms_of
from orchestrator.plan import Plan, StageSection, check_entries
from orchestrator.platforms.profile import Profile
from orchestrator.preflight import resume_position

SHM = Path("/dev/shm")
SHM_OF_LOADERS, SHM_OF_A_RANK = 64 << 20, 32 << 20
"""Bytes. NCCL's segments are 6 to 10 MB each, as its error messages say, several a rank where GPUs do not reach each other."""


def lines(
    engine: Engine,
    home: Path,
    profile: Profile,
    plan: Plan,
    workdir: Path,
    *,
    elsewhere: bool = False,
    overrides: Sequence[str] = (),
) -> tuple[list[Line], Reached | None]:
    """The lines of `kgorch check` about the machine, and where a start would go on; None where it begins a run.

    Args:
        elsewhere: it is another machine's GPUs that are meant.
        overrides: of the command line; `plan` has them already.
    """
    found, reached = inventory.describe_host(home), None

    def checkpoint() -> Iterator[Line]:
        nonlocal reached
        reached = yield from resume_position.look(engine, home, profile, plan, workdir, overrides)

    looks: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("software", lambda: _software(found)),
        ("gpus", lambda: _gpus(home, plan, profile.name, elsewhere=elsewhere)),
        ("memory", lambda: _memory(found)),
        ("shared memory", lambda: _shared_memory(found["shm_free"], plan)),
        ("paths", lambda: _paths(home, plan, workdir)),
        ("inputs", lambda: _inputs(_stages_to_do(engine, plan), workdir, profile.name)),
        ("checkpoint", checkpoint),
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
    return told, reached


def _software(found: dict[str, Any]) -> Iterator[Line]:
    wanted = importlib.metadata.metadata("kgorch")["Requires-Python"] or ">=3.11"
    least = tuple(int(part) for part in re.findall(r"\d+", wanted)[:2])
    here = ".".join(str(part) for part in sys.version_info[:3])
    verdict = PASS if sys.version_info[:2] >= least else FAIL
    yield Line("python", verdict, here, "" if verdict == PASS else f"install a Python {wanted}")
    if found["torch"] is None:
        yield Line("torch", FAIL, "not installed", "pip install torch")
        return
    cuda = devices.torch_cuda()
    build = "" if cuda is None else f", built for CUDA {cuda}" if cuda else ", built without CUDA"
    yield Line("torch", PASS, f"{found['torch']}{build}")


"""Where a platform has a GPU switched on."""


def _gpus(home: Path, plan: Plan, platform: str, *, elsewhere: bool) -> Iterator[Line]:
    try:
        accelerators = devices.detect_accelerators()
    except nvml.DriverUnresponsive as error:
        yield Line("gpus", FAIL, str(error), "see what nvidia-smi says")
        return
    for check in requirements.examine(accelerators, plan, elsewhere=elsewhere, platform=platform):
        yield check.line()
    universe = gpu_locks.visible_gpus()
    free, shared = gpu_locks.count_free_and_shared(home, universe)
    if universe and free < len(universe):
        busy = len(universe) - free - shared
        said = f"{busy} of {len(universe)} belong to other runs" + (f", {shared} are shared" if shared else "")
        yield Line("gpus taken", WARN, said, "kgorch queue shows who waits for what")


def _memory(found: dict[str, Any]) -> Iterator[Line]:
    bounded = ", bounded by a control group" if found["cgroup_bounds"] else ""
    yield Line("memory", PASS, f"{_gib(found['memory_free'])} of {_gib(found['memory_total'])} free{bounded}")


def _shared_memory(free: int | None, plan: Plan) -> Iterator[Line]:
    """`free`: bytes of /dev/shm; None where there is none to look at."""
    ranks = _ranks_on_gpus(plan)
    minimum, uses = SHM_OF_LOADERS, "loading workers hand batches over there"
    do = "give the container more (docker run --shm-size=1g); or num_workers = 0"
    if ranks > 1:
        minimum, uses = minimum + ranks * SHM_OF_A_RANK, f"{uses}, and {ranks} ranks exchange gradients (NCCL)"
        do += " and export NCCL_SHM_DISABLE=1, which is slower"
    if free is not None and free < minimum:
        what = f"{SHM} has {_mib(free)} free, and should have {_mib(minimum)}: {uses}"
        yield Line("shared memory", WARN, what, do)
    if size := nccl_bytes(SHM):
        what = f"{_mib(size)} of {SHM} are NCCL's files of your user: of a training, or left by ranks that were killed"
        do = f"when none of your trainings runs: find {SHM} -name 'nccl-*' -user $(id -u) -delete"
        yield Line("shared memory", WARN, what, do)


def _ranks_on_gpus(plan: Plan) -> int:
    """The most of a stage; 0 where they train on the CPU, or nobody can say."""
    with contextlib.suppress(nvml.DriverUnresponsive):
        if devices.visible_gpu_count() and devices.torch_cuda() != "":
            return max(devices.rank_count(stage.ranks) for stage in plan.stage)
    return 0


def nccl_bytes(folder: Path) -> int:
    """What the shared memory files of NCCL take that belong to this user. NCCL removes them itself, unless it is killed."""
    total = 0
    for path in folder.glob("nccl-*"):
        with contextlib.suppress(OSError):  # its owner has just removed it
            status = path.lstat()
            total += status.st_blocks * 512 if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode) else 0
    return total


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


def _stages_to_do(engine: Engine, plan: Plan) -> list[StageSection]:
    known = runs.newest(engine, plan.name)
    if known is None:
        return plan.stage
    return [] if known.state == RunState.FINISHED else attempts.open_stages(engine, known, plan)


def _inputs(stages: Sequence[StageSection], workdir: Path, platform: str) -> Iterator[Line]:
    """What the stages' own functions say is asked only where all that they read is there."""
    checks = [*requirements.cores(stages), *inputs.paths(stages, workdir, platform)]
    for check in checks:
        yield check.line()
    if not any(check.verdict == FAIL for check in checks):
        for check in inputs.calls(stages, workdir):
            yield check.line()


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
        *quota_pools.uses(engine, terms.quota, now),
        *(one.unwritten for one in quota_pools.living(engine, terms.quota.pool, now)),
    ]
    return max(0.0, terms.quota.usable_s - core.used_s(terms.quota, used, now))


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / (1 << 30):.1f} GiB"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
