"""A 3D U-Net that reads ink from a volume, its loss and its score.

Axes: B batch, C channels, D layers, H rows, W columns.
Normalised by instance, never by batch, so microbatches and ranks of any number give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch import Tensor, nn


class InkUNet(nn.Module):
    """MONAI's U-Net over the volume, collapsed over depth by weights that it learns.

    Args:
        channels: width of each level; the levels below the first halve D, H and W.
        residual_units: convolutions a level, with a skip around them.
    """

    def __init__(self, channels: Sequence[int] = (32, 64, 128, 256), residual_units: int = 2) -> None:
        super().__init__()
        self.divisor = 2 ** (len(channels) - 1)
        self.unet = UNet(
            spatial_dims=3, in_channels=1, out_channels=2, channels=channels,
            strides=[2] * (len(channels) - 1), num_res_units=residual_units,
        )  # fmt: skip

    def forward(self, volume_BCDHW: Tensor) -> Tensor:
        """[B, 1, D, H, W] -> ink logits, float32 [B, 1, H, W]; D, H, W must be multiples of `divisor`."""
        if any(size % self.divisor for size in volume_BCDHW.shape[2:]):
            raise ValueError(
                f"volume of {tuple(volume_BCDHW.shape[2:])} layers, rows and columns: "
                f"{self.divisor.bit_length()} levels need multiples of {self.divisor}; change layers, tile or channels"
            )
        score_BDHW, weight_BDHW = self.unet(volume_BCDHW).float().unbind(1)
        return (score_BDHW * weight_BDHW.softmax(1)).sum(1, keepdim=True)


def dice_loss() -> nn.Module:
    """Dice and cross-entropy of logits against ink, both [B, 1, H, W].

    Dice is taken for each sample and averaged, so parts of a batch, weighted by size, sum to the whole.
    """
    return DiceCELoss(sigmoid=True, batch=False)


def dice_parts(logits_BCHW: Tensor, ink_BCHW: Tensor) -> Tensor:
    """[2, float64]: twice the overlap of prediction and ink, and the sum of their areas.

    Whole numbers, to be summed over batches and ranks before they are divided: a tile without
    ink has no Dice of its own, and a sum of whole numbers is the same in any order.
    """
    found, ink = logits_BCHW > 0, ink_BCHW > 0.5
    return torch.stack([2 * (found & ink).sum(), found.sum() + ink.sum()]).double()
