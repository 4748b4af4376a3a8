"""What a foreign data loader consists of: the objects that give it its order, and the random generators that it holds.

Libraries wrap loaders and samplers in one another: on two ranks Accelerate keeps the shuffling generator at
`loader.batch_sampler.batch_sampler.sampler.generator`. So the graph of objects is searched, breadth first, along
attributes and the items of lists, tuples and dicts. An object is known by the path on which it was met first, which is
the same in the next process as long as the program builds the loader in the same way.

The search has bounds, because a dataset may hold millions of objects. It never reads tensors, arrays, tables or files,
and it runs no code of the objects, except the few properties in `ORDER`. Functions are followed to what they close over
and are bound to, not to their globals: a generator that only a module holds is not found.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import random
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from orchestrator.errors import CannotRestore
from orchestrator.worker.data import generator_states

MOST_OBJECTS, MOST_DEPTH, MOST_S = 10_000, 16, 2.0
"""Bounds of one search: objects that are looked into, edges from the loader, seconds."""

WHOLE, SAMPLE, INNER = 256, 64, 16
"""A container of more than WHOLE items is judged by SAMPLE of them, and one inside of another by INNER: it holds data, as a
rule."""

ORDER = ("batch_sampler", "sampler", "dataset", "generator")
"""Attributes of a loader or sampler that are asked for by name: wrappers offer them as properties."""

NOT_THE_RANKS = frozenset({"worker_init_fn", "_iterator"})
"""Attributes of a DataLoader that are not read in the rank's own process, or end with the epoch."""

CONTAINERS: tuple[Any, ...] = (dict, list, tuple, collections.deque)
PLAIN = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    range,
    slice,
    torch.Tensor,
    torch.dtype,
    torch.device,
)
CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
OF_LIBRARIES = frozenset({"numpy", "pandas", "polars", "pyarrow", "h5py", "PIL", "tokenizers", "io", "_io", "threading",
                          "_thread", "multiprocessing", "subprocess", "logging", "pathlib", "orchestrator"})  # fmt: skip
"""Modules whose objects hold data or handles, no order."""


@dataclass(slots=True)
class LoaderParts:
    """Attributes:
    generators: by path, without those of the process, which are saved with every checkpoint anyway.
    with_epochs: what has a `set_epoch`, from the outside to the inside, by path.
    ordering: the loader, samplers and streams, by path: what is not to be restored by others, too.
    loaders: PyTorch's DataLoaders, by path.
    unknown: sentences about what may hold a state that nobody can read.
    """

    generators: dict[str, Any] = field(default_factory=dict)
    with_epochs: dict[str, Any] = field(default_factory=dict)
    ordering: dict[str, Any] = field(default_factory=dict)
    loaders: dict[str, DataLoader[Any]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Met:
    """An object on the way.

    Attributes:
        edge: the last part of its path.
        is_data: below a dataset.
        is_beyond: reached through what is neither iterable nor indexed (a function, a trainer, a transform). Only its
            generators count: a trainer also holds the loader of its evaluation.
    """

    path: str
    depth: int
    thing: Any
    edge: str = ""
    is_data: bool = False
    is_beyond: bool = False


def parts_of(loader: Any) -> LoaderParts:
    return _Search(loader).parts


def takes_epochs(thing: Any) -> bool:
    """Whether it has a `set_epoch` that is given the epoch alone."""
    method = vars(thing).get("set_epoch") if hasattr(thing, "__dict__") else None
    if method is None and hasattr(type(thing), "set_epoch"):
        method = getattr(thing, "set_epoch", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(0)
    except TypeError:
        return False
    except ValueError:  # written in C: it does not say
        return True
    return True


def set_epoch(things: Sequence[Any], epoch: int) -> None:
    """Tells each of them once, the outer ones first: one that hands it on to another has told that one, too."""
    told: set[int] = set()
    with contextlib.ExitStack() as stack:
        for thing in things:
            if hasattr(thing, "__dict__"):
                stack.enter_context(_noted(thing, told))
        for thing in things:
            if id(thing) not in told:
                thing.set_epoch(epoch)


@contextlib.contextmanager
def _noted(thing: Any, told: set[int]) -> Iterator[None]:
    """While it lasts, a call of the thing's `set_epoch` is noted, whoever calls it."""
    method, own = thing.set_epoch, "set_epoch" in vars(thing)

    @functools.wraps(method)
    def noted(*args: Any, **named: Any) -> Any:
        told.add(id(thing))
        return method(*args, **named)

    vars(thing)["set_epoch"] = noted
    try:
        yield
    finally:
        if own:
            vars(thing)["set_epoch"] = method
        else:
            del vars(thing)["set_epoch"]


def _generator_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
    return (torch.Generator, random.Random, *own)


def _of_the_process() -> set[int]:
    """Generators whose states a checkpoint holds anyway."""
    numpy = sys.modules.get("numpy")
    found = [random._inst, torch.default_generator]
    if numpy:
        found += [numpy.random.mtrand._rand, numpy.random.mtrand._rand._bit_generator]
    return {id(item) for item in found}


class _Search:
    def __init__(self, loader: Any) -> None:
        self.parts = LoaderParts()
        self._types, self._global = _generator_types(), _of_the_process()
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no id is given twice while the search lasts
        self._inert: dict[type, bool] = {}
        self._shared: dict[type, dict[str, Any]] = {}
        self._open = collections.deque([_Met("loader", 0, loader)])
        self._partly: dict[str, int] = {}
        self._search(time.monotonic() + MOST_S)
        self._judge()

    def _search(self, until_s: float) -> None:
        while self._open:
            met = self._open.popleft()
            if id(met.thing) in self._seen:
                continue
            is_late = len(self._seen) % 256 == 255 and time.monotonic() > until_s
            if len(self._seen) >= MOST_OBJECTS or is_late:
                self._doubt(f"only {len(self._seen)} of its objects were searched for random generators")
                return
            self._seen.add(id(met.thing))
            self._held.append(met.thing)
            self._meet(met)
            below = list(self._below(met))
            if met.depth < MOST_DEPTH:
                self._open.extend(below)
            elif below:
                self._doubt(f"{met.path} lies too deep to be searched for random generators")

    def _doubt(self, sentence: str) -> None:
        self.parts.unknown.append(sentence)

    def _meet(self, met: _Met) -> None:
        thing, path = met.thing, met.path
        if isinstance(thing, self._types):
            try:
                generator_states.raw_state_of(thing)
                self.parts.generators[path] = thing
            except CannotRestore as error:  # random.SystemRandom, or one of a kind that is not known
                self._doubt(f"{path}: {error.what}")
        elif not met.is_beyond:
            if isinstance(thing, DataLoader):
                self.parts.loaders[path] = thing
            if takes_epochs(thing):
                self.parts.with_epochs[path] = thing
            if self._gives_order(met):
                self.parts.ordering[path] = thing
            if met.depth and hasattr(type(thing), "__next__"):
                self._doubt(f"{path} is a {type(thing).__name__}, exact if it begins anew with each epoch")

    def _gives_order(self, met: _Met) -> bool:
        if met.depth == 0 or isinstance(met.thing, IterableDataset):
            return True
        return not met.is_data and (
            isinstance(met.thing, DataLoader | Sampler) or met.edge in (".sampler", ".batch_sampler")
        )

    def _is_inert(self, thing: Any) -> bool:
        kind = type(thing)
        if (known := self._inert.get(kind)) is None:
            known = self._inert[kind] = self._holds_nothing(thing)
        return known or id(thing) in self._global

    def _holds_nothing(self, thing: Any) -> bool:
        """The same for all objects of its type."""
        if isinstance(thing, self._types):
            return False
        if isinstance(thing, PLAIN + CODE):
            return True
        root = type(thing).__module__.partition(".")[0]
        if root == "torch":
            return not isinstance(thing, Sampler | DataLoader | Dataset | nn.Module)
        return root in OF_LIBRARIES

    def _below(self, met: _Met) -> Iterator[_Met]:
        thing = met.thing
        if isinstance(thing, self._types):
            return
        for kind in CONTAINERS:
            if isinstance(thing, kind):
                yield from self._items(met, kind)
                if type(thing) is kind:
                    return
        if isinstance(thing, types.MethodType):
            yield from self._to(met, ".__self__", thing.__self__, is_beyond=True)
            yield from self._to(met, ".__func__", thing.__func__, is_beyond=True)
        elif isinstance(thing, functools.partial):
            for name, value in {"func": thing.func, "args": thing.args, "keywords": thing.keywords}.items():
                yield from self._to(met, f".{name}", value, is_beyond=True)
        elif isinstance(thing, types.FunctionType):
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # still empty
                    yield from self._to(met, f".{name}", cell.cell_contents, is_beyond=True)
        else:
            for name, value in self._attributes(met).items():
                yield from self._to(met, f".{name}", value, is_data=name in ("dataset", "data_source"))

    def _items(self, met: _Met, kind: Any) -> Iterator[_Met]:
        """By the container's own methods: those of a class derived from it may read anything."""
        keys = list(dict.keys(met.thing)) if kind is dict else range(kind.__len__(met.thing))
        fewest = INNER if met.edge.startswith("[") else WHOLE
        numbers = _spread(len(keys), fewest, min(fewest, SAMPLE))
        if len(numbers) < len(keys):
            self._partly[met.path] = len(numbers)
        for number in numbers:
            key = keys[number]
            if not self._is_inert(value := kind.__getitem__(met.thing, key)):
                name = repr(key) if isinstance(key, str | int | float) else f"#{number}"
                yield from self._to(met, f"[{name:.80}]", value)

    def _attributes(self, met: _Met) -> dict[str, Any]:
        thing, own = met.thing, _asked(met.thing, "__dict__")
        own = dict(own) if isinstance(own, dict) else {}
        for kind in type(thing).__mro__:
            slots = [name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType)]
            own |= {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
        if isinstance(thing, nn.Module):
            own = {name: value for name, value in own.items() if not name.startswith("_")} | dict(
                thing.named_children()
            )
        if not met.is_beyond and (met.depth == 0 or isinstance(thing, DataLoader | Sampler)):
            asked = {name: _asked(thing, name) for name in ORDER if name not in own}
            own |= {name: value for name, value in asked.items() if value is not None}
        if isinstance(thing, DataLoader):
            own = {name: value for name, value in own.items() if name not in NOT_THE_RANKS}
        return self._shared_by(type(thing)) | own

    def _shared_by(self, kind: type) -> dict[str, Any]:
        """Generators that all objects of a class share."""
        if kind not in self._shared:
            members = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
            self._shared[kind] = {name: value for name, value in members.items() if isinstance(value, self._types)}
        return self._shared[kind]

    def _to(
        self, met: _Met, edge: str, thing: Any, *, is_data: bool = False, is_beyond: bool = False
    ) -> Iterator[_Met]:
        """What lies at the end of an edge, unless it holds nothing."""
        if not self._is_inert(thing):
            kind = type(thing)
            iterable = not isinstance(thing, nn.Module) and (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"))
            is_beyond = is_beyond or met.is_beyond or not iterable
            yield _Met(met.path + edge, met.depth + 1, thing, edge, is_data or met.is_data, is_beyond)

    def _judge(self) -> None:
        """Says what may go on from a state of its own: samplers that are not PyTorch's and hold nothing that is known."""
        known = [*self.parts.generators, *self.parts.with_epochs, *self.parts.ordering]
        for path, thing in self.parts.ordering.items():
            own = type(thing).__module__.startswith("torch.utils.data") or isinstance(
                thing, DataLoader | IterableDataset
            )
            plain = isinstance(thing, (*CONTAINERS, set, frozenset))
            if path == "loader" or own or plain or path in self.parts.with_epochs or hasattr(type(thing), "__next__"):
                continue
            if not any(name.startswith(f"{path}.") for name in known):
                self._doubt(f"{path} is a {type(thing).__name__}, exact if it gives the same order each time")
        for path, number in self._partly.items():
            if any(name.startswith(path) for name in self.parts.generators):
                self._doubt(f"only {number} items of {path} were searched for random generators")


def _asked(thing: Any, name: str) -> Any:
    """An attribute that may be a property, of a class that nobody here knows: it may raise anything."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _spread(count: int, whole: int, sample: int) -> Sequence[int]:
    """Numbers of the items to look at: all of them up to `whole`, else `sample` with the first and the last."""
    return range(count) if count <= whole else [number * (count - 1) // (sample - 1) for number in range(sample)]
