"""What `kgorch check` learns of a foreign program: written by its agent as probe.json, read by preflight/foreign_probe.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system.clock import boottime_s
from kgorch.worker.foreign.checkpoint_watch import CheckpointWatch
from kgorch.worker.foreign.latest_pointer import LatestPointer
from kgorch.worker.foreign.program_status import ProgramStatus
from kgorch.worker.foreign.program_stop import ProgramStop


class ProbeRecord:
    """The probe of one program, from its start on."""

    def __init__(self, launch: LaunchSpec) -> None:
        self._launch, self.began_s = launch, boottime_s()
        self._probe: Mapping[str, Any] = launch.probe or {}

    def is_enough(self, watch: CheckpointWatch | None) -> bool:
        """Whether the program has shown what there is to see."""
        ran_s = boottime_s() - self.began_s
        has_saved = watch is None or watch.newest is not None
        return ran_s >= self._probe["longest_s"] or (ran_s >= self._probe["seconds"] and has_saved)

    def write(
        self, stop: ProgramStop, watch: CheckpointWatch | None, status: ProgramStatus, latest: LatestPointer | None
    ) -> None:
        """Write probe.json."""
        history = status.position().history
        foreign = self._launch.foreign or {}
        now_s = boottime_s()
        steps = history[-1][1] - history[0][1] if history else 0
        figures = {
            "ran_s": (stop.asked_s or now_s) - self.began_s,
            "ended": not stop.asked_s,
            "reads_steps": bool(foreign.get("step")),
            "step_s": (history[-1][0] - history[0][0]) / 1e9 / steps if steps > 0 else None,
            "step": status.step,
            "metrics": status.metrics,
            "last_lines": status.last_lines[-5:],
            "place": foreign.get("checkpoint"),
            "lies_there": watch.describe() if watch else "",
            "checkpoints": [item._asdict() for item in watch.taken] if watch else [],
            "latest": latest.problem() if latest else "",
            "stop_s": now_s - stop.asked_s if stop.asked_s else None,
            "by": stop.means,
            "killed": stop.was_killed,
            "saved": bool(watch and stop.asked_s and watch.has_saved_since(stop.asked_s)),
        }
        content = {"attached_at_s": self.began_s, "end_s": figures["ran_s"], "foreign": figures}
        Path(self._launch.folder, "probe.json").write_text(json.dumps(content))
