"""EdgeNeXt without its classifier, with the parameter names of timm's `edgenext_base`: published weights load as they are.

Maaz et al., EdgeNeXt: Efficiently Amalgamated CNN-Transformer Architecture for Mobile Vision Applications, 2022. Four stages
at strides 4, 8, 16 and 32: convolutions that are depthwise and large, and at the end of each stage but the first one block
of split depthwise transpose attention (SDTA), whose attention is between channels, so it costs the same at any picture size.

Axes: B batch, C channels, H rows, W columns, N = H·W places, E channels of one head. Normalised by layer, never by batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize

KERNELS, SPLITS = (3, 5, 7, 9), (2, 2, 3, 4)
"""Of each stage: the side of its depthwise convolutions, and into how many parts its SDTA block splits the channels."""

PARTS = 4
"""The backbone freezes and thaws in so many parts: the stem with the first stage, then the other stages."""

LAYER_SCALE = 1e-6


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of each place of [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BHWC = x_BCHW.permute(0, 2, 3, 1)
        return layer_norm(x_BHWC, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Mlp(nn.Module):
    """Four times as wide inside; over the last axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class ConvBlock(nn.Module):
    """A large depthwise convolution, then an MLP at each place; around both a shortcut."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = Mlp(channels)
        self.gamma = nn.Parameter(torch.full((channels,), LAYER_SCALE))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BHWC = self.mlp(self.norm(self.conv_dw(x_BCHW).permute(0, 2, 3, 1)))
        return x_BCHW + (self.gamma * y_BHWC).permute(0, 3, 1, 2)


class FourierPosition(nn.Module):
    """Row and column of each place as waves of 32 lengths each, projected onto the channels."""

    def __init__(self, channels: int, waves: int = 32) -> None:
        super().__init__()
        self.waves = waves
        self.token_projection = nn.Conv2d(2 * waves, channels, 1)

    def forward(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """[1, C, H, W]."""
        down, across = self._waves(rows, device), self._waves(columns, device)
        both = (down[:, :, None].expand(-1, -1, columns), across[:, None].expand(-1, rows, -1))
        return self.token_projection(torch.cat(both)[None])

    def _waves(self, count: int, device: torch.device) -> Tensor:
        """[waves, count]: sine and cosine in turn; the first to the last place make one full turn of the longest wave."""
        turn = torch.arange(1, count + 1, device=device, dtype=torch.float32) / (count + 1e-6) * 2 * math.pi
        octave = torch.arange(self.waves, device=device) // 2 * 2 / self.waves
        phase = turn / (10000.0**octave)[:, None]
        return torch.stack([phase[0::2].sin(), phase[1::2].cos()], 1).flatten(0, 1)


class CrossCovariance(nn.Module):
    """Attention between channels, [B, N, C] -> [B, N, C]: how alike two channels are over all places."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x_BNC: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(x_BNC).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 4, 1)
        )  # each [B, heads, E, N]
        alike = normalize(query, dim=-1) @ normalize(key, dim=-1).transpose(-2, -1) * self.temperature
        return self.proj((alike.softmax(-1) @ value).flatten(1, 2).transpose(1, 2))


class SDTABlock(nn.Module):
    """Channels split into parts, each convolved on top of the part before; then attention between channels, and an MLP."""

    def __init__(self, channels: int, splits: int, heads: int, *, knows_place: bool) -> None:
        super().__init__()
        self.width = math.ceil(channels / splits)
        self.convs = nn.ModuleList(
            nn.Conv2d(self.width, self.width, 3, padding=1, groups=self.width) for _ in range(splits - 1)
        )
        self.pos_embd = FourierPosition(channels) if knows_place else None
        self.norm_xca = nn.LayerNorm(channels, eps=1e-6)
        self.gamma_xca = nn.Parameter(torch.full((channels,), LAYER_SCALE))
        self.xca = CrossCovariance(channels, heads)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = Mlp(channels)
        self.gamma = nn.Parameter(torch.full((channels,), LAYER_SCALE))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        *parts, last = x_BCHW.split(self.width, 1)
        done: list[Tensor] = []
        for conv, part in zip(self.convs, parts, strict=True):
            done.append(conv(part + done[-1] if done else part))
        y_BCHW = torch.cat([*done, last], 1)
        rows, columns = y_BCHW.shape[2:]
        if self.pos_embd is not None:
            y_BCHW = y_BCHW + self.pos_embd(rows, columns, y_BCHW.device)
        y_BNC = y_BCHW.flatten(2).transpose(1, 2)
        y_BNC = y_BNC + self.gamma_xca * self.xca(self.norm_xca(y_BNC))
        y_BNC = self.gamma * self.mlp(self.norm(y_BNC))
        return x_BCHW + y_BNC.transpose(1, 2).unflatten(2, (rows, columns))


class Stage(nn.Module):
    """Half the rows and columns (but in the first stage), then its blocks."""

    def __init__(self, number: int, before: int, channels: int, depth: int, heads: int) -> None:
        super().__init__()
        self.downsample = (
            nn.Sequential(LayerNorm2d(before), nn.Conv2d(before, channels, 2, 2)) if number else nn.Identity()
        )
        attending = min(number, 1)
        self.blocks = nn.Sequential(
            *(ConvBlock(channels, KERNELS[number]) for _ in range(depth - attending)),
            *(SDTABlock(channels, SPLITS[number], heads, knows_place=number == 1) for _ in range(attending)),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.blocks(self.downsample(x_BCHW))


class EdgeNeXt(nn.Module):
    """The defaults are edgenext_base.

    Args:
        dims: channels of each stage, multiples of `heads`. depths: blocks of each stage.

    Attributes:
        frozen: the first so many of its four parts run without gradients.
    """

    def __init__(
        self, dims: Sequence[int] = (80, 160, 288, 584), depths: Sequence[int] = (3, 3, 9, 3), heads: int = 8
    ) -> None:
        super().__init__()
        self.frozen = 0
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], 4, 4), LayerNorm2d(dims[0]))
        before = [dims[0], *dims]
        self.stages = nn.ModuleList(
            Stage(number, before[number], dims[number], depths[number], heads) for number in range(PARTS)
        )
        for part in self.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def part(self, number: int) -> list[nn.Module]:
        """What freezes and thaws together."""
        return [self.stem, self.stages[0]] if number == 0 else [self.stages[number]]

    def forward(self, image_BCHW: Tensor) -> list[Tensor]:
        """[B, 3, H, W] -> the features of each stage, [B, dims[i], H/s, W/s] for s = 4, 8, 16, 32."""
        found, x_BCHW = [], image_BCHW
        for number in range(PARTS):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number >= self.frozen):
                for module in self.part(number):
                    x_BCHW = module(x_BCHW)
            found.append(x_BCHW)
        return found
