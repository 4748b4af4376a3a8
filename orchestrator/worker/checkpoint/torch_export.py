"""Export of a checkpoint folder to one file of torch.save, for programs that load with PyTorch alone.

`python -m kgorch.worker.checkpoint.torch_export FOLDER OUT [NAME]`, started by checkpoint/export.py: the command line itself
never loads PyTorch. Without NAME everything that was tracked is exported, under its names. Loading the file runs no code: it is
loaded once with `weights_only` before it gets its final name.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from kgorch.checkpoint.folder import read_checkpoint, read_json_file
from kgorch.errors import KgorchError
from kgorch.system import files
from kgorch.worker import tagged_json
from kgorch.worker.checkpoint import restore_source


def convert(folder: Path, out: Path, name: str | None) -> int:
    """Write what was tracked as `name`, or everything when None, to the file `out`.

    Returns:
        The number of tensors.

    Raises:
        KgorchError: nothing was tracked under that name, or `weights_only` refuses a value.
        CannotRestore: the checkpoint is malformed.
        OSError: the file cannot be written.
    """
    manifest = read_checkpoint(folder)
    own = read_json_file(folder, manifest, "rank0.json")
    tree = read_json_file(folder, manifest, "state.json") | own["own"]
    if name is not None and name not in tree:
        raise KgorchError(
            f"{folder} holds nothing under {name!r}", next_step=f"give --only one of: {', '.join(sorted(tree))}"
        )
    shards, tensors = restore_source.ShardReader(folder, manifest, 0), dict[str, torch.Tensor]()

    def fetch(path: str) -> torch.Tensor:
        return tensors.setdefault(path, shards.fetch(path))  # tied names share one tensor, as they did

    states = {key: tagged_json.insert(tree[key], fetch, key) for key in ([name] if name is not None else tree)}
    content = _plain(states[name] if name is not None else states)
    try:
        with files.replacement(out, durable=True) as file:
            torch.save(content, file)
            file.flush()
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise KgorchError(
            "what is tracked holds a value that this PyTorch does not load with weights_only",
            str(error).partition("\n")[0],
            next_step="export one name with --only, or into .safetensors",
        ) from None
    return len(tensors)


def _plain(value: Any) -> Any:
    """NumPy arrays as tensors and NumPy scalars as Python numbers, because `weights_only` accepts neither."""
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value).__module__ == "numpy":
        return torch.from_numpy(value) if value.ndim else value.item()
    return value


def main(folder: str, out: str, name: str | None = None) -> int:
    try:
        print(convert(Path(folder), Path(out), name))
    except (KgorchError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
