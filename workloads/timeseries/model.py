"""Three networks that say from a window whether the price will rise: an LSTM, a Transformer, and a plain MLP.

Axes: B batch, F frames, T bars, C figures of a bar, H hidden. None normalises by batch, so microbatches and ranks of any
number give the same result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from workloads.timeseries.data import FIGURES


class PriceLSTM(nn.Module):
    """Two layers over time, the frames side by side in each step."""

    def __init__(self, frames: int, length: int, hidden: int = 128, dropout: float = 0.2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(frames * FIGURES, hidden, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 1))

    def forward(self, bars_BFTC: Tensor) -> Tensor:
        """[B, F, T, C] -> logits [B]."""
        course_BTH, _ = self.lstm(bars_BFTC.transpose(1, 2).flatten(2))
        return self.head(course_BTH[:, -1]).squeeze(1)


class PriceTransformer(nn.Module):
    """Every bar of every frame is a token that knows its frame and its age."""

    def __init__(
        self, frames: int, length: int, hidden: int = 128, dropout: float = 0.1, layers: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(FIGURES, hidden)
        self.place_FTH = nn.Parameter(torch.randn(frames, length, hidden) * 0.02)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 2 * hidden, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 1))

    def forward(self, bars_BFTC: Tensor) -> Tensor:
        """[B, F, T, C] -> logits [B]."""
        tokens_BNH = (self.embed(bars_BFTC) + self.place_FTH).flatten(1, 2)
        return self.head(self.encoder(tokens_BNH).mean(1)).squeeze(1)


class PriceMLP(nn.Module):
    """The window as one long row."""

    def __init__(self, frames: int, length: int, hidden: int = 128, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(frames * length * FIGURES, hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, bars_BFTC: Tensor) -> Tensor:
        """[B, F, T, C] -> logits [B]."""
        return self.layers(bars_BFTC).squeeze(1)


def hidden_of(weights: Mapping[str, Tensor]) -> int:
    """How wide the network was that these weights come from."""
    return len(weights["head.0.weight" if "head.0.weight" in weights else "layers.1.bias"])


MODELS: dict[str, type[nn.Module]] = {"lstm": PriceLSTM, "transformer": PriceTransformer, "mlp": PriceMLP}
