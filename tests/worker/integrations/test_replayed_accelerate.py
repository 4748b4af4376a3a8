"""Loops around Accelerate begin with their first epoch in each session: what comes of the epochs that are done."""

from __future__ import annotations

import base64
import io
import os
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from cut_session import Cut, CutSession
from small_trainings import goes_on, numbers, train_batch, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader

from kgorch.errors import CannotRestore
from kgorch.worker import entry, session_end
from kgorch.worker.integrations.prepared_loaders import MAX_BYTES, bits_of, text_of

pytestmark = pytest.mark.usefixtures("alone")


def samples(batch) -> list[int]:
    return batch[0].flatten().int().tolist()


def shuffled(count: int = 12) -> DataLoader:
    return DataLoader(numbers(count), 2, shuffle=True)


def prepared(accelerator, *loaders: DataLoader):
    model = nn.Linear(1, 1)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), *loaders)


@pytest.mark.parametrize("cut_at", [5, 6, 8, 12, 14, 17, None])
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_a_script_computes_in_an_epoch_has_a_value_after_it(accelerated, evaluates, cut_at):
    """As the examples of Transformers with --with_tracking: `total_loss` is a number until the first batch."""

    def script(accelerator):
        seen, means = [], []
        model, optimizer, train, other = prepared(accelerator, shuffled(), shuffled(6))
        for _ in range(3):
            total_loss = 0
            for batch in train:
                seen.append(samples(batch))
                loss = ((model(batch[0] / 10) - 1) ** 2).mean()
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if evaluates:
                evaluated = torch.cat([model(batch[0]) for batch in other])
                means.append(evaluated.mean().item())
            means.append(total_loss.item() / len(train) + loss.item())
        return seen, means[-1:] if cut_at else [], weights_of(model)

    if cut_at is None:
        _, whole = accelerated(script)
        assert goes_on(accelerated(script, saved=accelerated.session.saved(is_final=True))[1], whole, 18)
        return
    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    if cut_at % 6 and cut_at > 12:  # the mean of a cut epoch is that of its rest
        whole, resumed = (whole[0], whole[2]), (resumed[0], resumed[2])
    assert steps == 18 and goes_on(resumed, whole, cut_at)
    assert len(resumed[0]) == 18 - cut_at + -(-cut_at // 6) - bool(cut_at % 6)


@pytest.mark.parametrize("cut_at", [1, 2, 3, 4, 5])
def test_windows_of_accumulation_are_those_of_an_uninterrupted_training(accelerated, cut_at):
    def script(accelerator):
        seen = []
        model, optimizer, train = prepared(accelerator, shuffled())
        for _ in range(3):
            for batch in train:
                with accelerator.accumulate(model):
                    train_batch(accelerator, model, optimizer, batch)
                    seen.append((samples(batch), accelerator.sync_gradients))
        return seen, weights_of(model)

    options = {"gradient_accumulation_steps": 4}
    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at, **options)
    assert steps == 6 and goes_on(resumed, whole, cut_at // 2 * 6 + cut_at % 2 * 4)


def test_a_step_in_an_epoch_that_is_done_has_no_effect(accelerated):
    def script(accelerator):
        weights = []
        model, optimizer, train = prepared(accelerator, shuffled())
        for _ in range(3):
            for batch in train:
                assert batch[0].max() < 12
                batch[0].add_(12)  # the next epoch has it as the loader gave it
                train_batch(accelerator, model, optimizer, batch)
            weights.append((weights_of(model), len(optimizer.state)))
        return weights

    with pytest.raises(Cut) as cut:
        accelerated(script, 14)
    torch.manual_seed(3)
    first = weights_of(nn.Linear(1, 1))
    _, (*done, last) = accelerated(script, saved=cut.value.saved)
    assert done == [(first, 0), (first, 0)] and last[0] != first


@pytest.mark.parametrize("cut_at", [8, 12, 14])
def test_an_iterator_that_lasts_for_the_whole_training_goes_on_at_its_batch(accelerated, cut_at):
    def script(accelerator):
        seen = []
        model, optimizer, train, more = prepared(accelerator, shuffled(), shuffled(80))
        further = iter(more)
        for _ in range(3):
            for batch in train:
                other = next(further)
                seen.append((samples(batch), samples(other)))
                train_batch(accelerator, model, optimizer, [batch[0] + other[0]])
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)


def test_an_attribute_that_a_number_lacks_after_an_epoch_without_a_step_is_explained(monkeypatch):
    error = AttributeError("'int' object has no attribute 'item'")
    monkeypatch.setattr(session_end, "empty_epoch", None)
    entry.explain_empty_epoch(error)
    assert str(error) == "'int' object has no attribute 'item'"
    monkeypatch.setattr(session_end, "empty_epoch", 2)
    entry.explain_empty_epoch(error)
    assert "no step left in it: give what is used after the loop a value before it" in str(error)


def weight_in(path: str) -> float:
    return torch.load(path)["weight"].item()


@pytest.mark.parametrize("cut_at", [8, 12, 15])
def test_files_and_logs_of_epochs_that_are_done_stay_as_they_are(accelerated, cut_at):
    logged = []

    def script(accelerator):
        model, optimizer, train, other = prepared(accelerator, shuffled(), shuffled(6))
        accelerator.trackers = [SimpleNamespace(name="t", log=lambda values, step: logged.append((step, values)))]
        for epoch in range(4):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            loss = sum(((model(batch[0] / 10) - 1) ** 2).mean().item() for batch in other)
            accelerator.log({"loss": loss}, step=epoch)
            accelerator.save(accelerator.unwrap_model(model).state_dict(), f"epoch{epoch}.pt")
            accelerator.save_state(f"state{epoch}", safe_serialization=False)
            accelerator.save_model(model, f"model{epoch}", safe_serialization=False)
        return [weight_in(f"{kind}.pt") for kind in ("epoch0", "epoch1", "epoch2", "epoch3")] + [
            weight_in(f"{kind}{epoch}/pytorch_model.bin") for kind in ("state", "model") for epoch in range(4)
        ]

    _, whole = accelerated(script)
    logs = list(logged)
    logged.clear()
    with pytest.raises(Cut) as cut:
        accelerated(script, cut_at)
    assert accelerated(script, saved=cut.value.saved) == (24, whole) and logged == logs
    assert len(set(whole)) == 4


@pytest.mark.parametrize("cut_at", [8, 12, 15])
def test_what_is_logged_is_reported_once_for_each_epoch(accelerated, monkeypatch, cut_at):
    """`status` had no metrics of such a loop, and `keep.best` nothing to rank."""
    reported, report = [], CutSession.report

    def note(self, **metrics):
        report(self, **metrics)
        reported.append(metrics)

    monkeypatch.setattr(CutSession, "report", note)

    def script(accelerator):
        accelerator.log({"loss": 9.0})  # before there is a session
        model, optimizer, train = prepared(accelerator, shuffled())
        for epoch in range(4):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            loss = ((model(torch.ones(1, 1)) - 1) ** 2).mean().detach()
            accelerator.log({"loss": loss, "epoch": epoch, "name": "x", "nested": {"loss": 1.0}, 3: 1.0}, step=epoch)

    accelerated(script)
    whole = [{name: float(value) for name, value in metrics.items()} for metrics in reported]
    metrics = accelerated.session._state.metrics
    assert [sorted(each) for each in whole] == [["epoch", "loss"]] * 4
    assert metrics.values == whole[-1] and metrics.measured == {"epoch": 24, "loss": 24}
    reported.clear()
    with pytest.raises(Cut) as cut:
        accelerated(script, cut_at)
    accelerated(script, saved=cut.value.saved)
    assert [{name: float(value) for name, value in metrics.items()} for metrics in reported] == whole


@pytest.mark.parametrize("is_killed", [False, True])
def test_states_that_are_numbered_go_on_with_their_number(accelerated, is_killed):
    """What an attempt that was killed has written after the newest save is written again."""
    from accelerate.utils import ProjectConfiguration

    def script(accelerator):
        model, optimizer, train = prepared(accelerator, shuffled())
        accelerator.save_state(safe_serialization=False)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            accelerator.save_state(safe_serialization=False)
        return [weight_in(f"checkpoints/checkpoint_{number}/pytorch_model.bin") for number in range(4)]

    def options():
        return {"project_config": ProjectConfiguration(".", automatic_checkpoint_naming=True)}

    _, whole = accelerated(script, **options())
    Path("checkpoints").rename("of the first one")
    with pytest.raises(Cut) as cut:
        accelerated(script, 7, **options())
    if is_killed:
        with pytest.raises(Cut):
            accelerated(script, 14, saved=cut.value.saved, **options())
    assert accelerated(script, saved=cut.value.saved, **options()) == (18, whole)
    assert Path(".kgorch-aside", "checkpoint_2").is_dir() == is_killed


def goes_on_from(accelerator, folder: str, epochs: int = 4):
    """As the examples of Diffusers with --resume_from_checkpoint=latest, or a folder's name."""
    seen, steps = [], 0
    model, optimizer, train = prepared(accelerator, shuffled())
    if folder == "latest":
        folder = max((path.name for path in Path().glob("state*")), default="")
    if folder:
        accelerator.load_state(folder)
        steps = int(folder.removeprefix("state"))
    for _ in range(steps // 6, epochs):
        for batch in train:
            seen.append(samples(batch))
            train_batch(accelerator, model, optimizer, batch)
            steps += 1
            if steps % 6 == 0:
                accelerator.save_state(f"state{steps:02}")
    return seen, weights_of(model)


def test_a_script_that_goes_on_from_its_newest_state_in_a_later_session_is_told_to_leave_that_to_kgorch(accelerated):
    (steps, whole) = accelerated(lambda accelerator: goes_on_from(accelerator, ""))
    for path in sorted(Path().glob("state*")):
        path.rename(f"of the first one {path}")
    with pytest.raises(Cut) as cut:
        accelerated(lambda accelerator: goes_on_from(accelerator, "latest"), 8)
    with pytest.raises(CannotRestore, match="leave out its flag"):
        accelerated(lambda accelerator: goes_on_from(accelerator, "latest"), saved=cut.value.saved)
    resumed = accelerated(lambda accelerator: goes_on_from(accelerator, ""), saved=cut.value.saved)
    assert resumed[0] == steps == 24 and goes_on(resumed[1], whole, 8)


@pytest.mark.parametrize("cut_at", [4, 6, 8, 12, 14])
def test_a_run_that_begins_with_a_state_of_the_script_goes_on_with_it_in_each_session(accelerated, cut_at):
    accelerated(lambda accelerator: goes_on_from(accelerator, "", 1))
    for path in sorted(Path().glob("state1*")) + sorted(Path().glob("state2*")):
        path.rename(f"of the first one {path}")

    def script(accelerator):
        return goes_on_from(accelerator, "state06")

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)
    with pytest.raises(Cut) as cut:
        accelerated(script, cut_at)
    for other in ("latest", "") if cut_at > 6 else ("",):
        with pytest.raises(CannotRestore, match="name 'state06' in its flag"):
            accelerated(lambda accelerator, other=other: goes_on_from(accelerator, other), saved=cut.value.saved)


def test_a_state_that_the_script_loads_after_an_epoch_is_no_other_beginning(accelerated):
    def script(accelerator):
        model, optimizer, train = prepared(accelerator, shuffled())
        for epoch in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            if epoch == 1:
                accelerator.load_state("best")
            elif epoch == 0:
                accelerator.save_state("best")
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, 14)
    assert resumed == whole


def test_that_files_of_the_script_are_written_again_is_told_once_where_epochs_are_done(accelerated, capfd):
    def script(accelerator):
        model, optimizer, train = prepared(accelerator, shuffled())
        for _ in range(4):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)

    whole_and_resumed(accelerated, script, 15)
    assert capfd.readouterr().err.count("what the script writes otherwise is written again") == 1


@pytest.mark.parametrize("cut_at", [3, 4])
def test_a_batch_size_that_is_found_by_running_out_of_memory_is_that_of_the_training(accelerated, cut_at):
    """Also in a later session with more memory."""
    from accelerate.utils import find_executable_batch_size

    def script(accelerator, fits=3):
        seen = []

        @find_executable_batch_size(starting_batch_size=6)
        def train(batch_size):
            accelerator.free_memory()
            model = nn.Linear(1, 1)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            loader = DataLoader(numbers(12), batch_size, shuffle=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for _ in range(3):
                for batch in loader:
                    if batch_size > fits:
                        raise RuntimeError("CUDA out of memory. Tried to allocate")
                    seen.append(samples(batch))
                    train_batch(accelerator, model, optimizer, batch)
            return model

        weights = weights_of(train())
        accelerator.free_memory()
        return seen, weights

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 12 and goes_on(resumed, whole, cut_at)
    with pytest.raises(Cut) as cut:
        accelerated(script, cut_at)
    larger = accelerated(lambda accelerator: script(accelerator, fits=6), saved=cut.value.saved)
    assert larger[0] == 12 and goes_on(larger[1], whole, cut_at)
    assert "training" not in accelerated.session.exactness
    assert accelerated.session._state.tracked.things.keys() == {"model0", "optimizer0", "attributes"}


def test_a_second_training_after_a_step_is_told_in_the_log(accelerated, capsys):
    def script(accelerator):
        for _ in range(2):
            accelerator.free_memory()
            model, optimizer, train = prepared(accelerator, shuffled())
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)

    accelerated(script)
    assert "second training and not saved: make it a stage of its own" in capsys.readouterr().err


def test_the_number_of_the_next_save_is_no_path_of_a_stranger(accelerated):
    """It is a part of the name of a folder that is moved away."""
    from accelerate.utils import ProjectConfiguration

    def script(accelerator):
        model, optimizer, train = prepared(accelerator, shuffled())
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
        accelerator.save_state(safe_serialization=False)

    def options():
        return {"project_config": ProjectConfiguration("project", automatic_checkpoint_naming=True)}

    with pytest.raises(Cut) as cut:
        accelerated(script, 7, **options())
    other = Path("other")
    other.mkdir()
    Path("project/checkpoints/checkpoint_").mkdir(parents=True)
    cut.value.saved._own["remembered"]["saves"] = "/../../../other"
    accelerated(script, saved=cut.value.saved, **options())
    assert other.is_dir() and Path("project/checkpoints/checkpoint_0").is_dir()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (base64.b64encode(zlib.compress(bytes(MAX_BYTES + 1))).decode(), "more than"),
        (base64.b64encode(zlib.compress(b"1")[:-2]).decode(), "cut off"),
        ("no base64", "cannot be read"),
        (3, "cannot be read"),
    ],
    ids=["too long", "cut off", "no base64", "no text"],
)
def test_training_epochs_that_are_a_strangers_are_bounded(text, says):
    with pytest.raises(CannotRestore, match=says):
        bits_of(text)
    assert bits_of(text_of(0b1011)) == 0b1011


def made_before(weights, path: Path) -> None:
    """As tempfile.mkstemp."""
    (beside := path.with_name("made")).touch()
    torch.save(weights, beside)
    torch.load(beside)
    beside.replace(path)


WRITERS = {
    "torch.save": lambda weights, path: torch.save(weights, path),
    "by name": lambda weights, path: torch.save(obj=weights, f=str(path)),
    "safetensors": lambda weights, path: safetensors.torch.save_file(weights, path),
    "beside it": lambda weights, path: (torch.save(weights, f"{path}.tmp"), Path(f"{path}.tmp").replace(path)),
    "made before": lambda weights, path: made_before(weights, path),
    "moved": lambda weights, path: (torch.save(weights, f"{path}.tmp"), shutil.move(f"{path}.tmp", path)),
}


def begun_again(accelerated, script, folder: Path, cut_at: int | None):
    """Without its files, up to the cut; to its end for None. Returns: what the next session continues from."""
    for file in folder.iterdir():
        file.unlink()
    if cut_at is None:
        accelerated(script)
        return accelerated.session.saved(is_final=True)
    with pytest.raises(Cut) as cut:
        accelerated(script, cut_at)
    return cut.value.saved


@pytest.mark.parametrize("cut_at", [8, 12, 14, None])
@pytest.mark.parametrize("how", WRITERS)
def test_files_of_weights_of_epochs_that_are_done_stay_as_they_are(accelerated, tmp_path, how, cut_at):
    """As a script that keeps its best weights: in an epoch that is done it would write weights that are not trained over them."""
    (folder := tmp_path / "weights").mkdir()
    names = "save", "serialize_file", "rename"
    before = [getattr(module, name) for module, name in zip((torch, safetensors.torch, os), names, strict=True)]

    def script(accelerator):
        model, optimizer, train = prepared(accelerator, shuffled())
        for epoch in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            for name in (f"epoch{epoch}", "newest"):
                WRITERS[how](accelerator.unwrap_model(model).state_dict(), folder / name)
            torch.save(epoch, scratch := io.BytesIO())
            assert scratch.getvalue()

    def written() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    accelerated(script)
    uncut = written()
    assert uncut.keys() == {"epoch0", "epoch1", "epoch2", "newest"}
    saved = begun_again(accelerated, script, folder, cut_at)
    accelerated(script, saved=saved)
    assert written() == uncut
    assert before == [getattr(module, name) for module, name in zip((torch, safetensors.torch, os), names, strict=True)]


def test_a_file_of_an_epoch_that_is_done_is_written_where_it_is_gone(accelerated, tmp_path, capfd):
    (last := tmp_path / "weights" / "last").parent.mkdir()

    def script(accelerator):
        model, optimizer, train = prepared(accelerator, shuffled())
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            WRITERS["beside it"](model.state_dict(), last)
            torch.load(last)
            assert [file.name for file in last.parent.iterdir()] == ["last"]

    with pytest.raises(Cut) as cut:
        accelerated(script, 14)
    last.unlink()
    accelerated(script, saved=cut.value.saved)
    assert f"were written with weights that are not trained (1): {last}" in capfd.readouterr().err


@pytest.mark.parametrize("cut_at", [8, 12, 14, None])
def test_the_best_file_stays_the_best_however_a_script_comes_by_it(accelerated, tmp_path, cut_at, capfd):
    """It is saved before the first epoch, too; copied from the newest; and a kill has left a torn file beside it."""
    (folder := tmp_path / "weights").mkdir()
    held = []

    def script(accelerator, scores=(3, 2, 1)):
        model, optimizer, train = prepared(accelerator, shuffled())
        torch.save("first", folder / "kept")
        best = 0.0
        for score in scores:
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            held.append(torch.save)
            torch.save(model.state_dict(), folder / "newest")
            if score > best:
                best = score
                shutil.copy(folder / "newest", folder / "best")
                torch.save(model.state_dict(), folder / "kept.tmp")
                Path(folder / "kept.tmp").replace(folder / "kept")

    def written() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".tmp"}

    accelerated(script)
    uncut = written()
    assert uncut["best"] != uncut["newest"]
    saved = begun_again(accelerated, script, folder, cut_at)
    (folder / "kept.tmp").write_bytes(b"torn")
    accelerated(script, saved=saved)
    assert written() == uncut and "not trained" not in capfd.readouterr().err
    held[-3]("later", folder / "newest")  # of an epoch that was done
    assert torch.load(folder / "newest") == "later"


def cycle(loader):
    while True:
        yield from loader


class CountsSteps:
    """As the trainers of diffusion models: its steps take their batches from a loader without an end."""

    def __init__(self, accelerator, accumulate):
        self.accelerator, self.accumulate, self.step = accelerator, accumulate, 0
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        self.model, self.optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(numbers(10), 2, shuffle=True)
        )
        self.batches = cycle(loader)

    def train(self, steps):
        while self.step < steps:
            for _ in range(self.accumulate):
                batch = next(self.batches)
                self.accelerator.backward(((self.model(batch[0] / 10) - 1) ** 2).mean() / self.accumulate)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("cut_at", [1, 2, 3, 4, 5, 7, 8])
def test_a_loop_that_counts_steps_over_a_loader_without_an_end_begins_where_a_step_does(
    accelerated, accumulate, cut_at
):
    """After an odd number of epochs it stood in the middle of a step, and all later steps had other batches."""

    def script(accelerator):
        trainer = CountsSteps(accelerator, accumulate).train(9)
        return trainer.step, weights_of(trainer.model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole and whole[1][0] == 9


def numbered_batches(loader):
    yield from enumerate(loader)


@pytest.mark.parametrize("cut_at", [1, 2, 3, 4, 5, 6])
def test_a_generator_of_each_epoch_that_counts_its_batches_counts_on(accelerated, cut_at):
    """It is no loader without an end: what it has counted belongs to its epoch."""

    def script(accelerator):
        model, optimizer, loader = prepared(accelerator, DataLoader(numbers(10), 2, shuffle=True))[:3]
        for _ in range(4):
            for number, batch in numbered_batches(loader):
                accelerator.backward(((model(batch[0] / 10) - 1) ** 2).mean())
                if (number + 1) % 3 == 0 or number + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole
