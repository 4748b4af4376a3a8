"""Weights of GLF-CR's own programs, and the network that takes them."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kgorch.errors import WeightsRefused
from kgorch.workloads.cloud_removal import authors, predict
from kgorch.workloads.cloud_removal.make_scenes import make_table
from kgorch.workloads.cloud_removal.model import CloudRemover

ROOT = Path(__file__).parents[2]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of RDN_residual_CR in the authors' repository (codes/net_CR_RDN.py), its buffers aside."""

    def conv(name: str, outputs: int, inputs: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs, size, size)
        yield f"{name}.bias", (outputs,)

    def linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs)
        yield f"{name}.bias", (outputs,)

    for stream, bands in (("", 13), ("_SAR", 2)):
        yield from conv(f"SFENet1{stream}", 96, 4 * bands, 5)
        yield from conv(f"SFENet2{stream}", 96, 96, 3)
    for i in range(6):
        for j in range(5):
            at = f"RDBs.{i}.convs.{j}"
            yield f"{at}.attn.relative_position_bias_table", (225, 8)
            yield from conv(f"{at}.attn.attn_fuse_1x1conv", 8, 8, 1)
            for stream in ("", "_SAR"):
                yield from conv(f"{at}.conv{stream}.0", 48, 96 + 48 * j, 3)
                yield from linear(f"{at}.attn.qkv{stream}", 144, 48)
                yield from linear(f"{at}.attn.proj{stream}", 48, 48)
                yield from ((f"{at}.norm2{stream}.{kind}", (48,)) for kind in ("weight", "bias"))
                yield from linear(f"{at}.mlp{stream}.fc1", 96, 48)
                yield from linear(f"{at}.mlp{stream}.fc2", 48, 96)
        for stream in ("", "_SAR"):
            yield from conv(f"RDBs.{i}.LFF{stream}", 96, 336, 3)
        yield from conv(f"DF.{i}.fac_warp.0.0", 96, 192, 3)
        for block in (1, 2):
            for layer in (0, 2):
                yield from conv(f"DF.{i}.fac_warp.{block}.stem.{layer}", 96, 96, 3)
        yield from conv(f"DF.{i}.fac_warp.3.0", 2400, 96, 1)
        yield from conv(f"sar_fuse_1x1conv.{i}", 96, 96, 1)
        yield from conv(f"opt_distribute_1x1conv.{i}", 96, 96, 1)
    yield from conv("GFF.0", 96, 576, 1)
    yield from conv("GFF.1", 96, 96, 3)
    yield from conv("UPNet.0", 256, 96, 3)
    yield from conv("UPNet.2", 13, 64, 3)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    """Weights that PyTorch's generator gives on every machine, small enough that 6 blocks of products do not overflow."""
    random, found = torch.Generator().manual_seed(0), {}
    for name, shape in sorted(shapes()):
        gain = 0.15 if name.startswith("DF") else 1.5 if ".qkv" in name else 0.6
        value = torch.randn(shape, generator=random, dtype=torch.float64)
        value *= gain * torch.Size(shape[1:]).numel() ** -0.5 if len(shape) > 1 else 0.1
        found[name] = (value + (1 if name.endswith(("norm2.weight", "norm2_SAR.weight")) else 0)).float()
    return found


def test_the_authors_network_has_14_827_million_weights_of_which_a_layers_own_scale_and_the_last_gate_are_not_needed(
    theirs,
):
    count = sum(value.numel() for value in theirs.values())
    assert count == 14_827_373
    ours = sum(value.numel() for value in CloudRemover().parameters())
    assert count - ours == 30 * 2 * 2 * 48 + 96 * 96 + 96


@pytest.mark.parametrize("form", ["CR_net.pth", "best_model.pth"])
def test_with_the_authors_weights_the_network_gives_what_their_program_gives(theirs, tmp_path, form):
    """The expected figures were computed once with the authors' network in double precision, in evaluation, of these weights."""
    best = {
        "epoch": 3, "model_state_dict": {f"module.{name}": value for name, value in theirs.items()},
        "val_psnr": np.float64(28.5), "opts": argparse.Namespace(lr=1e-4, gpu_ids="0,1"),
    }  # fmt: skip
    torch.save({"epoch": 3, "network": theirs} if form == "CR_net.pth" else best, tmp_path / form)
    net = CloudRemover().eval()
    net.load_state_dict(authors.read(tmp_path / form))
    cloudy = torch.linspace(0, 1, 13 * 32 * 32).reshape(1, 13, 32, 32).sin().abs()
    sar = torch.linspace(0, 7, 2 * 32 * 32).reshape(1, 2, 32, 32).cos().abs()
    with torch.no_grad():
        found = net(cloudy, sar)
    expected = [0.0432, 0.0919, 0.0488, 0.3276, 0.1653, 0.4493, 0.5721, 0.3951, 0.4472, 0.6504, 0.8384, 0.6164, 0.9013]
    assert found.mean((0, 2, 3)).tolist() == pytest.approx(expected, abs=2e-4)
    assert found[0, ::3, 5, 9].tolist() == pytest.approx([-0.0929, 0.2711, 0.4961, 0.6731, 0.8765], abs=2e-4)


def test_a_checkpoint_of_theirs_is_tested_on_a_few_images_before_any_training(theirs, tmp_path, monkeypatch, capfd):
    """Cell 3 of the users' notebook: CR_net.pth, one batch of the test part. `limit` opens no other image."""
    monkeypatch.chdir(tmp_path)
    make_table(tmp_path / "image1", scenes=30, size=32, seed=0)
    plan = tomllib.loads((ROOT / "workloads/cloud_removal/plan_pretrained.toml").read_text())["stage"][0]
    torch.save({"network": theirs}, tmp_path / "CR_net.pth")
    own = {"data": "image1", "data_list": "image1/data.csv", "weights": "CR_net.pth", "limit": 2, "num_workers": 0}
    predict.main(**plan["args"] | own)
    assert "weights: file CR_net.pth" in capfd.readouterr().out
    made = json.loads((tmp_path / "outputs" / "predictions.json").read_text())
    assert made["images"] == 2 and made["weights"] == {"checkpoint": "CR_net.pth", "which": "file"}
    assert len(list((tmp_path / "outputs" / "predictions").glob("*.tif"))) == 2


def test_what_is_not_glf_crs_is_refused_by_name(theirs, tmp_path, monkeypatch, capsys):
    path = tmp_path / "net.pth"
    torch.save({"network": {"conv1.weight": torch.zeros(3)}}, path)
    with pytest.raises(WeightsRefused, match="not of GLF-CR") as caught:
        authors.read(path)
    assert "conv1.weight" in str(caught.value)
    four_bands = theirs | {"SFENet1.weight": torch.zeros(96, 16, 5, 5)}
    torch.save(four_bands, path)
    with pytest.raises(WeightsRefused, match="another size") as caught:
        authors.read(path)
    assert "(96, 52, 5, 5), found (96, 16, 5, 5)" in str(caught.value)
    torch.save({"network": Path("runs code when it is loaded")}, path)
    monkeypatch.setattr("sys.argv", ["authors", str(path), str(tmp_path / "out.safetensors")])
    with pytest.raises(SystemExit) as ended:
        authors.main()
    assert ended.value.code == 1 and "no file of weights" in capsys.readouterr().err
