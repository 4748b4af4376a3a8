"""The worked examples of CONTRIBUTING.md work."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest

from kgorch.platforms import detect

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SCRIPT = """
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from kgorch.worker.integrations import carrier, import_hook

import_hook.MODULES["toy"] = "toy_trainer"
carrier.TESTED["toy"] = 1
import toy

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
net[0].register_forward_hook(lambda *_: time.sleep(float(sys.argv[2])))
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
toy.Trainer(net, torch.optim.Adam(net.parameters()), epochs=10).fit(DataLoader(data, 8, shuffle=True))
torch.save(net.state_dict(), "net.pt")
"""


def blocks(language: str, topic: str) -> list[str]:
    [section] = re.findall(rf"^## {topic}\n(.*?)(?=^## )", PAGE, re.S | re.M)
    return re.findall(rf"```{language}\n(.*?)```", section, re.S)


def load(name: str, path: Path, text: str):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look for their module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_the_platform_is_detected(tmp_path, monkeypatch):
    [text] = blocks("python", "Add a platform")
    crunch = load("crunch", tmp_path / "crunch.py", text)
    monkeypatch.setattr(detect, "PLATFORMS", (crunch, *detect.PLATFORMS))
    assert detect.detect({"CRUNCH_SESSION": "1"}, tmp_path) is crunch.PROFILE
    assert detect.detect({}, tmp_path) is not crunch.PROFILE


def test_the_rung_is_parsed_and_chosen_after_its_change_was_applied(tmp_path):
    [diff] = blocks("diff", "Add a rung of the memory ladder")
    text = (ROOT / "orchestrator" / "core" / "memory" / "memory_ladder.py").read_text()
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    changed = load("memory_ladder", tmp_path / "memory_ladder.py", text)
    rung, base = changed.parse_rung("prefetch/2"), changed.Settings()
    facts = changed.MemoryFacts(num_workers=2)
    chosen = changed.next_rung([rung], base, base, facts, where=changed.HOST)
    assert chosen is not None and chosen[1].prefetch_divided == 2
    assert changed.next_rung([rung], chosen[1], base, facts, where=changed.HOST) is None
    assert changed.Settings.from_dict(chosen[1].as_dict()) == chosen[1]


def test_the_integration_carries_a_training_through_a_stop_with_the_same_bits(kgorch):
    torch = pytest.importorskip("torch")
    for text in blocks("python", "Add an integration"):
        name = re.match(r"# (\w+\.py)", text)[1]
        (kgorch.folder / name).write_text(text)
    (kgorch.folder / "train.py").write_text(SCRIPT)
    plan = kgorch.plan("train.py", args={"pause": 0.0})
    kgorch("start", str(plan))
    assert kgorch.status()["step"] == 80
    uncut = torch.load(kgorch.folder / "net.pt")
    supervisor = kgorch.background("start", str(plan), "--fresh", "--set", "stage.train.args.pause=0.3")
    kgorch.wait_for_step(20)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 10
    (kgorch.folder / "net.pt").unlink()
    kgorch("start", str(plan), "--set", "stage.train.args.pause=0.0")
    assert str(torch.load(kgorch.folder / "net.pt")) == str(uncut)
