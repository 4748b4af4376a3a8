"""Checks of a machine before a plan is started on it, each with advice.

No training is started, and PyTorch is never loaded. What is written is removed again: empty files, and copies of databases from
other machines.
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

from kgorch.admission.requests import LocalState
from kgorch.core.codes import RunState
from kgorch.core.forecast.cost_estimate import ResumePosition
from kgorch.core.limits import quota as core
from kgorch.db import runs
from kgorch.errors import KgorchError, PlanError
from kgorch.hardware import devices, gpu_locks, inventory, nvml
from kgorch.launch import attempts, inputs, requirements
from kgorch.launch.verdicts import FAIL, PASS, WARN, CheckLine
from kgorch.limits import fixed_walls, quota_pools
from kgorch.limits.quota_ledger import Terms, terms_of
from kgorch.nodes import allocation
from kgorch.plan import Plan, StageSection, check_entries
from kgorch.platforms.profile import Profile
from kgorch.preflight import resume_position
from kgorch.system.clock import boottime_s

SHM = Path("/dev/shm")
SHM_OF_LOADERS, SHM_OF_A_RANK = 64 << 20, 32 << 20
"""Bytes required in /dev/shm. NCCL's segments are 6 to 10 MB each, as its error messages say, and a rank has several where GPUs
do not reach each other.
"""


def lines(
    state: LocalState, plan: Plan, workdir: Path, *, elsewhere: bool = False, overrides: Sequence[str] = ()
) -> tuple[list[CheckLine], ResumePosition | None]:
    """The lines of `kgorch check` about the machine, and where a start would go on; None where it begins a run.

    Args:
        elsewhere: the plan is meant for another machine: too few GPUs here are no failure.
        overrides: of the command line; `plan` has them already.
    """
    engine, home, profile = state.engine, state.home, state.profile
    host, position = inventory.describe_host(home), None

    def checkpoint() -> Iterator[CheckLine]:
        nonlocal position
        position = yield from resume_position.find(state, plan, workdir, overrides)

    checks: list[tuple[str, Callable[[], Iterator[CheckLine]]]] = [
        ("software", lambda: _software(plan)),
        ("gpus", lambda: _gpus(home, plan, profile.name, elsewhere=elsewhere)),
        ("nodes", lambda: _nodes(plan, elsewhere=elsewhere)),
        ("memory", lambda: _memory(host)),
        ("shared memory", lambda: _shared_memory(host["shm_free"], plan)),
        ("paths", lambda: _paths(home, plan, workdir)),
        ("inputs", lambda: _inputs(_stages_to_do(engine, plan), workdir, profile.name)),
        ("checkpoint", checkpoint),
        ("ports", _ports),
        ("platform", lambda: _platform(plan, profile, elsewhere=elsewhere)),
        ("quota", lambda: _quota(engine, plan, profile)),
    ]
    results: list[CheckLine] = []
    for name, check in checks:
        try:
            results += check()
        except OSError as error:  # the other checks are made all the same
            results.append(CheckLine(name, WARN, f"cannot be looked at: {error}"))
    return results, position


def _software(plan: Plan) -> Iterator[CheckLine]:
    required = importlib.metadata.metadata("kgorch")["Requires-Python"] or ">=3.11"
    least = tuple(int(part) for part in re.findall(r"\d+", required)[:2])
    here = ".".join(str(part) for part in sys.version_info[:3])
    verdict = PASS if sys.version_info[:2] >= least else FAIL
    yield CheckLine("python", verdict, here, "" if verdict == PASS else f"install a Python {required}")
    yield from (check.line() for check in requirements.check_pytorch(plan.stage))


def _gpus(home: Path, plan: Plan, platform: str, *, elsewhere: bool) -> Iterator[CheckLine]:
    try:
        accelerators = devices.detect_accelerators()
    except nvml.DriverUnresponsive as error:
        yield CheckLine("gpus", FAIL, str(error), "see what nvidia-smi says")
        return
    for check in requirements.check_accelerators(accelerators, plan, elsewhere=elsewhere, platform=platform):
        yield check.line()
    universe = gpu_locks.visible_gpus()
    free, shared = gpu_locks.count_free_and_shared(home, universe)
    if universe and free < len(universe):
        busy = len(universe) - free - shared
        what = f"{busy} of {len(universe)} belong to other runs" + (f", {shared} are shared" if shared else "")
        yield CheckLine("gpus taken", WARN, what, "kgorch queue shows who waits for what")


def _nodes(plan: Plan, *, elsewhere: bool) -> Iterator[CheckLine]:
    """Whether the allocation has the nodes of each stage; nothing where all stages run on one machine."""
    for stage in plan.stage:
        if stage.nodes != 1:
            try:
                least, hosts = allocation.choose(stage, allocation.hosts_of(plan.nodes))
            except KgorchError as error:
                what = "; ".join((error.what, *error.facts))
                yield CheckLine("nodes", WARN if elsewhere else FAIL, what, error.next_step or "")
            else:
                named = ", ".join(hosts) or "this machine"
                yield CheckLine("nodes", PASS, f"stage {stage.name}: {named}; at least {least}")


def _memory(host: dict[str, Any]) -> Iterator[CheckLine]:
    bounded = ", bounded by a control group" if host["cgroup_bounds"] else ""
    yield CheckLine("memory", PASS, f"{_gib(host['memory_free'])} of {_gib(host['memory_total'])} free{bounded}")


def _shared_memory(free: int | None, plan: Plan) -> Iterator[CheckLine]:
    """`free`: bytes of /dev/shm; None where there is none."""
    ranks = _ranks_on_gpus(plan)
    minimum, uses = SHM_OF_LOADERS, "loading workers hand batches over there"
    do = "give the container more (docker run --shm-size=1g); or num_workers = 0"
    if ranks > 1:
        minimum, uses = minimum + ranks * SHM_OF_A_RANK, f"{uses}, and {ranks} ranks exchange gradients (NCCL)"
        do += " and export NCCL_SHM_DISABLE=1, which is slower"
    if free is not None and free < minimum:
        what = f"{SHM} has {_mib(free)} free, and should have {_mib(minimum)}: {uses}"
        yield CheckLine("shared memory", WARN, what, do)
    if size := nccl_bytes(SHM):
        what = f"{_mib(size)} of {SHM} are NCCL's files of your user: of a training, or left by ranks that were killed"
        do = f"when none of your trainings runs: find {SHM} -name 'nccl-*' -user $(id -u) -delete"
        yield CheckLine("shared memory", WARN, what, do)


def _ranks_on_gpus(plan: Plan) -> int:
    """The most ranks of a stage; 0 where they train on the CPU, or the driver does not answer."""
    with contextlib.suppress(nvml.DriverUnresponsive):
        if devices.visible_gpu_count() and devices.torch_cuda() != "":
            return max(devices.rank_count(stage.ranks) for stage in plan.stage)
    return 0


def nccl_bytes(folder: Path) -> int:
    """Bytes of NCCL's shared memory files of this user. NCCL removes them itself, unless it is killed."""
    total = 0
    for path in folder.glob("nccl-*"):
        with contextlib.suppress(OSError):  # its owner has just removed it
            status = path.lstat()
            total += status.st_blocks * 512 if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode) else 0
    return total


def _paths(home: Path, plan: Plan, workdir: Path) -> Iterator[CheckLine]:
    try:
        check_entries(plan, workdir)
        yield CheckLine("entries", PASS, ", ".join(dict.fromkeys(stage.entry for stage in plan.stage)))
    except PlanError as error:
        yield CheckLine("entries", FAIL, "; ".join((error.what, *error.facts)), error.next_step or "")
    folders = {"state folder": home}
    if plan.checkpoint.dir:
        folders["checkpoints"] = workdir / plan.checkpoint.dir
    if plan.checkpoint.mirror and "://" not in plan.checkpoint.mirror:
        folders["mirror"] = workdir / plan.checkpoint.mirror
    for name, folder in folders.items():
        if name == "mirror" and not folder.is_dir():
            yield CheckLine(name, FAIL, f"there is no folder {folder}", "make it, or correct checkpoint.mirror")
        else:
            yield _writable(name, folder)
    for number, stage in enumerate(plan.stage):
        for key, value in stage.args.items():
            if isinstance(value, str) and (workdir / value).exists() and not os.access(workdir / value, os.R_OK):
                yield CheckLine(f"stage {number + 1}", FAIL, f"{key} = {value!r} cannot be read", "see its permissions")


def _stages_to_do(engine: Engine, plan: Plan) -> list[StageSection]:
    run = runs.newest(engine, plan.name)
    if run is None:
        return plan.stage
    return [] if run.state == RunState.FINISHED else attempts.open_stages(engine, run, plan)


def _inputs(stages: Sequence[StageSection], workdir: Path, platform: str) -> Iterator[CheckLine]:
    """Check what the stages read. Their own functions are called only where all paths can be read."""
    checks = [*requirements.check_cores(stages), *inputs.check_paths(stages, workdir, platform)]
    for check in checks:
        yield check.line()
    if not any(check.verdict == FAIL for check in checks):
        for check in inputs.call_preflights(stages, workdir):
            yield check.line()


def _writable(name: str, folder: Path) -> CheckLine:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return CheckLine(name, PASS, f"{folder} can be written")
    except OSError as error:
        return CheckLine(
            name, FAIL, f"{there} cannot be written: {error.strerror}", "name another folder, or free this one"
        )


def disk_free(folder: Path) -> int | None:
    """Free bytes of the disk of `folder`, which need not exist yet; None where that is not known."""
    try:
        return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    except OSError:
        return None


def _ports() -> Iterator[CheckLine]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
        socket.getaddrinfo(socket.gethostname(), None)  # gloo looks for its own address that way
        yield CheckLine("ports", PASS, "ranks can meet on this machine")
    except socket.gaierror:
        name = socket.gethostname()
        yield CheckLine(
            "ports", WARN, f"the host's name {name!r} has no address", f"add it to /etc/hosts: 127.0.0.1 {name}"
        )
    except OSError as error:
        yield CheckLine("ports", FAIL, f"no port of 127.0.0.1 can be opened: {error}", "see what bounds this container")


def _platform(plan: Plan, profile: Profile, *, elsewhere: bool) -> Iterator[CheckLine]:
    wall_s = plan.session.wall or profile.wall_s
    what = f"{profile.name}; sessions of {timedelta(seconds=wall_s)}" if wall_s else f"{profile.name}; no wall is known"
    if wall_s and not elsewhere and profile.began != "start":
        left_s = fixed_walls.began_s(profile.began) + wall_s - boottime_s()
        what += f", {timedelta(seconds=max(0, round(left_s)))} of this one left: it began with the {profile.began}"
        if left_s <= 0:
            do = 'count from the start of kgorch ([platform] began = "start"), or start it with --until'
            yield CheckLine("platform", FAIL, what, do)
            return
    yield CheckLine("platform", PASS, what)


def _quota(engine: Engine, plan: Plan, profile: Profile) -> Iterator[CheckLine]:
    terms = terms_of(plan, profile)
    if terms is None:
        return
    left_s = quota_left_s(engine, terms)
    what = f"{left_s / 3600:.1f} of {terms.quota.total_s / 3600:g} h left in {terms.quota.pool!r}"
    verdict = PASS if left_s > 0 else WARN
    yield CheckLine("quota", verdict, what, "" if left_s > 0 else "a start waits in the queue until hours are renewed")


def quota_left_s(engine: Engine, terms: Terms) -> float:
    """Seconds of the quota that can be used now, with what living sessions have used and not yet written."""
    now = datetime.now(UTC)
    used = [
        *quota_pools.uses(engine, terms.quota, now),
        *(one.unwritten for one in quota_pools.live_usage(engine, terms.quota.pool, now)),
    ]
    return max(0.0, terms.quota.usable_s - core.used_s(terms.quota, used, now))


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / (1 << 30):.1f} GiB"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
