"""The weights that a stage of this run has left, for a later stage: of its best checkpoint, or of its last one.

Which one is the best is decided by retention.best_of, the rule of `keep.best` and of `checkpoints export --best`. The manifests
in the stage's folder are compared, not a database: a rank opens none, and all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from orchestrator.checkpoint.folder import read_json_file, readable_checkpoints
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.verify import verify_checkpoint
from orchestrator.core import retention
from orchestrator.errors import CannotRestore
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.worker import state

Which = Literal["best", "final", "file"]
Checkpoint: TypeAlias = tuple[Path, Manifest]


class Weights(dict[str, torch.Tensor]):
    """Tensors by the names of a state_dict, and where they come from.

    Attributes:
        checkpoint: stage and folder, "train/step-00000320"; of a file its path.
        which: "best" or "final" of its stage, or a "file".
        step: optimizer steps of the stage before them; 0 for a file.
        metric, value: by which it is the best; "" and None where it is not.
        label: all this in one line, for people.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], checkpoint: str, which: Which, *, step: int = 0,
        metric: str = "", value: float | None = None, label: str = "",
    ) -> None:  # fmt: skip
        super().__init__(tensors)
        self.checkpoint, self.which, self.step, self.metric, self.value = checkpoint, which, step, metric, value
        self.label = label or f"{which} {checkpoint}"

    @property
    def facts(self) -> dict[str, Any]:
        """The same for a JSON file."""
        facts: dict[str, Any] = {"checkpoint": self.checkpoint, "which": self.which}
        if self.which != "file":
            facts["step"] = self.step
        return facts | ({"metric": self.metric, "value": self.value} if self.which == "best" else {})


def read(launch: LaunchSpec, stage: str, name: str, which: str | None) -> Weights:
    """What the module `name` of that stage held; every byte is read back and compared with the manifest first.

    Args:
        which: "best" or "final"; None for the best where the plan keeps one and it was measured, else the final one, whose label
            then says so. A quick test, which measures little, has the final one also where the best is asked for.
    Raises: CannotRestore when the stage has left no such checkpoint, or the checkpoint nothing of that name; CheckpointBroken.
    """
    root = Path(launch.checkpoints).parent / stage
    own = [pair for pair in readable_checkpoints(root) if pair[1].run_id == launch.run_id]
    final = next((pair for pair in own if pair[1].final), None)
    if final is None and which != "best":
        raise CannotRestore(f"stage {stage!r} has left no final checkpoint in {root}")
    best = None if which == "final" else _best_of(launch, own)
    if best:
        folder, described = best
        metric = str(_rule(launch)[0])
        value = described.metrics[metric]
        known = "" if described.measured.get(metric) == described.step else " (reported last before it)"
        return _read(folder, described, name, "best", f"best {metric} {value:.6g}{known}", metric=metric, value=value)
    why = f": {launch.best['metric']} was measured on none" if launch.best else ": the plan keeps no best one"
    if final is None or (which == "best" and not (launch.quick or launch.probe)):
        raise CannotRestore(
            f"stage {stage!r} has no best checkpoint{why} of {len(own)} in {root}",
            next_step='have the plan say [checkpoint] keep = { best = "METRIC:max" } and the script session.report() that metric'
            ' after each evaluation; or take the last weights: which="final"',
        )
    return _read(*final, name, "final", "the last weights" + (why if which != "final" and launch.best else ""))


def _rule(launch: LaunchSpec) -> tuple[str, bool]:
    assert launch.best
    return str(launch.best["metric"]), bool(launch.best["highest"])


def _best_of(launch: LaunchSpec, newest_first: Sequence[Checkpoint]) -> Checkpoint | None:
    if not launch.best:
        return None
    known = {str(folder): (folder, described) for folder, described in reversed(newest_first)}
    rivals = [
        retention.Kept(
            key=key, stage=described.stage, step=described.step, bytes=described.total_bytes, order=order, verified=True,
            final=described.final, metrics=described.metrics, measured=described.measured,
        )
        for order, (key, (_, described)) in enumerate(known.items())
    ]  # fmt: skip
    best = retention.best_of(rivals, *_rule(launch))
    return known[best.key] if best else None


def _read(folder: Path, described: Manifest, name: str, which: Which, what: str, **known: Any) -> Weights:
    verify_checkpoint(folder)
    tree = read_json_file(folder, described, "state.json")
    if not isinstance(tree.get(name), dict):
        raise CannotRestore(f"{folder} holds no {name!r}", f"it holds: {', '.join(tree)}")
    shards = state.Shards(folder, described, 0)
    tensors = {
        key: shards.fetch(item["$tensor"])
        for key, item in tree[name].items()
        if isinstance(item, dict) and isinstance(item.get("$tensor"), str)
    }
    place = f"{described.stage}/{folder.name}"
    return Weights(tensors, place, which, step=described.step, label=f"checkpoint {place}, {what}", **known)
