"""Unmodified programs of Trainer libraries: cut by a stop and by SIGKILL they end with the bits of an uninterrupted run, and what
follows the training runs once. Where the Trainer writes checkpoints itself, they are those of the uninterrupted run, too."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from harness import Kgorch

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "transformers": ("transformers", "with_transformers.py", {}, {}),
    "transformers, accumulated, workers": (
        "transformers",
        "with_transformers.py",
        {"accumulate": 2, "workers": 2, "epochs": 7, "save_steps": 6},
        {},
    ),
    "lightning": ("lightning", "with_lightning.py", {}, {}),
    "lightning, accumulated, workers": (
        "lightning",
        "with_lightning.py",
        {"accumulate": 2, "workers": 2, "epochs": 7, "save_steps": 6},
        {},
    ),
    "accelerate": ("accelerate", "with_accelerate.py", {"max_steps": 45}, {}),
    "accelerate, accumulated, workers": (
        "accelerate",
        "with_accelerate.py",
        {"accumulate": 2, "workers": 2, "epochs": 7},
        {},
    ),
    "trl, peft": ("trl", "with_trl.py", {"epochs": 4}, {}),
    "pytorch_lightning, a scheduler that follows a metric": (
        "pytorch_lightning",
        "with_lightning.py",
        {"plateau": True},
        {"LIGHTNING": "pytorch_lightning"},
    ),
}

RANKS = {"accelerate": 3}
"""Two by default. The sums of three depend on DDP's buckets (worker/memory/bucket_order.py)."""

SOAK = ("transformers", "lightning", "accelerate, accumulated, workers")
"""The same in fewer ways than another case."""


BEST = {
    "transformers": '[checkpoint.keep]\nbest = "eval_loss:min"',
    "lightning": '[checkpoint.keep]\nbest = "val_loss:min"',
}
"""What the plan adds: the best checkpoint by a metric that the Trainer reports."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.soak if case in SOAK else ()) for case in CASES])
def test_an_unmodified_program_has_the_bits_of_an_uninterrupted_one(kgorch: Kgorch, tmp_path, case):
    library, program, args, env = CASES[case]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (tmp_path / "alone").mkdir()
    alone = Kgorch(tmp_path / "alone", tmp_path / "alone-home", extra_env=env)
    plan = alone.plan(program, ranks=RANKS.get(case, 2), args=args, every="600s", extra=BEST.get(library, ""))
    alone("start", str(plan))
    state, steps = alone.export(), alone.status()["step"]
    assert "weights" not in alone.status()["exactness"], "the ranks hold the same"
    kgorch.extra_env |= env | {"SPREAD_S": "1.0"}
    plan = kgorch.plan(program, ranks=RANKS.get(case, 2), args=args, every="700ms", extra=BEST.get(library, ""))
    kgorch.stop_and_kill(plan, steps, env={"SPREAD_S": "0"}, within_s=120)
    assert (kgorch.folder / "out" / "after.txt").read_text() == (alone.folder / "out" / "after.txt").read_text()
    assert kgorch.export() == state
    assert own_checkpoints(alone) <= own_checkpoints(kgorch)
    if library in BEST:
        assert kgorch.status()["best"]["step"] == alone.status()["best"]["step"]


def own_checkpoints(kgorch: Kgorch) -> set[str]:
    """Files that the Trainer has written. A version of Lightning's counts once: it never writes over a file."""
    files = (path for path in (kgorch.folder / "out").rglob("*") if path.is_file())
    return {re.sub(r"-v\d+\.ckpt$", ".ckpt", str(path.relative_to(kgorch.folder))) for path in files}
