"""The student: BLIP's image encoder and PhoBERT, fused, and ViT5 that says the answer.

The modules are named as in the users' own program, so that its `vqa_student_best_….pt` can be a stage's starting weights.
Axes: B batch, P places of the picture (patches and one for the whole), L tokens of the question, T tokens of the target,
D width of the decoder, V its vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import BaseModelOutput

from kgorch import KgorchError
from kgorch.workloads.vqa import parts
from kgorch.workloads.vqa.curriculum import FORMAT_PART, PADDING, REASON_PART

FUSIONS = ("mlp", "attention")


class Look(nn.Module):
    """A layer of the attention fusion: the question looks at the picture; a gate says what of it is let in."""

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


class Attention(nn.Module):
    """In the place of the users' MLP and ViT5's encoder: the decoder sees every token of the question with what it saw."""

    def __init__(self, image: int, text: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.image_to, self.text_to = nn.Linear(image, width), nn.Linear(text, width)
        self.layers = nn.ModuleList([Look(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, image_BPD: Tensor, text_BLD: Tensor) -> Tensor:
        image_BPD, text_BLD = self.image_to(image_BPD), self.text_to(text_BLD)
        for layer in self.layers:
            text_BLD = layer(text_BLD, image_BPD)
        return self.norm(text_BLD)


class Student(nn.Module):
    """Made of three folders (parts.py); the fusion between them is new.

    Args:
        fusion: "mlp", as the users have it: the mean of the picture's places and the question's first token, side by side
            through two layers, are the one token that ViT5's encoder reads. "attention": two layers in which the question
            looks at the picture, and no encoder of ViT5.
        tokens: of the answers' tokenizer; ViT5 gets rows for those that it lacks.
        decoder_checkpointing: compute the decoder's blocks again in the backward pass, keep none of their activations.
    """

    def __init__(
        self, image_encoder: str, text_encoder: str, decoder: str, *, fusion: str = "mlp", layers: int = 2,
        dropout: float = 0.1, tokens: int = 0, decoder_checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if fusion not in FUSIONS:
            raise KgorchError(f"there is no fusion {fusion!r}", next_step=f"fusion = {' or '.join(map(repr, FUSIONS))}")
        self.vision_encoder, mean, std = parts.image_encoder(image_encoder)
        self.text_encoder, self.decoder = parts.text_encoder(text_encoder), parts.decoder(decoder, tokens=tokens)
        image, text = self.vision_encoder.config.hidden_size, self.text_encoder.config.hidden_size
        width = self.decoder.config.d_model
        self.fusion: nn.Module
        if fusion == "mlp":
            both = image + text
            self.fusion = nn.Sequential(
                nn.Linear(both, both), nn.ReLU(), nn.Dropout(2 * dropout),
                nn.Linear(both, width), nn.ReLU(), nn.Dropout(dropout),
            )  # fmt: skip
        else:
            self.fusion = Attention(image, text, width, self.decoder.config.num_heads, layers, dropout)
            self.decoder.encoder = parts.NoEncoder()
        self.register_buffer("mean_311", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std_311", torch.tensor(std)[:, None, None], persistent=False)
        if decoder_checkpointing:  # the reentrant way does not go together with DDP
            self.decoder.decoder.gradient_checkpointing_enable({"use_reentrant": False})
        self.train()  # from_pretrained leaves its models in evaluation mode

    def fused(self, image_B3HW: Tensor, question_BL: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder looks at [B, L or 1, D], and which of it is no padding, int64 [B, L or 1]."""
        mask_BL = (question_BL != self.text_encoder.config.pad_token_id).long()
        colours_B3HW = (image_B3HW / 255 - self.mean_311) / self.std_311
        image_BPD = self.vision_encoder(colours_B3HW).last_hidden_state
        text_BLD = self.text_encoder(question_BL, attention_mask=mask_BL).last_hidden_state
        if isinstance(self.fusion, Attention):
            return self.fusion(image_BPD, text_BLD), mask_BL
        fused_B1D = self.fusion(torch.cat([image_BPD.mean(1), text_BLD[:, 0]], -1))[:, None]
        mask_B1 = torch.ones_like(question_BL[:, :1])
        return self.decoder.get_encoder()(inputs_embeds=fused_B1D, attention_mask=mask_B1).last_hidden_state, mask_B1

    def forward(self, image_B3HW: Tensor, question_BL: Tensor, target_BT: Tensor) -> Tensor:
        """Logits [B, T, V], each of a token given those before it."""
        fused_BLD, mask_BL = self.fused(image_B3HW, question_BL)
        return self.decoder(
            encoder_outputs=BaseModelOutput(fused_BLD),
            attention_mask=mask_BL,
            decoder_input_ids=self.decoder.prepare_decoder_input_ids_from_labels(target_BT),
            use_cache=False,
        ).logits

    @torch.no_grad()
    def say(self, image_B3HW: Tensor, question_BL: Tensor, *, beams: int, length: int) -> Tensor:
        """The likeliest answers by beam search, int64 [B, length], padded."""
        fused_BLD, mask_BL = self.fused(image_B3HW, question_BL)
        found = self.decoder.generate(
            encoder_outputs=BaseModelOutput(fused_BLD), attention_mask=mask_BL,
            num_beams=beams, do_sample=False, early_stopping=beams > 1, max_new_tokens=length,
        )[:, 1:]  # fmt: skip  # the first one only starts it
        return nn.functional.pad(found, (0, length - found.shape[1]), value=self.decoder.config.pad_token_id)


def token_loss(
    logits_BTV: Tensor, target_BT: Tensor, part_BT: Tensor, weights: tuple[float, float, float] | None,
    *, tag_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy of each sample, and then the samples' mean: so a batch can be cut into microbatches.

    Args:
        weights: of format, answer and reasons, each the mean over its own tokens; parts that a sample lacks leave their weight
            to the others. None: one mean over all tokens, in which those of the format count `tag_weight` times.
    """
    loss_BT = cross_entropy(logits_BTV.float().transpose(1, 2), target_BT, reduction="none")
    if weights is None:
        weight_BT = (part_BT != PADDING) + (tag_weight - 1) * (part_BT == FORMAT_PART)
    else:
        weight_BT = torch.zeros_like(loss_BT)
        for part, weight in zip(range(FORMAT_PART, REASON_PART + 1), weights, strict=True):
            of_part_BT = part_BT == part
            weight_BT = weight_BT + weight * of_part_BT / of_part_BT.sum(1, keepdim=True).clamp(min=1)
    return ((loss_BT * weight_BT).sum(1) / weight_BT.sum(1)).mean()
