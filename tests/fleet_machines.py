"""Machines of a fleet on this host: a state folder and a name each, one PostgreSQL, one folder with plans and one mirror."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Kgorch, processes_of, wait_until
from postgres import PostgresServer

LEASE_S = 12


@dataclass
class FleetMachine(Kgorch):
    """`name`: of the machine. `daemon`: the one that was started last."""

    name: str = ""
    daemon: subprocess.Popen[str] | None = None

    def start_daemon(self, *words: str) -> None:
        self.daemon = self.background("daemon", *words)

    def kill_daemon(self) -> None:
        """The daemon alone: its sessions go on."""
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()

    def die(self) -> None:
        """As a machine that lost its power: everything of it ends at once, and its state folder is not reached by others."""
        self.kill_everything()
        wait_until(lambda: not processes_of(self.home), what=f"everything of {self.name} has ended")


@dataclass
class TestFleet:
    """A fleet for a test. `folder`: of the plans and the mirror, which every machine reaches."""

    __test__ = False

    server: PostgresServer
    url: str
    folder: Path
    machines: dict[str, FleetMachine] = field(default_factory=dict)

    def machine(self, name: str, root: Path) -> FleetMachine:
        config = self.folder / "fleet.toml"
        config.write_text(f'[fleet]\nlease = "{LEASE_S}s"\n')
        home = root / name
        home.mkdir()
        environment = {"KGORCH_DATABASE": self.url, "KGORCH_MACHINE": name, "KGORCH_CONFIG": str(config)}
        made = FleetMachine(self.folder, home, extra_env=environment, name=name)
        self.machines[name] = made
        return made

    def plan(self, name: str, *, epochs: int, sleep: float, quota_hours: float | None = None, **changes: Any) -> Path:
        """A plan of its own file, whose checkpoints go into the mirror."""
        extra = "[checkpoint.keep]\nlast = 3\n"
        if quota_hours is not None:
            extra += f'[quota]\nhours = {quota_hours}\npool = "shared"\nresets = "never"\n'
        made = next(iter(self.machines.values())).plan(
            name=name, args={"epochs": epochs, "sleep": sleep}, extra=extra, **changes
        )
        text = made.read_text().replace(
            "[checkpoint]\n", f"[checkpoint]\nmirror = {json.dumps(str(self.folder / 'mirror'))}\n"
        )
        (self.folder / "mirror").mkdir(exist_ok=True)
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    def end(self) -> None:
        for machine in self.machines.values():
            machine.kill_everything()
        for machine in self.machines.values():
            for process in machine.started:
                if process.poll() is None:
                    process.kill()
                process.communicate()
