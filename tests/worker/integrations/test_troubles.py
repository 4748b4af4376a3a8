"""What befalls an unmodified program of a Trainer library in a real session: a rank that hangs, weights that are no numbers."""

from __future__ import annotations

import importlib.util
import json

import pytest
from harness import Kgorch

PROGRAMS = {
    "accelerate": "with_accelerate.py",
    "lightning": "with_lightning.py",
    "transformers": "with_transformers.py",
}


def train(kgorch: Kgorch, program: str, name: str, trouble: dict[str, dict[str, int]]) -> bytes:
    """A run of two ranks to its end. Returns its final state."""
    health = '[health]\nnan = ["rollback"]\nhang = { step = "6s" }'
    kgorch.extra_env = {"TROUBLE": json.dumps(trouble), "SPREAD_S": "0.05"}
    kgorch("start", str(kgorch.plan(program, name=name, ranks=2, args={"epochs": 2}, every="500ms", extra=health)))
    return kgorch.export(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "library", ["accelerate", *(pytest.param(name, marks=pytest.mark.soak) for name in ("lightning", "transformers"))]
)
def test_a_hang_and_spoilt_weights_end_their_attempts_and_the_run_has_the_bits_of_a_sound_one(kgorch, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = PROGRAMS[library]
    troubled = train(kgorch, program, "troubled", {"hang": {"at": 4, "rank": 1}, "spoil": {"at": 9}})
    attempts = [attempt for session in kgorch.history() for attempt in session["attempts"]]
    assert [attempt["outcome"] for attempt in attempts] == ["hung", "diverged", "finished"]
    assert "in a step" in attempts[0]["cause"] and "is no number" in attempts[1]["cause"]
    assert train(kgorch, program, "sound", {}) == troubled
