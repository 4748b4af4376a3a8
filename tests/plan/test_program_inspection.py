"""The plan that `kgorch adopt` writes for a program: what its source shows is found, what it does not show is left out and said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kgorch.plan import parse
from kgorch.plan.adopted_plan import plan_text
from kgorch.plan.program_inspection import inspect, is_carried
from kgorch.plan.program_names import ProgramNames

PUBLIC = Path(__file__).parents[1] / "programs" / "public"


def adopted(name: str, *words: str):
    found = inspect((PUBLIC / name).read_text(), words)
    return parse(plan_text(name, words, found), "plan.toml").stage[0], found


def test_a_ddp_program_with_folders_that_it_renames():
    stage, found = adopted("flags.py", "--max_steps", "5", "--output_dir", "runs/a")
    assert (stage.argv, stage.flags, stage.launcher) == (
        ["--max_steps", "5", "--output_dir", "runs/a"],
        "--key value",
        "torchrun",
    )
    assert stage.foreign.checkpoint == "runs/a/checkpoint-*" and stage.foreign.incomplete == ["tmp-checkpoint-*"]
    assert stage.foreign.again == ["--resume_from_checkpoint", "{checkpoint}"]
    assert (stage.foreign.step.log, stage.foreign.metrics["loss"].log) == (found.step, found.loss)
    assert re.search(found.step, "step 3/5 loss 0.25").groups() == ("3", "5")
    assert found.library == "torch" and not found.notes


def test_a_program_with_global_settings_and_one_file():
    stage, _ = adopted("configurator.py", "small.py", "--compile=False")
    assert (stage.flags, stage.launcher, stage.foreign.checkpoint) == ("--key=value", "none", "out/ckpt.pt")
    assert stage.foreign.again == ["--init_from=resume"] and stage.foreign.incomplete == []


def test_a_program_with_key_value_settings_that_handles_the_signal():
    stage, _ = adopted("overrides.py", "epochs=3")
    assert (stage.flags, stage.foreign.checkpoint) == ("key=value", "ckpts/epoch_*.pt")
    assert stage.foreign.again == ["resume={checkpoint}"] and stage.foreign.stop.signal == "SIGTERM"


def test_a_program_without_pytorch_whose_folder_is_an_argument():
    stage, found = adopted("counts.py", "5", "state")
    assert (stage.foreign.checkpoint, stage.foreign.incomplete) == ("state/state.json", ["*.tmp"])
    assert stage.foreign.again == [] and [note.split(":")[0] for note in found.notes] == ["again"]


TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(args=args).train(resume_from_checkpoint=args.resume_from_checkpoint)
"""
LIGHTNING = """
import lightning as L
L.Trainer(max_epochs=3).fit(model)
"""
ACCELERATE = """
import argparse
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--resume_from_checkpoint", type=str)
"""
EPOCHS = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true")
def save_checkpoint(state, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
"""


@pytest.mark.parametrize(
    ("source", "words", "launcher", "checkpoint", "again"),
    [
        (TRAINER, ["--output_dir", "runs"], "torchrun", "runs/checkpoint-*", ["--resume_from_checkpoint", "{checkpoint}"]),
        (LIGHTNING, [], "none", "lightning_logs/*/checkpoints/*.ckpt", []),
        (ACCELERATE, ["--output_dir=o"], "accelerate", "o/step_*", ["--resume_from_checkpoint={checkpoint}"]),
        (EPOCHS, [], "none", "checkpoint.pth.tar", ["--resume"]),
    ],
)  # fmt: skip
def test_what_a_library_does_by_itself_is_known(source, words, launcher, checkpoint, again):
    found = inspect(source, words)
    stage = parse(plan_text("train.py", words, found), "plan.toml").stage[0]
    assert (stage.launcher, stage.foreign.checkpoint, stage.foreign.again) == (launcher, checkpoint, again)


@pytest.mark.parametrize(
    ("source", "carried"),
    [
        (TRAINER, True),
        (LIGHTNING, True),
        ("from trl import SFTTrainer\n", True),
        (
            "from sentence_transformers import SentenceTransformerTrainer\nSentenceTransformerTrainer(model).train()\n",
            True,
        ),
        ("import sentence_transformers as st\nst.CrossEncoderTrainer(model).train()\n", True),
        ("from setfit import Trainer, TrainingArguments\nTrainer(model=model).train()\n", True),
        (
            "import torch\nfrom sentence_transformers import SentenceTransformer\nSentenceTransformer('x').encode(y)\n",
            False,
        ),
        (
            "import torch\nfrom sentence_transformers import SentenceTransformer\nclass Trainer: pass\nTrainer().train()\n",
            False,
        ),
        ("from accelerate import Accelerator\n", True),
        ("from lightning.fabric import Fabric\nimport lightning as L\nL.Trainer()\nFabric()\n", True),
        ("from lightning.fabric import Fabric\nFabric().launch()\n", False),
        (ACCELERATE, False),
        (EPOCHS, False),
    ],
)
def test_a_known_trainer_is_carried_and_its_plan_has_no_foreign_section(source, carried):
    found = inspect(source, ["--epochs", "3"])
    assert is_carried(found) is carried
    stage = parse(plan_text("train.py", ["--epochs", "3"], found, is_foreign=not carried), "plan.toml").stage[0]
    assert (stage.foreign is None) is carried and stage.argv == ["--epochs", "3"] and stage.integration == "auto"


def test_a_script_that_calls_attach_gets_a_plan_without_a_foreign_section():
    found = inspect("from kgorch import attach\nsession = attach()\ntorch.save(net.state_dict(), 'net.pt')\n", [])
    text = plan_text("train.py", [], found, is_foreign=not is_carried(found))
    assert is_carried(found) and parse(text, "plan.toml").stage[0].foreign is None and "integration" not in text


@pytest.mark.parametrize("shape", ["checkpoint-{step}", "{step}_checkpoint", "step.{step}"])
def test_a_checkpoint_of_several_files_is_their_folder(shape):
    """Of a folder whose number follows a hyphen only the first file was taken."""
    source = f"""
def save(out, step):
    d = os.path.join(out, f"{shape}")
    torch.save(model.state_dict(), os.path.join(d, "pytorch_model.bin"))
    torch.save(optimizer.state_dict(), os.path.join(d, "optimizer.pt"))
for step in range(9):
    save("runs/exp", step)
"""
    assert inspect(source, []).checkpoint == "runs/exp/" + shape.replace("{step}", "*")


@pytest.mark.parametrize("folder", ["out/", "./out", "out//", ".//out/"])
def test_a_folder_that_is_written_with_more_slashes_is_the_same_place(folder):
    source = f"import os, torch\nfolder = {folder!r}\ntorch.save(x, os.path.join(folder, 'ckpt.pt'))\n"
    assert inspect(source, []).checkpoint == "out/ckpt.pt"
    assert inspect(TRAINER, ["--output_dir", folder]).checkpoint == "out/checkpoint-*"


@pytest.mark.parametrize(
    ("line", "checkpoint", "incomplete"),
    [
        ("print(line.replace('  ', ' ')); torch.save(x, 'out/ckpt.pt')", "out/ckpt.pt", []),
        ("name = name.replace('out', ''); torch.save(x, 'out/ckpt.pt')", "out/ckpt.pt", []),
        ("torch.save(x, 'out/ckpt.pt.tmp'); os.replace('out/ckpt.pt.tmp', 'out/ckpt.pt')", "out/ckpt.pt", ["*.tmp"]),
        ("torch.save(x, 'ckpt.pt.tmp'); shutil.move('ckpt.pt.tmp', 'ckpt.pt')", "ckpt.pt", ["*.tmp"]),
        ("torch.save(x, 'ckpt.pt.tmp'); replace('ckpt.pt.tmp', 'ckpt.pt')", "ckpt.pt", ["*.tmp"]),
        ("torch.save(x, 'ckpt.pt.tmp'); Path('ckpt.pt.tmp').replace('ckpt.pt')", "ckpt.pt", ["*.tmp"]),
        ("new = Path('ckpt.pt.tmp'); torch.save(x, new); new.rename(Path('ckpt.pt'))", "ckpt.pt", ["*.tmp"]),
        ("torch.save(x, 'new.pt'); os.replace('new.pt', 'last.pt')", "last.pt", ["new.pt"]),
        ("torch.save(x, f'new-{i}.pt'); os.replace(f'new-{i}.pt', f'out/{i}.pt')", "out/*.pt", ["new-*.pt"]),
        ("torch.save(x, f'a/{i}.pt'); os.replace(f'a/{i}.pt', f'out/{i}.pt')", "out/*.pt", []),
    ],
)
def test_a_rename_is_one_of_files_and_not_of_parts_of_a_text(line, checkpoint, incomplete):
    found = inspect(f"import os, shutil, torch\nfrom os import replace\nfrom pathlib import Path\n{line}\n", [])
    assert (found.checkpoint, found.incomplete) == (checkpoint, incomplete)


def test_a_folder_that_the_source_does_not_name_is_told():
    found = inspect("import torch\nfor i in range(3):\n    torch.save(x, load_settings().out / 'last.pt')\n", [])
    assert found.checkpoint == "*/last.pt"
    assert "checkpoint: in which folder? `*` is the name of one folder, and of no path" in found.notes


IMAGENET = """
import argparse, shutil, torch
parser = argparse.ArgumentParser()
parser.add_argument('--resume', default='', type=str, metavar='PATH')
def main(path):
    for epoch in range(9):
        train(path)
        save_checkpoint({'epoch': epoch}, is_best)
def load(filename="words.txt"):
    return open(filename)
def save_checkpoint(state, is_best, filename='checkpoint.pth.tar'):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, 'model_best.pth.tar')
main('imagenet')
"""
MULTIGPU = """
import os, torch
from torch.distributed import init_process_group
class Trainer:
    def __init__(self, model, save_every, snapshot_path):
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
    def _load_snapshot(self, snapshot_path):
        snapshot = torch.load(snapshot_path)
    def _save_snapshot(self, epoch):
        torch.save(snapshot, self.snapshot_path)
    def train(self, epochs):
        for epoch in range(epochs):
            self._save_snapshot(epoch)
def main(save_every, epochs, snapshot_path="snapshot.pt"):
    init_process_group()
    trainer = Trainer(model, save_every, snapshot_path)
    trainer.train(epochs)
main(args.save_every, args.epochs)
"""


def test_what_a_function_saves_under_the_default_of_a_parameter_is_found():
    """Of PyTorch's own examples, imagenet/main.py and multigpu_torchrun.py, no checkpoint was found."""
    stage = parse(plan_text("main.py", [], inspect(IMAGENET, [])), "plan.toml").stage[0]
    assert (stage.foreign.checkpoint, stage.foreign.again) == ("checkpoint.pth.tar", ["--resume", "{checkpoint}"])
    found = inspect(MULTIGPU, [])
    assert (found.checkpoint, found.launcher) == ("snapshot.pt", "torchrun")


@pytest.mark.parametrize(
    ("call", "checkpoint"),
    [
        ("save(s)", "a.pt"),
        ("save(s, path=f'ckpt-{i}.pt')", "ckpt-*.pt"),
        ("save(s, 'b.pt')", "b.pt"),
        ("save(*s)", "a.pt"),
        ("save(s, path=unknown())", ""),
        ("Saver().store(s)", "c.pt"),
        ("saver = Saver('out')\nsaver.store(s)", "out/c.pt"),
        ("saver = Saver(folder='out')\nsaver.store(s, name=f'{i}.pt')", "out/*.pt"),
        ("saver = Saver('out')\nsaver.store(s, f'{i}.pt')\ntorch.store(s, 'no.pt')", "out/*.pt"),
    ],
)
def test_a_parameter_is_what_a_call_gives_or_else_its_default(call, checkpoint):
    one, other = """
def save(state, path="a.pt"):
    torch.save(state, path)
""", """
class Saver:
    def __init__(self, folder="."):
        self.out = folder
    def store(self, state, name="c.pt"):
        torch.save(state, os.path.join(self.out, name))
"""  # fmt: skip
    lines = "".join(f"    {line}\n" for line in call.splitlines())
    source = f"import os, torch\n{other if 'Saver' in call else one}\nfor i in range(3):\n{lines}"
    assert inspect(source, []).checkpoint == checkpoint


def test_a_parameter_is_one_of_its_own_function():
    source = """
import os, torch
class Data:
    def __init__(self, path, filename="words.txt"):
        self.words = open(os.path.join(path, filename))
def save(state, path, filename="last.pt"):
    filename = os.path.join(path, filename)
    def write():
        torch.save(state, filename)
    write()
data = Data("corpus")
for epoch in range(9):
    save(state, "out")
"""
    assert inspect(source, []).checkpoint == "out/last.pt"


FINAL = """
import torch
torch.save(model.state_dict(), "final.pt")
def main():
    for epoch in range(9):
        torch.save(state, SAVE)
"""


@pytest.mark.parametrize("place", ["f'ckpt_{epoch}.pt'", "'ckpt.pt'"])
def test_a_save_in_a_loop_is_the_checkpoint_and_not_the_weights_at_the_end(place):
    assert inspect(FINAL.replace("SAVE", place), []).checkpoint == ("ckpt_*.pt" if "{" in place else "ckpt.pt")


def test_a_name_that_differs_is_the_checkpoint_where_no_save_is_in_a_loop():
    source = FINAL.replace("SAVE", "f'ckpt_{epoch}.pt'").replace("for epoch in range(9)", "if epoch")
    assert inspect(source, []).checkpoint == "ckpt_*.pt"


@pytest.mark.parametrize(
    "line",
    [
        "torch.save(x, '/abs/ckpt.pt')",
        "torch.save(x, '../ckpt.pt')",
        "torch.save(x, f'{a}')",
        "torch.save(x, unknown())",
        "torch.save(x)",
        "a = b; b = a; torch.save(x, a)",
    ],
)
def test_a_place_that_is_not_known_or_lies_outside_is_left_to_the_user(line):
    found = inspect(f"import torch\n{line}\n", [])
    assert found.checkpoint == "" and found.notes[0].startswith("checkpoint: where does it save?")
    assert parse(plan_text("a b'c.py", [], found), "plan.toml").name == "a-b-c"


def test_the_plan_keeps_any_words_as_they_are():
    words = ["--text", 'a "quoted" word', "--path=C:\\x", "ä", "--regex", "'\\d+'"]
    stage = parse(plan_text("t.py", words, inspect("", words)), "plan.toml").stage[0]
    assert stage.argv == words


@pytest.mark.parametrize(
    ("printed", "line", "step", "loss"),
    [
        ("step {step} loss {loss:.4f}", "step 12 loss 0.5012", ("12",), "0.5012"),
        ("step {step} loss {loss}", "step 12 loss 9.5e-05", ("12",), "9.5e-05"),
        ("step {step} loss {loss}", "step 12 loss -3.25E+2,", ("12",), "-3.25E+2"),
        ("step {step} loss {loss}", "step 12 loss nan", ("12",), "nan"),
        ("step {step} loss {loss}", "step 12 loss -inf", ("12",), "-inf"),
        ("step {step:6d}/{steps:6d} loss {loss:9.4f}", "step     12/   100 loss   -0.5000", ("12", "100"), "-0.5000"),
        ("step {step:<6d}/{steps} loss={loss:<9.4f}|", "step 12    /100 loss=0.5000   |", ("12", "100"), "0.5000"),
        ("Iteration: {step:>5}, loss: {loss:.2e}.", "Iteration:    12, loss: 1.25e-03.", ("12",), "1.25e-03"),
    ],
)
def test_what_is_printed_is_read_as_it_was_whatever_its_form(printed, line, step, loss):
    found = inspect(f"print(f{printed!r})\n", [])
    assert re.search(found.step, line).groups() == step
    assert re.search(found.loss, line).groups() == (loss,)


@pytest.mark.parametrize(
    "source",
    [
        "print('step', step, 'loss', loss)",
        "print('step %6d loss %.4f' % (step, loss))",
        "print('step {} loss {:.3f}'.format(step, loss))",
        "logger.info('step %d loss %s', step, loss)",
        "text = f'step {step} loss {loss}'\nprint(text)",
        "torch.save(x, f'out/Step-{step}.pt')\nprint('step', step, 'loss', loss)",
        "path = f'Step-{step}_loss={loss}.ckpt'\nprint(f'step {step} loss {loss}')",
        "tag = f'Step {step}'\nprint(f'step {step} loss {loss}')",
    ],
)
def test_what_is_printed_is_found_in_each_way_to_print_it_and_no_name_of_a_file_is_taken_for_it(source):
    found = inspect(source, [])
    line = "step 12 loss 0.5012"
    assert re.search(found.step, line).groups() == ("12",), found.step
    assert re.search(found.loss, line).groups() == ("0.5012",), found.loss


@pytest.mark.parametrize(
    ("words", "argv", "first"),
    [
        (["--resume", "old.pt", "--lr", "1"], ["--lr", "1"], ["--resume", "old.pt"]),
        (["--lr", "1", "--resume=old.pt"], ["--lr", "1"], ["--resume=old.pt"]),
        (["--lr", "1"], ["--lr", "1"], []),
    ],
)
def test_a_flag_by_which_a_program_continues_is_for_its_first_launch_alone(words, argv, first):
    """The plan was refused, for the flag was given twice, with a line of a file that did not exist."""
    source = "parser.add_argument('--resume')\ntorch.save(x, f'ckpt-{step}.pt')"
    stage = parse(plan_text("t.py", words, inspect(source, words)), "plan.toml").stage[0]
    assert (stage.argv, list(stage.foreign.first), list(stage.foreign.again)) == (
        argv,
        first,
        ["--resume", "{checkpoint}"],
    )


@pytest.mark.parametrize("loss", ["0.5012", "9.5e-05", "-1.5", "nan"])
def test_the_loss_of_the_transformers_trainer_is_read_as_it_was(loss):
    found = inspect(TRAINER, [])
    assert [re.search(found.loss, f"{{'loss': {value}, 'epoch': 1.0}}")[1] for value in (loss, f"'{loss}'")] == [
        loss
    ] * 2


@pytest.mark.parametrize(
    ("line", "latest"),
    [
        ("open(os.path.join(out, 'latest'), 'w').write(name)", ("file", "out/latest")),
        (
            "Path(out, 'x')\n(Path(out) / 'latest_checkpointed_iteration.txt').write_text(str(step))",
            ("file", "out/latest_checkpointed_iteration.txt"),
        ),
        ("os.symlink(name, f'{out}/latest')", ("link", "out/latest")),
        ("Path(f'{out}/ckpt-latest').symlink_to(name)", None),
        ("open(out + '/latest')", None),
        ("open(out + '/latest.json', 'w')", None),
        ("open(f'{out}/{name}/latest', 'w')", None),
        ("open('/data/latest', 'w')", None),
        ("pickle.dump(x, open('out/latest', 'wb'))", None),
    ],
)
def test_what_names_the_newest_checkpoint_is_offered_in_the_plan(line, latest):
    """Not set: in other words than the program's own, it would break a resume that works."""
    found = inspect(f"out = 'out'\nfor step in x:\n    torch.save(x, f'out/ckpt-{{step}}')\n{line}", [])
    text = plan_text("t.py", [], found)
    assert (found.checkpoint, found.latest) == ("out/ckpt-*", latest) and parse(text, "plan.toml").stage[
        0
    ].foreign.latest is None
    if latest:
        section = parse(text.replace("# latest", "latest"), "plan.toml").stage[0].foreign.latest
        assert getattr(section, latest[0]) == latest[1]


FIXED = """
for epoch in range(start, args.epochs):
    train(model)
    save_on_master(state, os.path.join(args.out, "checkpoint.pth"))
    if epoch % 5 == 0:
        save_on_master(state, os.path.join(args.out, f"checkpoint{epoch:04}.pth"))
    torch.save(state, os.path.join(args.out, "best.pth"))
    torch.save(state, os.path.join(args.out, "scratch.pth"))
    torch.save(state, os.path.join(args.out, "best_checkpoint.pth"))
torch.load(os.path.join(args.out, "checkpoint.pth"))
model.load_state_dict(torch.load(os.path.join(args.out, "best.pth")))
"""


@pytest.mark.parametrize(
    ("loads", "checkpoint"),
    [
        ("utils.restart_from_checkpoint(os.path.join(args.out, 'checkpoint.pth'), model=model)", "out/checkpoint.pth"),
        ("path = f'{args.out}/checkpoint.pth'\nif os.path.exists(path):\n    torch.load(path)", "out/checkpoint.pth"),
        ("torch.load(args.out + '/scratch.pth')\nupload(args.out + '/checkpoint.pth')", "out/checkpoint*.pth"),
        ("def evaluate():\n    torch.load(args.out + '/best_checkpoint.pth')\nevaluate()", "out/checkpoint*.pth"),
        (
            "def evaluate(model):\n    torch.load(args.out + '/checkpoint.pth')\nfor n in x:\n    evaluate(model)",
            "out/checkpoint*.pth",
        ),
        ("parser.add_argument('--resume')\ntorch.load(args.out + '/checkpoint.pth')", "out/checkpoint*.pth"),
        ("torch.load(sorted(glob(args.out + '/checkpoint*.pth'))[-1])", "out/checkpoint*.pth"),
        ("", "out/checkpoint*.pth"),
    ],
)
def test_the_file_that_a_program_continues_from_by_itself_is_the_checkpoint(loads, checkpoint):
    """With the numbered ones beside it, it began anew on another machine, without a word."""
    found = inspect(f"parser.add_argument('--out', default='out')\n{loads}\n{FIXED}", [])
    assert found.checkpoint == checkpoint
    is_told = any("out/checkpoint*.pth is not kept" in note for note in found.notes)
    assert is_told is (checkpoint == "out/checkpoint.pth")


@pytest.mark.parametrize(
    "source",
    [
        "class T:\n def _path(self, tag):\n  return os.path.join('out', f'{tag}.pt')\n"
        " def fit(self):\n  for n in x:\n   torch.save(s, self._path(f'ckpt-{n}'))",
        "def place(n):\n    if n is None:\n        return None\n    return Path('out') / f'ckpt-{n}.pt'\n"
        "for n in x:\n    torch.save(s, place(n))",
        "def place(n):\n    return place(n)\nfor n in x:\n    torch.save(s, place(n) or f'out/ckpt-{n}.pt')",
    ],
)
def test_a_place_that_a_function_of_the_program_returns_is_followed(source):
    assert inspect(source, []).checkpoint == "out/ckpt-*.pt"


@pytest.mark.parametrize(
    ("count", "line", "step"),
    [
        ("i", "epoch 3 iter 120 loss 0.5", ("3",)),
        ("i + 1", "epoch 3 iter 120 loss 0.5", ("3",)),
        ("i * len(batch)", "epoch 3 iter 120 loss 0.5", ("3",)),
        ("j", "epoch 3 iter 120 loss 0.5", ("120",)),
        ("epoch * len(loader) + i", "epoch 3 iter 120 loss 0.5", ("120",)),
        ("steps", "epoch 3 iter 120 loss 0.5", ("120",)),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "f'epoch {{epoch}} iter {{{0}}} loss {{loss}}'",
        "'epoch %d iter %d loss %f' % (epoch, {0}, loss)",
        "'epoch {{}} iter {{}} loss {{}}'.format(epoch, {0}, loss)",
        "'epoch', epoch, 'iter', {0}, 'loss', loss",
    ],
)
def test_what_is_counted_anew_in_each_epoch_is_no_step(form, count, line, step):
    source = (
        "def train_one_epoch(loader, epoch):\n    for j, batch in enumerate(loader, epoch * 9):\n        pass\n"
        "    for i, batch in enumerate(loader):\n        steps += 1\n"
        f"        print({form.format(count)})\nfor epoch in range(9):\n    train_one_epoch(loader, epoch)\n"
    )
    found = inspect(source, [])
    assert re.search(found.step, line).groups() == step and re.search(found.loss, line).groups() == ("0.5",)


def test_a_program_that_prints_nothing_else_has_its_steps_within_an_epoch():
    found = inspect("for e in x:\n    for i, b in enumerate(y):\n        print(f'iter {i} loss {loss}')\n", [])
    assert re.search(found.step, "iter 12 loss 0.5").groups() == ("12",)


def test_the_folders_of_ranks_are_parts_of_one_checkpoint():
    """As Megatron's."""
    source = (
        "def place(step, rank, part=None):\n    if part is None:\n        return f'out/iter_{step:07d}/mp_rank_{rank:02d}/a.pt'\n"
        "    return f'out/iter_{step:07d}/mp_rank_{rank:02d}_{part:03d}/a.pt'\n"
        "for step in x:\n    torch.save(state, place(step, rank))\n"
    )
    assert inspect(source, []).checkpoint == "out/iter_*"


@pytest.mark.parametrize(
    ("saves", "checkpoint"),
    [
        ("torch.save(state, Path('out') / folder() / f'{n}')", ""),
        ("torch.save(state, f'runs/{seed}__{time}/agent_{n}.pt')", "runs/*__*/agent_*.pt"),  # a run's folder
        ("torch.save(state, f'out/step-{n}/model.pt')", "out/step-*"),
        ("torch.save(state, f'out/step-{n}/rank_{rank}.pt')", "out/step-*"),
        (
            "save('best')\n    save('training')\ndef save(kind):\n    torch.save(state, f'out/{kind}_{n}.pt')",
            "out/training_*.pt",
        ),
        ("torch.save(state, 'out/best.pt')\n    torch.save(state, 'out/last.pt')", "out/last.pt"),
        ("torch.save(state, f'out/best_{n}.pt')\n    torch.save(state, f'out/training_{n}.pt')", "out/training_*.pt"),
    ],
)
def test_a_folder_is_a_checkpoint_only_where_it_is_one_of_several(saves, checkpoint):
    assert inspect(f"for n in x:\n    {saves}\n", []).checkpoint == checkpoint


def test_source_that_calls_itself_is_inspected_in_little_time():
    """Each call was followed through all of the function: minutes. What is counted is the walks through it."""
    lines = "\n".join(f"    y{number} = {number}" for number in range(2000))
    calls = "\n".join(f"load(g({number}))" for number in range(20))
    source = f"def g(a):\n{lines}\n    return g(a) + g(a)\n{calls}\nfor n in x:\n    torch.save(s, f'out/{{n}}.pt')\n"
    names = ProgramNames(ast.parse(source), [])
    [function] = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert names._returned(function) is names._returned(function)
    assert inspect(source, []).checkpoint == "out/*.pt"


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("train.py", "my-GPT-train"),
        ("src/main.py", "my-GPT-main"),
        ("Finetune.py", "my-GPT-Finetune"),
        ("train_gpt2.py", "train_gpt2"),
        ("-m nano.gpt.train", "nano.gpt-train"),
        ("-m src.train", "my-GPT-train"),
        ("-m nano", "nano"),
        ("übung.py", "bung"),
    ],
)
def test_a_run_is_not_named_as_that_of_any_other_project(entry, name):
    """Each train.py became a run "train", and the second one was told that it is finished."""
    assert parse(plan_text(entry, [], inspect("", []), folder="my GPT"), "plan.toml").name == name


@pytest.mark.parametrize(("handler", "grace_s"), [("", 10), ("signal.signal(signal.SIGTERM, save)", 60)])
def test_a_program_that_does_not_save_when_asked_gets_little_time_for_it(handler, grace_s):
    source = f"for n in x:\n    torch.save(s, f'out/{{n}}.pt')\n{handler}"
    stage = parse(plan_text("t.py", [], inspect(source, [])), "plan.toml").stage[0]
    assert stage.foreign.stop.grace == grace_s


@pytest.mark.parametrize("nargs", ["argparse.REMAINDER", "'...'"])
def test_what_continues_a_program_stands_before_the_words_that_it_takes_whatever_they_are(nargs):
    """As detectron2's: `--resume` became one of them, and each session began anew."""
    source = (
        "p.add_argument('--config-file'); p.add_argument('--resume', action='store_true')\n"
        f"p.add_argument('--amp', action='store_true'); p.add_argument('opts', nargs={nargs})\n"
        "for n in x:\n    torch.save(s, f'out/model_{n}.pth')\n"
    )
    words = ["--config-file", "a.yaml", "--amp", "SOLVER.MAX_ITER", "360", "--x"]
    stage = parse(plan_text("t.py", words, inspect(source, words)), "plan.toml").stage[0]
    assert stage.argv == ["--config-file", "a.yaml", "--amp"]
    assert stage.foreign.again == ["--resume", *words[3:]] and stage.foreign.first == words[3:]
    whole = parse(plan_text("t.py", words, inspect("print(1)\n" + source.partition("\n")[0], words)), "plan.toml")
    assert whole.stage[0].argv == words


YOLO = """
import argparse, torch
from pathlib import Path

def increment_path(path):
    path = Path(path)
    for n in range(2, 100):
        if not path.exists():
            return path
        path = path.with_name(f"exp{n}")

parser = argparse.ArgumentParser()
parser.add_argument("--project", default="runs/train")
parser.add_argument("--name", default="exp")
parser.add_argument("--exist-ok", action="store_true")
parser.add_argument("--resume", nargs="?", const=True, default=False)
opt = parser.parse_args()

def main(opt):
    if opt.resume:
        save_dir = Path(opt.resume).parent.parent
    else:
        save_dir = Path(opt.project) / opt.name if opt.exist_ok else increment_path(Path(opt.project) / opt.name)
    w = save_dir / "weights"
    last, best = w / "last.pt", w / "best.pt"
    for epoch in range(3):
        torch.save({"model": 1}, last)
        torch.save({"model": 1}, best)
"""


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ((), "runs/train/*/weights/last.pt"),
        (("--exist-ok", "--name", "mine"), "runs/train/mine/weights/last.pt"),
    ],
)
def test_a_folder_that_is_numbered_where_it_is_taken_is_any(words, place):
    """As YOLO's `runs/train/exp`, then `exp2`: `*/*/weights` was the place, and `kgorch check` found no program in its folder."""
    stage = parse(plan_text("train.py", words, inspect(YOLO, words)), "plan.toml").stage[0]
    assert stage.foreign.checkpoint == place and stage.foreign.again == ["--resume", "{checkpoint}"]
