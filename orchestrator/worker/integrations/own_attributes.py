"""Numbers, tensors, random generators, optimizers and orders of names in attributes of the script's objects, which its Trainer's
library does not save: of callbacks, the Trainer, the model's modules and data sets. Also in variables of the script's modules and
classes, and in objects that variables of the running functions of a script around Accelerate hold.

Only attributes count that code of the script sets. They are compared with what they were when the training had begun, so that a
session's own stay the session's. An object that also holds something that has changed and cannot be saved, as a file or what it has
read of one, is left alone as a whole, and named: half of its state would be worse than none. Of a callback any such object counts,
changed or not. Texts are never put back: one may be a path.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from kgorch.worker.audit.script_objects import frames_of_script
from kgorch.worker.audit.untracked_state import content_of, storage_of
from kgorch.worker.data import generator_states
from kgorch.worker.integrations import attribute_values as values_of
from kgorch.worker.integrations import metric_states
from kgorch.worker.integrations.attribute_search import CODE, OF_MODULES, SCALARS, AttributeSearch, Root
from kgorch.worker.object_variables import variables_of

MOST_BYTES = 256 << 20
"""Of all tensors together, besides twice those of the trained model."""

MOST_NAMED = 5
"""Objects that are named, because `exactness` is part of every status."""

NANOSECONDS = 10**9

A_WHILE_S = 30 * 86_400.0
"""Seconds from now. Of the clock of the day alone: no other number of a training is as large by chance."""

WHAT = "attributes that may hold more than numbers and tensors, and begin anew in each session"

NOT_THERE: Any = object()


class _Object(NamedTuple):
    """An object that is looked at.

    Attributes:
        begun: marks of its attributes when the training began.
        ids: of their values then, where `is_running`.
        kinds: types of those that a checkpoint does not hold in their kind.
        listings: lists of which it holds the order alone.
    """

    label: str
    thing: Any
    is_callback: bool
    loader: str
    has_all: bool
    is_running: bool
    begun: dict[str, Any]
    ids: dict[str, int]
    kinds: dict[str, type]
    listings: dict[str, values_of.Listing]

    @property
    def is_table(self) -> bool:
        """It is the variables of a running function, which have nothing to do with each other."""
        return self.is_running and type(self.thing) is dict


class _Changed(NamedTuple):
    """What of an object has changed since the training began, by attribute.

    Attributes:
        modules: tensors of modules, by name.
        generators: states of random generators.
        states: of optimizers, schedules and other objects of libraries that give theirs.
        others: attributes that may have changed, and cannot be saved.
        iterators: that have given further items. They cannot be saved, and nothing else hangs on where they are.
    """

    values: dict[str, Any]
    modules: dict[str, dict[str, torch.Tensor]]
    generators: dict[str, Any]
    states: dict[str, Any]
    others: list[str]
    iterators: list[str]

    @property
    def names(self) -> list[str]:
        return [*self.values, *self.modules, *self.generators, *self.states]


NOTHING = _Changed({}, {}, {}, {}, [], [])


class OwnAttributes:
    """The attributes of those objects whose class the script defines, and of a Trainer that its code sets.

    Args:
        roots: objects; modules in a model, and objects of the script's classes in attributes, are looked at as well.
        known: objects that are no state of another one: the Trainer, its arguments, its data.
        held: modules and optimizers whose tensors a checkpoint holds.
        without: names of attributes that are saved otherwise.
        device: where a tensor is put that this session has not made yet.
        note: is given what is not saved, in words; "" where nothing is left out any more.
        of_loaders: returns the random generators that are saved with the place of a loader.
        running: returns what the running functions hold (`running_roots`), which comes and goes.
        has_numbers: whether the numbers of one of these objects, by its id, are saved otherwise.
    """

    def __init__(
        self, roots: Iterable[Root], known: Iterable[Any], held: Iterable[Any], device: torch.device | str,
        note: Callable[[str], None], without: Iterable[str] = (), of_loaders: Callable[[], Iterable[Any]] = tuple,
        running: Callable[[], Iterable[Root]] | None = None, has_numbers: Callable[[int], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self._known = {id(item) for item in known if item is not None}
        self._device, self._note, self._of_loaders = torch.device(device), note, of_loaders
        self._left, self._misfits, self._held = list[str](), list[str](), list(held)
        self._tracked = {id(item) for item in self._held}
        self._search = AttributeSearch(roots, self._known, without)
        found = self._search.objects()
        # modules have weights, which count wherever they are
        self._known |= {id(root.thing) for root in found if not isinstance(root.thing, nn.Module)}
        self._objects = [self._begun(root) for root in found]
        self._lasting, self._running, self._is_followed = set(self._known), running, False
        self._has_numbers = has_numbers
        self._follow_running()
        self._clocks = [(clock, clock()) for clock in (time.time, time.monotonic)]

    def state(self) -> list[list[Any]]:
        """(label, values, tensors of modules, states of generators, states of other objects) of each object, as far as they have
        changed since the training began; the label alone of one that is left alone."""
        self._follow_running()
        states, left = self._states(self._objects)
        left += [*self._search.too_many, *self._misfits]
        if left != self._left:
            self._left = left
            more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
            self._note(f"{WHAT}: {', '.join(left[:MOST_NAMED])}{more}" if left else "")
        return states

    def _follow_running(self) -> None:
        """Look at what the running functions hold now. When the script is over it is what they held last."""
        if self._running is None or (self._is_followed and not frames_of_script()):
            return
        lasting = [item for item in self._objects if not item.is_running]
        before = {_key(item): item for item in self._objects if item.is_running}
        self._known.intersection_update(self._lasting)
        try:
            found = self._search.objects(self._running(), but={id(item.thing) for item in lasting})
        except Exception as error:  # of a value's own code: no look may cost a run
            self._search.too_many = [f"variables of the running functions ({type(error).__name__})"]
            return
        self._known |= {id(root.thing) for root in found if not isinstance(root.thing, nn.Module)}
        self._objects = [*lasting, *(self._followed(root, before.get(_key(root))) for root in found)]
        self._is_followed = True

    def _followed(self, root: Root, before: _Object | None) -> _Object:
        """An object of a running function. One that was made since the look before, as a meter of an epoch or a copy of the best
        weights, is saved as a whole."""
        if before is None:
            now = self._begun(root)
            return now._replace(begun={}) if self._is_followed else now
        if not before.is_table:
            return before._replace(label=root.label)
        same = {name for name, value in root.thing.items() if before.thing.get(name, NOT_THERE) is value}
        return self._begun(root)._replace(begun={name: mark for name, mark in before.begun.items() if name in same})

    @property
    def looked_at(self) -> set[int]:
        """Ids of the objects whose state is saved, or that are named, and of their attributes' values."""
        values = (value for item in self._objects for value in self._search.attributes(item).values())
        return {id(value) for value in itertools.chain((item.thing for item in self._objects), values)}

    def count_tensors(self, before: dict[int, dict[str, Any]]) -> None:
        """Save the tensors that callbacks have made as the training began, as copies of its first weights: those of a later session
        are others, and change as little.

        Args:
            before: what callbacks held before, by their ids; `tensors_held`.
        """
        for item in self._objects:
            for name, now in tensors_held(item.thing).items() if id(item.thing) in before else ():
                if before[id(item.thing)].get(name) != now:
                    item.begun.pop(name, None)

    def state_of(self, loader: str) -> list[list[Any]]:
        """The same of the objects by which a loader reads; copies."""
        return copy.deepcopy(self._states([item for item in self._objects if item.loader == loader])[0])

    def marks_of(self, loader: str) -> list[dict[str, Any]]:
        """What tells a change of them, by object and attribute."""
        return [self._begun(Root(*item[:4])).begun for item in self._objects if item.loader == loader]

    def keep_data(self, things: Iterable[Any]) -> None:
        """The loaders of the training now read by these objects: others, made for an epoch before, are looked at no more."""
        kept = {id(thing) for thing in things}
        within = tuple(f"{item.label}." for item in self._objects if item.loader and id(item.thing) in kept)
        self._objects = [
            item for item in self._objects if not item.loader or id(item.thing) in kept or item.label.startswith(within)
        ]

    def _states(self, objects: Iterable[_Object]) -> tuple[list[list[Any]], list[str]]:
        """Their states, and what is left out, in words."""
        states, left, storages = list[list[Any]](), list[str](), self._storages()
        of_loaders = {id(item) for item in self._of_loaders()}
        room = MOST_BYTES + 2 * sum(tensor.nbytes for tensor in self._tensors())
        for item in objects:
            try:
                changed = self._changed_in_parts(item, storages, of_loaders)
                room -= sum(
                    tensor.nbytes for tensor in values_of.tensors_in([changed.values, changed.modules, changed.states])
                )
            except Exception as error:  # of a value's own code: no look may cost a run
                changed = NOTHING._replace(others=[type(error).__name__])
            if (named := [*changed.others, *changed.iterators]) or room < 0:
                left.append(f"{item.label} ({', '.join(sorted(named or changed.names)[:3])})")
            # The variables of a module or function are those of many things: what cannot be saved is no part of the others.
            if room < 0 or (changed.others and not (isinstance(item.thing, CODE) or item.is_table)):
                states.append([item.label])
            else:
                states.append([item.label, *changed[:-2]])
        return states, left

    def _changed_in_parts(self, item: _Object, storages: set[int], of_loaders: set[int]) -> _Changed:
        if not item.is_table:
            return self._changed(item, storages, of_loaders)
        all_of_it = _Changed({}, {}, {}, {}, [], [])
        for name, value in item.thing.items():
            try:
                one = self._changed(item._replace(thing={name: value}), storages, of_loaders)
            except Exception:  # of a value's own code
                one = NOTHING._replace(others=[name])
            parts: Any = zip(all_of_it, one, strict=True)
            for found, part in parts:
                found.update(part) if isinstance(found, dict) else found.extend(part)
        return all_of_it

    def _changed(self, item: _Object, storages: set[int], of_loaders: set[int]) -> _Changed:
        changed = values, modules, generators, states, others, iterators = _Changed({}, {}, {}, {}, [], [])
        for name, value in self._search.attributes(item).items():
            begun, held = item.begun.get(name, NOT_THERE), values_of.held(value, storages)
            if id(value) in self._known or id(value) in of_loaders or (held and all(held)):
                continue
            if item.is_running and self._is_of_session(value, begun):
                continue
            if metric_states.is_metric(value):
                if begun != values_of.mark(collected := metric_states.states_of(value)) or item.is_running:
                    states[name] = values_of.saved(collected)
            elif isinstance(value, nn.Module):
                tensors = values_of.by_name(value)
                if not held:
                    others += [name] if item.is_callback else []  # it may have a state of another kind, as a metric
                elif begun != content_of(values_of.tensors_in(value)):
                    own = {key: one for key, one in tensors.items() if storage_of(one) not in storages}
                    if len(own) < len(held) - sum(held):  # a module that leaves weights out of its state_dict
                        others.append(name)
                    else:
                        modules[name] = own
            elif values_of.is_generator(value):
                if begun != (state := generator_states.state_of(value)):
                    generators[name] = state
            elif values_of.is_iterator(value):
                if begun != values_of.mark_of_iterator(value):
                    iterators.append(name)
            elif values_of.has_state(value):
                if not self._is_tracked(value) and begun != values_of.mark(own_state := values_of.state_of(value)):
                    if own_state is None:
                        others.append(name)
                    else:
                        states[name] = own_state
            elif type(value) is list and (listing := item.listings.get(name)):
                if not listing.is_as_begun(value):
                    if (order := listing.order_of(value)) is None:
                        others.append(name)
                    else:
                        states[name] = order
            elif values_of.is_value(value):
                is_same = not item.is_running or type(value) in SCALARS or item.ids.get(name) == id(value)
                if self._is_instant(value) or (begun == values_of.mark(value) and is_same):
                    continue
                if any(held) or (values_of.is_special(value) and item.kinds.get(name) is not type(value)):
                    others.append(name)
                else:
                    values[name] = values_of.saved(value)
            elif not self._is_no_state(value, begun, is_callback=item.is_callback):
                others.append(name)
        own_dict = variables_of(item.thing)
        held_by_others = [own_dict.get(name) for name in others]
        is_counted = (
            changed.names or not item.is_callback or values_of.tensors_in(held_by_others)
            or values_of.has_arrays(held_by_others)
        )  # fmt: skip
        are_numbers = changed.names == [*values] and {*map(type, values.values())} <= {*SCALARS}
        if are_numbers and self._has_numbers(id(item.thing)):
            changed = changed._replace(values={})
        return changed if is_counted else changed._replace(others=[])

    def state_dict(self) -> dict[str, Any]:
        """Of an object that is tracked by itself."""
        return {"objects": self.state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.put_back(saved.get("objects"))

    def put_back(
        self, saved: Any, *, loader: str | None = None, is_rest: bool = False, marks: list[dict[str, Any]] | None = None
    ) -> None:  # fmt: skip
        """Set what `state` has returned: numbers and tensors alone, whoever has written them.

        Args:
            loader: only of the objects by which it reads; "": only of those by which none does.
            is_rest: of an epoch whose hooks have run once more. Numbers that they have changed were at the save what they had been
                when the training began, as a flag that the first step takes back: they are not among what is saved.
            marks: of `marks_of`: only what has not changed since.
        """
        changed = self._changed_since(marks, loader or "") if marks is not None else set()
        left = [entry for entry in saved if _is_entry(entry)] if isinstance(saved, list) else []
        pairs = list[tuple[_Object, _Changed]]()
        for item in self._objects:
            entry = next((entry for entry in left if entry[0] == item.label), None)
            if entry is not None and loader in (None, item.loader):
                left.remove(entry)
                if is_rest and len(entry) > 1:
                    self._set_as_begun(item)
                values, modules, generators, states = (*entry[1:], {}, {}, {}, {})[:4]
                pairs.append((item, _Changed(values, modules, generators, states, [], [])))
        in_place, self._misfits = self._in_place(pairs, loader), []
        for item, saved in pairs:
            names = self._search.names_of(item)
            if item.is_table:
                missing = sorted({*saved.names} - names)
                self._misfits += [
                    f"{item.label} ({name}: it is not there where the session goes on)" for name in missing
                ]
            for name in names & {*saved.names}:
                if (id(item.thing), name) in changed:
                    continue
                try:
                    if _may_be_set(item.thing, name):
                        self._put_back(item, name, saved, in_place)
                        # saved from now on, also where the session happened to begin with it
                        item.begun.pop(name, None)
                except Exception:  # of a module that is another one, or of a value's own code
                    self._misfits.append(f"{item.label} ({name}: of another kind or size than it was)")

    def _changed_since(self, marks: list[dict[str, Any]], loader: str) -> set[tuple[int, str]]:
        """(id of the object, attribute) of what has changed."""
        found, objects = set[tuple[int, str]](), [item for item in self._objects if item.loader == loader]
        for item, before, now in zip(objects, marks, self.marks_of(loader), strict=True):
            names = before.keys() | now.keys()
            found |= {(id(item.thing), name) for name in names if before.get(name, self) != now.get(name, self)}
        return found

    def _set_as_begun(self, item: _Object) -> None:
        for name, value in self._search.attributes(item).items():
            begun = item.begun.get(name, NOT_THERE)
            if type(value) in SCALARS and type(begun) in SCALARS and value != begun and not self._is_instant(value):
                _set(item.thing, name, begun)

    def _in_place(self, pairs: list[tuple[_Object, _Changed]], loader: str | None) -> set[int]:
        """Ids of the values that may be changed in place: all attributes that hold one get the same, and it is no weight."""
        named, wanted, storages = Counter[int](), defaultdict[int, list[Any]](list), self._storages()
        for item in self._objects:
            if loader in (None, item.loader):
                named.update(id(value) for value in self._search.attributes(item).values())
        for item, saved in pairs:
            own = self._search.attributes(item)
            for name in saved.values.keys() & own.keys():
                wanted[id(own[name])].append(values_of.mark(saved.values[name]))
        held = {id(value) for item, _ in pairs for value in self._search.attributes(item).values()
                if any(values_of.held(value, storages))}  # fmt: skip
        return {
            key for key, marks in wanted.items() if len(marks) == named[key] and all(one == marks[0] for one in marks)
        } - held

    def _put_back(self, item: _Object, name: str, saved: _Changed, in_place: set[int]) -> None:
        own = variables_of(item.thing)
        now, value, tensors = own.get(name), saved.values.get(name, NOT_THERE), saved.modules.get(name)
        if name in saved.generators:
            if not values_of.is_generator(now):
                raise KeyError(name)
            generator_states.set_state(now, saved.generators[name])
        elif name in saved.states:
            if metric_states.is_metric(now):
                metric_states.put_back(now, copy.deepcopy(saved.states[name]))
            elif type(now) is list:
                _set(item.thing, name, item.listings[name].in_order(now, saved.states[name]))
            elif values_of.has_state(now):
                values_of.set_state(now, copy.deepcopy(saved.states[name]))
            else:
                raise KeyError(name)
        elif isinstance(now, nn.Module):
            if tensors is not None:
                there, loaded, storages = values_of.by_name(now), now.state_dict().keys(), self._storages()
                missing = there.keys() - tensors.keys()
                # Earlier versions have saved no buffer that is in no state_dict.
                if any(key in loaded and storage_of(there[key]) not in storages for key in missing):
                    raise KeyError(name)
                now.load_state_dict(
                    {key: one for key, one in tensors.items() if key in loaded}, strict=not missing & loaded
                )
                with torch.no_grad():
                    for key in tensors.keys() - loaded:
                        if there[key].shape != tensors[key].shape:  # `copy_` would repeat a smaller one
                            raise ValueError(key)
                        there[key].copy_(tensors[key])
        elif value is not NOT_THERE and values_of.is_value(value):
            is_value = values_of.is_value(now) if name in own else not item.has_all
            has_switch = item.is_running and any(type(leaf) is bool for leaf in values_of.items_of([now, value]))
            if is_value and not has_switch:
                _set(item.thing, name, values_of.renewed(now, value, self._device, in_place=id(now) in in_place))

    def _begun(self, root: Root) -> _Object:
        """With marks of the values: the values themselves would be kept alive."""
        begun, kinds, listings = dict[str, Any](), dict[str, type](), dict[str, values_of.Listing]()
        own = self._search.attributes(root)
        ids = {name: id(value) for name, value in own.items()} if root.is_running else {}
        for name, value in own.items():
            with contextlib.suppress(Exception):  # of a value's own code: it counts as changed
                if metric_states.is_metric(value):
                    begun[name] = values_of.mark(metric_states.states_of(value))
                elif isinstance(value, nn.Module):
                    begun[name] = content_of(values_of.tensors_in(value))
                elif values_of.is_generator(value):
                    begun[name] = generator_states.state_of(value)
                elif values_of.is_iterator(value):
                    begun[name] = values_of.mark_of_iterator(value)
                elif values_of.has_state(value):
                    begun[name] = values_of.mark(values_of.state_of(value))
                elif values_of.is_value(value):
                    begun[name] = values_of.mark(value)
                else:
                    begun[name] = value if values_of.is_fixed(value) else self._mark_of_other(value)
                if values_of.is_listing(value):
                    listings[name] = values_of.Listing(value)
                if values_of.is_special(value):
                    kinds[name] = type(value)
        return _Object(*root[:4], root.has_all, root.is_running, begun, ids, kinds, listings)

    def _is_of_session(self, value: Any, begun: Any) -> bool:
        """Whether what a running function holds may be this session's: a switch, which may say that it is to end; a handle, an
        integer that was nothing before; a reading of a clock; an iterator, for those over loaders are followed; data, which are
        read again."""
        if (type(value) is int and begun is None) or values_of.is_iterator(value):
            return True
        if issubclass(type(value), Dataset | Sampler | DataLoader):
            return True
        return any(type(leaf) is bool or self._is_instant(leaf) for leaf in values_of.items_of(value))

    def _is_tracked(self, value: Any) -> bool:
        """Whether it is an optimizer that is saved by itself, or a library's wrapper of it."""
        inner = getattr(value, "optimizer", None) if isinstance(value, torch.optim.Optimizer) else None
        return id(value) in self._tracked or id(inner) in self._tracked

    def _mark_of_other(self, value: Any) -> Any:
        return values_of.mark_of_other(value, self._known | self._tracked)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for thing in self._held:
            if isinstance(thing, nn.Module):
                yield from (tensor for tensor in thing.state_dict().values() if isinstance(tensor, torch.Tensor))
            else:
                yield from (weight for group in thing.param_groups for weight in group["params"])

    def _storages(self) -> set[int]:
        return {storage_of(tensor) for tensor in self._tensors()}

    def _is_instant(self, value: Any) -> bool:
        """Whether it is the session's: a clock has shown it since the training began, or will in a while, as a time limit."""
        (wall, wall_s), (other, other_s) = self._clocks
        if type(value) is float:
            return bool(wall_s <= value <= wall() + A_WHILE_S or other_s <= value <= other())
        if type(value) is not int:
            return False
        return int(wall_s) <= value <= wall() + A_WHILE_S or any(
            began_s <= value / NANOSECONDS <= clock() for clock, began_s in self._clocks
        )

    def _is_no_state(self, value: Any, begun: Any, *, is_callback: bool) -> bool:
        """Whether what cannot be saved has not changed with the training. A device is the session's own. Of a callback any other
        object counts."""
        if isinstance(value, torch.device):
            return True
        if values_of.is_fixed(value):
            return bool(value == begun)
        tensors = values_of.tensors_in(value)
        if tensors and values_of.are_of_graph(tensors):
            return True
        return not is_callback and bool(begun == self._mark_of_other(value))


def _key(item: Root | _Object) -> Any:
    """By which an object of a running function is found again; its variables are another dict each time."""
    return item.label if type(item.thing) is dict else id(item.thing)


def _set(thing: Any, name: str, value: Any) -> None:
    if isinstance(thing, type):
        setattr(thing, name, value)
    else:  # without code of its own
        variables_of(thing)[name] = value


def _may_be_set(thing: Any, name: str) -> bool:
    """Whether an attribute of this name is a variable, and no method, property, weight or module."""
    of_class = getattr(type(thing), name, None)
    if isinstance(thing, nn.Module) and name in (*OF_MODULES, *thing._parameters, *thing._buffers, *thing._modules):
        return False
    return not callable(of_class) and not isinstance(of_class, property)


def tensors_held(thing: Any) -> dict[str, tuple[int, int]]:
    """By attribute: what tells other tensors in it from those."""
    found = dict[str, tuple[int, int]]()
    for name, value in list(variables_of(thing).items()):
        with contextlib.suppress(Exception):  # of a value's own code
            if tensors := values_of.tensors_in(value):
                found[name] = id(tensors[0]), len(tensors)
    return found


def _is_entry(entry: Any) -> bool:
    """Whether it has the form of one of `state`. Earlier versions have written no modules, generators or other states."""
    is_list = isinstance(entry, list | tuple) and 1 <= len(entry) <= 5
    return is_list and isinstance(entry[0], str) and all(isinstance(part, dict) for part in entry[1:])
