"""The three folders that a student is made of: seen to be whole, then loaded, without a network.

Real ones are copies of published models; `make_students.py` writes small ones of the same files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import (
    BlipVisionModel,
    PhobertTokenizer,
    PreTrainedModel,
    RobertaModel,
    T5ForConditionalGeneration,
    T5TokenizerFast,
)
from transformers.utils import logging

from workloads.common.files import DataError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Folder:
    """What a folder must hold: for each group of files at least one (of tuples all)."""

    what: str
    published: str
    files: tuple[tuple[str | tuple[str, ...], ...], ...] = ()

    def see(self, folder: Path) -> None:
        """Raises DataError naming what is missing, and where it is to be had."""
        missing = "the folder"
        if folder.is_dir():
            missing = ""
            for group in (("config.json",), WEIGHTS, *self.files):
                choices = [(names,) if isinstance(names, str) else names for names in group]
                if not any(all((folder / name).is_file() for name in names) for names in choices):
                    missing = " or ".join(" with ".join(names) for names in choices)
                    break
        if missing:
            raise DataError(
                f"the {self.what} is not whole: {missing} is missing", f"expected {self.published} in {folder.absolute()}",
                next_step=f"hf download {self.published} --local-dir {folder}, where there is a network; for small ones of "
                "random weights: python -m workloads.vqa.make_shapes",
            )  # fmt: skip


IMAGE = Folder("image encoder", "Salesforce/blip-vqa-base", (("preprocessor_config.json",),))
TEXT = Folder("text encoder", "vinai/phobert-base", ((("vocab.txt", "bpe.codes"),),))
DECODER = Folder("decoder", "VietAI/vit5-base", (("tokenizer.json", "spiece.model"),))


def load(part: Folder, kind: type[Any], folder: Path, **options: Any) -> Any:
    """A model or tokenizer of that folder. Raises DataError for files that are broken, or lack what the model needs."""
    is_model = issubclass(kind, PreTrainedModel)
    logging.set_verbosity_error()  # a whole BLIP has more weights than its image encoder, and is told to have them
    logging.disable_progress_bar()
    try:
        if not is_model:
            return kind.from_pretrained(folder, local_files_only=True, **options)
        model, told = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as problem:
        raise DataError(
            f"the {part.what} cannot be loaded", f"{folder}: expected {part.published}, found: {problem}",
            next_step="fetch its files again",
        ) from problem  # fmt: skip
    if told["missing_keys"]:
        missing = sorted(told["missing_keys"])
        raise DataError(
            f"the {part.what} lacks {len(missing)} weights", f"{folder}: expected {missing[0]}, found no such",
            next_step=f"fetch the files of {part.published} again",
        )  # fmt: skip
    return model.float()


def image_encoder(folder: str | Path) -> tuple[BlipVisionModel, list[float], list[float]]:
    """The ViT, and the mean and deviation of the colours (0..1) that it was trained with."""
    IMAGE.see(Path(folder))
    colours = json.loads((Path(folder) / "preprocessor_config.json").read_text(encoding="utf-8"))
    if missing := [name for name in ("image_mean", "image_std") if len(colours.get(name, ())) != 3]:
        raise DataError(
            f"preprocessor_config.json of the image encoder has no {missing[0]!r}", f"{folder}: expected three numbers",
            next_step=f"fetch the files of {IMAGE.published} again",
        )  # fmt: skip
    # in a whole BLIP, as published, the image encoder's weights are below this name
    model = load(IMAGE, BlipVisionModel, Path(folder), key_mapping={r"^vision_model\.": ""})
    return model, colours["image_mean"], colours["image_std"]


def text_encoder(folder: str | Path) -> RobertaModel:
    TEXT.see(Path(folder))
    return load(TEXT, RobertaModel, Path(folder), add_pooling_layer=False)


class NoEncoder(nn.Module):
    """In the place of ViT5's own encoder: generate() asks it for the name of its input, and for nothing else."""

    main_input_name = "input_ids"


def decoder(folder: str | Path) -> T5ForConditionalGeneration:
    """ViT5 without its encoder."""
    DECODER.see(Path(folder))
    model = load(DECODER, T5ForConditionalGeneration, Path(folder))
    model.decoder.embed_tokens = model.shared
    model.encoder = NoEncoder()
    return model


def question_tokens(folder: str | Path, length: int) -> PhobertTokenizer:
    """The tokenizer of questions. Raises DataError where `length` or its words are more than the encoder has places for."""
    TEXT.see(Path(folder))
    tokens = load(TEXT, PhobertTokenizer, Path(folder))
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    places = config["max_position_embeddings"] - 2  # RoBERTa counts them from 2
    if length > places:
        raise DataError(
            f"question_length = {length} is more than the text encoder has places for", f"{folder}: found {places}",
            next_step=f"question_length = {places} at most",
        )  # fmt: skip
    see_that_they_fit(TEXT, len(tokens), config["vocab_size"], folder)
    return tokens


def answer_tokens(folder: str | Path) -> T5TokenizerFast:
    """The tokenizer of answers."""
    DECODER.see(Path(folder))
    tokens = load(DECODER, T5TokenizerFast, Path(folder))
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    see_that_they_fit(DECODER, len(tokens), config["vocab_size"], folder)
    return tokens


def see_that_they_fit(part: Folder, tokens: int, rows: int, folder: str | Path) -> None:
    if tokens > rows:
        raise DataError(
            f"the {part.what} and its tokenizer do not belong together", f"{folder}: {tokens} tokens for {rows} embeddings",
            next_step=f"fetch all files of {part.published} again",
        )  # fmt: skip
