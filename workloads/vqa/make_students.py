"""Small folders of the three models a student is made of: random weights from a seed, tokenizers learnt from texts.

The files are those of the published ones, so they are loaded in the same way, by every version of transformers that parts.py
allows: the tokenizer is written by the tokenizers library, whose files do not hang on that version.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kgorch.workloads.vqa import parts  # checks the version of transformers first
from kgorch.workloads.vqa.curriculum import TAGS
from kgorch.workloads.vqa.data import Asked, read_questions

from transformers import (  # isort: skip
    BlipVisionConfig,
    BlipVisionModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
"""Of the colours, as BLIP's preprocessor_config.json has them."""
NAMES = tuple(part.published.partition("/")[2] for part in (parts.IMAGE, parts.TEXT, parts.DECODER))


def make_students(
    out: Path, questions: list[str], answers: list[str], *, seed: int, hidden: int = 64, layers: int = 2,
    image_size: int = 32, patch_size: int = 8,
) -> None:  # fmt: skip
    """Write out/blip-vqa-base, out/phobert-base, out/vit5-base; a function of its arguments alone."""
    torch.manual_seed(seed)
    image, text, decoder = (out / name for name in NAMES)
    width = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    width["initializer_range"] = hidden**-0.5  # the published 0.02 is for their width, and makes small ones learn late
    blip = BlipVisionConfig(**width, num_attention_heads=4, image_size=image_size, patch_size=patch_size)
    BlipVisionModel(blip).save_pretrained(image)
    (image / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD, "size": {"height": image_size, "width": image_size}}) + "\n"
    )

    words = write_phobert_tokens(text, questions)
    roberta = RobertaConfig(
        **width, num_attention_heads=4, vocab_size=words, max_position_embeddings=66, type_vocab_size=1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    RobertaModel(roberta, add_pooling_layer=False).save_pretrained(text)

    t5 = T5Config(
        vocab_size=write_vit5_tokens(decoder, answers), d_model=hidden, d_kv=hidden // 4, d_ff=2 * hidden, num_layers=layers,
        num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(t5).save_pretrained(decoder)


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


def write_vit5_tokens(folder: Path, texts: list[str]) -> int:
    """tokenizer.json as T5 has it, of the texts' words, the likelier the more often they stand there, and their letters; its size.

    The tags are words, too; a `[TYPE]` is one where the texts hold it.
    """
    words = Counter(word for text in [*texts, *TAGS] for word in text.split())
    pieces = Counter({f"▁{word}": count for word, count in words.items()})
    total = pieces.total()
    scores = {piece: float(torch.tensor(count / total).log()) for piece, count in sorted(pieces.items())}
    letters = dict.fromkeys(["▁", *sorted(set("".join(words)))], -20.0)
    special = ("<pad>", "</s>", "<unk>")
    vocabulary = [*((name, 0.0) for name in special), *scores.items(), *letters.items()]
    learnt = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    metaspace = {"replacement": "▁", "prepend_scheme": "always"}
    learnt.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**metaspace)]
    )
    learnt.decoder = decoders.Metaspace(**metaspace)
    learnt.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    learnt.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    learnt.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "T5Tokenizer",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "extra_ids": 0,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described) + "\n")
    return len(vocabulary)


def main() -> None:
    """Parse, then write the three folders."""
    parser = argparse.ArgumentParser(
        description="Write small folders of BLIP's image encoder, PhoBERT and ViT5, with random weights.",
        epilog="example: python -m kgorch.workloads.vqa.make_students students --listing shapes/teacher_outputs.jsonl --hidden 64",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument(
        "--listing", type=Path, required=True, help=".jsonl or .csv whose texts the tokenizers are learnt from"
    )
    parser.add_argument("--hidden", type=int, default=64, help="width of all three (default: 64)")
    parser.add_argument("--layers", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--image-size", type=int, default=32, help="rows and columns of a picture (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    questions, answers = texts_of(read_questions(options.listing)[0])
    make_students(
        options.out, questions, answers, seed=options.seed, hidden=options.hidden, layers=options.layers,
        image_size=options.image_size,
    )  # fmt: skip


def texts_of(asked: Iterable[Asked]) -> tuple[list[str], list[str]]:
    """What is asked, and what is said."""
    listed = list(asked)
    return [item.question for item in listed], [f"{item.answer} [{item.kind}] {item.reason}" for item in listed]


if __name__ == "__main__":
    main()
