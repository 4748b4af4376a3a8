"""Weights of GLF-CR's own programs by the names of model.py: CR_net.pth of the authors, best_model.pth of train_CR_kaggle.py.

    python -m kgorch.workloads.cloud_removal.authors CR_net.pth cloud_removal.safetensors

`predict` takes such a file as it is (`weights = "CR_net.pth"`). A training begins with one after this conversion:
`weights = "cloud_removal.safetensors"` of the stage. The optimizer's state is not taken over.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kgorch import KgorchError
from kgorch.errors import WeightsRefused
from kgorch.worker.checkpoint.pretrained import SAFE_SINCE, numpy_numbers
from kgorch.workloads.cloud_removal.model import CloudRemover

WRAPPINGS = ("network", "model_state_dict", "state_dict")
"""What the state_dict is kept under: by the authors' program, and by the one for Kaggle."""

BLOCKS, LAYERS = 6, 5
NEXT = "give CR_net.pth, or a checkpoint that train_CR_kaggle.py has written"


def read(path: str | Path) -> dict[str, Tensor]:
    """The state_dict of a CloudRemover of the published size, from a .pth file; no code in it is run.

    Of a program's own checkpoint its arguments (an argparse.Namespace) are let in beside tensors and plain values.

    Raises:
        WeightsRefused: it is no such file; named with what is missing or of another shape.
    """
    name = Path(path).name
    if torch.__version__ < SAFE_SINCE:
        print(
            f"warning: before PyTorch {SAFE_SINCE} a hostile file can run code in spite of weights_only (this is"
            f" {torch.__version__}): take {name} from whom you trust",
            file=sys.stderr,
        )
    torch.serialization.add_safe_globals([argparse.Namespace])
    try:
        with numpy_numbers():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a foreign file makes of its reader
        said = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).partition("\n")[0])
        raise WeightsRefused(f"{name} is no file of weights", f"{path}: {said[:300]}", next_step=NEXT) from None
    found = next((content[key] for key in WRAPPINGS if isinstance(content, Mapping) and key in content), content)
    tensors = found.items() if isinstance(found, Mapping) else ()
    theirs = {str(key).removeprefix("module."): value for key, value in tensors if isinstance(value, Tensor)}
    try:
        weights = renamed(theirs)
    except KeyError as missing:
        raise WeightsRefused(
            f"{name} is not of GLF-CR's network",
            f"{path}: expected a tensor {missing}, found {len(theirs)} like {min(theirs, default='none')}",
            next_step=NEXT,
        ) from None
    with torch.device("meta"):
        own = CloudRemover().state_dict()
    for key, value in weights.items():
        if value.shape != own[key].shape:
            raise WeightsRefused(
                f"{name} is of another size than GLF-CR as published",
                f"{key}: expected {tuple(own[key].shape)}, found {tuple(value.shape)}",
                next_step="this network has 13 bands, 96 channels, 6 blocks of 5 layers; another one cannot be taken",
            )
    return weights


def modules() -> dict[str, tuple[str, ...]]:
    """Modules of model.py with weight and bias, and those of their program that they are made of: one, or one of each stream."""
    found: dict[str, tuple[str, ...]] = {
        "of_optical": ("SFENet1",),
        "of_sar": ("SFENet1_SAR",),
        "shallow": ("SFENet2", "SFENet2_SAR"),
        "gather.0": ("GFF.0",),
        "gather.1": ("GFF.1",),
        "rise.0": ("UPNet.0",),
        "rise.2": ("UPNet.2",),
    }
    for i in range(BLOCKS):
        filters, theirs = f"blocks.{i}.fuse.filters", f"DF.{i}.fac_warp"
        found |= {
            f"blocks.{i}.join": (f"RDBs.{i}.LFF", f"RDBs.{i}.LFF_SAR"),
            f"{filters}.0": (f"{theirs}.0.0",),
            **{f"{filters}.{2 + n}.layers.{k}": (f"{theirs}.{1 + n}.stem.{k}",) for n in (0, 1) for k in (0, 2)},
            f"{filters}.4": (f"{theirs}.3.0",),
            f"blocks.{i}.fuse.to_optical": (f"sar_fuse_1x1conv.{i}",),
        }
        if i < BLOCKS - 1:  # nothing reads what the last one makes
            found[f"blocks.{i}.fuse.to_sar"] = (f"opt_distribute_1x1conv.{i}",)
        for j in range(LAYERS):
            ours, theirs = f"blocks.{i}.layers.{j}", f"RDBs.{i}.convs.{j}"
            found |= {
                f"{ours}.conv": (f"{theirs}.conv.0", f"{theirs}.conv_SAR.0"),
                f"{ours}.attention.qkv": (f"{theirs}.attn.qkv", f"{theirs}.attn.qkv_SAR"),
                f"{ours}.attention.out": (f"{theirs}.attn.proj", f"{theirs}.attn.proj_SAR"),
                f"{ours}.attention.gate": (f"{theirs}.attn.attn_fuse_1x1conv",),
                f"{ours}.mlp.0": (f"{theirs}.mlp.fc1", f"{theirs}.mlp_SAR.fc1"),
                f"{ours}.mlp.2": (f"{theirs}.mlp.fc2", f"{theirs}.mlp_SAR.fc2"),
            }
    return found


def renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of model.py. Raises KeyError naming what is missing."""
    theirs = dict(theirs)
    for i, j in itertools.product(range(BLOCKS), range(LAYERS)):
        for stream in ("", "_SAR"):  # LayerNorm's own scale and shift go into the linear layer after it
            layer, norm = f"RDBs.{i}.convs.{j}.mlp{stream}.fc1", f"RDBs.{i}.convs.{j}.norm2{stream}"
            weight = theirs[f"{layer}.weight"].double()
            theirs[f"{layer}.bias"] = (theirs[f"{layer}.bias"] + weight @ theirs[f"{norm}.bias"].double()).float()
            theirs[f"{layer}.weight"] = (weight * theirs[f"{norm}.weight"]).float()
    found = {}
    for name, sources in modules().items():
        for kind in ("weight", "bias"):
            both = torch.cat([theirs[f"{source}.{kind}"] for source in sources])
            found[f"{name}.{kind}"] = both[..., None, None] if kind == "weight" and both.ndim == 2 else both
    for i, j in itertools.product(range(BLOCKS), range(LAYERS)):
        table = theirs[f"RDBs.{i}.convs.{j}.attn.relative_position_bias_table"]
        found[f"blocks.{i}.layers.{j}.attention.bias_AP"] = table.T.contiguous()
    return found


def main() -> None:
    """Parse, convert, write."""
    parser = argparse.ArgumentParser(
        description="Convert weights of GLF-CR's own programs to a safetensors file.",
        epilog="example: python -m kgorch.workloads.cloud_removal.authors CR_net.pth cloud_removal.safetensors",
    )
    parser.add_argument("file", help="CR_net.pth, best_model.pth or checkpoint_epoch_N.pth")
    parser.add_argument("out", help="the safetensors file to write")
    options = parser.parse_args()
    try:
        save_file(read(options.file), options.out)
    except KgorchError as error:
        parser.exit(1, f"error: {error}\n")
    print(f'next: in the plan, the stage\'s weights = "{Path(options.out).name}"')


if __name__ == "__main__":
    main()
