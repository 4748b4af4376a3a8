"""Search of a foreign data loader for the objects that determine its order, and for its random generators.

Libraries nest loaders and samplers: on two ranks Accelerate keeps the shuffling generator at
`loader.batch_sampler.batch_sampler.sampler.generator`. So the graph of objects is searched, breadth first, along attributes and the
items of lists, tuples and dicts. An object is identified by the first path to it, which is the same in the next process as long as
the program builds the loader in the same way.

The search is bounded, because a dataset may hold millions of objects. It never reads tensors, arrays, tables or files, and it
runs no code of the objects, except the few properties in `ORDER`. Functions are followed to their closures and bound objects,
not to their
globals: a generator that only a module refers to is not found.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from kgorch.errors import CannotRestore
from kgorch.worker.data import generator_states

MOST_OBJECTS, MOST_DEPTH = 10_000, 64
"""Limits of one search: visited objects, edges from the loader. None of time: what is found must not depend on how busy the machine
is, because the next session has to find the same. The most objects take about 0.3 s."""

WHOLE, SAMPLE, INNER = 256, 64, 16
"""Of a container with more than WHOLE items, SAMPLE of them are visited; of one inside another container INNER: it usually holds
data."""

ORDER = ("batch_sampler", "sampler", "dataset", "generator")
"""Attributes of a loader or sampler that are read by name, because wrappers provide them as properties."""

NOT_THE_RANKS = frozenset({"worker_init_fn", "_iterator"})
"""Attributes of a DataLoader that are not used in the rank's own process, or end with the epoch."""

CONTAINERS: tuple[Any, ...] = (dict, list, tuple, collections.deque)
SCALARS = (str, bytes, int, float, complex, bool, range, torch.dtype, torch.device)
PLAIN = (*SCALARS, bytearray, type(None), slice, torch.Tensor)
CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
OF_LIBRARIES = frozenset({"numpy", "pandas", "polars", "pyarrow", "h5py", "PIL", "tokenizers", "io", "_io", "threading",
                          "_thread", "multiprocessing", "subprocess", "logging", "pathlib", "kgorch"})  # fmt: skip
"""Packages whose objects hold data or handles, and do not determine an order."""


@dataclass(slots=True)
class LoaderParts:
    """The relevant objects of a loader, by path.

    Attributes:
        generators: random generators, without the process's global ones, which every checkpoint holds anyway.
        with_epochs: objects with a `set_epoch`, the outer ones first.
        ordering: the loader, samplers and streams; nothing else may restore them as well.
        loaders: PyTorch's DataLoaders.
        unknown: sentences about objects that may have a state that cannot be read.
    """

    generators: dict[str, Any] = field(default_factory=dict)
    with_epochs: dict[str, Any] = field(default_factory=dict)
    ordering: dict[str, Any] = field(default_factory=dict)
    loaders: dict[str, DataLoader[Any]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SearchNode:
    """An object that the search has reached.

    Attributes:
        path: the first path to it.
        depth: number of edges from the loader.
        thing: the object.
        edge: the last part of its path.
        is_data: it is below a dataset.
        is_beyond: it was reached through an object that is neither iterable nor indexed (a function, a trainer, a transform). Only
            its generators count: a trainer also refers to the loader of its evaluation.
        is_own: what it refers to is among the values (`remembered_values`).
    """

    path: str
    depth: int
    thing: Any
    edge: str = ""
    is_data: bool = False
    is_beyond: bool = False
    is_own: bool = False


def parts_of(loader: Any) -> LoaderParts:
    """Search a loader."""
    return LoaderSearch(loader).parts


def plain_values(thing: Any) -> dict[str, Any]:
    """Numbers and texts that an object refers to, by path, and of what else it holds the type: told by these, it has changed.

    Of tensors it is known whether they were written to, of arrays which ones they are, of containers their length.
    """
    values: dict[str, Any] = {}
    LoaderSearch(thing, values)
    return values


def takes_epochs(thing: Any) -> bool:
    """Whether the object has a `set_epoch` that takes the epoch alone."""
    method = vars(thing).get("set_epoch") if hasattr(thing, "__dict__") else None
    if method is None and hasattr(type(thing), "set_epoch"):
        method = getattr(thing, "set_epoch", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(0)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def set_epoch(things: Sequence[Any], epoch: int) -> None:
    """Call `set_epoch` of each once, the outer ones first. One that an outer one has called already is left out."""
    called: set[int] = set()
    with contextlib.ExitStack() as stack:
        for thing in things:
            if hasattr(thing, "__dict__"):
                stack.enter_context(_noted(thing, called))
        for thing in things:
            if id(thing) not in called:
                thing.set_epoch(epoch)


@contextlib.contextmanager
def _noted(thing: Any, called: set[int]) -> Iterator[None]:
    """A context that records calls of the object's `set_epoch`, whoever makes them."""
    method, own = thing.set_epoch, "set_epoch" in vars(thing)

    @functools.wraps(method)
    def noted(*args: Any, **named: Any) -> Any:
        called.add(id(thing))
        return method(*args, **named)

    vars(thing)["set_epoch"] = noted
    try:
        yield
    finally:
        if own:
            vars(thing)["set_epoch"] = method
        else:
            del vars(thing)["set_epoch"]


def generator_types() -> tuple[type, ...]:
    """Classes of random generators, those of NumPy if it is loaded."""
    numpy = sys.modules.get("numpy")
    own = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
    return (torch.Generator, random.Random, *own)


def of_the_process() -> set[int]:
    """Ids of the process's global generators, whose states every checkpoint holds."""
    numpy = sys.modules.get("numpy")
    global_generators = [random._inst, torch.default_generator]
    if numpy:
        global_generators += [numpy.random.mtrand._rand, numpy.random.mtrand._rand._bit_generator]
    return {id(item) for item in global_generators}


class LoaderSearch:
    """Args: values: see `plain_values`, which fills it; None: they are not asked for."""

    most_objects, is_whole = MOST_OBJECTS, True

    def __init__(self, loader: Any, values: dict[str, Any] | None = None) -> None:
        self.parts, self._values = LoaderParts(), values
        self._types, self._global = generator_types(), of_the_process()
        self._visited: set[int] = set()
        self._held: list[Any] = []  # kept alive, so that no id is reused during the search
        self._inert: dict[type, bool] = {}
        self._shared: dict[type, dict[str, Any]] = {}
        self._open = collections.deque([SearchNode("loader", 0, loader)])
        self._partly: dict[str, int] = {}
        self._search()
        self._judge()

    def _search(self) -> None:
        while self._open:
            node = self._open.popleft()
            if id(node.thing) in self._visited:
                continue
            if len(self._visited) >= self.most_objects:
                self.is_whole = False
                self._doubt(f"only {self.most_objects} of its objects were searched for random generators")
                return
            self._visited.add(id(node.thing))
            self._held.append(node.thing)
            self._meet(node)
            below = list(self._below(node))
            if node.depth < MOST_DEPTH:
                self._open.extend(below)
            elif below:
                self._doubt(f"{node.path} lies too deep to be searched for random generators")

    def _doubt(self, sentence: str) -> None:
        self.parts.unknown.append(sentence)

    def _meet(self, node: SearchNode) -> None:
        thing, path = node.thing, node.path
        if isinstance(thing, self._types):
            try:
                generator_states.raw_state_of(thing)
                self.parts.generators[path] = thing
            except CannotRestore as error:  # random.SystemRandom, or an unknown type
                self._doubt(f"{path}: {error.what}")
        elif not node.is_beyond:
            if isinstance(thing, DataLoader):
                self.parts.loaders[path] = thing
            if takes_epochs(thing):
                self.parts.with_epochs[path] = thing
            if self._gives_order(node):
                self.parts.ordering[path] = thing
            if node.depth and hasattr(type(thing), "__next__"):
                self._doubt(f"{path} is a {type(thing).__name__}, exact if it begins anew with each epoch")

    def _gives_order(self, node: SearchNode) -> bool:
        if node.depth == 0 or isinstance(node.thing, IterableDataset):
            return True
        return not node.is_data and (
            isinstance(node.thing, DataLoader | Sampler) or node.edge in (".sampler", ".batch_sampler")
        )

    def _is_inert(self, thing: Any) -> bool:
        kind = type(thing)
        if (known := self._inert.get(kind)) is None:
            known = self._inert[kind] = self._holds_nothing(thing)
        return known or id(thing) in self._global

    def _holds_nothing(self, thing: Any) -> bool:
        """Whether objects of its type cannot refer to anything relevant."""
        if isinstance(thing, self._types):
            return False
        if isinstance(thing, PLAIN + CODE):
            return True
        module = type(thing).__module__
        root = module.partition(".")[0]
        if root == "torch":
            return not isinstance(thing, Sampler | DataLoader | Dataset | nn.Module)
        # the reference trainings are in the package, but their data sets are those of a training
        return root in OF_LIBRARIES and not module.startswith("kgorch.workloads.")

    def _below(self, node: SearchNode) -> Iterator[SearchNode]:
        thing = node.thing
        if isinstance(thing, self._types):
            return
        for kind in CONTAINERS:
            if isinstance(thing, kind):
                yield from self._items(node, kind)
                if type(thing) is kind:
                    return
        if isinstance(thing, types.MethodType):
            yield from self._to(node, ".__self__", thing.__self__, is_beyond=True)
            yield from self._to(node, ".__func__", thing.__func__, is_beyond=True)
        elif isinstance(thing, functools.partial):
            for name, value in {"func": thing.func, "args": thing.args, "keywords": thing.keywords}.items():
                yield from self._to(node, f".{name}", value, is_beyond=True)
        elif isinstance(thing, types.FunctionType):
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # the cell is still empty
                    yield from self._to(node, f".{name}", cell.cell_contents, is_beyond=True)
        else:
            for name, value in self._attributes(node).items():
                yield from self._to(node, f".{name}", value, is_data=name in ("dataset", "data_source"))

    def _items(self, node: SearchNode, kind: Any) -> Iterator[SearchNode]:
        """The items, by the built-in type's own methods: those of a subclass may do anything."""
        keys = list(dict.keys(node.thing)) if kind is dict else range(kind.__len__(node.thing))
        fewest = INNER if node.edge.startswith("[") else WHOLE
        numbers = _spread(len(keys), fewest, min(fewest, SAMPLE))
        if len(numbers) < len(keys):
            self._partly[node.path] = len(numbers)
        for number in numbers:
            key = keys[number]
            if not self._is_inert(value := kind.__getitem__(node.thing, key)) or self._values is not None:
                name = repr(key) if isinstance(key, str | int | float) else f"#{number}"
                yield from self._to(node, f"[{name:.80}]", value)

    def _attributes(self, node: SearchNode) -> dict[str, Any]:
        thing, own = node.thing, _asked(node.thing, "__dict__")
        own = dict(own) if isinstance(own, dict) else {}
        for kind in type(thing).__mro__:
            slots = [name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType)]
            own |= {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
        if isinstance(thing, nn.Module):
            own = {name: value for name, value in own.items() if not name.startswith("_")} | dict(
                thing.named_children()
            )
        if not node.is_beyond and (node.depth == 0 or isinstance(thing, DataLoader | Sampler)):
            asked = {name: _asked(thing, name) for name in ORDER if name not in own}
            own |= {name: value for name, value in asked.items() if value is not None}
        if isinstance(thing, DataLoader):
            own = {name: value for name, value in own.items() if name not in NOT_THE_RANKS}
        return self._shared_by(type(thing)) | own

    def _shared_by(self, kind: type) -> dict[str, Any]:
        """Generators that are class attributes."""
        if kind not in self._shared:
            members = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
            self._shared[kind] = {name: value for name, value in members.items() if isinstance(value, self._types)}
        return self._shared[kind]

    def _to(
        self, node: SearchNode, edge: str, thing: Any, *, is_data: bool = False, is_beyond: bool = False
    ) -> Iterator[SearchNode]:
        """The object at the end of an edge, unless it is irrelevant."""
        if self._values is not None and self._counts(node) and (value := self._value(thing)) is not None:
            self._values[node.path + edge] = value
        if not self._is_inert(thing):
            kind = type(thing)
            iterable = not isinstance(thing, nn.Module) and (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"))
            is_beyond = is_beyond or node.is_beyond or not iterable
            yield SearchNode(node.path + edge, node.depth + 1, thing, edge, is_data or node.is_data, is_beyond)

    def _counts(self, node: SearchNode) -> bool:
        """Whether what the object refers to is among the values."""
        return True

    def _value(self, thing: Any) -> Any:
        """By what a change of the object is told; None of files and the like, which a dataset may open at any time."""
        if isinstance(thing, SCALARS):
            return thing
        if isinstance(thing, torch.Tensor):
            return id(thing), 0 if thing.is_inference() else thing._version
        if (numpy := sys.modules.get("numpy")) and isinstance(thing, numpy.ndarray):
            return id(thing), thing.shape
        if type(thing) in (*CONTAINERS, set, frozenset):
            return type(thing), len(thing)
        return None if self._is_inert(thing) else type(thing)

    def _judge(self) -> None:
        """Report objects that may have a state of their own: samplers that are not PyTorch's and hold nothing known."""
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
    """An attribute, or None. It may be a property of an unknown class, which may raise anything."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _spread(count: int, whole: int, sample: int) -> Sequence[int]:
    """Indices of the items to visit: all up to `whole` items, else `sample` of them, with the first and the last."""
    return range(count) if count <= whole else [number * (count - 1) // (sample - 1) for number in range(sample)]
