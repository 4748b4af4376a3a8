"""The objects that a script can name while it trains: variables of its running functions, and globals of their modules.

The search is bounded. It runs no code of the objects, and opens objects of the script's own classes, containers, and other objects
that have a `state_dict`. Data sets, loaders and libraries are not opened.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from kgorch.worker.object_variables import attributes_of
from kgorch.worker.script_code import is_of_script, is_own_class

MOST_OBJECTS, MOST_ITEMS, MOST_DEPTH = 4_000, 256, 4
"""Limits of one search: visited objects, items of a container, edges from a variable."""

READS_ITS_LOCALS = "locals"
"""A function that calls it is not searched before Python 3.13: reading its variables from outside changes the very dict that
`locals()` has given it."""

LEAVES = (nn.Module, torch.Tensor, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler,
          torch.Generator, random.Random)  # fmt: skip
CLOSED = (
    Dataset,
    DataLoader,
    Sampler,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
)


def frames_of_script() -> list[FrameType]:
    """The running functions of the script, the innermost first, without those of libraries."""
    frames, frame = [], inspect.currentframe()
    while frame is not None:
        if is_of_script(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
            frames.append(frame)
        frame = frame.f_back
    return frames


def named_objects(frames: list[FrameType]) -> Iterator[tuple[str, Any]]:
    """The objects of these functions and of their modules, each once, by the shortest path to it."""
    waiting: deque[tuple[str, Any, int]] = deque()
    for names in itertools.chain(map(variables_of, frames), (frame.f_globals for frame in frames)):
        waiting.extend((name, value, 0) for name, value in list(names.items()) if not name.startswith("__"))
    visited: dict[int, Any] = {}  # held, so that no id is used twice
    while waiting and len(visited) < MOST_OBJECTS:
        path, thing, depth = waiting.popleft()
        if id(thing) in visited or issubclass(type(thing), CLOSED):
            continue
        visited[id(thing)] = thing
        yield path, thing
        if depth < MOST_DEPTH and not issubclass(type(thing), LEAVES):
            waiting.extend((inner, value, depth + 1) for inner, value in _below(path, thing))


def loader_iterators() -> list[_BaseDataLoaderIter]:
    """The iterators of DataLoaders that exist. A `for` holds its iterator where no search of variables finds it."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), _BaseDataLoaderIter)]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function; none of a module, and none where reading them would change what the script reads."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module, whose variables are its globals
        return {}
    if sys.version_info >= (3, 13):
        return dict(frame.f_locals)
    if READS_ITS_LOCALS in frame.f_code.co_names:
        return {}
    snapshot = frame.f_locals
    variables = dict(snapshot)
    snapshot.clear()  # the frame keeps it, and with it a step's batch and graph
    return variables


def _below(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        for key, value in itertools.islice(list(thing.items()), MOST_ITEMS):
            yield f"{path}[{key!r:.60}]" if isinstance(key, str | int) else f"{path}[…]", value
    elif isinstance(thing, list | tuple | deque):
        for number, value in enumerate(itertools.islice(list(thing), MOST_ITEMS)):
            yield f"{path}[{number}]", value
    elif _is_opened(type(thing)):
        for name, value in list(attributes_of(thing).items()):
            yield f"{path}.{name}", value


def _is_opened(kind: type) -> bool:
    is_closed = str(kind.__module__).partition(".")[0] in ("torch", "builtins", "numpy", "kgorch")
    return is_own_class(kind) or (not is_closed and hasattr(kind, "state_dict"))
