"""The page for users of a program of their own: its example runs as it stands."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from foreign import wait_for_checkpoint

from kgorch.plan import Plan, dotted_keys, parse

PAGE = (Path(__file__).parents[2] / "docs" / "your-training.md").read_text()
LEVEL_1, LEVEL_2, LEVEL_3 = re.split(r"^## Level \d", PAGE, flags=re.M)[1:]


def block(language: str, level: str = LEVEL_3) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", level, re.S)
    return text


@pytest.mark.parametrize("level", [LEVEL_1, LEVEL_2], ids=["1", "2"])
def test_the_programs_of_levels_1_and_2_are_stopped_and_come_to_the_result_that_they_have_uncut(kgorch, level):
    if level is LEVEL_1 and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    (kgorch.folder / "train.py").write_text(block("python", level))
    (kgorch.folder / "plan.toml").write_text(block("toml", level))
    kgorch("start")
    assert kgorch.status()["step"] == 80
    uncut = torch.load(kgorch.folder / "line.pt")
    slower = block("python", level).replace("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.1)")
    slower = slower.replace("return loss", "__import__('time').sleep(0.1); return loss")
    (kgorch.folder / "train.py").write_text(slower)
    (kgorch.folder / "line.pt").unlink()
    supervisor = kgorch.background("start", "--fresh")
    kgorch.wait_for_step(20)
    supervisor.send_signal(signal.SIGTERM)  # what `kgorch stop` does, without the time that it takes to start
    assert supervisor.wait(timeout=60) == 10
    kgorch("start")
    assert str(torch.load(kgorch.folder / "line.pt")) == str(uncut)


def test_the_program_and_the_plan_of_level_3_run_through_a_stop_to_the_end(kgorch):
    (kgorch.folder / "count.py").write_text(block("python"))
    (kgorch.folder / "plan.toml").write_text(block("toml"))
    supervisor = kgorch.background("start", "--set", "stage.train.args.steps=400")
    wait_for_checkpoint(kgorch)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    kgorch("start")
    kgorch("checkpoints", "export", "count", "final.json")
    assert json.loads((kgorch.folder / "final.json").read_text()) == {"step": 400, "sum": 80200}
    status = kgorch.status()
    assert status["step"] == 400 and status["metrics"]["loss"] == 0.0025
    assert "--resume=out/step-" in kgorch.logs(), "the second session went on from the first one's checkpoint"


def test_what_adopt_writes_for_that_program_is_the_plan_of_the_page(kgorch):
    (kgorch.folder / "count.py").write_text(block("python"))
    kgorch("adopt", "count.py", "--", "out", "--steps=100")
    found = parse((kgorch.folder / "plan.toml").read_text(), "plan.toml").stage[0].foreign
    told = parse(block("toml"), "page").stage[0].foreign
    assert (found.checkpoint, found.incomplete, found.again) == (told.checkpoint, told.incomplete, told.again)
    assert (found.step, found.metrics) == (told.step, told.metrics)
    assert kgorch("adopt", "count.py", code=2).stderr.startswith("error: ")


def test_every_key_of_the_section_is_on_the_page():
    keys = {key.split(".")[2] for key in dotted_keys(Plan) if key.startswith("stage.foreign.")}
    assert len(keys) == 9 and all(re.search(rf"\| .*`{key}`.* \|", LEVEL_3) for key in keys)
