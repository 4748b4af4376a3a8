"""The weights of an earlier stage of this run: of its best checkpoint, or of its last one.

retention.best_of decides which checkpoint is the best, as for `keep.best` and `checkpoints export --best`. It compares the
manifests in the stage's folder: ranks do not open the database, and all ranks get the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from kgorch.checkpoint.folder import read_json_file, readable_checkpoints
from kgorch.checkpoint.manifest import Manifest
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.checkpoint import retention
from kgorch.errors import CannotRestore, KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker import tagged_json
from kgorch.worker.checkpoint import restore_source

Which = Literal["best", "final", "file"]
Checkpoint: TypeAlias = tuple[Path, Manifest]


class Weights(dict[str, torch.Tensor]):
    """A state_dict (tensors by name) that knows its origin.

    Attributes:
        checkpoint: stage and folder, "train/step-00000320"; for a file its path.
        which: "best" or "final" of its stage, or "file".
        step: optimizer steps of the stage; 0 for a file.
        metric: by which the checkpoint is the best; "" where it is not chosen by one.
        value: of that metric; None where there is none.
        label: all of this in one line, for people.
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
        """The attributes, for a JSON file."""
        facts: dict[str, Any] = {"checkpoint": self.checkpoint, "which": self.which}
        if self.which != "file":
            facts["step"] = self.step
        return facts | ({"metric": self.metric, "value": self.value} if self.which == "best" else {})


def read(launch: LaunchSpec | None, stage: str, name: str, which: str | None) -> Weights:
    """The state_dict of the module `name` of that stage. Every byte is read back and compared with the manifest first.

    Args:
        launch: None when the script runs alone, which is an error.
        stage: its name in the plan.
        which: "best" or "final". None takes the best where the plan keeps one and it was measured, else the final one, whose label
            then says so. A quick test, which measures little, takes the final one also where the best is asked for.

    Raises:
        KgorchError: `which` is something else.
        CannotRestore: the stage has left no such checkpoint, or the checkpoint has no module of that name.
        CheckpointBroken: its bytes differ from its manifest.
    """
    if which not in (None, "best", "final"):
        raise KgorchError(f'session.weights(which={which!r:.80}): expected "best", "final" or None')
    if not launch:
        raise CannotRestore(
            "session.weights() needs a run of kgorch: a script without one has no stages",
            next_step="give the script a file of weights",
            error_code="KG211",
        )
    root = Path(launch.checkpoints).parent / stage
    own = [pair for pair in readable_checkpoints(root) if pair[1].run_id == launch.run_id]
    final = next((pair for pair in own if pair[1].final), None)
    if final is None and which != "best":
        raise CannotRestore(f"stage {stage!r} has left no final checkpoint in {root}", error_code="KG211")
    best = None if which == "final" else _best_of(launch, own)
    if best:
        folder, manifest = best
        metric = str(_rule(launch)[0])
        value = manifest.metrics[metric]
        note = "" if manifest.measured.get(metric) == manifest.step else " (reported last before it)"
        return _read(folder, manifest, name, "best", f"best {metric} {value:.6g}{note}", metric=metric, value=value)
    why = f": {launch.best['metric']} was measured on none" if launch.best else ": the plan keeps no best one"
    if final is None or (which == "best" and not (launch.quick or launch.probe)):
        raise CannotRestore(
            f"stage {stage!r} has no best checkpoint{why} of {len(own)} in {root}",
            next_step='have the plan say [checkpoint] keep = { best = "METRIC:max" } and the script session.report() that metric'
            ' after each evaluation; or take the last weights: which="final"',
            error_code="KG211",
        )
    return _read(*final, name, "final", "the last weights" + (why if which != "final" and launch.best else ""))


def _rule(launch: LaunchSpec) -> tuple[str, bool]:
    assert launch.best
    return str(launch.best["metric"]), bool(launch.best["highest"])


def _best_of(launch: LaunchSpec, newest_first: Sequence[Checkpoint]) -> Checkpoint | None:
    if not launch.best:
        return None
    candidates = {str(folder): (folder, manifest) for folder, manifest in reversed(newest_first)}
    rivals = [
        retention.RetentionCandidate(
            key=key, stage=manifest.stage, step=manifest.step, bytes=manifest.total_bytes, order=order, verified=True,
            final=manifest.final, metrics=manifest.metrics, measured=manifest.measured,
        )
        for order, (key, (_, manifest)) in enumerate(candidates.items())
    ]  # fmt: skip
    best = retention.best_of(rivals, *_rule(launch))
    return candidates[best.key] if best else None


def _read(folder: Path, manifest: Manifest, name: str, which: Which, what: str, **score: Any) -> Weights:
    verify_checkpoint(folder)
    tree = read_json_file(folder, manifest, "state.json")
    if not isinstance(tree.get(name), dict):
        raise CannotRestore(f"{folder} holds no {name!r}", f"it holds: {', '.join(tree)}", error_code="KG211")
    fetch = tagged_json.kept(restore_source.ShardReader(folder, manifest, 0).fetch)
    tensors = {
        key: fetch(item["$tensor"])
        for key, item in tree[name].items()
        if isinstance(item, dict) and isinstance(item.get("$tensor"), str)
    }
    place = f"{manifest.stage}/{folder.name}"
    return Weights(tensors, place, which, step=manifest.step, label=f"checkpoint {place}, {what}", **score)
