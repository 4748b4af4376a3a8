"""Loops that the script owns (session.boundary, session.follow): cut by walls and kills they end with the bits of an uninterrupted
run, without a `with` block."""

from __future__ import annotations

import pytest
import torch
from harness import Kgorch
from safetensors.torch import load

STYLES = {
    "iterations": {"style": "iterations", "steps": 100},
    "loaders": {"style": "loaders", "steps": 6},
    "accumulated": {"style": "loaders", "steps": 6, "accumulate": 3, "workers": 2},
}

RANKS = {"iterations": 3, "loaders": 3, "accumulated": 2}
"""The sums of three have other bits where DDP lays the gradients into other buckets (worker/memory/bucket_order.py)."""

SLEEP_S = {"iterations": 0.5, "loaders": 0.6, "accumulated": 1.8}
"""In each step: 25 s a training, which is cut before."""


def outputs(kgorch: Kgorch) -> dict[str, str]:
    (folder,) = kgorch.home.glob("runs/*/1/outputs")
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By style: the final state, its step, and what the script has written after its loop."""
    known: dict[str, tuple[bytes, int, dict[str, str]]] = {}

    def of(style: str) -> tuple[bytes, int, dict[str, str]]:
        if style not in known:
            folder = tmp_path_factory.mktemp(style)
            alone = Kgorch(folder, folder / "home")
            plan = alone.plan("owns_loop.py", ranks=RANKS[style], args=STYLES[style] | {"sleep": 0.0}, every="600s")
            alone("start", str(plan))
            facts = alone.status()["exactness"]
            assert "untracked" not in facts and ("ladder" in facts) == (style != "iterations"), facts
            assert style == "iterations" or alone.status()["epoch"] == STYLES[style]["steps"]
            known[style] = alone.export(), alone.status()["step"], outputs(alone)
        return known[style]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_loop_that_the_script_owns_has_the_bits_of_an_uninterrupted_one(kgorch, uninterrupted, style):
    state, steps, written = uninterrupted(style)
    plan = kgorch.plan(
        "owns_loop.py", ranks=RANKS[style], args=STYLES[style] | {"sleep": SLEEP_S[style]}, every="500ms"
    )
    kgorch.stop_and_kill(plan, steps, hurry=("--set", "stage.train.args.sleep=0.0"))
    assert outputs(kgorch) == written
    assert kgorch.export() == state


# Frozen weights


def trained(kgorch: Kgorch) -> dict[str, torch.Tensor]:
    (path,) = kgorch.home.glob("runs/*/1/outputs/net.pt")
    return torch.load(path, weights_only=True)


def saved_names(kgorch: Kgorch) -> set[str]:
    """Of the model's tensors in the newest checkpoint."""
    return {name for name in load(kgorch.export()) if name.startswith("model.")}


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, {"teacher": True}, {"thaws": True}], ids=["frozen", "a teacher", "thaws"])
def test_weights_without_a_gradient_are_saved_if_they_change_and_never_lost(kgorch, args, tmp_path):
    alone = Kgorch(kgorch.folder, tmp_path / "alone")
    plan = kgorch.plan("freezes.py", args=args | {"sleep": 0.5}, every="500ms")
    fast = ("--set", "stage.train.args.sleep=0.0")
    alone("start", str(plan), *fast)
    kgorch.stop_and_kill(plan, 48, hurry=fast)
    known, found = trained(alone), trained(kgorch)
    assert all(torch.equal(found[name], known[name]) for name in known)
    heads, base = {"model.head.weight", "model.head.bias"}, {"model.base.2.weight", "model.base.2.bias"}
    everything = {f"model.{name}" for name in known}
    assert saved_names(kgorch) == {"teacher": everything, "thaws": heads | base}.get(*args or ("",), heads)


def test_a_resume_with_another_frozen_base_is_refused(kgorch):
    plan = kgorch.plan("freezes.py", args={"epochs": 2})
    kgorch("start", str(plan))
    said = kgorch("start", str(plan), "--extend", "--set", "stage.train.args.base=2", code=None)
    assert "the frozen weights of 'model' are not those that this run began with" in said.stdout + said.stderr
    assert said.returncode not in (0, 10), said.stdout
