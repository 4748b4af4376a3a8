"""Three networks that say from a window where the price will go: an LSTM, a Transformer, and a plain MLP.

Axes: B batch, F frames, T bars, C figures of a bar, H hidden, D width of a head, K classes, N tokens.

None normalises by batch, so microbatches and ranks of any number give the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kgorch.workloads.timeseries.bars import FIGURES


class PriceLSTM(nn.Module):
    """Two layers over time, the frames side by side in each step.

    Args:
        bidirectional: also from the newest bar to the oldest. All bars of a window are over, so nothing lies ahead.
        attention: the steps are weighted by what they hold, instead of the last step alone.
    """

    def __init__(
        self, frames: int, length: int, classes: int = 2, *, hidden: int = 128,
        bidirectional: bool = False, attention: bool = False, dropout: float = 0.2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.lstm = nn.LSTM(
            frames * FIGURES, hidden, num_layers=2, batch_first=True, dropout=dropout, bidirectional=bidirectional
        )
        wide = hidden * (2 if bidirectional else 1)
        self.attention = (
            nn.Sequential(nn.Linear(wide, wide // 2), nn.Tanh(), nn.Linear(wide // 2, 1)) if attention else None
        )
        self.head = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, classes))

    def forward(self, bars_BFTC: Tensor) -> Tensor:
        """[B, F, T, C] -> logits [B, K]."""
        steps_BTH, (last_LBH, _) = self.lstm(bars_BFTC.transpose(1, 2).flatten(2))
        if self.attention is not None:
            found_BH = (self.attention(steps_BTH).softmax(1) * steps_BTH).sum(1)
        else:  # the newest step forwards, and the oldest backwards: each has seen the whole window
            found_BH = last_LBH[-2:].transpose(0, 1).flatten(1) if self.lstm.bidirectional else last_LBH[-1]
        return self.head(found_BH)


class PriceTransformer(nn.Module):
    """Every bar of every frame is a token that knows its frame and its age.

    Args:
        feedforward: width of a layer's inner part, in multiples of `hidden`.
    """

    def __init__(
        self, frames: int, length: int, classes: int = 2, *, hidden: int = 128,
        layers: int = 3, heads: int = 4, feedforward: int = 2, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Linear(FIGURES, hidden)
        # no other weight's shape tells the number of heads, and weights fit a network with another number, too
        self.place_FTHD = nn.Parameter(torch.randn(frames, length, heads, hidden // heads) * 0.02)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, feedforward * hidden, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, classes))

    def forward(self, bars_BFTC: Tensor) -> Tensor:
        """[B, F, T, C] -> logits [B, K]."""
        tokens_BNH = (self.embed(bars_BFTC) + self.place_FTHD.flatten(2)).flatten(1, 2)
        return self.head(self.encoder(tokens_BNH).mean(1))


class PriceMLP(nn.Module):
    """The window as one long row."""

    def __init__(self, frames: int, length: int, classes: int = 2, *, hidden: int = 128, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(frames * length * FIGURES, hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, bars_BFTC: Tensor) -> Tensor:
        """[B, F, T, C] -> logits [B, K]."""
        return self.layers(bars_BFTC)


MODELS: dict[str, type[nn.Module]] = {"lstm": PriceLSTM, "transformer": PriceTransformer, "mlp": PriceMLP}


def options_of(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments, `frames` and `length` aside, of the network that these weights come from: a rung may have changed them."""
    if "layers.1.bias" in weights:
        return {"classes": len(weights["layers.7.bias"]), "hidden": len(weights["layers.1.bias"])}
    classes = len(weights["head.1.bias"])
    if "embed.bias" in weights:
        hidden = len(weights["embed.bias"])
        layers = {name.split(".")[2] for name in weights if name.startswith("encoder.layers.")}
        inner = len(weights["encoder.layers.0.linear1.bias"])
        return {
            "classes": classes, "hidden": hidden, "layers": len(layers), "heads": weights["place_FTHD"].shape[2],
            "feedforward": inner // hidden,
        }  # fmt: skip
    return {
        "classes": classes,
        "hidden": weights["lstm.weight_hh_l0"].shape[1],
        "bidirectional": "lstm.weight_hh_l0_reverse" in weights,
        "attention": "attention.0.weight" in weights,
    }
