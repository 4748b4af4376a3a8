"""A real Slurm (Debian: apt-get install slurm-wlm munge) on this machine: a controller and two nodes, in a folder and on ports of
its own. The nodes have a mount namespace each, in which the kernel has another boot id: to kgorch they are other machines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until
from ranks import free_port

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# a requeued job starts again after this time, by default two minutes
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=9
"""
NODES = ("n1", "n2")
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Cluster:
    """All of it below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        text = CONF.format(
            host=socket.gethostname(), ports=[free_port() for _ in range(3)], folder=folder, cpus=os.cpu_count()
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(stat.S_IRUSR | stat.S_IWUSR)

    def start(self) -> None:
        folder = self.folder
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        munge = [f"--{option}={folder / name}" for option, name in files.items()]
        self._run("munged", "munged", "--foreground", "--force", f"--log-file={folder}/munge.log", *munge)
        wait_until((folder / "munge.sock").exists, what="munge")
        self._run("slurmctld", "slurmctld", "-D")
        for node in NODES:
            boot_id = folder / f"boot_id-{node}"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            elsewhere = f'mount --bind "{boot_id}" {BOOT_ID} && exec "$0" -D -N {node}'
            self._run(node, "unshare", "--mount", "sh", "-c", elsewhere, str(shutil.which("slurmd", path=_path())))
        wait_until(self._are_nodes_idle, what=lambda: f"nodes: {self.logs()}")

    def _are_nodes_idle(self) -> bool:
        return self.ask("sinfo", "-h", "-N", "-p", "all", "-o", "%T").split() == ["idle"] * len(NODES)

    def _run(self, name: str, program: str, *options: str) -> None:
        path = shutil.which(program, path=_path())
        assert path
        with open(self.folder / f"{name}.out", "wb") as log:
            self.processes.append(subprocess.Popen([path, *options], env=self.env, stdout=log, stderr=log))

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        log = self.folder / "job.out"
        return self.ask("sbatch", "--parsable", "--overcommit", f"--output={log}", *options, str(path))

    def state(self, job: str) -> str:
        """Of a job, in Slurm's word; empty where it does not know it any more."""
        fields = self.ask("scontrol", "show", "job", job).split()
        return next((field.removeprefix("JobState=") for field in fields if field.startswith("JobState=")), "")

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out"))

    def clear(self) -> None:
        """Cancel all jobs, and wait until none is left."""
        self.ask("scancel", "--user=root")
        wait_until(lambda: not self.ask("squeue", "-h"), what="no job left")

    def stop_controller(self) -> None:
        """As its administrator does: the jobs run on."""
        [controller] = [one for one in self.processes if str(one.args[0]).endswith("/slurmctld")]  # type: ignore[index]
        self.processes.remove(controller)
        controller.terminate()
        controller.wait(timeout=60)

    def start_controller(self) -> None:
        self._run("slurmctld", "slurmctld", "-D")

    def stop(self) -> None:
        with contextlib.suppress(AssertionError):
            self.clear()
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster for the length of a block. Skips the test where Slurm, or root's rights, are missing."""
    if missing := [name for name in DAEMONS if not shutil.which(name, path=_path())]:
        pytest.skip(f"no Slurm here: {', '.join(missing)} missing (apt-get install slurm-wlm munge)")
    if os.geteuid():
        pytest.skip("Slurm's daemons need root")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this container allows no mount namespace")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()
