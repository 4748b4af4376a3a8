"""Download repositories of the models' hub: a process of its own for fetch.py, which imports huggingface_hub and nothing else.

python -m kgorch.workloads.vqa.hub vinai/phobert-base students/phobert-base [REPOSITORY FOLDER …]
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch

SMALL = ("config.json", "preprocessor_config.json", "vocab.txt", "bpe.codes", "tokenizer*.json", "special_tokens_map.json",
         "added_tokens.json", "spiece.model", "generation_config.json")  # fmt: skip
SAFE, PICKLED = "model*.safetensors*", "pytorch_model*.bin*"
"""Weights; the second only where the first is not published. Other frameworks' copies are left where they are."""


def wanted(names: list[str]) -> list[str]:
    """Those of a repository's files that a student is made of."""
    weights = SAFE if any(fnmatch(name, SAFE) for name in names) else PICKLED
    return [name for name in names if any(fnmatch(name, pattern) for pattern in (*SMALL, weights))]


def main(words: list[str]) -> None:
    """Files that are there already are left as they are."""
    from huggingface_hub import HfApi, snapshot_download

    for repository, folder in zip(words[::2], words[1::2], strict=True):
        names = wanted(HfApi().list_repo_files(repository))
        snapshot_download(repository, local_dir=folder, allow_patterns=names)


if __name__ == "__main__":
    main(sys.argv[1:])
