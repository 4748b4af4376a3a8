"""The student: BLIP's image encoder and PhoBERT, fused, and ViT5's decoder that says the answer.

Axes: B batch, P places of the picture (patches and one for the whole), L tokens of the question, T tokens of the answer,
D width of the decoder, V its vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import BaseModelOutput

from workloads.vqa import parts


class Fusion(nn.Module):
    """The question looks at the picture; a gate says, token by token, how much of what it saw is let in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before_look, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.gate = nn.Linear(2 * width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, text_BLD: Tensor, image_BPD: Tensor) -> Tensor:
        """[B, L, D]"""
        asking_BLD = self.before_look(text_BLD)
        seen_BLD, _ = self.look(asking_BLD, image_BPD, image_BPD, need_weights=False)
        open_BLD = self.gate(torch.cat([asking_BLD, seen_BLD], -1)).sigmoid()
        text_BLD = text_BLD + open_BLD * seen_BLD
        return text_BLD + self.feed(self.before_feed(text_BLD))


class Student(nn.Module):
    """Made of three folders (parts.py); the projections and the fusion between them are new.

    Args:
        layers: of fusion. decoder_checkpointing: compute the decoder's blocks again in the backward instead of keeping them.
    """

    def __init__(
        self, image_encoder: str, text_encoder: str, decoder: str, *, layers: int = 2, dropout: float = 0.1,
        decoder_checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.image, mean, std = parts.image_encoder(image_encoder)
        self.text, self.t5 = parts.text_encoder(text_encoder), parts.decoder(decoder)
        width = self.t5.config.d_model
        self.image_to = nn.Linear(self.image.config.hidden_size, width)
        self.text_to = nn.Linear(self.text.config.hidden_size, width)
        self.fusion = nn.ModuleList([Fusion(width, self.t5.config.num_heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mean_311", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std_311", torch.tensor(std)[:, None, None], persistent=False)
        if decoder_checkpointing:  # the reentrant way does not go together with DDP
            self.t5.decoder.gradient_checkpointing_enable({"use_reentrant": False})
        self.train()  # from_pretrained leaves its models in evaluation mode

    def fused(self, image_B3HW: Tensor, question_BL: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder looks at [B, L, D], and which of it is no padding, int64 [B, L]."""
        mask_BL = (question_BL != self.text.config.pad_token_id).long()
        colours_B3HW = (image_B3HW / 255 - self.mean_311) / self.std_311
        image_BPD = self.image_to(self.image(colours_B3HW).last_hidden_state)
        text_BLD = self.text_to(self.text(question_BL, attention_mask=mask_BL).last_hidden_state)
        for layer in self.fusion:
            text_BLD = layer(text_BLD, image_BPD)
        return self.norm(text_BLD), mask_BL

    def forward(self, image_B3HW: Tensor, question_BL: Tensor, target_BT: Tensor) -> Tensor:
        """Logits [B, T, V], each of a token given those before it."""
        fused_BLD, mask_BL = self.fused(image_B3HW, question_BL)
        return self.t5(
            encoder_outputs=BaseModelOutput(fused_BLD),
            attention_mask=mask_BL,
            decoder_input_ids=self.t5.prepare_decoder_input_ids_from_labels(target_BT),
            use_cache=False,
        ).logits

    @torch.no_grad()
    def say(self, image_B3HW: Tensor, question_BL: Tensor, *, beams: int, length: int) -> Tensor:
        """The likeliest answers by beam search, int64 [B, length], padded."""
        fused_BLD, mask_BL = self.fused(image_B3HW, question_BL)
        found = self.t5.generate(
            encoder_outputs=BaseModelOutput(fused_BLD), attention_mask=mask_BL,
            num_beams=beams, do_sample=False, early_stopping=beams > 1, max_new_tokens=length,
        )[:, 1:]  # fmt: skip  # the first one only starts it
        return nn.functional.pad(found, (0, length - found.shape[1]), value=self.t5.config.pad_token_id)


def token_loss(logits_BTV: Tensor, target_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """Cross-entropy weighted by token within a sample, and then the samples' mean: so it can be cut into microbatches."""
    loss_BT = cross_entropy(logits_BTV.float().transpose(1, 2), target_BT, reduction="none")
    return ((loss_BT * weight_BT).sum(1) / weight_BT.sum(1)).mean()
