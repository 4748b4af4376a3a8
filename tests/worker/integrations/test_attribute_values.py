"""Which values of attributes are saved, how they come back, and what is named because it is neither; without a training."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import importlib
import itertools
import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_trainings import Annealed, numbers
from torch import nn
from torch.utils.data import DataLoader, Subset

from kgorch.worker.integrations.attribute_search import Root, data_roots, script_roots
from kgorch.worker.integrations.own_attributes import OwnAttributes

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]


class Holder:
    """An object with attributes of all kinds."""

    def __init__(self):
        self.number, self.items, self.table, self.queue = 0, [1], {"a": 1}, collections.deque([1], maxlen=2)
        self.array, self.scalar, self.tensor, self.pair = (
            np.zeros(2),
            np.float64(0.5),
            torch.zeros(2),
            (1, torch.zeros(1)),
        )
        self.counts, self.module, self.inner = collections.Counter(), nn.Linear(1, 1), None
        self.text, self.file, self.modules = "a", None, [nn.Linear(1, 1)]
        self.large = None
        self.rng, self.legacy, self.python = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
        self.torch, self.several = torch.Generator().manual_seed(4), [random.Random(5)]

    def draw(self):
        numbers = (
            self.rng.uniform(),
            self.legacy.normal(),
            self.python.gauss(0, 1),
            float(torch.rand((), generator=self.torch)),
        )
        self.python.gauss(0, 1)
        return numbers

    def set_generators(self, rng, legacy, python, torch):
        self.rng, self.legacy, self.python, self.torch, self.several = rng, legacy, python, torch, None

    def train(self):
        self.number, self.items[0], self.table["b"], self.array[1], self.tensor[1] = 5, 2, 3, 1, 1
        self.queue.append(2)
        self.counts["x"] += 1
        self.scalar, self.pair = np.float64(0.25), (2, torch.ones(1))
        self.module.weight.data.fill_(7)

    def say(self):
        self.text = "b"

    def clear(self):
        self._modules, self._buffers, self.training = {}, {}, False  # names that a module has, too

    def change_modules(self):
        self.modules[0].weight.data.fill_(3)


def looked_at(thing, told, **options):
    label = options.pop("label", "thing")
    return OwnAttributes([Root(label, thing, **options)], (), (), "cpu", told.append)


def plain(value):
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple | collections.deque) else value


def test_each_kind_of_value_comes_back_in_place():
    told, trained = [], Holder()
    saves = looked_at(trained, told)
    assert saves.state() == [["thing", {}, {}, {}, {}]]
    trained.train()
    state = saves.state()
    assert set(state[0][1]) == {"number", "items", "table", "queue", "array", "scalar", "tensor", "pair", "counts"}
    other = Holder()
    held = {name: vars(other)[name] for name in ("items", "table", "queue", "array", "tensor", "counts", "module")}
    looked_at(other, told).put_back(state)
    for name in state[0][1]:
        assert plain(vars(other)[name]) == plain(vars(trained)[name]), name
    assert other.module.weight.item() == 7 and other.queue.maxlen == 2 and not told
    assert all(vars(other)[name] is value for name, value in held.items()), "others may hold them, too"


def test_a_random_generator_goes_on_where_it_was():
    """It began anew in each session, and nobody said so."""
    told, trained, other = [], Holder(), Holder()
    saves = looked_at(trained, told)
    trained.draw(), trained.draw()
    state = saves.state()
    assert json.loads(json.dumps(state[0][3])).keys() == {"rng", "legacy", "python", "torch"} and not state[0][1]
    again = looked_at(other, told)
    again.put_back(state)
    assert other.draw() == trained.draw() and not told
    trained.several[0].random()
    assert saves.state() == [["thing"]] and "thing (several)" in told[-1]
    other.rng = None
    again.put_back(state)
    again.state()
    assert "rng: of another kind" in told[-1], "it is not there to be set"


def test_a_generator_of_a_loader_or_of_the_process_is_saved_with_that():
    told, thing = [], Holder()
    thing.set_generators(
        np.random.mtrand._rand, np.random.mtrand._rand._bit_generator, random._inst, torch.default_generator
    )
    saves = looked_at(thing, told)
    np.random.rand(), random.random(), torch.rand(1)
    assert saves.state() == [["thing", {}, {}, {}, {}]]
    thing = Holder()
    saves = OwnAttributes(
        [Root("thing", thing)], (), (), "cpu", told.append, of_loaders=lambda: [thing.torch, thing.rng]
    )
    thing.draw()
    assert saves.state()[0][3].keys() == {"legacy", "python"} and not told


@pytest.mark.parametrize(
    "state", [None, 5, "x" * 100, {}, {"state": 1}, [3, [1] * 625, None], [3, [1 << 40] * 625, None]]
)
def test_a_state_of_a_generator_from_a_stranger_is_refused_and_leaves_it_as_it_is(state):
    told, thing, untouched = [], Holder(), Holder()
    saves = looked_at(thing, told)
    saves.put_back([["thing", {}, {}, dict.fromkeys(("rng", "legacy", "python", "torch", "number", "train"), state)]])
    saves.state()
    assert thing.draw() == untouched.draw() and "rng: of another kind or size" in told[-1] and thing.number == 0


def test_a_generator_of_the_scripts_own_class_goes_on_and_one_without_a_state_hinders_nothing():
    class Own(random.Random):
        pass

    told, trained, other = [], Holder(), Holder()
    for thing in (trained, other):
        thing.python, thing.rng = Own(1), random.SystemRandom()
    saves = looked_at(trained, told)
    trained.number = 5 + trained.python.randrange(3) + int(trained.rng.random())
    looked_at(other, told).put_back(saves.state())
    assert (other.number, other.python.random()) == (trained.number, trained.python.random()) and not told


def test_a_value_that_becomes_none_comes_back_as_none():
    """A Trainer without data has None among the objects that are no state of another one."""
    told, trained, other = [], Holder(), Holder()
    saves = OwnAttributes([Root("thing", trained)], (None,), (), "cpu", told.append)
    trained.number = None
    OwnAttributes([Root("thing", other)], (None,), (), "cpu", told.append).put_back(saves.state())
    assert other.number is None and not told


@pytest.mark.parametrize("change", ["say", "change_modules"])
@pytest.mark.parametrize("is_callback", [False, True])
def test_what_changes_and_cannot_be_saved_is_named(change, is_callback):
    told, thing = [], Holder()
    saves = looked_at(thing, told, is_callback=is_callback)
    thing.number = 5
    getattr(thing, change)()
    name = "text" if change == "say" else "modules"
    assert saves.state() == [["thing"]], "half of its state would be worse than none"
    assert name in told[0] and "thing (" in told[0]


def changed_and_put_back(change, before=lambda thing: None):
    """(object after a session that changes it, the one of the next session, what was told)."""
    told, trained, other = [], Holder(), Holder()
    before(trained)
    saves = looked_at(trained, told)
    change(trained)
    state = saves.state()
    before(other)
    looked_at(other, told).put_back(state)
    return trained, other, told


class Keeps:
    """Optimizers in several places, and names."""

    def __init__(self):
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], 0.1, momentum=0.9)
        self.all, self.names = [torch.optim.SGD([self.weight], 0.1, momentum=0.9)], ["a", "b", "c"]

    def train(self):
        self.weight.grad = torch.ones(2)
        self.optimizer.step()


def test_an_optimizer_in_a_list_is_named_and_one_that_a_checkpoint_holds_is_not():
    thing, told = Keeps(), []
    saves = OwnAttributes([Root("thing", thing)], (), [thing.optimizer], "cpu", told.append)
    thing.train()
    assert not saves.state()[0][4] and not told
    thing.weight.grad = torch.ones(2)
    thing.all[0].step()
    assert saves.state() == [["thing"]] and "thing (all)" in told[0]


def test_rows_with_texts_that_are_changed_in_place_are_named():
    """As the weights of a data set's samples, or the best score beside the path of its file."""
    thing, told = Keeps(), []
    thing.names, thing.all = [{"file": "a.png", "weight": 1.0}, {"file": "b.png", "weight": 1.0}], ["text", [0, ["b"]]]
    saves = looked_at(thing, told)
    assert saves.state() == [["thing", {}, {}, {}, {}]] and not told
    thing.names[1]["weight"] *= 0.5
    assert saves.state() == [["thing"]] and "thing (names)" in told[-1]
    thing.names[1]["weight"] = 1.0
    thing.all[1][0] += 1
    assert saves.state() == [["thing"]] and "thing (all)" in told[-1]


class Meter:
    """As the averages that each public script defines once more."""

    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum, self.count = self.sum + value, self.count + 1


def test_objects_in_short_lists_and_dicts_go_on():
    thing, other = Keeps(), Keeps()
    for item in (thing, other):
        item.names, item.all = {"loss": Meter(), "file": "a"}, [Meter(), [Meter()]]
    saves, restores = (looked_at(item, told := []) for item in (thing, other))
    thing.names["loss"].update(0.5)
    thing.all[0].update(2.0)
    restores.put_back(saves.state())
    assert vars(other.names["loss"]) == {"sum": 0.5, "count": 1} and vars(other.all[0]) == {"sum": 2.0, "count": 1}
    thing.names = [Meter() for _ in range(500)]
    assert len(looked_at(thing, told)._objects) == 2, "five hundred are data"


@dataclasses.dataclass(slots=True)
class Score:
    count: int = 0
    average: dict = dataclasses.field(default_factory=dict)


class Best(Score):
    """With slots, and a dict of its own."""

    def add(self, value):
        self.count, self.best = self.count + 1, value
        self.average["w"] = torch.full((2,), value)


class Counts:
    __slots__ = ("_hidden", "calls", "unset")

    def __init__(self):
        self.calls = self._hidden = 0

    def count(self):
        self.calls, self._hidden, self.unset = self.calls + 1, 5, 2.5


def test_objects_with_slots_go_on():
    """They began anew, and nobody said so."""
    told, trained, other = [], Holder(), Holder()
    for holder in (trained, other):
        holder.inner, holder.items = Best(), [Counts()]
    saves = looked_at(trained, told)
    trained.inner.add(0.5), trained.items[0].count()
    state = saves.state()
    looked_at(other, told).put_back(state)
    assert (other.inner.count, other.inner.best, other.inner.average["w"].tolist()) == (1, 0.5, [0.5, 0.5])
    assert (other.items[0].calls, other.items[0]._hidden, other.items[0].unset) == (1, 5, 2.5) and not told
    [entry] = [entry for entry in state if entry[0] == "thing.items.0"]
    entry[1]["new"] = 1
    looked_at(other, told).put_back(state)
    assert not hasattr(other.items[0], "new")


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (bytearray(b"a"), lambda text: text.extend(b"b")),
        (array.array("d", [1.0, 2.0]), lambda numbers: numbers.append(3.0)),
        ({"name": "a", "bytes": bytearray(2)}, lambda table: table["bytes"].__setitem__(0, 1)),
    ],
    ids=["bytes", "numbers", "bytes in a dict"],
)
def test_other_things_that_change_in_place_are_named(value, change):
    told, holder = [], Holder()
    holder.table = value
    saves = looked_at(holder, told)
    assert saves.state()[0] == ["thing", {}, {}, {}, {}] and not told
    change(value)
    assert saves.state()[0] == ["thing"] and "thing (table)" in told[0]


def test_a_frame_of_pandas_that_grows_in_place_is_named():
    pandas, told, holder = pytest.importorskip("pandas"), [], Holder()
    holder.table = pandas.DataFrame({"a": [1]})
    saves = looked_at(holder, told)
    saves.state()
    holder.table.loc[1] = 2
    assert saves.state() == [["thing"]] and "thing (table)" in told[0]


def test_a_namespace_goes_on_as_an_object_of_the_scripts():
    told, trained, other = [], Holder(), Holder()
    for holder in (trained, other):
        holder.inner = SimpleNamespace(number=0, tensor=torch.zeros(1), name="a")
    saves = looked_at(trained, told)
    trained.inner.number, trained.inner.tensor[0] = 3, 2.0
    looked_at(other, told).put_back(saves.state())
    assert (other.inner.number, other.inner.tensor.item(), other.inner.name) == (3, 2.0, "a") and not told


def counter(start=0):
    calls, means, fixed, text = start, [], 7, "a"

    def count(value):
        nonlocal calls, text
        calls, text = calls + 1, "b"
        means.append(value / fixed)
        return calls, means, text

    return count


def test_what_functions_share_with_those_that_they_are_defined_in_goes_on():
    told, trained, other = [], counter(), counter()
    saves = looked_at(trained, told)
    trained(7), trained(14)
    state = saves.state()
    assert state[0][:2] == ["thing", {"calls": 2, "means": [1.0, 2.0]}] and "(text)" in told[0], "a text is named"
    state[0][1]["fixed"] = 8  # of a stranger: no function sets it
    looked_at(other, told).put_back(state)
    assert other(21) == (3, [1.0, 2.0, 3.0], "b")


class Counting:
    def __init__(self):
        super().__init__()  # which needs its class as an outer variable


def test_functions_of_the_running_ones_are_looked_at():
    def running():  # apart, for an `assert` of pytest reads the variables of its function
        total, count = 0, torch.no_grad()(counter())

        class Counts(Counting):
            def add(self):
                nonlocal total
                total += 1

        count(1)
        return [root.label for root in script_roots([Counts()]) if root.label.startswith("function")]

    name = test_functions_of_the_running_ones_are_looked_at.__name__
    assert running() == ["function counter.<locals>.count", f"function {name}.<locals>.running.<locals>.Counts.add"]


@dataclasses.dataclass
class Unhashable:
    number: int = 0

    def __call__(self):
        pass


def test_odd_decorators_are_looked_through():
    def running():
        around = functools.wraps(Unhashable())(counter())
        circle = counter()
        circle.__wrapped__ = circle
        around(1), circle(1)
        return [root.label for root in script_roots([]) if root.label.startswith("function counter")]

    assert running() == ["function counter.<locals>.count"]


def test_numbers_that_the_script_sets_in_modules_of_libraries_go_on(monkeypatch):
    """As schedules of a BatchNorm's momentum and of dropout. What a class sets in itself alone is not looked for in others."""

    def set_momentum(part):
        part.momentum = 0.5

    def schedule(model):
        set_momentum(model[0])
        model[1].p += 0.25

    def built():
        return nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.25), nn.LSTM(1, 1))

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_layers, self.rate = 3, 0.5
            self.batch_first = False

    module = importlib.import_module(__name__)
    for name, thing in (("set_momentum", set_momentum), ("schedule", schedule), ("Own", Own)):
        monkeypatch.setattr(module, name, thing, raising=False)
    trained, other = built(), built()
    saves, restores = (OwnAttributes([Root("model", item)], (), [item], "cpu", print) for item in (trained, other))
    schedule(trained)
    state = saves.state()
    restores.put_back(state)
    assert other[0].momentum == 0.5 and other[1].p == 0.5
    assert [entry[0] for entry in state] == ["model.0", "model.1"], "and no LSTM"
    restores.put_back([["model.0", {"eps": 0.5, "momentum": 0.125, "training": 0}]])
    assert other[0].momentum == 0.125 and other[0].eps == 1e-5 and other[0].training


@pytest.mark.parametrize("is_callback", [False, True])
def test_large_arrays_are_named(is_callback):
    thing, told = Keeps(), []
    thing.names, thing.all = np.zeros(200_000), None
    saves = looked_at(thing, told, is_callback=is_callback)
    saves.state()
    assert not told or is_callback
    thing.names[5::100] += 1
    assert saves.state() == [["thing"]] and "thing (names" in told[-1]


def test_an_iterator_that_has_given_further_items_is_named_and_the_rest_goes_on():
    """As that of a second loader, from which a step takes its own batch."""
    made = {
        "loader": iter(DataLoader(numbers(4))), "count": itertools.count(3), "list": iter([1, 2]), "cycle": itertools.cycle([1, 2]),
        "generator": (number for number in range(3)),
    }  # fmt: skip
    for name, iterator in made.items():
        thing, told = Keeps(), []
        with open(__file__) as file:
            thing.names, thing.all, thing.weight = file, iterator, 1
            saves = looked_at(thing, told)
            saves.state()
            assert bool(told) == (name == "cycle"), "where it is shows nowhere"
            next(thing.all)
            next(file)
            thing.weight += 1
            assert saves.state() == [["thing", {"weight": 2}, {}, {}, {}]] and "thing (all)" in told[-1], name


def test_readings_of_a_clock_are_the_sessions():
    thing = Keeps()
    saves = looked_at(thing, [])
    thing.number, thing.other, thing.train = int(time.time()) + 60, time.monotonic(), time.monotonic_ns()
    thing.tensor = 5
    assert saves.state()[0][1] == {"tensor": 5}


def test_a_list_of_names_comes_back_in_its_order_where_it_is_the_same_list():
    thing, other = Keeps(), Keeps()
    saves, restores = (OwnAttributes([Root("thing", item)], (), (), "cpu", print) for item in (thing, other))
    thing.names.reverse()
    saved, shared = saves.state(), other.names
    restores.put_back(saved)
    assert other.names == ["c", "b", "a"] and other.names is shared
    assert restores.state()[0][4]["names"]["order"].tolist() == [2, 1, 0], "the next session begins otherwise"
    thing.names.append("d")
    assert saves.state() == [["thing"]], "a name comes from no checkpoint"
    third = Keeps()
    third.names = ["a", "b", "x"]
    told = []
    misfits = OwnAttributes([Root("thing", third)], (), (), "cpu", told.append)
    misfits.put_back(saved)
    misfits.state()
    assert third.names == ["a", "b", "x"] and "thing (names: of another kind or size than it was)" in told[0]


def test_a_list_of_names_that_is_made_and_shuffled_at_each_begin_comes_back_in_its_order():
    """As where `train_dataloader` lists the files and shuffles them: a session begins with an order of its own."""
    thing, other = Keeps(), Keeps()
    thing.names, other.names = [("b", 1), ("a", 1.0), ("c", 0), ("a", 1)], [("a", 1), ("a", 1.0), ("b", 1), ("c", 0)]
    saves, restores = (OwnAttributes([Root("thing", item)], (), (), "cpu", print) for item in (thing, other))
    made_anew = [(f"{name}", number) for name, number in thing.names]
    thing.names = [made_anew[place] for place in (2, 0, 3, 1)]
    restores.put_back(saves.state())
    assert [*map(repr, other.names)] == ["('c', 0)", "('b', 1)", "('a', 1)", "('a', 1.0)"]
    thing.names = [("d", 1)]
    assert saves.state() == [["thing"]], "a name comes from no checkpoint"


@pytest.mark.parametrize(
    "state", [5, {}, {"order": torch.tensor([9, 9, 9]), "of": 0}, {"order": [1], "of": "x"}, {"param_groups": 5}]
)
def test_states_of_a_stranger_are_refused(state):
    thing, told = Keeps(), []
    saves = OwnAttributes([Root("thing", thing)], (), (), "cpu", told.append)
    saves.put_back([["thing", {}, {}, {}, dict.fromkeys(("optimizer", "all", "names", "weight", "train"), state)]])
    saves.state()
    assert thing.names == ["a", "b", "c"] and len(thing.all) == 1 and callable(thing.train)
    assert thing.weight.tolist() == [1, 1] and thing.optimizer.param_groups[0]["lr"] == 0.1


def test_the_device_of_a_batch_is_no_state():
    """Of each batch another object. The script's name may also be one of the library's own, as Lightning's `_device`."""

    def trains(thing):
        thing.number, thing.file = 3, torch.device("cpu")

    trained, other, told = changed_and_put_back(trains)
    assert trained.file == torch.device("cpu") and (other.number, other.file) == (3, None)
    assert not any(told)


def test_a_cache_is_not_put_back_without_what_it_holds():
    """A data set with the number of the open shard, and its lines."""

    def opens(thing):
        thing.number, thing.file = 3, ["lines"]

    _, other, told = changed_and_put_back(opens)
    assert (other.number, other.file) == (0, None) and "thing (file)" in told[0]


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse_csr(), lambda: torch.empty(1, device="meta"),
        lambda: 1 << 63,
        lambda: np.zeros(1 << 20), lambda: np.array(["a"]), lambda: [[0.0] * 101] * 100, lambda: {(1, 2): 3}, lambda: [[[[[1]]]]],
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), lambda: [collections.Counter()], lambda: {1, 2},
        lambda: collections.defaultdict(int, {1: 2}), lambda: collections.deque([1], maxlen=2),
    ],
)  # fmt: skip
def test_what_a_checkpoint_cannot_hold_is_named_and_stops_no_save(value):
    """The last two are lost with their kind where a new process has not made them yet."""
    told, thing = [], Holder()
    saves = looked_at(thing, told)
    thing.large = value()
    assert saves.state() == [["thing"]] and "thing (large)" in told[0]


def test_what_one_object_is_to_two_attributes_stays_so_or_is_two():
    def shares(thing):
        thing.large = thing.tensor

    def parts(thing):
        thing.tensor = torch.tensor([6.0, 6.0])
        thing.large = torch.tensor([7.0, 7.0])

    _, other, _ = changed_and_put_back(parts, before=shares)
    assert (other.tensor.tolist(), other.large.tolist()) == ([6, 6], [7, 7])
    _, other, _ = changed_and_put_back(lambda thing: thing.tensor.add_(1), before=shares)
    assert other.tensor is other.large and other.tensor.tolist() == [1, 1]


def test_what_data_and_a_callback_share_stays_one_whenever_each_is_put_back():
    def made():
        data, callback, told = Holder(), Holder(), []
        callback.table = data.table
        return (
            data,
            callback,
            OwnAttributes([Root("data", data, loader="train"), Root("callback", callback)], (), (), "cpu", told.append),
        )

    trained, _, saves = made()
    trained.table["b"] = 3
    data, callback, attributes = made()
    for loader in ("", "train", None):
        attributes.put_back(saves.state(), loader=loader)
        assert data.table is callback.table and data.table == {"a": 1, "b": 3}


def test_weights_are_not_written_through_an_attribute_that_began_as_one_of_them():
    model, told, thing = nn.Linear(1, 1), [], Holder()
    with torch.no_grad():
        model.weight.fill_(5)
    thing.tensor = model.weight.detach()
    saves = OwnAttributes([Root("thing", thing)], (), [model], "cpu", told.append)
    saves.put_back([["thing", {"tensor": torch.full((1, 1), -9.0)}, {}]])
    assert model.weight.item() == 5 and thing.tensor.item() == -9


def test_a_leaf_that_the_script_trains_by_itself_stays_the_same():
    def begins(thing):
        thing.tensor = torch.zeros(1, requires_grad=True)
        thing.large = thing.tensor  # as its optimizer holds it

    def steps(thing):
        thing.tensor.data.add_(1)

    _, other, _ = changed_and_put_back(steps, before=begins)
    assert other.large is other.tensor and other.tensor.requires_grad and other.tensor.item() == 1


def test_a_module_that_shares_weights_with_the_model_goes_on_with_its_own():
    model, told = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), []

    def sharing():
        thing = Holder()
        thing.module = nn.Sequential(model[0], nn.Linear(1, 1))
        return thing, OwnAttributes([Root("thing", thing)], (), [model], "cpu", told.append)

    thing, saves = sharing()
    thing.module[1].weight.data.fill_(7)
    state = saves.state()
    other, its = sharing()
    its.put_back(state)
    assert other.module[1].weight.item() == 7 and other.module[0] is model[0] and not told


def test_a_model_of_very_many_modules_leaves_room_for_the_callbacks(monkeypatch):
    monkeypatch.setattr("kgorch.worker.integrations.attribute_search.MOST_OBJECTS", 5)
    told, thing = [], Holder()
    model = nn.Sequential(*(Annealed() for _ in range(9)))
    saves = OwnAttributes([Root("model", model), Root("thing", thing)], (), [model], "cpu", told.append)
    thing.number = 5
    assert ["thing", {"number": 5}, {}, {}, {}] in saves.state() and "(more than 5 objects)" in told[0]


def test_a_metric_of_a_callback_and_weights_that_are_in_no_state_dict_are_named():
    class Metric(nn.Module):
        total = 0

    class Hides(nn.Linear):
        def state_dict(self, *_, **__):
            return {}

    told, thing = [], Holder()
    thing.module, thing.inner = Metric(), Hides(1, 1)
    saves = looked_at(thing, told, is_callback=True)
    thing.number = 5
    thing.inner.weight.data += 1
    assert saves.state()[0] == ["thing"] and "thing (inner, module, modules)" in told[0]


def test_what_is_larger_than_the_training_is_named_and_not_saved(monkeypatch):
    monkeypatch.setattr("kgorch.worker.integrations.own_attributes.MOST_BYTES", 100)
    told, thing = [], Holder()
    saves = looked_at(thing, told)
    thing.large = torch.ones(100)
    assert saves.state() == [["thing"]] and "thing (large)" in told[0]


def test_a_stranger_sets_nothing_but_numbers_and_tensors_that_the_script_sets_itself():
    told, thing = [], Holder()
    saves = looked_at(thing, told)
    for values in (
        {"text": "/etc/passwd"},
        {"train": 5},
        {"unknown": 5},
        {"__class__": 5},
        {"number": "x"},
        {"items": ["x"]},
    ):
        saves.put_back([["thing", values, {}]])
    saves.put_back(
        [["thing", {}, {"module": {"weight": torch.ones(3, 3)}, "number": {}}], ["another", {"number": 1}, {}]]
    )
    saves.state()
    assert "thing (module: of another kind or size than it was)" in told[-1]
    thing.module = Annealed()
    saves.put_back([["thing", {}, {"module": {**Annealed().state_dict(), "places": torch.ones(1)}}]])
    saves.state()
    assert "thing (module: of another kind or size than it was)" in told[-1]
    assert thing.module.places.tolist() == [0, 1, 2]
    module = Annealed()
    values = {"net": 3, "forward": 5, "training": 0, "_modules": {}, "temperature": 0.5}
    looked_at(module, told).put_back([["thing", values, {}]])
    assert isinstance(module.net, nn.Linear) and callable(module.forward)
    assert module.training and module.temperature == 0.5
    values = {"weight": 4, "_modules": {"a": 1}, "_buffers": {"b": 1}}
    looked_at(module.net, told, label="trainer").put_back([["trainer", values, {}]])
    assert not module.net._modules and not module.net._buffers and isinstance(module.net.weight, nn.Parameter)
    saves.put_back([["thing", {"number": 3}]])  # as an earlier version has written it
    assert (thing.text, thing.items, thing.number, callable(thing.train)) == ("a", [1], 3, True)
    for saved in (
        None,
        {},
        [None],
        [[]],
        [["thing", 5]],
        [[5, {}]],
        [["thing", {5: 5, "number": {"a": [[[[[[5]]]]]]}}]],
    ):
        saves.put_back(saved)
    assert thing.number == 3


def test_an_object_whose_code_fails_is_named_and_costs_no_run():
    class Fails(nn.Linear):
        def state_dict(self, *args, **kwargs):
            raise RuntimeError("not now")

    told, thing = [], Holder()
    thing.table = Fails(1, 1)
    saves = looked_at(thing, told)
    thing.number, thing.inner = 5, Fails(1, 1)
    assert saves.state()[0] == ["thing"] and "thing (RuntimeError)" in told[0]


def test_a_look_at_the_running_functions_that_fails_is_named_and_costs_no_run():
    told = []
    saves = OwnAttributes([], (), (), "cpu", told.append, running=lambda: [Root("thing", 1 // 0)])
    assert saves.state() == [] and "running functions (ZeroDivisionError)" in told[0]
    saves.state()
    assert len(told) == 1


def test_a_tensor_of_a_graph_and_one_that_the_checkpoint_holds_are_none_of_an_object():
    told, thing, model = [], Holder(), nn.Linear(2, 2)
    saves = OwnAttributes([Root("thing", thing)], (), [model], "cpu", told.append)
    thing.tensor, thing.large = model(torch.ones(2)), model.weight.detach()
    thing.module = model
    with torch.no_grad():
        model.weight.add_(1)
    assert saves.state() == [["thing", {}, {}, {}, {}]] and not told


def test_objects_in_objects_are_looked_at_and_those_of_libraries_are_not():
    told, outer = [], Holder()
    outer.inner = Holder()
    saves = looked_at(outer, told)
    outer.inner.number = 9
    assert [entry[0] for entry in saves.state()] == ["thing", "thing.inner"] and saves.state()[1][1] == {"number": 9}
    assert looked_at(collections.UserDict(), told).state() == []
    names = [root.label for root in data_roots("train", {"a": Subset(numbers(3), [0]), "b": DataLoader(numbers(2))})]
    assert names == [
        "train.a",
        *(f"train.b.{name}" for name in ("collate_fn", "sampler", "batch_sampler")),
        "train.a.dataset",
        "train.b.dataset",
    ]
