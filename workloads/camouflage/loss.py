"""What the training makes smaller. Two kinds; each is taken of every sample alone and then averaged, so microbatches and
ranks of any number give the same result.

    bce_iou_edge   5 BCE + 3 (1 - IoU) + 2 edge of the mask, and `deep` times the mean BCE of the side outputs
    structure      F3Net's (Wei et al., 2020; PraNet and SINet-V2 use it, too): BCE and 1 - IoU that weigh the outline more,
                   of the mask and, by SIDE_WEIGHTS, of the side outputs

Logits are clamped to ±15, so half precision cannot overflow in a sigmoid. That hides nothing that is no number: clamp(NaN) is
NaN, which is for [health] of the plan to see. Axes: B batch, C channels (one), H rows, W columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, conv2d, interpolate

from kgorch import KgorchError
from kgorch.errors import nearest
from kgorch.workloads.camouflage.model import Answer, enlarged

BCE, IOU, EDGE = 5.0, 3.0, 2.0
"""Weights of the three terms, as the users of COD10K of the document that this training follows have them."""

SIDE_WEIGHTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the side outputs in `structure`, the coarsest first, beside 1 for the mask itself (as in F3Net)."""

LOGIT_LIMIT, LOSS_LIMIT = 15.0, 10.0
"""The clamps: of logits, and in `structure` of a picture's loss, so that one picture cannot outweigh all others."""

SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))

KINDS = ("bce_iou_edge", "structure")


class Loss(NamedTuple):
    """Which loss, and its free weights: `deep` of the side outputs (bce_iou_edge), `balance` of the experts' uneven use."""

    kind: str = KINDS[0]
    deep: float = 0.4
    balance: float = 0.01

    def check(self) -> Loss:
        """Raises KgorchError for a kind that is none."""
        if self.kind not in KINDS:
            raise KgorchError(
                f"there is no loss {self.kind!r}{nearest(self.kind, KINDS)}", next_step=f"known: {', '.join(KINDS)}"
            )
        return self

    def __call__(self, answer: Answer, mask_BCHW: Tensor, edge_BCHW: Tensor | None = None) -> Tensor:
        """Scalar. `edge_BCHW`: the outline, 0 or 1, for a network that has an output for it."""
        loss_B = self.balance * answer.balance
        if self.kind == "structure":
            loss_B = loss_B + structure_losses(answer, mask_BCHW)
        else:
            loss_B = loss_B + mask_loss(answer.mask, mask_BCHW, edges=answer.edge is None)
            sides = [entropy(side, interpolate(mask_BCHW, side.shape[2:], mode="area")) for side in answer.sides]
            loss_B = loss_B + self.deep * torch.stack(sides).mean(0)
        if answer.edge is not None:
            assert edge_BCHW is not None, "a network with an output for the outline needs one to compare it with"
            loss_B = loss_B + EDGE * outline_loss(answer.edge, edge_BCHW)
        return loss_B.mean()


def clamped(logits_BCHW: Tensor) -> Tensor:
    return logits_BCHW.float().clamp(-LOGIT_LIMIT, LOGIT_LIMIT)


def entropy(logits_BCHW: Tensor, mask_BCHW: Tensor) -> Tensor:
    """Binary cross-entropy, the mean over each picture. [B]."""
    return binary_cross_entropy_with_logits(clamped(logits_BCHW), mask_BCHW, reduction="none").mean((1, 2, 3))


def mask_loss(logits_BCHW: Tensor, mask_BCHW: Tensor, *, edges: bool) -> Tensor:
    """5 BCE + 3 (1 - IoU), and with `edges` 2 times the mean squared difference of what Sobel's filter gives of both. [B]."""
    found_BCHW = clamped(logits_BCHW).sigmoid()
    both_B, all_B = (found_BCHW * mask_BCHW).sum((1, 2, 3)), (found_BCHW + mask_BCHW).sum((1, 2, 3))
    loss_B = BCE * entropy(logits_BCHW, mask_BCHW) + IOU * (1 - (both_B + 1e-5) / (all_B - both_B + 1e-5))
    if not edges:
        return loss_B
    return loss_B + EDGE * (steepness(found_BCHW) - steepness(mask_BCHW)).square().mean((1, 2, 3))


def steepness(x_BCHW: Tensor) -> Tensor:
    """Magnitude of Sobel's two derivatives, 4 at a straight step from 0 to 1; not of the border's places. [B, 1, H - 2, W - 2]."""
    across = torch.tensor(SOBEL, device=x_BCHW.device)
    slopes = conv2d(x_BCHW, torch.stack([across, across.T])[:, None])
    return (slopes.square().sum(1, keepdim=True) + 1e-5).sqrt()  # the root's own slope at 0 is infinite


def outline_loss(logits_BCHW: Tensor, edge_BCHW: Tensor) -> Tensor:
    """1 - Dice of the outline: an outline is a hundredth of a picture, and a mean over all places would be deaf to it. [B]."""
    found_BCHW = clamped(enlarged(logits_BCHW.float(), edge_BCHW.shape[2:])).sigmoid()
    both_B, all_B = (found_BCHW * edge_BCHW).sum((1, 2, 3)), (found_BCHW + edge_BCHW).sum((1, 2, 3))
    return 1 - (2 * both_B + 1) / (all_B + 1)


def structure_losses(answer: Answer, mask_BCHW: Tensor) -> Tensor:
    """Of the mask and of each side output. [B]."""
    size, outline_BCHW = mask_BCHW.shape[2:], outline_weight(mask_BCHW)
    loss_B = structure_loss(answer.mask, mask_BCHW, outline_BCHW)
    for weight, side_BCHW in zip(SIDE_WEIGHTS, answer.sides, strict=True):
        loss_B = loss_B + weight * structure_loss(enlarged(side_BCHW.float(), size), mask_BCHW, outline_BCHW)
    return loss_B


def outline_weight(mask_BCHW: Tensor) -> Tensor:
    """1 where a place is like the 31x31 around it, up to 6 where it is not; along one axis after the other, for speed."""
    around_BCHW = avg_pool2d(avg_pool2d(mask_BCHW, (31, 1), 1, (15, 0)), (1, 31), 1, (0, 15))
    return 1 + 5 * (around_BCHW - mask_BCHW).abs()


def structure_loss(logits_BCHW: Tensor, mask_BCHW: Tensor, weight_BCHW: Tensor) -> Tensor:
    """Cross-entropy and 1 - IoU, both weighted by place. [B]."""
    logits_BCHW = clamped(logits_BCHW)
    entropy_BCHW = binary_cross_entropy_with_logits(logits_BCHW, mask_BCHW, reduction="none")
    entropy_B = (weight_BCHW * entropy_BCHW).sum((1, 2, 3)) / weight_BCHW.sum((1, 2, 3))
    found_BCHW = logits_BCHW.sigmoid()
    both_B = (weight_BCHW * found_BCHW * mask_BCHW).sum((1, 2, 3))
    either_B = (weight_BCHW * (found_BCHW + mask_BCHW)).sum((1, 2, 3)) - both_B
    return (entropy_B + 1 - (both_B + 1) / (either_B + 1)).clamp(max=LOSS_LIMIT)
