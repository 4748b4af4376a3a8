"""Weights of another program into a file that this network can begin with: `best_model.pth` of CamoXpert, timm's edgenext_base.

    python -m kgorch.workloads.camouflage.convert best_model.pth best_model.safetensors

Nothing in the file is run (torch.load with weights_only). Of a checkpoint, its averaged weights are taken where it has them:
they are what its best IoU was measured on. Names are mapped, the backbone's of timm's `features_only` (stem_0, stages_3) to
those of timm's whole model. What this network has not is left out, and said: another program's decoder and experts are others.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kgorch import KgorchError
from kgorch.errors import WeightsRefused
from kgorch.worker.checkpoint.pretrained import SAFE_SINCE, numpy_numbers
from kgorch.workloads.camouflage.edgenext import EdgeNeXt

WRAPPINGS = ("model_state_dict", "state_dict", "model")
AVERAGES = ("ema_state_dict", "state_dict_ema", "model_ema")


def main() -> None:
    """Parse, convert, say what was taken and what was not."""
    parser = argparse.ArgumentParser(
        description="Convert weights of another program for a plan's `weights`.",
        epilog="example: python -m kgorch.workloads.camouflage.convert best_model.pth best_model.safetensors",
    )
    parser.add_argument("file", type=Path, help=".pth, .pt, .bin or .safetensors")
    parser.add_argument("out", type=Path, help="what to write, NAME.safetensors")
    options = parser.parse_args()
    try:
        taken, left = converted(tensors_of(options.file), options.file)
    except KgorchError as error:
        parser.exit(1, "\n  ".join(["error: " + error.what, *error.facts]) + f"\nnext: {error.next_step}\n")
    save_file({name: value.contiguous() for name, value in taken.items()}, options.out)
    print(f"{options.out}: {len(taken)} tensors of this network, {sum(v.numel() for v in taken.values()):,} weights")
    for part, count in left.items():
        print(f"  left out: {count} of {part}")
    rest = "" if "mixture.near.weight" in taken else ', into = "model", strict = false'
    print(f'next: in the plan, weights = {{ file = "{options.out.name}"{rest} }}')


def tensors_of(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by their names, out of what they are wrapped in. Raises WeightsRefused."""
    if file.suffix != ".safetensors" and torch.__version__ < SAFE_SINCE:
        print(
            f"warning: before PyTorch {SAFE_SINCE} a hostile file can run code in spite of weights_only (this is"
            f" {torch.__version__}): take {file.name} from whom you trust",
            file=sys.stderr,
        )
    try:
        with numpy_numbers():
            content: Any = (
                load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
            )
    except Exception as error:  # whatever a foreign file makes of its reader
        said = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).partition("\n")[0])
        raise WeightsRefused(
            f"{file.name} is no file of weights", f"{file}: {said[:300]}",
            next_step="give what torch.save(…) wrote of tensors, numbers and text, or a .safetensors",
        ) from None  # fmt: skip
    content = content if isinstance(content, Mapping) else {}
    average = next((content[key] for key in AVERAGES if isinstance(content.get(key), Mapping)), {})
    found = next((content[key] for key in WRAPPINGS if isinstance(content.get(key), Mapping)), content)
    return {str(name): value for name, value in {**found, **average}.items() if isinstance(value, Tensor)}


def converted(found: Mapping[str, Tensor], file: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What this network can use, by its own names, and how many tensors of each other part were left. Raises WeightsRefused."""
    named = {renamed(name): value for name, value in found.items()}
    if "mixture.near.weight" in named:  # this training's own, perhaps its average: AveragedModel counts beside it
        named.pop("n_averaged", None)
        return named, {}
    taken, left = dict[str, Tensor](), dict[str, int]()
    backbone = backbone_shapes()
    for name, value in named.items():
        if backbone.get(name) == tuple(value.shape):
            taken[name] = value
        else:
            part = name.partition(".")[0]
            left[part] = left.get(part, 0) + 1
    if len(taken) < len(backbone):
        raise WeightsRefused(
            f"{file.name} does not hold an edgenext_base: {len(taken)} of its {len(backbone)} tensors",
            f"expected names like backbone.stages_0.blocks.0.norm.weight, found {len(found)} like {min(found, default='none')}",
            next_step="see which --backbone it was trained with; only edgenext_base fits",
        )
    return taken, left


def renamed(name: str) -> str:
    """`module.backbone.stages_3.blocks.0.norm.weight`, `stages.3.blocks.0.norm.weight` -> `backbone.stages.3.…`."""
    name = re.sub(r"^(module\.|_orig_mod\.)+", "", name)
    return re.sub(r"^(backbone\.)?(stem|stages)[_.](\d)\.", r"backbone.\2.\3.", name)


def backbone_shapes() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {f"backbone.{name}": tuple(value.shape) for name, value in EdgeNeXt().state_dict().items()}


if __name__ == "__main__":
    main()
