"""What an integration decides: which training is carried, what of a model is saved, what of a log is a metric."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kgorch
from kgorch.errors import KgorchError
from kgorch.protocol import transport
from kgorch.protocol.codec import decode
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry
from kgorch.worker.data import batches
from kgorch.worker.integrations import carrier, import_hook, transformers_trainer


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """A library `fakelib` with a Trainer, and ours that adapts it; imported anew in each test."""
    (tmp_path / "fakelib.py").write_text("class Trainer:\n    name = 'as it was'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def adapted_by(text: str) -> None:
        (tmp_path / "ours.py").write_text(text)
        importlib.invalidate_caches()
        # alone: what is adapted stays so in this process
        monkeypatch.setattr(import_hook, "MODULES", {"fakelib": "ours"})

    yield adapted_by
    for name in ("fakelib", "ours"):
        sys.modules.pop(name, None)


def test_a_trainer_is_adapted_when_the_script_imports_it(hooked):
    hooked("def adapt(module): module.Trainer.name = 'adapted'")
    import_hook.install()
    assert "fakelib" not in sys.modules
    import fakelib

    assert fakelib.Trainer.name == "adapted" and fakelib.__spec__.loader.get_filename().endswith("fakelib.py")


def test_a_trainer_that_is_imported_already_is_adapted_as_well(hooked):
    hooked("def adapt(module): module.Trainer.name = 'adapted'")
    import fakelib

    assert fakelib.Trainer.name == "as it was"
    import_hook.install()
    assert fakelib.Trainer.name == "adapted"


def test_a_version_that_cannot_be_adapted_runs_as_it_is_and_is_reported(hooked, capsys):
    hooked("def adapt(module): module.Trainer.was_renamed()")
    import_hook.install()
    import fakelib

    assert fakelib.Trainer.name == "as it was"
    said = capsys.readouterr().err
    assert "fakelib is of a version that kgorch does not know" in said and "was_renamed" in said


def test_a_script_that_runs_alone_is_not_carried(monkeypatch):
    monkeypatch.delenv("KGORCH_LAUNCH", raising=False)
    with carrier.carried_training("some") as session:
        assert session is None


def test_a_second_training_of_a_script_is_told_once_beside_what_the_first_one_said(tmp_path, monkeypatch, capsys):
    """It was in the log alone, while session after session began it anew."""
    first = SimpleNamespace(end=lambda: None, exactness={"data": "replayed"})
    launch = SimpleNamespace(socket=str(tmp_path / "socket"), attempt="1.1")
    monkeypatch.setattr(carrier, "Session", lambda *_, **__: first)
    monkeypatch.setattr(carrier.worker, "launch", lambda: launch)
    monkeypatch.setattr(carrier, "note_version", lambda *_: None)
    monkeypatch.setattr(carrier, "_carried", [])
    monkeypatch.delenv("RANK", raising=False)
    with carrier.carried_training("transformers") as session:
        assert session is first
    with transport.listen(tmp_path / "socket") as listener:
        for _ in range(2):
            with carrier.carried_training("transformers") as session:
                assert session is None
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            entry = decode(connection.recv(65536))
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert entry == JournalEntry("1.1", "exactness", {"data": "replayed", "training": carrier.SECOND})
    assert carrier.SECOND in capsys.readouterr().err


def lora() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    return net


def test_frozen_weights_are_neither_saved_nor_lost():
    net = lora()
    tracked = kgorch.trainable(net)
    saved = {name: value.clone() for name, value in tracked.state_dict().items()}
    assert saved.keys() == {name for name in net.state_dict() if not name.startswith("0.")}
    frozen = net[0].weight.clone()
    with torch.no_grad():
        net[2].weight.zero_()
        net[1].running_mean.fill_(5)
    tracked.load_state_dict(saved)
    assert torch.equal(net[0].weight, frozen)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in saved.items())


def test_the_fingerprint_of_frozen_weights_tells_any_change_and_nothing_else():
    """One value of many, which no sample holds; types of all sizes; an empty weight and a single value."""
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]
    net, known = nn.Module(), set()
    for number, dtype in enumerate(types):
        net.register_parameter(f"w{number}", nn.Parameter(torch.ones(7, 101).to(dtype), requires_grad=False))
    net.empty, net.single = nn.Parameter(torch.ones(0, 3), False), nn.Parameter(torch.tensor(2.0), False)

    def now() -> str:
        return kgorch.trainable(net).fingerprint()

    known.add(now())
    assert known == {now()}
    for number in range(len(types)):
        weight = getattr(net, f"w{number}").data
        weight.reshape(-1)[1] = torch.tensor(0).to(weight.dtype)
        known.add(now())
    net.single.data += 1
    known.add(now())
    assert len(known) == 2 + len(types)
    net.extra = nn.Parameter(torch.ones(2))
    assert now() in known, "a trained weight does not belong to it"
    assert kgorch.trainable(nn.Linear(2, 2)).fingerprint() == ""


class Quantised(torch.Tensor):
    """A wrapper that knows next to no operation, as libraries of quantised weights have them."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


def test_frozen_weights_of_a_kind_that_is_not_known_are_left_alone():
    net = nn.Linear(2, 2)
    net.register_parameter("odd", nn.Parameter(Quantised(torch.ones(3)), requires_grad=False))
    net.register_parameter("wide", nn.Parameter(torch.ones(3, dtype=torch.complex128), requires_grad=False))
    tracked = kgorch.trainable(net)
    for _ in range(2):
        assert tracked.state_dict().keys() == {"weight", "bias"}
    assert tracked.fingerprint() == ""


def test_a_model_without_frozen_weights_is_tracked_as_it_is():
    net = nn.Linear(2, 2)
    assert carrier.trainable(net) is net
    assert carrier.trainable(lora()).state_dict().keys() == kgorch.trainable(lora()).state_dict().keys()


def test_numbers_and_single_tensors_of_a_log_are_metrics():
    logged = {
        "loss": 1,
        "lr": 0.5,
        "one": torch.tensor([2.0]),
        "many": torch.ones(2),
        "name": "x",
        "nan": float("nan"),
        "is": True,
    }
    assert carrier.figures(logged).keys() == {"loss", "lr", "one"}


@pytest.mark.parametrize(
    ("state", "stays"),
    [
        ({"best": "out/a.ckpt", "k": {"out/b.ckpt": 0.5}, "mode": "min", "none": None}, True),
        ({"best": "/etc/passwd"}, False),
        ({"k": {"out/../../x": 0.5}}, False),
        (["../x"], False),
        ("out/link/x", False),
        ("s3://bucket/out", False),
        ("~/x", False),
        ("~root/x", False),
        ("other/x", False),
        ("Monitored metric val/acc did not improve", True),
        ("val/../../x", False),
    ],
    ids=str,
)
def test_a_saved_state_names_no_file_elsewhere(tmp_path, monkeypatch, state, stays):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to("/etc")
    (tmp_path / "other").mkdir()
    assert carrier.stays_in(state, "out", None) is stays


@pytest.mark.parametrize(
    ("version", "is_newer"), [("9.1.0", True), ("5.99.0.dev0", False), ("4.50.0", False), ("", False)]
)
def test_a_version_that_is_newer_than_the_tested_ones_runs_and_exactness_says_so(monkeypatch, version, is_newer):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with kgorch.attach() as session:
        carrier.note_version(session, "transformers")
        said = session.exactness.get("trainer", "")
    assert ("transformers 9.1.0 is newer than what kgorch was tested with (5.x)" in said) is is_newer


def test_a_program_of_a_foreign_stage_that_attaches_learns_what_to_change(tmp_path, monkeypatch):
    launch = LaunchSpec(
        "r", "id", "train", "1.1", str(tmp_path), "train.py", ".", 1, "", "c", "o", "h", foreign={"processes": 1}
    )
    monkeypatch.setenv("KGORCH_LAUNCH", str(launch.write()))
    with pytest.raises(KgorchError, match=r"stage 'train' calls kgorch.attach\(\).*\[stage.foreign\]") as error:
        kgorch.attach()
    assert "take [stage.foreign] out of the plan" in str(error.value.next_step)


def test_a_process_that_the_script_has_started_itself_is_refused(tmp_path, monkeypatch):
    """As Accelerate's notebook_launcher does: it failed with "mmap length is greater than file size"."""
    launch = LaunchSpec("r", "id", "train", "1.1", str(tmp_path), "train.py", ".", 1, "", "c", str(tmp_path), "h")
    monkeypatch.setenv("KGORCH_LAUNCH", str(launch.write()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(KgorchError, match="one of 2 that train together, and the stage has ranks = 1") as error:
        kgorch.attach()
    assert "`ranks = 2`" in str(error.value.next_step)


class InParts:
    """In place of a session: each batch in parts of one sample, as under a microbatch of 1."""

    def accumulate(self, batch, work, *, scaler):
        parts = batches.split(batch, 1)
        return sum(work(part, 1 / len(parts)).float() / len(parts) for part in parts)


def causal():
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=1, **size))


def classifier():
    """Takes the number of items and does not use it."""
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForSequenceClassification(
        BertConfig(vocab_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
    )


@pytest.mark.parametrize("build", [causal, classifier])
def test_the_parts_of_a_batch_have_the_gradient_and_the_loss_of_the_whole(tmp_path, monkeypatch, build):
    """Of three sentences with 7, 3 and 1 tokens each token counts alike."""
    transformers_library = pytest.importorskip("transformers.trainer")
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    training_step = transformers_trainer._in_microbatches(transformers_library.Trainer.training_step)
    ids = torch.arange(24).view(3, 8) % 16
    labels = ids.masked_fill(torch.arange(8) > torch.tensor([[7], [3], [1]]), -100)
    if build is classifier:
        labels = torch.tensor([0, 1, 1])
    arguments = transformers_library.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    model = build()
    trainer = transformers_library.Trainer(model, arguments)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    items = (labels[..., 1:] != -100).sum() if build is causal else torch.tensor(3)
    found = []
    for carried in (None, SimpleNamespace(session=InParts())):
        trainer._kgorch = carried
        model.zero_grad()
        loss = training_step(trainer, model, {"input_ids": ids, "labels": labels}, items)
        found.append((loss.item(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]))
    (whole, gradients), (loss, in_parts) = found
    assert loss == pytest.approx(whole, rel=1e-5)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(gradients, in_parts, strict=True))


class Reports(list):
    """In place of a session: what is reported, and at how many boundaries."""

    resumed, steps = False, 0
    world_size, device = 1, torch.device("cpu")

    def boundary(self, **_):
        self.steps += 1

    def report(self, **figures):
        self.append((self.steps, {name: round(float(value), 4) for name, value in figures.items()}))

    def evaluation(self):
        return contextlib.nullcontext()

    generators_of_loaders = ()

    def accumulate(self, batch, work, **_):
        return work(batch, 1.0)

    def __getattr__(self, _):
        return lambda *loader, **_: loader[0] if loader else None


@pytest.fixture
def lightning_session(lightning, monkeypatch):
    """The session of a Lightning training in this process."""
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    session = Reports()
    monkeypatch.setattr(carrier, "carried_training", lambda _: contextlib.nullcontext(session))
    return session


def lightning_trainer_of(library, folder, epochs: int):
    return library.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        default_root_dir=folder, enable_model_summary=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_lightning_leaves_no_cycle_that_holds_its_batch(lightning, lightning_session, tmp_path):
    """On a GPU such batches would pile up until Python's next collection."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.batches, self.alive = [], []

        def training_step(self, batch, index):
            self.alive.append(sum(known() is not None for known in self.batches))
            self.batches.append(weakref.ref(batch[0]))
            return (self.weight * batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    gc.disable()
    try:
        trainer = lightning_trainer_of(lightning, tmp_path, 1)
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(12, 1))))
    finally:
        gc.enable()
    assert lightning_session.steps == 12 and max(module.alive) <= 1


@pytest.mark.filterwarnings("ignore")
def test_what_lightning_logs_is_reported_once_at_its_step(lightning, lightning_session, tmp_path):
    """A batch's value, one that is logged now and then, an epoch's mean, an evaluation's, and what the end of an epoch logs."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def training_step(self, batch, index):
            self.log("loss", batch[0].sum())
            self.log("mean", batch[0].sum(), on_step=False, on_epoch=True)
            if index == 1:
                self.log("rarely", 7.0)
            return (self.weight * batch[0]).sum()

        def validation_step(self, batch, index):
            self.log("val_loss", batch[0].sum() + self.current_epoch)

        def on_train_epoch_end(self):
            self.log("last", 5.0 + self.current_epoch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    numbers = DataLoader(TensorDataset(torch.tensor([[1.0], [2.0], [6.0]])))
    lightning_trainer_of(lightning, tmp_path, 2).fit(Module(), numbers, numbers)
    assert lightning_session == [
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0, "rarely": 7.0}),
        (3, {"loss": 6.0}),
        (3, {"val_loss": 3.0}),
        (3, {"mean": 3.0, "last": 5.0}),
        (4, {"loss": 1.0}),
        (5, {"loss": 2.0, "rarely": 7.0}),
        (6, {"loss": 6.0}),
        (6, {"val_loss": 4.0}),
        (6, {"mean": 3.0, "last": 6.0}),
    ]
