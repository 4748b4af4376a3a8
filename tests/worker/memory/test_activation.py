"""Activation checkpointing at run time: the same bits, less memory, and no trace of it once it is off."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from kgorch.worker.memory.activation_checkpointing import (
    COMPILES_BATCHNORM,
    ActivationCheckpointing,
    CannotRecompute,
    blocks,
    has_batchnorm,
    has_sync_batchnorm,
)

STEPS, ON, OFF = 6, 2, 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Stack(nn.Module):
    """`inner` layers between a first and a last one."""

    def __init__(self, inner, **kwargs) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 16), nn.ModuleList(inner), nn.Linear(16, 1)
        self.kwargs = kwargs

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, **self.kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x)


class Mlp(nn.Module):
    """16 wide in and out; `between` stands in its midst."""

    def __init__(self, between=None) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(16, 32), between or nn.Dropout(0.3), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.between(torch.relu(self.up(x))))


class Draws(nn.Module):
    """Chance from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        drop = torch.rand(x.shape, generator=self.generator) < 0.8
        return x * drop * random.random() * float(numpy.random.rand()) + torch.randn_like(x)


class Counts(nn.Module):
    """What it computes depends on an attribute and on a buffer, both of which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.hidden = 0, torch.ones(1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.calls += 1
        self.scale *= 0.9
        self.hidden = (self.hidden + x.detach().mean()).tanh()
        return x * self.scale.clone() / self.calls + self.hidden


class InPlace(nn.Module):
    """Begins with a change of its input, which its caller sees."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.relu_(self.up(F.relu_(x))))


class Talkative(Mlp):
    """Takes more than tensors and returns more than one."""

    def forward(self, x, options=None, *, masks=()):
        return x + self.down(self.up(x) * options["factor"] * masks[0]), None, {"seen": x.shape}


class ByHand(nn.Module):
    """A person's own checkpoint() inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mlp, self.out, self.reentrant = Mlp(nn.BatchNorm1d(32)), nn.Linear(16, 16), reentrant

    def forward(self, x):
        return self.out(checkpoint(self.mlp, x, use_reentrant=self.reentrant))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        units = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU(inplace=True))
            for norm in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4))
        ]
        self.first, self.units, self.last = nn.Conv2d(1, 4, 1), nn.Sequential(*units), nn.Linear(4 * 8, 1)

    def forward(self, x):
        return self.last(self.units(self.first(x.reshape(-1, 1, 2, 4))).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.first, self.encoder, self.last = nn.Linear(2, 16), nn.TransformerEncoder(layer, 3), nn.Linear(16, 1)

    def forward(self, x):
        parts = x.reshape(-1, 4, 2)
        padding = torch.zeros(parts.shape[:2], dtype=torch.bool)
        padding[0, 2:] = True
        return self.last(self.encoder(self.first(parts), src_key_padding_mask=padding).mean(1))


MODELS = {
    "dropout": lambda: Stack([Mlp() for _ in range(3)]),
    "batchnorm": lambda: Stack([Mlp(nn.BatchNorm1d(32)) for _ in range(3)]),
    "cumulative batchnorm": lambda: Stack([Mlp(nn.BatchNorm1d(32, momentum=None)) for _ in range(3)]),
    "convolutions": Convolutions,
    "chance from everywhere": lambda: Stack([Mlp(Draws()) for _ in range(3)]),
    "counters": lambda: Stack([Mlp(Counts()) for _ in range(3)]),
    "spectral norm": lambda: Stack([Mlp(spectral_norm(nn.Linear(32, 32))) for _ in range(3)]),
    "in place": lambda: Stack([InPlace() for _ in range(3)]),
    "arguments": lambda: Stack([Talkative() for _ in range(3)], options={"factor": 0.5}, masks=[torch.rand(32)]),
    "by hand": lambda: Stack([ByHand(reentrant=False) for _ in range(3)]),
    "by hand, reentrant": lambda: Stack([ByHand(reentrant=True) for _ in range(3)]),
    "one block, many times": lambda: Stack([Mlp(), shared := Mlp(nn.BatchNorm1d(32)), shared, shared]),
    "recurrent": lambda: Stack([nn.LSTM(16, 16, num_layers=2, dropout=0.2) for _ in range(3)]),
    "transformer": Transformer,
}


def _seeded(make):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return make()


def _trained(make, switches=None, *, autocast=False, twice=False):
    """The state after STEPS; `switches` has a verb of Activations by the step before which it is called."""
    model = _seeded(make)
    activations = ActivationCheckpointing({"model": model})
    assert activations.blocks
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        if verb := (switches or {}).get(step):
            getattr(activations, verb)()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(16, 8, generator=data)).square().mean()
            if twice:  # two forwards before the backward
                loss = loss + model(torch.randn(16, 8, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
    chance = torch.get_rng_state(), random.random(), numpy.random.rand()
    return model.state_dict() | {"chance": chance[0]}, chance[1:]


def _same(one, two) -> bool:
    return (
        one[1] == two[1] and one[0].keys() == two[0].keys() and all(map(torch.equal, one[0].values(), two[0].values()))
    )


@pytest.mark.parametrize("how", [{}, {"autocast": True}, {"twice": True}], ids=["plain", "bf16", "two forwards"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_switched_on_and_off_again_the_bits_are_the_same(name, how):
    assert _same(
        _trained(MODELS[name], {ON: "switch_on", OFF: "switch_off"}, **how),
        _trained(MODELS[name], **how),
    )


def test_resumed_with_it_on_the_bits_are_the_same():
    assert _same(_trained(MODELS["batchnorm"], {0: "switch_on"}), _trained(MODELS["batchnorm"]))


def test_under_ddp_the_bits_are_the_same(tmp_path):
    program = Path(__file__).parents[2] / "programs" / "switches.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), "2", tmp_path / "store"], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said, _ = (rank.communicate(timeout=280)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    answers = [
        line.split()[0] for line in said.splitlines() if not line.startswith("[Gloo]")
    ]  # PyTorch 2.8 says it there
    assert answers == ["True"] * 4, said


def test_the_surface_unet_has_blocks_and_the_same_bits():
    model = pytest.importorskip("kgorch.workloads.surface_detection.model")

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model.SurfaceUNet(4, 2, kernel=3)

        def forward(self, x):
            return self.net(x.repeat(1, 16).reshape(-1, 1, 4, 4, 8))

    assert len(blocks({"model": Flat()})) >= 4
    assert _same(_trained(Flat, {ON: "switch_on", OFF: "switch_off"}), _trained(Flat))


def test_a_gradient_of_a_gradient_is_the_same():
    def penalties(switched):
        model = _seeded(MODELS["spectral norm"])
        if switched:
            ActivationCheckpointing({"model": model}).switch_on()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    assert all(map(torch.equal, penalties(True), penalties(False)))


# What it spares

MEMORY = """
import gc, resource, torch
from test_activation import Mlp, Stack
from kgorch.worker.memory.activation_checkpointing import ActivationCheckpointing
torch.set_num_threads(1)
model = Stack([Mlp() for _ in range(12)])
activations = ActivationCheckpointing({"model": model})
x = torch.randn(100_000, 8)
data = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (data + 300 * 2**20, resource.RLIM_INFINITY))
for verb in ("switch_off", "switch_on"):
    getattr(activations, verb)()
    try:
        model(x).mean().backward()
        print("done")
    except RuntimeError as error:
        print("can't allocate memory" in str(error))
    gc.collect()
"""


def test_what_does_not_fit_fits_with_it_on():
    """Some 45 MB a block, 12 blocks, in 300 MB."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back
    said = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=env, check=True)
    assert said.stdout.split() == ["True", "done"]


# What is chosen


def _chosen(model) -> list[str]:
    return [name.removeprefix("model.") for name in blocks({"model": model})]


class Level(nn.Sequential):
    def __init__(self, wide_in, wide_out):
        super().__init__(nn.Conv2d(wide_in, wide_out, 3), nn.BatchNorm2d(wide_out), nn.Conv2d(wide_out, wide_out, 3))


class Unet(nn.Module):
    """As many are written: levels of one class and different width, as attributes."""

    def __init__(self):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.down1, self.down2, self.up1, self.up2 = Level(8, 16), Level(16, 32), Level(32, 16), Level(16, 8)
        self.out = nn.Conv2d(8, 1, 1)


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(Mlp() for _ in range(depth)), nn.Linear(16, 16)


def test_levels_of_a_unet_are_blocks_and_what_lies_beside_them():
    assert _chosen(Unet()) == ["inc", "down1", "down2", "up1", "up2"]


def test_a_stage_gives_way_to_its_blocks():
    model = nn.ModuleDict({"stages": nn.ModuleList([Stage(2), Stage(3)])})
    assert _chosen(model) == [
        f"stages.{stage}.blocks.{block}" for stage, depth in ((0, 2), (1, 3)) for block in range(depth)
    ]


def test_transformer_layers_are_blocks_and_not_the_attentions_in_them():
    assert _chosen(nn.Transformer(16, 2, 2, 2, 32)) == [
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1",
    ]  # fmt: skip


def test_of_one_block_nothing_is_spared():
    assert not blocks({"model": nn.ModuleDict({"lstm": nn.LSTM(8, 8, 2), "out": nn.Linear(8, 1)})})
    assert not blocks({"model": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))})


def test_what_says_that_it_does_not_support_it_is_left_out():
    model = MODELS["dropout"]()
    model.layers[1].supports_gradient_checkpointing = False
    assert _chosen(model) == ["layers.0", "layers.2"]


def test_modules_tracked_twice_or_within_each_other_are_wrapped_once():
    model = MODELS["dropout"]()
    tracked = {"part": model.layers[0], "layers": model.layers, "model": model, "again": model}
    found = blocks(tracked)
    assert set(found.values()) == set(model.layers) and len(found) == 3


def test_compiled_blocks_are_wrapped_outside():
    model = MODELS["batchnorm"]()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="aot_eager")
    assert _chosen(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_compiled_model_keeps_its_bits():
    def make():
        return torch.compile(MODELS["batchnorm"](), backend="aot_eager")

    if TorchVersion(torch.__version__) < COMPILES_BATCHNORM:
        assert _chosen(make()) == []
        return
    assert _same(_trained(make, {ON: "switch_on", OFF: "switch_off"}), _trained(make))


CLASSES = [type(name, (nn.Module,), {"forward": lambda self, x: x}) for name in ("A", "B", "C")]


@st.composite
def trees(draw, depth=4):
    """Modules in lists and attributes, some with weights, some shared, some with a forward of their own."""
    made: list[nn.Module] = []

    def tree(depth):
        if made and draw(st.integers(0, 9)) == 0:
            return draw(st.sampled_from(made))
        kind = draw(st.sampled_from([*CLASSES, nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.Linear, nn.LSTM]))
        if kind in (nn.Linear, nn.LSTM):
            return kind(2, 2)
        inner = [tree(depth - 1) for _ in range(draw(st.integers(0, 3)))] if depth else []
        if kind in CLASSES or kind is nn.ModuleDict:
            module = kind()
            for number, child in enumerate(inner):
                module.add_module(f"child{number}", child)
        else:
            module = kind(inner) if kind is nn.ModuleList else kind(*inner)
        if kind in CLASSES and draw(st.booleans()):
            module.forward = torch.relu
        made.append(module)
        return module

    return tree(depth)


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=2))
def test_no_block_lies_in_another_and_nothing_stays_behind(roots):
    tracked = {f"model{number}": root for number, root in enumerate(roots)}
    parts = {part for root in roots for part in root.modules()}
    before = {part: dict(vars(part)) for part in parts}
    activations = ActivationCheckpointing(tracked)
    chosen = list(activations.blocks.values())
    assert len({*chosen}) == len(chosen) != 1
    for block in chosen:
        assert not {*chosen} & {part for part in block.modules() if part is not block}
    activations.switch_on()
    assert {part for part in parts if vars(part) != before[part]} == {*chosen}
    activations.switch_off()
    for part in parts:
        assert vars(part) == before[part] and list(vars(part)) == list(before[part])


# What else may happen to a model meanwhile


def test_a_copy_is_a_plain_model_that_trains_itself_alone():
    model = _seeded(MODELS["batchnorm"])
    model.layers[1].forward = functools.partial(Mlp.forward, model.layers[1])
    ActivationCheckpointing({"model": model}).switch_on()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(other.state_dict()) == list(before)
        other(torch.randn(16, 8)).sum().backward()
        assert all(weight.grad is not None for weight in other.parameters())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_pickle_needs_no_kgorch():
    block = _seeded(Mlp)
    model = nn.Sequential(block, Mlp())
    ActivationCheckpointing({"model": model}).switch_on()
    assert b"kgorch" not in pickle.dumps(model)


def test_a_block_that_computes_another_thing_is_named():
    rows = [8]

    class Fickle(Mlp):
        def forward(self, x):
            return x + self.down(self.up(x).split(rows[0])[0].relu().sum(0, keepdim=True))

    model = Stack([Mlp(), Fickle(), Mlp()])
    activations = ActivationCheckpointing({"model": model})
    activations.switch_on()
    loss = model(torch.randn(16, 8)).sum()
    rows[0] = 4
    said = r"model\.layers\.1 gave another result(.|\n)*next: take activation"
    with pytest.raises(CannotRecompute, match=said), activations.explained():
        loss.backward()


def test_an_input_changed_in_place_for_the_first_time_later_is_told():
    in_place = False

    class Sometimes(InPlace):
        def forward(self, x):
            return x + self.down(F.relu_(self.up(F.relu_(x) if in_place else x)))

    model = Stack([Mlp(), Sometimes()])
    ActivationCheckpointing({"model": model}).switch_on()
    model(torch.randn(16, 8)).sum().backward()
    in_place = True
    with pytest.raises(CannotRecompute, match="changed its input in place"):
        model(torch.randn(16, 8))


def test_a_cache_that_layers_append_to_is_off_while_it_is_on():
    """As transformers' decoders have it."""

    class Layer(Mlp):
        def forward(self, x, cache=None):
            if cache is not None:
                cache.append(x)
                x = torch.stack(cache).mean(0)
            return super().forward(x)

    class Decoder(nn.Module):
        supports_gradient_checkpointing = True

        def __init__(self):
            super().__init__()
            self.config, self.layers = SimpleNamespace(use_cache=True), nn.ModuleList(Layer() for _ in range(3))

        def gradient_checkpointing_enable(self):
            raise AssertionError("ours is used")

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, cache=[] if self.config.use_cache else None)
            return x

    model = Decoder()
    activations = ActivationCheckpointing({"model": model})
    activations.switch_on()
    with activations.explained():
        model(torch.randn(4, 16)).sum().backward()
    activations.switch_off()
    assert model.config.use_cache is True


def test_batchnorm_counts_unless_it_is_frozen():
    model = MODELS["batchnorm"]()
    assert has_batchnorm([model]) and not has_batchnorm([model.eval()]) and not has_batchnorm([MODELS["dropout"]()])
    assert has_sync_batchnorm([nn.SyncBatchNorm.convert_sync_batchnorm(model)]) and not has_sync_batchnorm([Mlp()])


@pytest.mark.parametrize("later", ["called", "trained"])
def test_statistics_that_the_first_call_left_alone_count_a_batch_once(later):
    """Stochastic depth may skip a norm in the first call; a norm may be frozen for the first steps."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
            self.is_skipped = False

        def forward(self, x):
            h = self.up(x)
            return x + self.down(h if self.is_skipped else self.norm(h))

    def trained(*, on):
        torch.manual_seed(0)
        blocks = [Block(), Block()]
        model = nn.Sequential(*blocks)
        activations = ActivationCheckpointing({"model": model})
        if on:
            activations.switch_on()
        for step in range(4):
            for block in blocks:
                block.is_skipped = later == "called" and step < 2
                block.norm.train(later != "trained" or step >= 2)
            model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        assert activations.is_on == on
        return model.state_dict()

    with_it, without = trained(on=True), trained(on=False)
    assert without["0.norm.num_batches_tracked"] == 2
    assert all(torch.equal(with_it[name], without[name]) for name in without)
