"""What `kgorch check` and `kgorch start` look at before a session is spent: the listing, a first sample, the models' folders.

Without a GPU, in seconds; the headers of all pictures are looked at when the training starts, once.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kgorch.workloads.common.files import DataError, picture
from kgorch.workloads.vqa import parts
from kgorch.workloads.vqa.data import Asked, read_questions, split
from kgorch.workloads.vqa.fetch import incomplete

HUB = "https://huggingface.co"
NETWORK_S = 5.0


def train(
    data: str,
    listing: str,
    teacher: str | None = None,
    valid: str | None = None,
    valid_share: float = 0.1,
    **others: Any,
) -> str:
    """For the train stage: how many questions there are. Raises DataError."""
    models = see_models(**others)
    skip_broken = bool(others.get("skip_broken"))
    asked, broken = read_questions(listing, teacher, skip_broken=skip_broken)
    if valid:
        to_score = read_questions(valid, skip_broken=skip_broken)[0]
    else:
        asked, to_score = split(asked, valid_share)
    see_first(asked, data, skip_broken=skip_broken)
    told = sum(bool(item.reason) for item in asked)
    left_out = f", {len(broken)} broken lines left out" if broken else ""
    return (
        f"{len(asked)} training questions ({told} with reasons) about {len({item.image for item in asked})} pictures,"
        f" {len(to_score)} to score on{left_out}; first sample read; {models}"
    )


def predict(data: str, listing: str, teacher: str | None = None, **others: Any) -> str:
    """For the predict stage. Raises DataError."""
    models, skip_broken = see_models(**others), bool(others.get("skip_broken"))
    asked, _ = read_questions(listing, teacher, skip_broken=skip_broken)
    see_first(asked, data, skip_broken=skip_broken)
    return f"{len(asked)} questions about {len({item.image for item in asked})} pictures; first sample read; {models}"


def see_first(asked: list[Asked], data: str, *, skip_broken: bool) -> None:
    """Raises DataError unless the first picture can be read (with `skip_broken`: one of the first hundred)."""
    problem: DataError | None = None
    for item in asked[: 100 if skip_broken else 1]:
        try:
            picture(Path(data, item.image))
            return
        except DataError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def see_models(
    students: str, image_encoder: str = "blip-vqa-base", text_encoder: str = "phobert-base", decoder: str = "vit5-base",
    text_tokenizer: str | None = None, answer_tokenizer: str | None = None, download: bool = False,
    question_length: int = 64, **_: Any,
) -> str:  # fmt: skip
    """In words what of the models is there. Raises DataError for one that is not, and cannot be fetched."""
    folders = parts.Folders.of(students, image_encoder, text_encoder, decoder, text_tokenizer, answer_tokenizer)
    if download and (lacking := incomplete(folders.needed)):
        see_network()
        return f"{', '.join(folder.name for folder in lacking)} to be downloaded"
    for folder, part in folders.needed.items():
        part.see(folder)
    folders.tokenizers(question_length)
    return "models whole"


def see_network() -> None:
    """Raises DataError where the models' hub cannot be reached."""
    where = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    proxy = urlsplit(os.environ.get(f"{where.scheme}_proxy") or os.environ.get(f"{where.scheme}_proxy".upper()) or "")
    host, port = (proxy.hostname, proxy.port) if proxy.hostname else (where.hostname, where.port)
    try:
        socket.create_connection((host or "", port or (80 if where.scheme == "http" else 443)), NETWORK_S).close()
    except OSError as problem:
        raise DataError(
            "models are to be downloaded, and there is no network", f"{host}: {problem}",
            next_step='on Kaggle switch on "Internet" in the notebook\'s settings; or attach the models as a dataset and name it in'
            " `students`",
        ) from problem  # fmt: skip
