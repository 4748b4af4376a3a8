"""The network that finds a camouflaged animal: backbone, decoder with a side output at each scale, experts at the end.

Axes: B batch, C channels, H rows, W columns, X experts. Normalised by layer or group and never by batch, so microbatches and
ranks of any number give the same result. The loss is in loss.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from kgorch import KgorchError
from kgorch.workloads.camouflage.data import DIVISOR
from kgorch.workloads.camouflage.edgenext import PARTS, EdgeNeXt

MOST_EXPERTS = 7


class Answer(NamedTuple):
    """What the network says of a batch of pictures."""

    mask: Tensor  # logits [B, 1, H, W]
    sides: list[Tensor]  # logits [B, 1, H/s, W/s] for s = 32, 16, 8, 4
    balance: Tensor  # [B]: 0 when the experts are asked equally, X - 1 when one does it all
    edge: Tensor | None = None  # logits [B, 1, H/4, W/4] of the outline, where the network was made with `edge`


def conv_norm(before: int, channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, channels, kernel, padding=kernel // 2, bias=False), nn.GroupNorm(8, channels), nn.GELU()
    )


class Level(nn.Module):
    """One scale of the decoder: what comes from below, enlarged, onto the backbone's features; and its side output."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.lateral = conv_norm(features, width, 1)
        self.refine = nn.Sequential(conv_norm(width, width, 3), conv_norm(width, width, 3))
        self.side = nn.Conv2d(width, 1, 1)

    def forward(self, features_BCHW: Tensor, below_BCHW: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features of this scale, and of the one below -> [B, width, H, W], side logits [B, 1, H, W]."""
        x_BCHW = self.lateral(features_BCHW)
        if below_BCHW is not None:
            x_BCHW = x_BCHW + enlarged(below_BCHW, x_BCHW.shape[2:])
        x_BCHW = x_BCHW + self.refine(x_BCHW)
        return x_BCHW, self.side(x_BCHW)


class Edges(nn.Module):
    """What differs from its surroundings."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW - avg_pool2d(x_BCHW, 5, 1, 2, count_include_pad=False)


class Scene(nn.Module):
    """The mean of the whole picture, at each of its places."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW.mean((2, 3), keepdim=True).expand_as(x_BCHW)


class Expert(nn.Module):
    """Looks around in its own way, then mixes the channels. [B, C, H, W] -> the same."""

    def __init__(self, look: nn.Module, width: int) -> None:
        super().__init__()
        self.look, self.norm = look, nn.GroupNorm(8, width)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.mix(self.norm(self.look(x_BCHW)))


def experts_of(width: int, count: int = MOST_EXPERTS) -> nn.ModuleList:
    """The first so many of: a point, near, wide, two with gaps, edges, the scene."""
    if not 1 <= count <= MOST_EXPERTS:
        raise KgorchError(
            f"experts = {count}", f"expected 1 to {MOST_EXPERTS}: each looks in a way of its own",
            next_step=f"give experts = {min(max(count, 1), MOST_EXPERTS)}",
        )  # fmt: skip

    def depthwise(kernel: int, gap: int = 1) -> nn.Conv2d:
        return nn.Conv2d(width, width, kernel, padding=kernel // 2 * gap, dilation=gap, groups=width)

    looks = (nn.Identity(), depthwise(3), depthwise(7), depthwise(3, 2), depthwise(3, 4), Edges(), Scene())
    return nn.ModuleList(Expert(look, width) for look in looks[:count])


class Mixture(nn.Module):
    """Experts, and a router that weights them at each place of each picture; all are asked, softly."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts_of(width, experts)
        self.near, self.scene = nn.Conv2d(width, experts, 3, padding=1), nn.Linear(width, experts)
        self.mask = nn.Sequential(conv_norm(width, width, 3), nn.Conv2d(width, 1, 1))

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """[B, width, H, W] -> mask logits [B, 1, H, W], imbalance [B]."""
        scores_BXHW = self.near(x_BCHW) + self.scene(x_BCHW.mean((2, 3)))[:, :, None, None]
        gates_BXHW = scores_BXHW.float().softmax(1)
        told = sum(gates_BXHW[:, [number]] * expert(x_BCHW) for number, expert in enumerate(self.experts))
        share_BX = gates_BXHW.mean((2, 3))
        return self.mask(x_BCHW + told), len(self.experts) * share_BX.square().sum(1) - 1


class CamouflageNet(nn.Module):
    """Args:
    dims, depths, heads: of the backbone. width: channels of decoder and experts, a multiple of 8.
    experts: 1 to 7. edge: with an output for the outline, at the finest scale.

    Attributes:
        trained_size: int64 scalar, rows and columns of the pictures that it was trained on, 0 before. A buffer, so that every
            checkpoint and every exported file says it, also where the memory ladder has changed it.
    """

    trained_size: Tensor

    def __init__(
        self, dims: Sequence[int] = (80, 160, 288, 584), depths: Sequence[int] = (3, 3, 9, 3), heads: int = 8,
        width: int = 64, *, experts: int = MOST_EXPERTS, edge: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone = EdgeNeXt(dims, depths, heads)
        self.levels = nn.ModuleList(Level(features, width) for features in reversed(dims))
        self.mixture = Mixture(width, experts)
        self.edge = nn.Conv2d(width, 1, 1) if edge else None
        self.register_buffer("trained_size", torch.tensor(0))

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> CamouflageNet:
        """The network that these weights are of, with them; its sizes are read off their shapes. Raises KgorchError."""
        try:
            stages = range(PARTS)
            dims = [len(weights[f"backbone.stages.{stage}.blocks.0.norm.weight"]) for stage in stages]
            blocks = [re.match(r"backbone\.stages\.(\d+)\.blocks\.(\d+)\.", name) for name in weights]
            depths = [len({found[2] for found in blocks if found and int(found[1]) == stage}) for stage in stages]
            heads = len(weights[f"backbone.stages.1.blocks.{depths[1] - 1}.xca.temperature"])
            experts, width = weights["mixture.near.weight"].shape[:2]
            net = cls(dims, depths, heads, width, experts=experts, edge="edge.weight" in weights)
            net.load_state_dict(weights)
        except (KeyError, RuntimeError) as problem:
            raise KgorchError(
                "these weights are not of this network",
                f"expected names like mixture.near.weight, found {len(weights)} like {min(weights, default='none')}: {problem}",
                next_step="python -m kgorch.workloads.camouflage.convert FILE OUT.safetensors  (says what a file of weights holds)",
            ) from problem
        return net

    def freeze(self, parts: int) -> None:
        """From the next forward on the first so many parts of the backbone take no gradients, and cost no backward."""
        self.backbone.frozen = parts

    def never_train(self, parts: int) -> None:
        """These stay frozen for good: to be said before DistributedDataParallel and the optimizer see the parameters."""
        for number in range(parts):
            for module in self.backbone.part(number):
                module.requires_grad_(False)

    def forward(self, image_BCHW: Tensor) -> Answer:
        """[B, 3, H, W], H and W multiples of 32."""
        size = image_BCHW.shape[2:]
        if any(side % DIVISOR for side in size):
            raise ValueError(f"a picture of {tuple(size)} rows and columns: expected multiples of {DIVISOR}")
        x_BCHW, sides = None, []
        for level, features_BCHW in zip(self.levels, reversed(self.backbone(image_BCHW)), strict=True):
            x_BCHW, side_BCHW = level(features_BCHW, x_BCHW)
            sides.append(side_BCHW)
        mask_BCHW, balance_B = self.mixture(x_BCHW)
        return Answer(enlarged(mask_BCHW, size), sides, balance_B, self.edge(x_BCHW) if self.edge else None)


def enlarged(x_BCHW: Tensor, size: Sequence[int]) -> Tensor:
    return interpolate(x_BCHW, size=tuple(size), mode="bilinear", align_corners=False)


def frozen_at(epoch: int, frozen: int, unfreeze_every: int) -> int:
    """Parts of the backbone that are frozen in an epoch: one fewer, the last stage first, each `unfreeze_every` epochs.

    A function of the epoch alone, so a run that goes on knows without having kept it. 0 for `unfreeze_every`: none thaws.
    """
    if not 0 <= frozen <= PARTS:
        raise ValueError(f"frozen = {frozen}: the backbone has {PARTS} parts")
    return max(0, frozen - epoch // unfreeze_every) if unfreeze_every else frozen


def iou_parts(logits_BCHW: Tensor, mask_BCHW: Tensor) -> Tensor:
    """[2, float64]: the sum of the pictures' IoU, and their number; 1 for a picture with nothing in it and nothing found."""
    found, mask = logits_BCHW > 0, mask_BCHW > 0.5
    both_B, either_B = ((pair.sum((1, 2, 3)).double()) for pair in (found & mask, found | mask))
    iou_B = torch.where(either_B > 0, both_B / either_B.clamp(min=1), torch.ones_like(both_B))
    return torch.stack([iou_B.sum(), torch.tensor(float(len(iou_B)), device=iou_B.device, dtype=torch.float64)])
