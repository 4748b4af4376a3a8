"""Starting weights from elsewhere: a file that somebody else's program wrote, put into a tracked module.

Nothing in it is run: safetensors holds no code, and torch.load is told `weights_only`. What does not fit is reported in
full, by name; with `strict = false` what fits is taken all the same.
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

from orchestrator.errors import WeightsRefused, nearest
from orchestrator.worker.checkpoint import state_codec

SAFE_SINCE = "2.10"
"""Before, a hostile file could run code in spite of `weights_only` (CVE-2025-32434, CVE-2026-24747)."""

WRAPPINGS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
SHOWN = 5


def load(tracked: Mapping[str, Any], path: Path, *, into: str | None, prefix: str, strict: bool) -> dict[str, str]:
    """Fill a tracked module, or a part of one (`into = "model.encoder"`), from the file; what became of it, in words.

    Args:
        into: "model" when None, or the only module that is tracked.
        prefix: only the file's names that begin so are taken, without it.
    Raises: WeightsRefused.
    """
    name, module = _module_of(tracked, into)
    found = _named(_read(path), path, module, prefix)
    own = module.state_dict()
    shapes = {
        key: f"(file {tuple(value.shape)}, {name} {tuple(own[key].shape)})"
        for key, value in found.items()
        if isinstance(own.get(key), torch.Tensor) and value.shape != own[key].shape
    }
    fitting = {key: value for key, value in found.items() if key not in shapes}
    if not fitting.keys() & own.keys():
        raise WeightsRefused(
            f"{path.name}: no tensor of it fits {name}",
            f"file: {_list(found)}",
            f"{name}: {_list(own)}",
            next_step="see whether it is another model's, or give weights a `prefix` or another `into`",
        )
    try:
        result = module.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        raise WeightsRefused(f"{path.name} does not fit {name}", str(error)[:2000]) from None
    taken = {_place(own[key]) for key in fitting.keys() & own.keys()}  # of tied tensors one is enough
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
            next_step="mend the model, or take what fits: weights = { file = …, strict = false }",
        )
    return facts


def _place(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else id(value)


def _module_of(tracked: Mapping[str, Any], into: str | None) -> tuple[str, nn.Module]:
    modules = {name: state_codec.unwrapped(thing) for name, thing in tracked.items() if isinstance(thing, nn.Module)}
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
    """What the file holds, on the CPU, without running any of it."""
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
            raise ValueError("it is a TorchScript program")  # which some PyTorch would load in spite of weights_only
        with numpy_numbers():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # whatever a foreign file makes of its reader
        code = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds more than weights: loading it would run {code[1]}" if code else "is no file of weights"
        lines = [line for line in str(error).splitlines() if line and "weights_only" not in line]  # its advice is bad
        said = (lines or [type(error).__name__])[0][:300]
        raise WeightsRefused(
            f"{path.name} {what}",
            f"{path}: {said}",
            next_step="give a file of tensors: .safetensors, or what torch.save(model.state_dict(), …) writes",
        ) from None


def numpy_numbers() -> contextlib.AbstractContextManager[Any]:
    """Lets `torch.load` with weights_only read NumPy's numbers: a checkpoint's best score often is one, made by np.mean.

    Such a number is its bytes and its type; to read it runs nothing of the file. NumPy 2 renamed the module that files name.
    """
    try:
        import numpy as np
    except ImportError:  # PyTorch does without
        return contextlib.nullcontext()
    if torch.__version__ < "2.6":  # it cannot be told the name that stands in the file
        return contextlib.nullcontext()
    made: Any = np.float64().__reduce__()
    scalar, (kind, _) = made
    names: list[Any] = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return torch.serialization.safe_globals([*names, np.dtype, type(kind), type(np.dtype(np.float32))])


def _named(content: Any, path: Path, module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The file's tensors by the names that the module might know: out of their wrapping, without a wrapper's prefix."""
    for _ in WRAPPINGS:
        if isinstance(content, Mapping):
            content = next((content[key] for key in WRAPPINGS if isinstance(content.get(key), Mapping)), content)
    named = content if isinstance(content, Mapping) else {}
    named = {str(key): value for key, value in named.items() if isinstance(value, torch.Tensor)}
    found = {key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)}
    if not found:
        which = f"that begins with {prefix!r}" if named else "with a tensor"
        raise WeightsRefused(f"{path.name} holds no name {which}", f"{path} holds: {_list(named or content)}")
    own = module.state_dict()
    for mark in PREFIXES * 2:
        if all(key.startswith(mark) for key in found) and not any(key.startswith(mark) for key in own):
            found = {key.removeprefix(mark): value for key, value in found.items()}
    return found


def _list(names: Any) -> str:
    """`7: a.weight (file (3,), model (4,)), b.weight, … 5 more`; of what holds no names, its type."""
    if not isinstance(names, Mapping):
        return f"a {type(names).__name__}"
    shown = [f"{name} {note}" if isinstance(note, str) and note else f"{name}" for name, note in names.items()][:SHOWN]
    more = len(names) - len(shown)
    return f"{len(names)}: " + ", ".join(shown) + (f", … {more} more" if more else "")
