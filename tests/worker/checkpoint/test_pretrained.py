"""Starting weights from elsewhere: what is read, what fits, what is refused, and that nothing in them is run."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kgorch.errors import WeightsRefused
from kgorch.worker.checkpoint import pretrained


@pytest.fixture
def net():
    return nn.Sequential(OrderedDict(stem=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 1)))


def _foreign(net):
    """What another training of the same net has come to."""
    return {name: torch.randn(value.shape).to(value.dtype) for name, value in net.state_dict().items()}


def _load(net, path, *, into=None, prefix="", strict=True, name="model"):
    return pretrained.load({name: net}, path, into=into, prefix=prefix, strict=strict)


def _holds(net, foreign):
    return all(torch.equal(value, foreign[name]) for name, value in net.state_dict().items())


WRAPPED = {
    "bare": lambda weights: weights,
    "lightning": lambda weights: {"epoch": 3, "state_dict": weights},
    "trainer": lambda weights: {"model_state_dict": weights, "optimizer_state_dict": {"lr": 0.1}},
    "export --all": lambda weights: {"model": weights, "optimizer": {"state": {}}},
    "ddp": lambda weights: {f"module.{name}": value for name, value in weights.items()},
    "compiled": lambda weights: {"model": {f"module._orig_mod.{name}": value for name, value in weights.items()}},
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_foreign_file_fills_the_model_whatever_it_is_wrapped_in(tmp_path, net, wrapping):
    foreign = _foreign(net)
    torch.save(WRAPPED[wrapping](foreign), tmp_path / "net.pth")
    facts = _load(net, tmp_path / "net.pth")
    assert facts == {"file": "net.pth", "into": "model", "loaded": "9 of 9 tensors"}
    assert _holds(net, foreign)


@pytest.mark.parametrize("how", ["safetensors", "old format of torch.save", "half precision"])
def test_every_format_that_holds_no_code_is_read(tmp_path, net, how):
    foreign = _foreign(net)
    if how == "safetensors":
        path = tmp_path / "net.safetensors"
        save_file({f"module.{name}": value for name, value in foreign.items()}, path)
    else:
        path = tmp_path / "net.pt"
        foreign = {name: value.half().to(value.dtype) for name, value in foreign.items()}
        kept = {name: value.half() for name, value in foreign.items()} if how == "half precision" else foreign
        torch.save(kept, path, _use_new_zipfile_serialization=how == "half precision")
    _load(net, path)
    assert _holds(net, foreign)


def test_a_checkpoint_whose_score_is_a_number_of_numpy_is_read(tmp_path, net):
    foreign = _foreign(net)
    torch.save({"model_state_dict": foreign, "best_iou": np.mean([0.5, 0.7]), "epoch": 84}, tmp_path / "best_model.pth")
    _load(net, tmp_path / "best_model.pth")
    assert _holds(net, foreign)


def test_a_part_of_the_file_goes_into_a_part_of_the_model_or_into_the_only_module(tmp_path, net):
    foreign = nn.Linear(2, 3).state_dict()
    torch.save(
        {f"encoder.{name}": value for name, value in foreign.items()} | {"x.y": torch.ones(1)}, tmp_path / "n.pt"
    )
    assert _load(net, tmp_path / "n.pt", into="model.stem", prefix="encoder.")["into"] == "model.stem"
    assert _holds(net.stem, foreign)
    assert _load(net.stem, tmp_path / "n.pt", prefix="encoder.", name="only")["into"] == "only"
    for into, said in [("modle", r"\(did you mean 'model'\?\)"), ("model.stm", "stm")]:
        with pytest.raises(WeightsRefused, match=said):
            _load(net, tmp_path / "n.pt", into=into)
    with pytest.raises(WeightsRefused, match=r"no name that begins with 'decoder\.'"):
        _load(net, tmp_path / "n.pt", prefix="decoder.")


def test_what_does_not_fit_is_told_in_full_and_by_name(tmp_path, net):
    foreign = _foreign(net)
    foreign |= {"classifier.weight": foreign["head.weight"], "stem.weight": torch.ones(5, 2)}
    del foreign["head.weight"]
    torch.save(foreign | {f"extra.{number}": torch.ones(1) for number in range(9)}, tmp_path / "net.pth")
    with pytest.raises(WeightsRefused) as refused:
        _load(net, tmp_path / "net.pth")
    said = refused.value.what
    assert "net.pth does not fit model (7 of 9 tensors do)" in said and "strict = false" in str(refused.value)
    assert "missing: 1: head.weight (did you mean 'classifier.weight'?)" in said
    assert "unexpected: 10: classifier.weight (did you mean 'head.weight'?), extra.0" in said and "… 5 more" in said
    assert "shapes: 1: stem.weight (file (5, 2), model (3, 2))" in said
    before = {name: value.clone() for name, value in net.state_dict().items()}
    facts = _load(net, tmp_path / "net.pth", strict=False)
    assert facts.keys() == {"file", "into", "loaded", "missing", "unexpected", "shapes"}
    assert torch.equal(net.head.bias, foreign["head.bias"]), "what fits is taken"
    assert torch.equal(net.stem.weight, before["stem.weight"]), "the rest is as it was"


def test_a_file_of_which_nothing_fits_is_refused_strict_or_not(tmp_path, net):
    torch.save({"other.weight": torch.ones(1)}, tmp_path / "net.pth")
    with pytest.raises(WeightsRefused, match="no tensor of it fits model"):
        _load(net, tmp_path / "net.pth", strict=False)


def test_tied_weights_may_stand_in_the_file_once_and_old_batchnorms_lack_a_counter(tmp_path, net):
    net.other = nn.Linear(2, 3)
    net.other.weight = net.stem.weight
    foreign = _foreign(net)
    kept = {name: value for name, value in foreign.items() if name not in ("other.weight", "norm.num_batches_tracked")}
    save_file(kept, tmp_path / "net.safetensors")
    _load(net, tmp_path / "net.safetensors")
    assert torch.equal(net.other.weight, foreign["stem.weight"])


class Runs:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_file_that_would_run_code_is_refused_by_name_and_has_not_run(tmp_path, net):
    sign = tmp_path / "it ran"
    torch.save({"state_dict": net.state_dict(), "more": Runs(str(sign))}, tmp_path / "zip.pth")
    (tmp_path / "bare.pth").write_bytes(pickle.dumps({"weight": Runs(str(sign))}, protocol=2))
    torch.save(net, tmp_path / "whole.pt")
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    refused = {
        "zip.pth": "would run posix.mkdir",
        "bare.pth": "would run posix.mkdir",
        "whole.pt": "would run torch.nn.modules",
        "script.pt": r"is no file of weights\s+.*TorchScript program",
    }
    for name, said in refused.items():
        with pytest.raises(WeightsRefused, match=rf"^{name} .*{said}"):
            _load(net, tmp_path / name)
    assert not sign.exists()
    pickle.loads((tmp_path / "bare.pth").read_bytes())
    assert sign.exists(), "it would have"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.pth", b"<html>404 Not Found</html>"),
        ("empty.pt", b""),
        ("text.safetensors", b"<html>404 Not Found</html>"),
        ("empty.safetensors", b""),
        ("huge.safetensors", b"\xff" * 64),
        ("list.pt", pickle.dumps([1, 2])),
    ],
)
def test_what_is_no_file_of_weights_is_refused_by_name(tmp_path, net, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsRefused, match=name.replace(".", r"\.")):
        _load(net, tmp_path / name)


def test_a_file_that_wraps_itself_is_no_endless_way(tmp_path, net):
    around = {}
    around["model"] = around
    torch.save(around, tmp_path / "net.pt")
    with pytest.raises(WeightsRefused, match="holds no name with a tensor"):
        _load(net, tmp_path / "net.pt")


@pytest.mark.parametrize(("version", "warned"), [("2.9.1", True), ("2.10.0", False)])
def test_a_pytorch_whose_weights_only_was_not_safe_is_warned_of(tmp_path, net, monkeypatch, capsys, version, warned):
    torch.save(_foreign(net), tmp_path / "net.pth")
    save_file(_foreign(net), tmp_path / "net.safetensors")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    _load(net, tmp_path / "net.safetensors")
    assert not capsys.readouterr().err
    _load(net, tmp_path / "net.pth")
    assert ("CVE-2026-24747" in capsys.readouterr().err) is warned


# In a run


def _plan(kgorch, weights, ranks=1):
    plan = kgorch.plan("adapts.py", ranks=ranks)
    plan.write_text(plan.read_text().replace("[checkpoint]", f"weights = {weights}\n[checkpoint]"))
    return plan


def test_a_stage_begins_with_the_plans_weights_on_every_rank_and_goes_on_without_them(kgorch):
    foreign = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict()
    torch.save({"model": foreign}, kgorch.folder / "net.pth")
    plan = _plan(kgorch, '"net.pth"', ranks=2)
    kgorch("start", str(plan))
    first = f"begins with {[round(value, 4) for value in foreign['0.weight'].flatten().tolist()]}"
    assert [first in (kgorch.attempt() / f"rank{rank}.log").read_text() for rank in (0, 1)] == [True, True]
    [event] = kgorch.events("weights_loaded")
    assert event["facts"] == {"file": "net.pth", "into": "model", "loaded": "4 of 4 tensors"}
    assert kgorch.status()["notices"] == []
    kgorch("checkpoints", "export", "test", "out.pt")
    kgorch("checkpoints", "export", "test", "out.safetensors")
    written, same = (
        torch.load(kgorch.folder / "out.pt", weights_only=True),
        load_file(kgorch.folder / "out.safetensors"),
    )
    assert written.keys() == same.keys() and all(torch.equal(written[name], same[name]) for name in same)
    assert "ends in one of" in kgorch("checkpoints", "export", "test", "out.onnx", code=2).stderr


def test_weights_that_do_not_fit_fail_the_run_at_once_and_status_says_why(kgorch):
    torch.save({"0.weight": torch.ones(3, 2), "2.bias": torch.ones(1)}, kgorch.folder / "net.pth")
    done = kgorch("start", str(_plan(kgorch, '"net.pth"')), code=20)
    assert "net.pth does not fit model" in done.stderr and "0.bias" in done.stderr and "2.bias" in done.stderr
    assert len(kgorch.history()[0]["attempts"]) == 1
    assert "unexpected: 1: 2.bias" in kgorch.status()["why"] and "2.bias" in kgorch("status").stdout
    plan = _plan(kgorch, '{ file = "net.pth", strict = false }')
    kgorch("start", str(plan))
    [event] = kgorch.events("weights_partly_loaded")
    assert event["facts"]["loaded"] == "1 of 4 tensors" and "0.bias" in event["facts"]["missing"]
    [notice] = kgorch.status()["notices"]
    assert "net.pth" in notice and "1 of 4 tensors" in notice and "0.bias" in notice
    assert notice in kgorch("status").stdout


def test_a_file_of_weights_that_is_not_there_is_refused_before_anything_starts(kgorch):
    done = kgorch("start", str(_plan(kgorch, '"net.pth"')), code=2)
    assert "there is no weights file" in done.stderr and not list(kgorch.home.glob("runs/*/*"))
