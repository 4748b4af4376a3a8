"""A network that sees through clouds by radar, after GLF-CR (Xu et al., "GLF-CR: SAR-enhanced cloud removal with global-local
fusion", ISPRS Journal 2022): a residual dense network of two streams that fuse within windows and pixel by pixel.

Axes: B batch, S streams (optical, SAR), C channels, H rows, W columns; M windows of N pixels, A attention heads, D channels of
a head, K taps of a filter. Nothing is normalised by batch, and the authors' stochastic depth is left out, so microbatches and
ranks of any number give the same result. With the authors' weights (authors.py) it computes what their program computes.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kgorch.workloads.cloud_removal.data import Sample

STREAMS, OPTICAL_BANDS, SAR_BANDS = 2, 13, 2


class StreamConv(nn.Conv2d):
    """Each stream by weights of its own: the streams are the groups of one convolution. [B, S, C, H, W]"""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__(STREAMS * inputs, STREAMS * outputs, size, padding=size // 2, groups=STREAMS)

    def forward(self, both_BSCHW: Tensor) -> Tensor:
        return super().forward(both_BSCHW.flatten(1, 2)).unflatten(1, (STREAMS, -1))


class WindowAttention(nn.Module):
    """Pixels attend to those of their window; where the optical stream looks is corrected by where the SAR stream looks.

    Args:
        shift: the windows begin so many pixels further down and right, so that pixels at their edges meet others.
    """

    def __init__(self, channels: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv, self.out = StreamConv(channels, 3 * channels, 1), StreamConv(channels, channels, 1)
        self.gate = nn.Conv2d(heads, heads, 1)
        self.bias_AP = nn.Parameter(torch.randn(heads, (2 * window - 1) ** 2) * 0.02)  # P: places of a pixel to another
        self.register_buffer("place_NN", relative_places(window), persistent=False)

    def forward(self, both_BSCHW: Tensor) -> Tensor:
        """Height and width are multiples of the window. Shape kept."""
        B, S, C, H, W = both_BSCHW.shape
        side, down, across = self.window, H // self.window, W // self.window
        qkv = self.qkv(both_BSCHW).roll((-self.shift, -self.shift), (3, 4))
        qkv = qkv.reshape(B, S, 3, self.heads, -1, down, side, across, side).permute(2, 0, 5, 7, 1, 3, 6, 8, 4)
        query, key, value = qkv.reshape(3, B * down * across, S, self.heads, side * side, -1)  # [M, S, A, N, D]

        score_MSANN = query @ key.mT * query.shape[-1] ** -0.5 + self.bias_AP[:, self.place_NN]
        optical, sar = score_MSANN.unbind(1)
        optical = optical + (sar - optical) * self.gate(sar - optical).sigmoid()
        score_MSANN = torch.stack([optical, sar], 1)
        if self.shift:
            apart_MNN = torn_apart(down, across, side, self.shift, score_MSANN.device).repeat(B, 1, 1)
            score_MSANN = score_MSANN.masked_fill(apart_MNN[:, None, None], -torch.inf)
        seen = score_MSANN.softmax(-1) @ value

        seen = seen.reshape(B, down, across, S, self.heads, side, side, -1).permute(0, 3, 4, 7, 1, 5, 2, 6)
        return self.out(seen.reshape(B, S, C, H, W).roll((self.shift, self.shift), (3, 4)))


def relative_places(window: int) -> Tensor:
    """[N, N]: a number for how far down and across each pixel of a window is from each other one."""
    row_N, column_N = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    down_NN, across_NN = (axis.flatten()[:, None] - axis.flatten() + window - 1 for axis in (row_N, column_N))
    return down_NN * (2 * window - 1) + across_NN


@lru_cache(maxsize=16)
def torn_apart(down: int, across: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Bool [down * across, N, N]: pixels of a shifted window that come from opposite edges of the image."""
    row, column = (
        (torch.arange(count * window, device=device) >= count * window - shift).int() for count in (down, across)
    )
    edge_MN = (
        (2 * row[:, None] + column).reshape(down, window, across, window).transpose(1, 2).reshape(-1, window * window)
    )
    return edge_MN[:, :, None] != edge_MN[:, None]


class DenseLayer(nn.Module):
    """Adds `growth` channels to each stream: a convolution of all before, attention within windows, an MLP a pixel."""

    def __init__(self, inputs: int, growth: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.conv = StreamConv(inputs, growth, 3)
        self.attention = WindowAttention(growth, heads, window, shift)
        self.mlp = nn.Sequential(StreamConv(growth, 2 * growth, 1), nn.GELU(), StreamConv(2 * growth, growth, 1))

    def forward(self, dense_BSCHW: Tensor) -> Tensor:
        new = self.conv(dense_BSCHW).relu()
        new = new + self.attention(new)
        normal = F.layer_norm(new.movedim(2, -1), new.shape[2:3]).movedim(-1, 2)
        return torch.cat([dense_BSCHW, new + self.mlp(normal)], 2)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.layers(x_BCHW)


class LocalFusion(nn.Module):
    """SAR filtered at each pixel by a filter made for it, against speckle and shifts; then gates both ways.

    Args:
        last: no gate back to the SAR stream, which nobody reads after the last block.
    """

    def __init__(self, channels: int, taps: int, *, last: bool) -> None:
        super().__init__()
        self.taps = taps
        self.filters = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 3, padding=1), nn.LeakyReLU(0.1, inplace=True),
            Residual(channels), Residual(channels), nn.Conv2d(channels, channels * taps**2, 1), nn.LeakyReLU(0.1, inplace=True),
        )  # fmt: skip
        with torch.no_grad():  # begin near the filter that leaves all as it is
            self.filters[-2].bias.view(channels, -1)[:, taps**2 // 2] += 1
        self.to_optical = nn.Conv2d(channels, channels, 1)
        self.to_sar = None if last else nn.Conv2d(channels, channels, 1)

    def forward(self, both_BSCHW: Tensor) -> Tensor:
        optical, sar = both_BSCHW.unbind(1)
        edged = F.pad(sar, [self.taps // 2] * 4, mode="replicate")
        around_BCKHW = F.unfold(edged, self.taps).reshape(*sar.shape[:2], -1, *sar.shape[2:])
        filtered = (around_BCKHW * self.filters(both_BSCHW.flatten(1, 2)).view_as(around_BCKHW)).sum(2)
        optical = optical + (filtered - optical) * self.to_optical(filtered - optical).sigmoid()
        if self.to_sar is not None:
            sar = sar + (optical - filtered) * self.to_sar(optical - filtered).sigmoid()
        return torch.stack([optical, sar], 1)


class FusionBlock(nn.Module):
    """A residual dense block of both streams, fused at its end."""

    def __init__(
        self, channels: int, growth: int, layers: int, heads: int, window: int, taps: int, *, last: bool
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                DenseLayer(channels + number * growth, growth, heads, window, shift=window // 2 * (number % 2))
                for number in range(layers)
            )
        )
        self.join = StreamConv(channels + layers * growth, channels, 3)
        self.fuse = LocalFusion(channels, taps, last=last)

    def forward(self, both_BSCHW: Tensor) -> Tensor:
        return self.fuse(both_BSCHW + self.join(self.layers(both_BSCHW)))


class CloudRemover(nn.Module):
    """Works at half the resolution, and adds what it finds to the cloudy image. The defaults are the published size.

    Args:
        width: channels of a stream between blocks. growth: channels that each layer of a block adds.
        window, heads: of the attention. taps: rows and columns of the filters.
    """

    def __init__(
        self, width: int = 96, growth: int = 48, blocks: int = 6, layers: int = 5, window: int = 8, heads: int = 8,
        taps: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        if growth % heads:
            raise ValueError(f"growth {growth} cannot be shared by {heads} heads; make it a multiple")
        self.multiple = 2 * window
        self.of_optical = nn.Conv2d(4 * OPTICAL_BANDS, width, 5, padding=2)
        self.of_sar = nn.Conv2d(4 * SAR_BANDS, width, 5, padding=2)
        self.shallow = StreamConv(width, width, 3)
        self.blocks = nn.ModuleList(
            FusionBlock(width, growth, layers, heads, window, taps, last=number == blocks - 1)
            for number in range(blocks)
        )
        self.gather = nn.Sequential(nn.Conv2d(blocks * width, width, 1), nn.Conv2d(width, width, 3, padding=1))
        inner = 2 * width // 3
        self.rise = nn.Sequential(
            nn.Conv2d(width, 4 * inner, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(inner, OPTICAL_BANDS, 3, padding=1)
        )
        nn.init.zeros_(self.rise[-1].weight)  # begin with the cloudy image as it is
        nn.init.zeros_(self.rise[-1].bias)

    def forward(self, cloudy_BCHW: Tensor, sar_BCHW: Tensor) -> Tensor:
        """[B, 13, H, W] and [B, 2, H, W], 0..1 -> cloud-free [B, 13, H, W]; of any size, padded to whole windows."""
        height, width = cloudy_BCHW.shape[2:]
        pad = (0, -width % self.multiple, 0, -height % self.multiple)
        cloudy, sar = (F.pad(image, pad, mode="replicate") if any(pad) else image for image in (cloudy_BCHW, sar_BCHW))
        first = self.of_optical(F.pixel_unshuffle(cloudy, 2))
        both_BSCHW = self.shallow(torch.stack([first, self.of_sar(F.pixel_unshuffle(sar, 2))], 1))
        found = []
        for block in self.blocks:
            both_BSCHW = block(both_BSCHW)
            found.append(both_BSCHW[:, 0])
        change = self.rise(self.gather(torch.cat(found, 1)) + first)
        return cloudy_BCHW + change[..., :height, :width]


def scores(clear_BCHW: Tensor, batch: Sample) -> Tensor:
    """[B, 3] of each image: PSNR in dB, SSIM, and the PSNR of the cloudy image, which is what there is to beat.

    Over all bands and pixels, of reflectances 0..1; an image that is the truth itself has a PSNR of 100.
    """
    # Here, for it loads transformers where that is installed: seconds that a session's start can do without.
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    psnr = partial(peak_signal_noise_ratio, data_range=1.0, reduction="none", dim=(1, 2, 3))
    clear_BCHW = clear_BCHW.clamp(0, 1)
    ssim_B = structural_similarity_index_measure(clear_BCHW, batch.clear, data_range=1.0, reduction="none")
    found_BF = torch.stack([psnr(clear_BCHW, batch.clear), ssim_B.reshape(-1), psnr(batch.cloudy, batch.clear)], 1)
    return found_BF.clamp(max=100)
