"""The launch specification: everything that the supervisor tells the guard process and the ranks of one attempt."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kgorch.protocol.codec import PROTOCOL_VERSION, ProtocolError

LAUNCH_VARIABLE = "KGORCH_LAUNCH"
"""Environment variable with the path of `launch.json`."""

BOARD_VARIABLE = "KGORCH_BOARD"
"""Environment variable with the descriptor of the shared memory page on which ranks agree; the shim holds it open."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of one node among those of an attempt.

    Attributes:
        number: of this node, from 0.
        ranks: number of ranks of each node; ranks are numbered through the nodes in this order.
        address: of the first node; `port`: where its torchrun listens for the others.
        interface: network interface of this node for the ranks' traffic; empty where the system is to choose.
    """

    number: int
    ranks: list[int]
    address: str
    port: int
    interface: str = ""

    @property
    def first_rank(self) -> int:
        return sum(self.ranks[: self.number])

    @property
    def ranks_here(self) -> int:
        return self.ranks[self.number]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [sum(self.ranks[:number]) for number in range(len(self.ranks))]


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """The file `launch.json` in the attempt's folder. Instants are CLOCK_BOOTTIME in seconds (system/clock.py).

    Attributes:
        run: name of the run.
        run_id: identity of the run, the same on every machine.
        stage: name of the stage.
        attempt: number of the session and of the attempt in it, as `3.1`.
        folder: of the attempt: launch.json, logs, records of the ranks.
        entry: the training function, as `module:function`; or a program (plan/stages.py).
        workdir: working directory of the ranks.
        ranks: number of processes.
        socket: path of the supervisor's socket.
        checkpoints: folder of the stage's checkpoints.
        output: folder that the script may write to.
        plan_hash: identity of the plan, stored in every manifest.
        seed: of all random generators.
        args: keyword arguments of the training function; flags of a program.
        resume: checkpoint folder to resume from; None to start anew, or with `snapshot`.
        wall_s: instant of the session's time limit; None for none.
        deadline_s: instant at which the ranks save and stop without being told; None for none.
        keeper: path of the snapshot server's socket.
        snapshot: number of the server's snapshot to resume from, in the place of `resume`.
        snapshot_s: least seconds between two snapshots; None for no snapshots between saves.
        memory_bytes: the plan's bound on the host memory of all snapshots; None for none.
        stop_at: step of the stage at which every rank saves and stops without a request; None for none.
        deterministic: the plan's demand for deterministic kernels.
        weights: the stage's pretrained weights, from the plan; None for none.
        settings: of memory, as the plan has them at its start (core/memory/memory_ladder.py).
        schedule: what changes before which step, in order of the steps: {"step": 40, "settings": {…}}. A step that is
            repeated after a resume is computed as it was. Entries that are not about memory: core/health/training_health.py.
        changes: the rows that `schedule` comes from, as they stand in every manifest (manifest.Adjustment).
        ladder: the plan's rungs.
        device: to which remembered rungs belong, together with the number of ranks.
        health: `nan`: the plan's remedies; `spike`; `past`: [[step, remedy] …] of those applied.
        data: folder of the local cache of each source, by the source's absolute path (services/data_cache.py).
        extends: the final checkpoint to resume from is trained further, because the plan has more epochs now.
        cached: folder of values that the run computes once (worker/data/value_cache.py); empty where none are kept.
        collective_timeout_s: of the process group; None for the default.
        best: the plan's `keep.best`: {"metric": …, "highest": …, "value": …}; `value` of the best checkpoint so far or None.
        quick: a quick test: one epoch of one batch, and two batches of every other loader.
        probe: a quick test that is measured (worker/probe/probe.py), with its options; None otherwise.
        argv: words of a program's command line, before its flags.
        flags: how `args` become flags (core/program_command.py).
        launcher: what starts the processes (the same).
        integration: "off" where Trainers of known libraries are left alone (worker/integrations).
        foreign: the stage's [stage.foreign] (plan/foreign.py, as_launch), with `processes`, the number that the launcher starts,
            `lead_s`, seconds before the wall (without the margin) at which the program is asked to stop, and `claims`, a folder
            (worker/foreign/claim.py); None for a program that attaches.
        nodes: this node's place where the attempt runs on several (`node`); None for one node.
        version: of the protocol.
    """

    run: str
    run_id: str
    stage: str
    attempt: str
    folder: str
    entry: str
    workdir: str
    ranks: int
    socket: str
    checkpoints: str
    output: str
    plan_hash: str
    seed: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    wall_s: float | None = None
    deadline_s: float | None = None
    keeper: str = ""
    snapshot: int | None = None
    snapshot_s: float | None = None
    memory_bytes: int | None = None
    stop_at: int | None = None
    deterministic: str = "off"
    weights: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    ladder: list[Any] = field(default_factory=list)
    device: str = ""
    health: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    extends: bool = False
    cached: str = ""
    collective_timeout_s: float | None = None
    best: dict[str, Any] | None = None
    quick: bool = False
    probe: dict[str, Any] | None = None
    argv: list[str] = field(default_factory=list)
    flags: str = "--key value"
    launcher: str = "torchrun"
    integration: str = "auto"
    foreign: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None
    version: int = PROTOCOL_VERSION

    @property
    def node(self) -> NodePlace | None:
        """This node's place among several; None for one node."""
        return None if self.nodes is None else NodePlace(**self.nodes)

    @property
    def ranks_here(self) -> range:
        """The ranks of this node."""
        node = self.node
        return range(node.first_rank, node.first_rank + node.ranks_here) if node else range(self.ranks)

    @property
    def own_folder(self) -> Path:
        """Folder of this node's processes: launch.json, lock, and the files of shim and torchrun. The ranks' are in `folder`."""
        node = self.node
        return Path(self.folder, f"node{node.number}") if node and node.number else Path(self.folder)

    def write(self) -> Path:
        path = self.own_folder / "launch.json"
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @staticmethod
    def read(path: str | Path) -> LaunchSpec:
        """The file's content, which our own supervisor wrote. Raises: ProtocolError for one of another version."""
        document = json.loads(Path(path).read_text())
        if document.get("version") != PROTOCOL_VERSION:
            raise ProtocolError(f"{path}: launch version {document.get('version')!r}, expected {PROTOCOL_VERSION}")
        return LaunchSpec(**document)
