"""Files of weights from epochs that are done: the script comes by there again, with weights that are not trained."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class KeptFiles:
    """While it is open, `torch.save` and safetensors (`save_pretrained`) leave a file as it is where there is one.

    A file that is missing is written: the script may read it next. Such a file replaces no other one either, as that of a script
    which writes beside its file, and renames. What goes into a stream or an open file is written.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType, str, Callable[..., Any]]] = []
        self._written: set[Path] = set()

    def open(self) -> None:
        """Safe to repeat."""
        if self._originals:
            return
        self._wrap(torch, "save", lambda original: self._keeping(original, "f"))
        if safetensors := sys.modules.get("safetensors.torch"):
            self._wrap(safetensors, "serialize_file", lambda original: self._keeping(original, "filename"))
        for name in ("rename", "replace"):
            self._wrap(os, name, self._moving)

    def close(self) -> None:
        """Safe to repeat."""
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)
        self._written.clear()

    def _wrap(self, module: ModuleType, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(module, name)
        self._originals.append((module, name, original))
        setattr(module, name, functools.wraps(original)(wrapper(original)))

    def _keeping(self, original: Callable[..., Any], keyword: str) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            path = _path(args[1] if len(args) > 1 else kwargs.get(keyword))
            if path and path.exists() and path not in self._written:
                return None
            if path:
                self._written.add(path)
            return original(*args, **kwargs)

        return write

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(src: Any, dst: Any, **kwargs: Any) -> None:
            source, target = _path(src), _path(dst)
            if source not in self._written or not target or kwargs:
                original(src, dst, **kwargs)
            elif target.exists() and target not in self._written:
                source.unlink()
            else:
                original(src, dst)
                self._written.add(target)

        return move


def _path(given: Any) -> Path | None:
    """None for a stream or a descriptor."""
    return Path(os.fsdecode(given)).absolute() if isinstance(given, str | bytes | os.PathLike) else None
