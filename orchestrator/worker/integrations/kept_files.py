"""Files of weights from epochs that are done: the script comes by there again, with weights that are not trained."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class KeptFiles:
    """While it is open, `torch.save` and safetensors (`save_pretrained`) leave a file as it is where there is one.

    A file that is missing or empty is written: the script may read it next. Neither such a file nor one that was left takes the
    place of another one, renamed or copied, as where a script writes beside its file, or copies the newest to the best. What goes
    into a stream or an open file is written. A process that was forked meanwhile, as those that load data, writes all.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType, str, Callable[..., Any]]] = []
        self._written: set[Path] = set()
        self._kept: set[Path] = set()
        self._pid = 0

    def open(self) -> None:
        """Safe to repeat."""
        if self._originals:
            return
        self._pid = os.getpid()
        self._wrap(torch, "save", lambda original: self._keeping(original, "f"))
        if safetensors := sys.modules.get("safetensors.torch"):
            self._wrap(safetensors, "serialize_file", lambda original: self._keeping(original, "filename"))
        for module, name in ((os, "rename"), (os, "replace"), (shutil, "copyfile")):
            self._wrap(module, name, functools.partial(self._moving, copies=module is shutil))

    def close(self) -> list[Path]:
        """Returns: files that were missing and are there now. Safe to repeat."""
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)
        made = sorted(path for path in self._written if path.exists())
        self._written.clear()
        self._kept.clear()
        return made

    @property
    def _is_open(self) -> bool:
        """Not for who has kept one of these functions, nor in a forked process."""
        return bool(self._originals) and os.getpid() == self._pid

    def _wrap(self, module: ModuleType, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(module, name)
        self._originals.append((module, name, original))
        setattr(module, name, functools.wraps(original)(wrapper(original)))

    def _is_there(self, path: Path) -> bool:
        """A file that an earlier session has written; one that is empty was made a moment ago (tempfile)."""
        return path not in self._written and path.exists() and path.stat().st_size > 0

    def _keeping(self, original: Callable[..., Any], keyword: str) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            path = _path(args[1] if len(args) > 1 else kwargs.get(keyword)) if self._is_open else None
            if path and self._is_there(path):
                self._kept.add(path)
                return None
            if path:
                self._written.add(path)
            return original(*args, **kwargs)

        return write

    def _moving(self, original: Callable[..., Any], *, copies: bool) -> Callable[..., Any]:
        def move(src: Any, dst: Any, **kwargs: Any) -> Any:
            source, target = _path(src), _path(dst)
            if not self._is_open or not target or source not in self._written | self._kept:
                return original(src, dst, **kwargs)
            if self._is_there(target):
                if source in self._written and not copies:
                    Path(src).unlink()
                return dst if copies else None
            if source in self._written:
                self._written.add(target)
            return original(src, dst, **kwargs)

        return move


def _path(given: Any) -> Path | None:
    """None for a stream or a descriptor."""
    return Path(os.fsdecode(given)).absolute() if isinstance(given, str | bytes | os.PathLike) else None
