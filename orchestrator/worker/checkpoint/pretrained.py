"""Pretrained weights: loads a file that another program wrote into a tracked module.

No code of the file runs: safetensors holds none, and torch.load is called with `weights_only`. Everything that does not fit is
reported by name; with `strict = false` the rest is loaded nevertheless.
"""

from __future__ import annotations

import contextlib
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kgorch.errors import WeightsRefused, nearest
from kgorch.worker import local_tensors
from kgorch.worker.checkpoint import sharded_tensors
from kgorch.worker.wrappers import unwrapped

SAFE_SINCE = "2.10"
"""In older versions a hostile file could run code in spite of `weights_only` (CVE-2025-32434, CVE-2026-24747)."""

WRAPPINGS = ("state_dict", "model_state_dict", "model")
"""Keys under which programs store the weights in their own checkpoints."""

PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
SHOWN = 5
"""Names in a message; the others are counted."""


def load(tracked: Mapping[str, Any], path: Path, *, into: str | None, prefix: str, strict: bool) -> dict[str, str]:
    """Load the file into a tracked module, or into a part of one (`into = "model.encoder"`).

    Args:
        tracked: objects by name.
        into: when None, "model" or the only module that is tracked.
        prefix: only the file's names that start with it are loaded, without it.
        strict: refuse a file that does not fit completely.

    Returns:
        Facts for the journal: file, into, loaded; and where they apply missing, unexpected, shapes.

    Raises:
        WeightsRefused: the file is not one of weights, or does not fit.
    """
    name, module = _module_of(tracked, into)
    tensors = _named(_read(path), path, module, prefix)
    own = module.state_dict()
    shapes = {
        key: f"(file {tuple(value.shape)}, {name} {tuple(own[key].shape)})"
        for key, value in tensors.items()
        if isinstance(own.get(key), torch.Tensor) and value.shape != own[key].shape
    }
    fitting = {key: sharded_tensors.like(value, own.get(key)) for key, value in tensors.items() if key not in shapes}
    if not fitting.keys() & own.keys():
        raise WeightsRefused(
            f"{path.name}: no tensor of it fits {name}",
            f"file: {_list(tensors)}",
            f"{name}: {_list(own)}",
            next_step="check that it is of the same model, or give weights a `prefix` or another `into`",
        )
    try:
        result = module.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        raise WeightsRefused(f"{path.name} does not fit {name}", str(error)[:2000]) from None
    taken = {_place(own[key]) for key in fitting.keys() & own.keys()}  # of tied tensors, one in the file is enough
    missing = [key for key in result.missing_keys if key not in shapes and _place(own[key]) not in taken]
    unexpected = list(result.unexpected_keys)
    loaded = len(own) - len(missing) - len(shapes)
    facts = {"file": path.name, "into": name, "loaded": f"{loaded} of {len(own)} tensors"}
    if missing:
        facts["missing"] = _list({key: nearest(key, unexpected).strip() for key in missing})
    if unexpected:
        facts["unexpected"] = _list({key: nearest(key, missing).strip() for key in unexpected})
    if shapes:
        facts["shapes"] = _list(shapes)
    if strict and len(facts) > 3:
        rest = "; ".join(f"{kind}: {facts[kind]}" for kind in ("missing", "unexpected", "shapes") if kind in facts)
        raise WeightsRefused(
            f"{path.name} does not fit {name} ({facts['loaded']} do): {rest}",
            f"file: {path}",
            next_step="correct the model, or load what fits: weights = { file = …, strict = false }",
        )
    return facts


def _place(value: Any) -> Any:
    return local_tensors.identity(value) if isinstance(value, torch.Tensor) else id(value)


def _module_of(tracked: Mapping[str, Any], into: str | None) -> tuple[str, nn.Module]:
    modules = {name: unwrapped(thing) for name, thing in tracked.items() if isinstance(thing, nn.Module)}
    name, _, part = (into or ("model" if "model" in modules or len(modules) != 1 else next(iter(modules)))).partition(
        "."
    )
    if name not in modules:
        raise WeightsRefused(
            f"starting weights are for {name!r}, and no module is tracked under that name{nearest(name, modules)}",
            f"tracked modules: {', '.join(modules) or 'none'}",
            next_step="give weights an `into` that session.track() names",
        )
    try:
        return into or name, modules[name].get_submodule(part)
    except AttributeError as error:
        raise WeightsRefused(f"starting weights are for {into!r}: {error}") from None


def _read(path: Path) -> Any:
    """The content of the file, on the CPU; none of it is executed."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if torch.__version__ < SAFE_SINCE:
            print(
                f"warning: {path.name} is read by PyTorch {torch.__version__}; before 2.10 a hostile file can run code"
                " in spite of weights_only (CVE-2025-32434, CVE-2026-24747): take it from whom you trust, or as safetensors",
                file=sys.stderr,
            )
        is_zip = zipfile.is_zipfile(path)
        if is_zip and any(name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist()):
            raise ValueError(
                "it is a TorchScript program"
            )  # which some versions of PyTorch load in spite of weights_only
        with numpy_numbers():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a foreign file may make its reader raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds more than weights: loading it would run {code[1]}" if code else "is no file of weights"
        lines = [
            line for line in str(error).splitlines() if line and "weights_only" not in line
        ]  # PyTorch advises to load without it
        reason = (lines or [type(error).__name__])[0][:300]
        raise WeightsRefused(
            f"{path.name} {what}",
            f"{path}: {reason}",
            next_step="give a file of tensors: .safetensors, or what torch.save(model.state_dict(), …) writes",
        ) from None


def numpy_numbers() -> contextlib.AbstractContextManager[Any]:
    """A context in which `torch.load` with weights_only accepts NumPy scalars: a checkpoint's best score is often one, of np.mean.

    Such a scalar is stored as its type and bytes, and reading it runs no code of the file. NumPy 2 renamed the module that files
    refer to.
    """
    try:
        import numpy as np
    except ImportError:  # PyTorch works without it
        return contextlib.nullcontext()
    if torch.__version__ < "2.6":  # its safe_globals cannot be given the name that the file contains
        return contextlib.nullcontext()
    made: Any = np.float64().__reduce__()
    scalar, (kind, _) = made
    names: list[Any] = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return torch.serialization.safe_globals([*names, np.dtype, type(kind), type(np.dtype(np.float32))])


def _named(content: Any, path: Path, module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The file's tensors by name, out of the program's own checkpoint and without a wrapper's prefix."""
    for _ in WRAPPINGS:
        if isinstance(content, Mapping):
            content = next((content[key] for key in WRAPPINGS if isinstance(content.get(key), Mapping)), content)
    entries = content if isinstance(content, Mapping) else {}
    entries = {str(key): value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    tensors = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
    if not tensors:
        which = f"that begins with {prefix!r}" if entries else "with a tensor"
        raise WeightsRefused(f"{path.name} holds no name {which}", f"{path} holds: {_list(entries or content)}")
    own = module.state_dict()
    for mark in PREFIXES * 2:
        if all(key.startswith(mark) for key in tensors) and not any(key.startswith(mark) for key in own):
            tensors = {key.removeprefix(mark): value for key, value in tensors.items()}
    return tensors


def _list(names: Any) -> str:
    """A list of names, as `7: a.weight (file (3,), model (4,)), b.weight, … 5 more`; for what has no names, its type."""
    if not isinstance(names, Mapping):
        return f"a {type(names).__name__}"
    parts = [f"{name} {note}" if isinstance(note, str) and note else f"{name}" for name, note in names.items()][:SHOWN]
    more = len(names) - len(parts)
    return f"{len(names)}: " + ", ".join(parts) + (f", … {more} more" if more else "")
