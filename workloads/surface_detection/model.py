"""A residual 3D U-Net with attention that finds surfaces in a volume, its loss and its score.

Axes: B batch, C channels, D pages, H rows, W columns.
Normalised by instance, never by batch, so microbatches and ranks of any number give the same result. Only operations that
PyTorch knows to be deterministic on a GPU, too: maxima are taken with amax, whose gradient is, where that of MaxPool3d is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

DICE, FOCAL, BCE = 0.6, 0.2, 0.2
ALPHA, GAMMA = 0.25, 2.0
SPACE = (-3, -2, -1)


class Residual(nn.Module):
    """Two convolutions of 3 × 3 × 3 with InstanceNorm and ReLU, and a skip around them."""

    def __init__(self, before: int, after: int, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [
                nn.Conv3d(width, after, 3, padding=1, bias=False),
                nn.InstanceNorm3d(after),
                nn.ReLU(inplace=True),
            ]
            layers += [nn.Dropout3d(dropout)] if dropout else []
        self.conv = nn.Sequential(*layers)
        self.skip = nn.Identity() if before == after else nn.Conv3d(before, after, 1, bias=False)

    def forward(self, x_BCDHW: Tensor) -> Tensor:
        return self.conv(x_BCDHW) + self.skip(x_BCDHW)


class Attention(nn.Module):
    """Weights each channel by its mean and its maximum over space, then each voxel by those over the channels."""

    def __init__(self, channels: int, reduction: int, kernel: int) -> None:
        super().__init__()
        narrow = max(channels // reduction, 1)
        self.channel = nn.Sequential(
            nn.Conv3d(channels, narrow, 1, bias=False),
            nn.ReLU(inplace=True),
            nn.Conv3d(narrow, channels, 1, bias=False),
        )
        self.space = nn.Conv3d(2, 1, kernel, padding=kernel // 2, bias=False)

    def forward(self, x_BCDHW: Tensor) -> Tensor:
        means, peaks = x_BCDHW.mean(SPACE, keepdim=True), x_BCDHW.amax(SPACE, keepdim=True)
        x_BCDHW = x_BCDHW * (self.channel(means) + self.channel(peaks)).sigmoid()
        both_BCDHW = torch.cat([x_BCDHW.mean(1, keepdim=True), x_BCDHW.amax(1, keepdim=True)], 1)
        return x_BCDHW * self.space(both_BCDHW).sigmoid()


class Up(nn.Module):
    """Twice the resolution and half the channels, joined with what the encoder had there."""

    def __init__(self, channels: int, dropout: float, reduction: int, kernel: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, channels // 2, 2, 2)
        self.conv = Residual(channels, channels // 2, dropout)
        self.attention = Attention(channels // 2, reduction, kernel)

    def forward(self, x_BCDHW: Tensor, skip_BCDHW: Tensor) -> Tensor:
        return self.attention(self.conv(torch.cat([skip_BCDHW, self.up(x_BCDHW)], 1)))


class SurfaceUNet(nn.Module):
    """Encoder of `depth` halvings, decoder with attention: one logit a voxel.

    Args:
        width: channels of the first level; each level below has twice as many.
        depth: how often the resolution is halved.
        dropout: the highest share of channels that is dropped; it rises from 0 with the depth of the encoder, and again
            through the decoder, whose last level has three quarters of it at depth 4.
        reduction, kernel: of the attention's narrow layer, and of its convolution over space.
    """

    def __init__(
        self, width: int = 32, depth: int = 4, dropout: float = 0.2, reduction: int = 16, kernel: int = 7
    ) -> None:
        super().__init__()
        self.divisor = 2**depth
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = Residual(1, width)
        self.down = nn.ModuleList(
            Residual(widths[level], widths[level + 1], dropout * level / max(depth - 1, 1)) for level in range(depth)
        )
        self.up = nn.ModuleList(
            Up(widths[depth - level], dropout * level / depth, reduction, kernel) for level in range(depth)
        )
        self.last = nn.Conv3d(width, 1, 1)

    def forward(self, volume_BCDHW: Tensor) -> Tensor:
        """[B, 1, D, H, W], 0 to 1 -> logits, float32, of the same shape. D, H and W must be multiples of `divisor`."""
        if any(size % self.divisor for size in volume_BCDHW.shape[2:]):
            raise ValueError(
                f"a volume of {tuple(volume_BCDHW.shape[2:])} pages, rows and columns cannot be halved"
                f" {len(self.down)} times: it needs multiples of {self.divisor}; change patch or depth"
            )
        levels = [self.first(volume_BCDHW)]
        for block in self.down:
            levels.append(block(halved(levels[-1])))
        x_BCDHW = levels.pop()
        for block in self.up:
            x_BCDHW = block(x_BCDHW, levels.pop())
        return self.last(x_BCDHW).float()


def halved(x_BCDHW: Tensor) -> Tensor:
    """The largest of each 2 × 2 × 2 voxels, one axis after another."""
    for axis in SPACE:
        x_BCDHW = torch.maximum(*x_BCDHW.unflatten(axis, (-1, 2)).unbind(axis))
    return x_BCDHW


def weights_of(net: nn.Module) -> int:
    """How many it learns."""
    return sum(weight.numel() for weight in net.parameters())


def loss_of(logits_BCDHW: Tensor, label_BCDHW: Tensor, ignore: int | None = 2) -> Tensor:
    """0.6 soft Dice + 0.2 focal (0.25, 2) + 0.2 binary cross-entropy, over the labelled voxels. A scalar.

    Each is taken for a patch by itself and then averaged, so parts of a batch, weighted by size, sum to the whole. A patch
    without a labelled voxel counts as nothing.

    Args:
        label_BCDHW: whole numbers; 1 is surface, `ignore` is not labelled, all else background.
    """
    logits_BN, label_BN = logits_BCDHW.flatten(1), label_BCDHW.flatten(1)
    known_BN = torch.ones_like(logits_BN) if ignore is None else (label_BN != ignore).to(logits_BN.dtype)
    truth_BN, found_BN = (label_BN == 1).to(logits_BN.dtype), logits_BN.sigmoid() * known_BN
    overlap_B, areas_B = (found_BN * truth_BN).sum(1), found_BN.sum(1) + truth_BN.sum(1)
    dice_B = 1 - (2 * overlap_B + 1) / (areas_B + 1)
    entropy_BN = functional.binary_cross_entropy_with_logits(logits_BN, truth_BN, reduction="none") * known_BN
    right_BN = torch.where(truth_BN > 0, found_BN, 1 - found_BN)
    share_BN = torch.where(truth_BN > 0, ALPHA, 1 - ALPHA)
    count_B = known_BN.sum(1).clamp(min=1)
    focal_B = (share_BN * (1 - right_BN) ** GAMMA * entropy_BN).sum(1) / count_B
    return (DICE * dice_B + FOCAL * focal_B + BCE * entropy_BN.sum(1) / count_B).mean()


def dice_parts(probability: Tensor, label: Tensor, thresholds: Sequence[float], ignore: int | None = 2) -> Tensor:
    """[2 × T, float64]: for each threshold twice the overlap of what is found and what is surface, then the sums of their sizes.

    Whole numbers, to be summed over batches, volumes and ranks before they are divided: a patch without surface has no Dice of
    its own. Both arguments have any shape, the same one.
    """
    known, truth = torch.ones_like(label, dtype=torch.bool) if ignore is None else label != ignore, label == 1
    sums = []
    for threshold in thresholds:
        found = (probability > threshold) & known
        sums.append(torch.stack([2 * (found & truth).sum(), found.sum() + truth.sum()]))
    return torch.stack(sums, 1).flatten().double()
