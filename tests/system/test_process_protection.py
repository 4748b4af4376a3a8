"""What kgorch writes is its owner's alone, what a training writes as the person has it; memory that runs out takes a rank."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from harness import processes_of, wait_until

from kgorch.system import process_protection

pytestmark = pytest.mark.slow


def umask_of(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def oom_score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def roles(kgorch) -> dict[str, int]:
    found = dict(kgorch.pids())
    for keeper in processes_of(kgorch.home, "kgorch.snapshots.keeper"):
        found["keeper"] = keeper.pid
    return found


@pytest.mark.parametrize("is_daemons", [False, True], ids=["a person's session", "the daemon's session"])
def test_only_ranks_have_the_persons_umask_and_the_kernel_takes_a_rank_first(kgorch, is_daemons):
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05}, every="1s")
    before = os.umask(0o027)
    try:
        if is_daemons:
            kgorch("start", str(plan), "--queue")
        first = kgorch.background(*(["daemon"] if is_daemons else ["start", str(plan)]))
    finally:
        os.umask(before)
    kgorch.wait_for_step(2)
    found = {"supervisor": kgorch.status()["session"]["supervisor"]["pid"], "first": first.pid, **roles(kgorch)}
    private = {name: umask_of(pid) for name, pid in found.items() if name not in ("torchrun", "rank0")}
    assert set(private.values()) == {0o077} and "keeper" in private, private
    assert umask_of(found["rank0"]) == 0o027
    scores = {name: oom_score_of(pid) for name, pid in found.items()}
    rank = scores.pop("rank0")
    scores.pop("torchrun")
    assert max(scores.values()) < rank, (scores, rank)
    assert rank == oom_score_of(os.getpid()) or rank == oom_score_of(os.getpid()) + process_protection.MORE_LIKELY
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in kgorch.attempt().iterdir() if path.is_file()}
    assert not [name for name, mode in modes.items() if mode & 0o077 and not name.startswith("rank")], modes
    kgorch("stop")
    if is_daemons:
        kgorch("daemon", "stop")
    wait_until(lambda: not processes_of(kgorch.home), within_s=30)


def test_where_the_own_score_may_not_be_lowered_that_of_the_ranks_is_raised(tmp_path):
    """As for anybody but root: without CAP_SYS_RESOURCE."""
    program = (
        "from kgorch.system import process_protection; process_protection.protect();"
        "process_protection.restore_user_settings(); print(open('/proc/self/oom_score_adj').read().strip())"
    )
    words = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource", "python", "-c", program]
    words[3] = os.sys.executable
    if subprocess.run([*words[:3], "true"], capture_output=True).returncode:
        pytest.skip("no right to give up a capability")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.strip() == str(min(oom_score_of(os.getpid()) + process_protection.MORE_LIKELY, 1000)), done
