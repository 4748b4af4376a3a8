"""`kgorch check` and quick tests of loops that the script owns: a few steps, whatever the loop would do."""

from __future__ import annotations

import json


def test_a_check_takes_a_few_steps_of_a_loop_by_iteration_and_forecasts_all_of_them(kgorch):
    kgorch.extra_env["KGORCH_TESTS_COMPILER"] = "1"  # the profiler needs it
    plan = kgorch.plan("owns_loop.py", ranks=2, args={"steps": 100_000, "sleep": 0.05})
    found = json.loads(kgorch("check", str(plan), "--json", code=None, timeout_s=120).stdout)
    (stage,) = found["stages"]
    assert stage["time"]["batches"] == 100_000 and 0.05 <= stage["time"]["step_s"] < 5
    assert stage["memory"]["parts"]["activations"] > 0 and found["forecast"]["training_s"] > 5000
    assert stage["exactness"] == {"deterministic": "not asked for"}, "it tracks all, and uses session.backward"


def test_a_check_names_what_a_loop_leaves_out_of_its_checkpoints_and_cannot_do(kgorch):
    kgorch.extra_env["KGORCH_TESTS_COMPILER"] = "1"
    plan = kgorch.plan("owns_loop.py", args={"style": "forgetting", "steps": 100_000})
    found = json.loads(kgorch("check", str(plan), "--json", code=None, timeout_s=120).stdout)
    (stage,) = found["stages"]
    assert stage["exactness"]["untracked"].startswith(
        "optimizer `second` (AdamW), `schedule` (ExponentialLR), `average.shadow` (4 tensors), the place in a DataLoader"
    )
    assert stage["exactness"]["ladder"].startswith("none: the steps do not use session.backward")
    lines = [line for line in found["preflight"] if line["name"] == "stage train"]
    assert any(
        line["verdict"] == "warn" and "give it to session.track(), or a resume" in line["said"] for line in lines
    )
    assert any(line["said"].startswith("memory ladder: none") for line in lines)


def test_a_quick_test_of_a_loop_by_iteration_is_one_step(kgorch):
    quick = '[[stage]]\nname = "quick"\nquick_test_of = "train"\n'
    plan = kgorch.plan("owns_loop.py", args={"steps": 30, "sleep": 0.05})
    text = plan.read_text()
    plan.write_text(text.replace("[[stage]]", quick + "[[stage]]", 1))
    kgorch("start", str(plan))
    (saved,) = (path for path in kgorch.checkpoints() if path.parent.name == "quick")
    assert saved.name == "step-00000001-final"
    assert kgorch.status()["step"] == 30
