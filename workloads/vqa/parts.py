"""The three folders that a student is made of: seen to be whole, then loaded, without a network.

Real ones are copies of published models (fetch.py); `make_students.py` writes small ones of the same files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn

from kgorch import KgorchError
from kgorch.workloads.common.files import DataError
from kgorch.workloads.vqa.curriculum import TAGS

OLDEST, TOO_NEW = (4, 50), (6, 0)
"""Of transformers. 4.49 cannot rename weights while it loads them (`key_mapping`), so it finds no image encoder in BLIP; 6 is not
there yet. `make transformers VERSION=…` tests any other."""


def see_version(installed: str) -> None:
    """Raises KgorchError for a version of transformers that this training cannot work with."""
    found = tuple(int(number) for number in installed.split(".")[:2])
    if not OLDEST <= found < TOO_NEW:
        bounds = f">={'.'.join(map(str, OLDEST))},<{TOO_NEW[0]}"
        raise KgorchError(
            f"transformers {installed} does not fit kgorch.workloads.vqa", f"expected {bounds}",
            next_step=f'pip install "transformers{bounds}"',
        )  # fmt: skip


see_version(metadata.version("transformers"))  # before its names are imported, which change between versions

from transformers import (  # noqa: E402
    BlipVisionModel,
    PhobertTokenizer,
    PreTrainedModel,
    RobertaModel,
    T5ForConditionalGeneration,
    T5TokenizerFast,
)
from transformers.utils import is_protobuf_available, logging  # noqa: E402

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

Group = tuple[str | tuple[str, ...], ...]
"""Files of which one must be there; of a tuple all."""


@dataclass(frozen=True)
class Folder:
    """What a folder must hold. argument: the plan's, for a tokenizer that lies elsewhere."""

    what: str
    published: str
    model: tuple[Group, ...]
    tokens: tuple[Group, ...] = ()
    argument: str = ""

    def missing(self, folder: Path, groups: tuple[Group, ...]) -> str:
        """The files that lack, in words; "" for none."""
        if not folder.is_dir():
            return "the folder"
        for group in groups:
            choices = [(names,) if isinstance(names, str) else names for names in group]
            if not any(all((folder / name).is_file() for name in names) for names in choices):
                return " or ".join(" with ".join(names) for names in choices)
        return ""

    def see(self, folder: Path, *, tokens: bool = False) -> None:
        """Raises DataError naming what the model (with `tokens`: the tokenizer) lacks, and where it is to be had."""
        lacks = self.missing(folder, self.tokens if tokens else self.model)
        if not lacks:
            return
        facts = [f"expected {self.published} in {folder.absolute()}"]
        fetched = f"python -m kgorch.workloads.vqa.fetch {folder.parent}, where there is a network, or download = true"
        if not tokens and self.tokens and not self.missing(folder, self.tokens):
            facts.append(f"{folder.name} holds a tokenizer alone, no weights")
            fetched = f'{self.argument} = "{folder}", and {fetched}'
        raise DataError(
            f"the {self.what}{' tokenizer' if tokens else ''} is not whole: {lacks} is missing", *facts,
            next_step=f"{fetched}; for small ones of random weights: python -m kgorch.workloads.vqa.make_shapes shapes",
        )  # fmt: skip


IMAGE = Folder("image encoder", "Salesforce/blip-vqa-base", (("config.json",), WEIGHTS, ("preprocessor_config.json",)))
TEXT = Folder(
    "text encoder",
    "vinai/phobert-base",
    (("config.json",), WEIGHTS),
    ((("vocab.txt", "bpe.codes"),),),
    "text_tokenizer",
)
DECODER = Folder(
    "decoder",
    "VietAI/vit5-base",
    (("config.json",), WEIGHTS),
    (("tokenizer.json", "spiece.model"),),
    "answer_tokenizer",
)


def load(part: Folder, kind: type[Any], folder: Path, **options: Any) -> Any:
    """A model or tokenizer of that folder. Raises DataError for files that are broken, or lack what the model needs."""
    is_model = issubclass(kind, PreTrainedModel)
    logging.set_verbosity_error()  # a whole BLIP has more weights than its image encoder, and is told to have them
    logging.disable_progress_bar()
    try:
        if not is_model:
            return kind.from_pretrained(folder, local_files_only=True, **options)
        model, told = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as problem:
        raise DataError(
            f"the {part.what} cannot be loaded", f"{folder}: expected {part.published}, found: {problem}",
            next_step=f"fetch its files again: python -m kgorch.workloads.vqa.fetch {folder.parent}",
        ) from problem  # fmt: skip
    if told["missing_keys"]:
        missing = sorted(told["missing_keys"])
        raise DataError(
            f"the {part.what} lacks {len(missing)} weights", f"{folder}: expected {missing[0]}, found no such",
            next_step=f"fetch the files of {part.published} again: python -m kgorch.workloads.vqa.fetch {folder.parent}",
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
    """PhoBERT without its pooling layer."""
    TEXT.see(Path(folder))
    return load(TEXT, RobertaModel, Path(folder), add_pooling_layer=False)


class NoEncoder(nn.Module):
    """In the place of ViT5's own encoder: generate() asks it for the name of its input, and for nothing else."""

    main_input_name = "input_ids"


def decoder(folder: str | Path, *, tokens: int = 0) -> T5ForConditionalGeneration:
    """ViT5, with a row for each of `tokens` tokens: those that it lacks begin as the mean of the others."""
    DECODER.see(Path(folder))
    model = load(DECODER, T5ForConditionalGeneration, Path(folder))
    rows = model.shared.num_embeddings
    if tokens > rows:
        model.resize_token_embeddings(tokens, mean_resizing=False)
        for table in {model.shared, model.lm_head}:
            with torch.no_grad():
                table.weight[rows:] = table.weight[:rows].mean(0)
    model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    return model


def question_tokens(folder: str | Path, length: int, model: str | Path | None = None) -> PhobertTokenizer:
    """The tokenizer of questions, for the text encoder in `model` (default: the same folder).

    Raises DataError where `length` or its words are more than the encoder has places for.
    """
    TEXT.see(Path(folder), tokens=True)
    tokens = load(TEXT, PhobertTokenizer, Path(folder))
    config = config_of(TEXT, model or folder)
    places = config["max_position_embeddings"] - 2  # RoBERTa counts them from 2
    if length > places:
        raise DataError(
            f"question_length = {length} is more than the text encoder has places for", f"{folder}: found {places}",
            next_step=f"question_length = {places} at most",
        )  # fmt: skip
    see_that_they_fit(TEXT, len(tokens), config["vocab_size"], folder)
    return tokens


def answer_tokens(folder: str | Path, model: str | Path | None = None) -> T5TokenizerFast:
    """The tokenizer of answers, for the decoder in `model` (default: the same folder).

    A tag that it cannot write gets a token of its own; the decoder is to have a row for each (`decoder(tokens=…)`).
    """
    DECODER.see(Path(folder), tokens=True)
    if (
        not (Path(folder) / "tokenizer.json").is_file() and not is_protobuf_available()
    ):  # what is said else leads astray
        raise DataError(
            "spiece.model cannot be read without protobuf",
            f"{folder} has no tokenizer.json",
            next_step="pip install protobuf",
        )
    tokens = load(DECODER, T5TokenizerFast, Path(folder))
    see_that_they_fit(
        DECODER, len(tokens) - len(tokens.get_added_vocab()), config_of(DECODER, model or folder)["vocab_size"], folder
    )
    unknown = [tag for tag in TAGS if tokens.unk_token_id in tokens(tag, add_special_tokens=False).input_ids]
    tokens.add_tokens(unknown)
    return tokens


def config_of(part: Folder, folder: str | Path) -> dict[str, Any]:
    part.see(Path(folder))
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return found


def see_that_they_fit(part: Folder, tokens: int, rows: int, folder: str | Path) -> None:
    if tokens > rows:
        raise DataError(
            f"the {part.what} and its tokenizer do not belong together", f"{folder}: {tokens} tokens for {rows} embeddings",
            next_step=f"fetch all files of {part.published} again",
        )  # fmt: skip


class Folders(NamedTuple):
    """Where a student's three models and two tokenizers lie."""

    models: tuple[str, str, str]
    text_tokenizer: str
    answer_tokenizer: str

    @staticmethod
    def of(
        students: str, image_encoder: str, text_encoder: str, decoder: str, text_tokenizer: str | None = None,
        answer_tokenizer: str | None = None,
    ) -> Folders:  # fmt: skip
        """From a plan's arguments: the models' names are below `students`, unless they are whole paths."""
        models = str(Path(students, image_encoder)), str(Path(students, text_encoder)), str(Path(students, decoder))
        return Folders(models, text_tokenizer or models[1], answer_tokenizer or models[2])

    @property
    def needed(self) -> dict[Path, Folder]:
        """What each of the models' folders must hold."""
        return dict(zip(map(Path, self.models), (IMAGE, TEXT, DECODER), strict=True))

    def tokenizers(self, question_length: int) -> tuple[PhobertTokenizer, T5TokenizerFast]:
        """Of questions and of answers. Raises DataError."""
        asking = question_tokens(self.text_tokenizer, question_length, self.models[1])
        return asking, answer_tokens(self.answer_tokenizer, self.models[2])
