"""The pages with a complete example run as they stand: the tutorial, unmodified programs, Lightning, Transformers."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def block(language: str, page: str = "tutorial") -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
    return text


@pytest.mark.slow
def test_the_script_of_the_tutorial_ends_with_the_same_weights_plain_alone_and_cut(kgorch):
    script = kgorch.folder / "train.py"
    weights = kgorch.folder / "spirals.pt"

    def run_alone() -> bytes:
        subprocess.run([sys.executable, script], cwd=kgorch.folder, check=True, env=kgorch.env())
        return weights.read_bytes()

    script.write_text(block("python").replace("range(60)", "range(8)"))
    plain = run_alone()
    change = block("diff").replace("range(60)", "range(8)").replace("session.epochs(60)", "session.epochs(8)")
    subprocess.run(["git", "apply"], input=change, text=True, cwd=kgorch.folder, check=True)
    assert run_alone() == plain
    weights.unlink()
    fast = script.read_text()
    script.write_text(fast.replace("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.02)"))
    (kgorch.folder / "plan.toml").write_text(block("toml").replace('wall = "40s"', 'wall = "1h"'))
    supervisor = kgorch.background("start")
    kgorch.wait_for_step(200)  # in the second epoch
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 10
    assert not weights.exists()
    script.write_text(fast)
    kgorch("start")
    assert weights.read_bytes() == plain


def test_what_adopt_writes_for_the_unmodified_program_is_the_plan_of_the_page(kgorch):
    (kgorch.folder / "train.py").write_text(block("python", "unmodified"))
    kgorch("adopt", "train.py", "--", "--steps", "48000")
    assert (kgorch.folder / "plan.toml").read_text().strip() == block("toml", "unmodified").strip().replace(
        "my-project", kgorch.folder.name
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "library", "shorter"),
    [
        ("lightning", "lightning", ("max_epochs=20", "max_epochs=1")),
        ("transformers", "transformers", ("num_train_epochs=4", "num_train_epochs=1")),
    ],
)
def test_a_script_with_a_trainer_runs_and_keeps_the_best_by_its_metric(kgorch, page, library, shorter):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = block("python", page)
    assert shorter[0] in script
    (kgorch.folder / "train.py").write_text(script.replace(*shorter))
    (kgorch.folder / "plan.toml").write_text(block("toml", page).replace('wall = "40s"', 'wall = "1h"'))
    kgorch("start")
    status = kgorch.status()
    assert status["state"] == "finished" and status["best"]["by"].removesuffix(":max") in status["metrics"]
