"""A machine with a real systemd as its PID 1: boots, reboots, loses its power. In namespaces of its own, on this kernel.

systemd cleans /tmp at boot and changes control groups, so before it is started the namespace gets /tmp, /run, /var/tmp,
and a control group of its own; should one of them be missing, nothing is started. Its disk is a folder that lies at the same
path inside and outside, and survives reboots. A boot has its own boot id and, where the kernel allows, a clock since boot
that begins anew, as on a real machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import Kgorch, wait_until

from kgorch.errors import KgorchError

SYSTEMD = Path("/lib/systemd/systemd")
UPTIME_AFTER_BOOT_S = 5
# Only what a boot needs: the distribution's own services would write to the real disk.
KEPT_UNITS = (
    "*.target *.slice systemd-journald*.service systemd-journald*.socket systemd-poweroff.service user@.service"
)

# PID 1 of the namespaces, before it becomes systemd. $1 is the disk, $2 the name of the control group.
INIT = f"""
set -eu
if [ "$1" != inside ]; then
    mount --make-rprivate /
    for folder in /tmp /var/tmp /run; do mount -t tmpfs tmpfs $folder; done
    mkdir -p "$1/units" "$1/cache" "$1/log" /run/lib-units /run/no-generators /run/groups
    cp --no-dereference $(cd /usr/lib/systemd/system && ls -d $PWD/{KEPT_UNITS.replace(" ", " $PWD/")} 2>/dev/null) /run/lib-units/
    mkdir /run/lib-units/sysinit.target.d
    printf '[Unit]\\nWants=systemd-journald.socket systemd-journald.service\\n' > /run/lib-units/sysinit.target.d/journal.conf
    mount --bind /run/lib-units /usr/lib/systemd/system
    mount --bind /run/no-generators /usr/lib/systemd/system-generators
    mount --bind "$1/units" /etc/systemd/system
    mount --bind "$1/cache" /var/cache
    mount --bind "$1/log" /var/log
    cp "$1/boot_id" /run/boot_id
    mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
    mount -t cgroup2 cgroup2 /run/groups
    mkdir -p "/run/groups/$2"
    echo $$ > "/run/groups/$2/cgroup.procs"
    exec unshare --cgroup bash -c "$INIT" init inside
fi
umount /run/groups
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for folder in /tmp /var/tmp /run /sys/fs/cgroup /etc/systemd/system; do mountpoint -q $folder; done
exec env -i container=lxc PATH="$PATH" {SYSTEMD} --system --unit=multi-user.target --show-status=0
"""


def needs_systemd() -> None:
    """Skips the test where such a machine cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("a systemd of its own needs root")
    if not SYSTEMD.exists() or not shutil.which("nsenter"):
        pytest.skip("no systemd here: apt-get install systemd")
    if any(
        Path(place).is_relative_to(hidden)
        for place in (__file__, sys.prefix)
        for hidden in ("/tmp", "/var/tmp", "/run")
    ):
        pytest.skip("the repository lies where the machine has a /tmp of its own")


@dataclass
class Machine:
    """Off until `boot()`. `disk` outlives reboots; `close()` takes machine and disk away."""

    disk: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="kgorch-machine-", dir="/var/lib")))
    _holder: subprocess.Popen[bytes] | None = None
    _pid: int = 0

    def boot(self) -> None:
        assert self._holder is None, "it is on already"
        (self.disk / "boot_id").write_text(f"{uuid.uuid4()}\n")
        spaces = ["--fork", "--kill-child", "--pid", "--mount", "--uts", "--ipc", "--mount-proc"]
        if Path("/proc/self/ns/time").exists():
            since_boot_s = int(time.clock_gettime(time.CLOCK_BOOTTIME)) - UPTIME_AFTER_BOOT_S
            spaces += ["--time", f"--boottime=-{since_boot_s}"]
        with open(self.disk / "console.log", "ab") as console:
            self._holder = subprocess.Popen(
                ["unshare", *spaces, "bash", "-c", INIT, "init", str(self.disk), self.disk.name],
                env={"PATH": os.environ["PATH"], "INIT": INIT},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        self._pid = int(wait_until(self._child, within_s=20, what="PID 1"))
        wait_until(
            self._is_up, within_s=60, what=lambda: f"the boot: {(self.disk / 'console.log').read_text()[-2000:]}"
        )

    def inside(self, *command: str | Path, folder: Path | None = None) -> list[str]:
        """The command line that runs `command` in the machine."""
        entered = ["nsenter", "-t", str(self._pid), "-p", "-m", "-u", "-i", "-C"]
        entered += ["-T"] if Path("/proc/self/ns/time").exists() else []
        return [*entered, f"--wdns={folder or self.disk}", "--", *map(str, command)]

    def run(self, *command: str | Path, check: bool = True, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *words, check=check).stdout.strip()

    def show(self, unit: str, *properties: str) -> list[str]:
        """Values of a unit's properties, in the order asked for."""
        found = dict(
            line.split("=", 1)
            for line in self.systemctl("show", unit, *(f"-p{name}" for name in properties)).splitlines()
        )
        return [found[name] for name in properties]

    def main_pid(self, unit: str) -> int:
        """Of the machine's own counting; 0 when the unit has none."""
        return int(self.show(unit, "MainPID")[0])

    def journal(self, *words: str) -> str:
        """Of this boot."""
        return self.run("journalctl", "--no-pager", "-q", *words).stdout

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        self.run("kill", f"-{int(number)}", str(pid))

    def is_alive(self, pid: int) -> bool:
        found = self.run("cat", f"/proc/{pid}/stat", check=False).stdout
        return bool(found) and found.rpartition(")")[2].split()[0] not in "ZX"

    def unit(self, name: str, text: str) -> None:
        """Write a unit, or a drop-in (`kgorch.service.d/test.conf`), and have it read."""
        path = self.disk / "units" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if self._holder:
            self.systemctl("daemon-reload")

    def cut_power(self) -> None:
        """Everything in it dies at once, by SIGKILL."""
        if self._holder is None:
            return
        if child := self._child():
            os.kill(int(child), signal.SIGKILL)
        self._gone()

    def power_off(self, *, within_s: float = 90) -> None:
        """As `systemctl poweroff` does it: units are stopped, then the rest is killed."""
        self.run("systemctl", "--no-block", "poweroff", check=False)
        self._gone(within_s)

    def reboot(self, *, graceful: bool = False) -> None:
        if graceful:
            self.power_off()
        else:
            self.cut_power()
        self.boot()

    def close(self) -> None:
        self.cut_power()
        shutil.rmtree(self.disk, ignore_errors=True)
        _remove_groups(self.disk.name)

    def _child(self) -> str:
        assert self._holder is not None
        assert self._holder.poll() is None, (self.disk / "console.log").read_text()[-2000:]
        return Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().strip()

    def _is_up(self) -> bool:
        self._child()
        if Path(f"/proc/{self._pid}/comm").read_text().strip() != "systemd":
            return False
        return self.systemctl("is-system-running", check=False) in ("running", "degraded")

    def _gone(self, within_s: float = 30) -> None:
        assert self._holder is not None
        try:
            self._holder.wait(timeout=within_s)
        finally:
            self._holder.kill()
            self._holder.wait()
            self._holder, self._pid = None, 0


def _remove_groups(name: str) -> None:
    """The control groups that systemd made; empty once the last process that the machine's end killed is gone."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    roots = {Path(words[1]) / name for words in mounts if words[2] == "cgroup2"}

    def gone() -> bool:
        for root in roots:
            for folder in [*sorted(root.rglob("*/"), reverse=True), root]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return not any(root.exists() for root in roots)

    wait_until(gone, within_s=20, what=f"control groups of {name}")


def environment(values: dict[str, str]) -> str:
    """Lines of a [Service] section."""
    return "".join(f'Environment="{name}={value}"\n' for name, value in values.items())


@dataclass
class Person(Kgorch):
    """Somebody at the machine, who types the same commands there, and has installed the unit for it."""

    machine: Machine = field(default_factory=Machine)

    def command(self, *args: str) -> list[str]:
        return self.machine.inside(*super().command(*args), folder=self.folder)

    def look(self, *args: str) -> Any:
        """There: pids count otherwise outside."""
        done = self(*args, "--json", code=None)
        if done.returncode:
            raise KgorchError(done.stderr)
        return json.loads(done.stdout)

    def install(self) -> None:
        """As the README says it; the tests' copy of kgorch is the one that runs, whichever is installed."""
        root = str(Path(__file__).parents[1])
        self.extra_env["PYTHONPATH"] = f"{root}:{root}/tests"
        drop_in = f"[Service]\n{environment({'PYTHONPATH': self.extra_env['PYTHONPATH']})}"
        # ProtectKernelTunables= mounts /proc/sys anew, without the boot id that we have laid over the kernel's
        drop_in += "BindReadOnlyPaths=/run/boot_id:/proc/sys/kernel/random/boot_id\n"
        self.machine.unit("kgorch.service.d/test.conf", drop_in)
        self("systemd", "install", "--system", "--home", str(self.home), "--now")

    def trained_by(self) -> list[int]:
        """The pids of the ranks, by the machine's own counting."""
        found = self.machine.run("pgrep", "-f", "kgorch.worker.entry|kgorch/worker/entry", check=False).stdout
        return sorted(int(pid) for pid in found.split())
