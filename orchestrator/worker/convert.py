"""A checkpoint folder as one file of torch.save, for whoever loads with PyTorch alone.

`python -m orchestrator.worker.convert FOLDER OUT [NAME]`, started by checkpoint/export.py: the command line itself never
loads PyTorch. Without NAME everything that was tracked, under its names. Nothing in the file runs code when it is loaded:
it is loaded once with `weights_only` before it takes its name.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.folder import read_checkpoint, read_json_file
from orchestrator.errors import KgorchError
from orchestrator.system import files
from orchestrator.worker import state


def convert(folder: Path, out: Path, name: str | None) -> int:
    """Write what was tracked as `name`, or everything, into `out`. Returns the tensors.

    Raises: KgorchError when nothing was tracked under that name; CannotRestore; OSError.
    """
    described = read_checkpoint(folder)
    own = read_json_file(folder, described, "rank0.json")
    tree = read_json_file(folder, described, "state.json") | own["own"]
    if name is not None and name not in tree:
        raise KgorchError(
            f"{folder} holds nothing under {name!r}", next_step=f"give --only one of: {', '.join(sorted(tree))}"
        )
    shards, tensors = state.Shards(folder, described, 0), dict[str, torch.Tensor]()

    def fetch(path: str) -> torch.Tensor:
        return tensors.setdefault(path, shards.fetch(path))  # one tensor for tied names, as it was

    taken = {key: _Taken() for key in ([name] if name is not None else tree)}
    state.restore(taken, {key: tree[key] for key in taken}, fetch)
    content = _plain(taken[name].content if name is not None else {key: item.content for key, item in taken.items()})
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


class _Taken:
    """Stands in for what was tracked, and keeps what it is given."""

    content: Any

    def load_state_dict(self, loaded: Any) -> None:
        self.content = loaded


def _plain(value: Any) -> Any:
    """Numpy arrays as tensors and numpy numbers as Python's: `weights_only` takes none of them."""
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
