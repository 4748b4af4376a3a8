"""Small folders of the three models a student is made of: random weights from a seed, tokenizers learnt from a listing.

The files are those of the published ones, so they are loaded on the same way.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BlipVisionConfig,
    BlipVisionModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    T5TokenizerFast,
)

from workloads.vqa.curriculum import ANSWER, REASON

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
"""Of the colours, as BLIP's preprocessor_config.json has them."""


def make_students(
    out: Path, questions: list[str], answers: list[str], *, seed: int, hidden: int = 64, layers: int = 2,
    image_size: int = 32, patch_size: int = 8,
) -> None:  # fmt: skip
    """Write out/blip, out/phobert, out/vit5; a function of its arguments alone."""
    torch.manual_seed(seed)
    width = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    width["initializer_range"] = hidden**-0.5  # the published 0.02 is for their width, and makes small ones learn late
    blip = BlipVisionConfig(**width, num_attention_heads=4, image_size=image_size, patch_size=patch_size)
    BlipVisionModel(blip).save_pretrained(out / "blip")
    (out / "blip" / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD, "size": {"height": image_size, "width": image_size}}) + "\n"
    )

    words = write_phobert_tokens(out / "phobert", questions)
    roberta = RobertaConfig(
        **width, num_attention_heads=4, vocab_size=words, max_position_embeddings=66, type_vocab_size=1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    RobertaModel(roberta, add_pooling_layer=False).save_pretrained(out / "phobert")

    tokens = vit5_tokens(answers)
    tokens.save_pretrained(out / "vit5")
    t5 = T5Config(
        vocab_size=len(tokens), d_model=hidden, d_kv=hidden // 4, d_ff=2 * hidden, num_layers=layers, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(t5).save_pretrained(out / "vit5")


def write_phobert_tokens(folder: Path, texts: list[str]) -> int:
    """vocab.txt and bpe.codes as PhoBERT has them; how many tokens that makes, with the five special ones."""
    learnt = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learnt.normalizer, learnt.pre_tokenizer = normalizers.NFC(), pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=400, min_frequency=1, end_of_word_suffix="</w>", show_progress=False)
    learnt.train_from_iterator(texts, trainer)
    described = json.loads(learnt.to_str())["model"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in described["merges"]]
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [name.removesuffix("</w>") if name.endswith("</w>") else f"{name}@@" for name in described["vocab"]]
    (folder / "vocab.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")
    (folder / "bpe.codes").write_text("".join(f"{first} {second} 1\n" for first, second in merges), encoding="utf-8")
    return len(set(pieces)) + 5


def vit5_tokens(texts: list[str]) -> T5TokenizerFast:
    """A unigram tokenizer with the words of the texts, the likelier the more often they stand there, and their letters."""
    words = Counter(word for text in [*texts, ANSWER, REASON] for word in text.split())
    pieces = Counter({f"▁{word}": count for word, count in words.items()})
    total = pieces.total()
    scores = {piece: float(torch.tensor(count / total).log()) for piece, count in sorted(pieces.items())}
    letters = dict.fromkeys(["▁", *sorted(set("".join(words)))], -20.0)
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5TokenizerFast(vocab=[*special, *scores.items(), *letters.items()], extra_ids=0)


def main() -> None:
    """Parse, then write the three folders."""
    parser = argparse.ArgumentParser(
        description="Write small folders of BLIP's image encoder, PhoBERT and ViT5, with random weights.",
        epilog="example: python -m workloads.vqa.make_students students --listing shapes/train.jsonl --hidden 64",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--listing", type=Path, required=True, help="JSONL whose texts the tokenizers are learnt from")
    parser.add_argument("--hidden", type=int, default=64, help="width of all three (default: 64)")
    parser.add_argument("--layers", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--image-size", type=int, default=32, help="rows and columns of a picture (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.listing.read_text(encoding="utf-8").splitlines() if line.strip()]
    questions, answers = texts_of(lines)
    make_students(
        options.out, questions, answers, seed=options.seed, hidden=options.hidden, layers=options.layers,
        image_size=options.image_size,
    )  # fmt: skip


def texts_of(lines: list[dict]) -> tuple[list[str], list[str]]:
    """What is asked, and what is said."""
    told = [line.get("teacher") or {} for line in lines]
    said = [line["answer"] for line in lines] + [teacher.get("reasoning", "") for teacher in told]
    return [line["question"] for line in lines], said


if __name__ == "__main__":
    main()
