"""What `kgorch adopt` finds in the modules of a program, and in the flags that it is called with."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from kgorch.cli import cli
from kgorch.plan import parse, program_modules
from kgorch.plan.adopted_plan import plan_text
from kgorch.plan.program_inspection import inspect, is_carried, why_foreign

MAIN = """
import os, torch
from utils import files
from package.options import parse
args = parse()
for epoch in range(9):
    files.save_on_master({}, os.path.join(args.output_dir, f"checkpoint_{epoch}.pth"))
"""
MODULES = {
    "utils/__init__.py": "",
    "utils/files.py": "import torch\nfrom .ranks import is_first\ndef save_on_master(state, path):\n    torch.save(state, path)\n",
    "utils/ranks.py": "import torch.distributed as dist\ndef is_first(): dist.init_process_group()\n",
    "package/options.py": """
import argparse
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--resume")
    return parser.parse_args()
def export():
    torch.save(weights, "never_called.pt")
""",
}


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_what_a_program_calls_in_its_own_modules_counts(tmp_path):
    written(tmp_path, MODULES | {"train.py": MAIN})
    others = program_modules.sources(tmp_path / "train.py", MAIN, tmp_path)
    assert len(others) == 4
    found = inspect(MAIN, ["--output_dir", "runs"], others)
    assert (found.checkpoint, found.again) == ("runs/checkpoint_*.pth", ["--resume", "{checkpoint}"])
    assert found.launcher == "none", "nothing that is called makes a process group"
    others = [text.replace("    torch.save", "    is_first()\n    torch.save") for text in others]
    assert inspect(MAIN, [], others).launcher == "torchrun"


def test_modules_of_a_package_that_is_run_by_its_name_are_found(tmp_path, monkeypatch):
    package = {f"pkg/{name}": text for name, text in MODULES.items()} | {"pkg/__init__.py": ""}
    main = MAIN.replace("from utils", "from pkg.utils").replace("from package", "from .package")
    written(tmp_path, package | {"pkg/train.py": main})
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["adopt", "-m pkg.train", "--print"], catch_exceptions=False)
    assert (
        'checkpoint = "out/checkpoint_*.pth"' in done.stdout and 'again = ["--resume", "{checkpoint}"]' in done.stdout
    )


def test_modules_that_cannot_be_read_or_lie_elsewhere_are_left_out(tmp_path, monkeypatch):
    inside = tmp_path / "plan"
    main = "import broken, deep, loop, utf, gone, link\nfrom ...above import x\nfrom . import sibling\n"
    written(
        inside,
        {
            "train.py": main, "broken.py": "def", "deep.py": "(" * 5000, "loop.py": "import loop, train",
            "sibling.py": "import loop", "above.py": "",
        },
    )  # fmt: skip
    (inside / "utf.py").write_bytes(b"x = '\xff\x00'")
    (inside / "link.py").symlink_to(inside / "nowhere.py")
    written(tmp_path, {"above.py": "x = 1"})
    found = program_modules.sources(inside / "train.py", main, inside)
    assert found == ["import loop, train", "import loop"]
    monkeypatch.setattr(program_modules, "MOST_MODULES", 1)
    assert program_modules.sources(inside / "train.py", main, inside) == ["import loop, train"]
    monkeypatch.setattr(program_modules, "MOST_BYTES", 3)
    assert len("".join(program_modules.sources(inside / "train.py", main, inside))) <= 3


OFTEN = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--save-period", type=int, default=-1)
parser.add_argument("--keep", action="store_true")
parser.add_argument("--every")
args = parser.parse_args()
for epoch in range(9):
    torch.save(state, "out/last.pt")
    if TEST:
        torch.save(state, f"out/epoch{epoch}.pt")
"""


@pytest.mark.parametrize(
    ("test", "words", "is_numbered"),
    [
        ("args.save_period > 0 and epoch % args.save_period == 0", "", False),
        ("args.save_period > 0 and epoch % args.save_period == 0", "--save-period 3", True),
        ("args.save_period > 0", "--save-period=0", False),
        ("args.keep", "", False),
        ("args.keep", "--keep", True),
        ("not args.keep", "", True),
        ("args.every is not None", "", False),
        ("args.every", "--every 5", True),
        ("isinstance(args.every, int)", "--every 5", True),
        ("isinstance(args.every, int)", "--every epoch", False),
        ('args.every == "epoch" or args.keep', "--every epoch", True),
        ('args.every == "epoch" or args.keep', "--every step", False),
        ("unknown(args)", "", True),
        ("epoch == 3", "", True),
        ("epoch and not unknown", "", True),
    ],
)
def test_a_save_that_the_flags_switch_off_is_not_the_checkpoint(test, words, is_numbered):
    found = inspect(OFTEN.replace("TEST", test), words.split())
    assert found.checkpoint == ("out/epoch*.pt" if is_numbered else "out/last.pt") and not found.is_off


def test_saves_that_are_all_off_are_told():
    source = OFTEN.replace('torch.save(state, "out/last.pt")', "pass").replace("TEST", "args.keep")
    found = inspect(source, [])
    assert found.checkpoint == "out/epoch*.pt"
    assert "checkpoint: with these flags it does not save out/epoch*.pt, it seems" in found.notes
    assert not any("does not save" in note for note in inspect(source, ["--keep"]).notes)


NO_TRAINER = """
import argparse, os
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--checkpointing_steps")
parser.add_argument("--resume_from_checkpoint")
def main():
    args = parser.parse_args()
    checkpointing_steps = args.checkpointing_steps
    for epoch in range(9):
        for batch in loader:
            if isinstance(checkpointing_steps, int):
                output_dir = f"step_{steps}"
                if args.output_dir is not None:
                    output_dir = os.path.join(args.output_dir, output_dir)
                accelerator.save_state(output_dir)
        if args.checkpointing_steps == "epoch":
            output_dir = f"epoch_{epoch}"
            if args.output_dir is not None:
                output_dir = os.path.join(args.output_dir, output_dir)
            accelerator.save_state(output_dir)
    model.save_pretrained(args.output_dir)
main()
"""


@pytest.mark.parametrize(("steps", "place"), [("500", "step_*"), ("epoch", "epoch_*"), (None, None)])
def test_a_loop_around_accelerate_is_left_to_resume_by_itself_only_if_it_saves(steps, place):
    """The guess by the library's habits stood before what the source says."""
    words = ["--output_dir", "o", *(["--checkpointing_steps", steps] if steps else [])]
    found = inspect(NO_TRAINER, words)
    assert is_carried(found) is (place is None) and bool(why_foreign(found)) is (place is not None)
    if place:
        assert found.checkpoint == f"o/{place}"
    source = NO_TRAINER.replace('f"step_{steps}"', 'f"checkpoint-{steps}"')
    assert steps != "500" or inspect(source, words).checkpoint == "o/checkpoint-*"


@pytest.mark.parametrize(
    ("loop", "takes"),
    [
        ("while step < n:\n    batch = next(data)", True),
        ("for step in range(9):\n    batch = next(self.data)", True),
        ("while step < n:\n    batch = next(iter(loader))", False),
        ("batch = next(data)", False),
        ("for batch in loader:\n    name = next(one for one in names)", False),
    ],
)
def test_a_loop_around_accelerate_that_takes_batches_by_next_is_not_said_to_be_carried(loop, takes):
    found = inspect(f"from accelerate import Accelerator\n{loop}\n", [])
    assert is_carried(found) is not takes and any("next(…)" in note for note in found.notes) is takes
    text = plan_text("t.py", [], found, is_foreign=takes)
    assert takes or "whose loop is carried" in text


@pytest.mark.parametrize(
    ("option", "again"),
    [
        ('click.option("--resume/--no-resume")', ["--resume"]),
        ('parser.add_argument("--no_resume", action="store_true")', []),
        (
            'parser.add_argument("--auto-resume", action="store_true")\nparser.add_argument("--resume-from")',
            ["--resume-from", "{checkpoint}"],
        ),
        ('parser.add_argument("--init_from", choices=["scratch", "resume"])', ["--init_from", "resume"]),
        ('parser.add_argument("--resume", nargs="?", const=True, default=False)', ["--resume", "{checkpoint}"]),
    ],
)
def test_the_words_by_which_it_continues_are_those_of_its_options(option, again):
    assert inspect(f"{option}\nfor i in x:\n    torch.save(x, 'a.pt')\n", []).again == again


def test_a_flag_to_resume_without_a_value_takes_no_other_flag_along():
    source = 'parser.add_argument("--resume", nargs="?")\nfor i in x:\n    torch.save(x, "a.pt")\n'
    words = ["--resume", "--data", "coco.yaml"]
    stage = parse(plan_text("t.py", words, inspect(source, words)), "plan.toml").stage[0]
    assert (list(stage.foreign.first), stage.argv) == (["--resume"], ["--data", "coco.yaml"])


def test_words_to_resume_are_written_though_no_checkpoint_is_found():
    text = plan_text("t.py", [], inspect('parser.add_argument("--restart-resume")', []))
    assert '# again = ["--restart-resume", "{checkpoint}"]\n' in text and parse(text, "plan.toml")


@pytest.mark.parametrize(
    ("line", "checkpoint", "note"),
    [
        ("with open(args.save, 'wb') as f:\n        torch.save(x, f)", "model.pt", ""),
        ("misc.save_model(args, epoch, 'out/m.pth')", "out/m.pth", ""),
        ("misc.save_curve(args, epoch, 'out/curve.png')", "", "checkpoint: where does it save? For example"),
        ("fabric.save(f'out/step-{i}.ckpt', state)", "out/step-*.ckpt", ""),
        ("torch.save(x, '/scratch/a.pt')", "", "checkpoint: where does it save? In a folder outside of the plan's"),
        ("os.rename(path, path + '_old'); torch.save(x, unknown)", "", "checkpoint: where does it save?"),
    ],
)
def test_where_it_saves_is_found_in_each_way_to_say_it(line, checkpoint, note):
    source = f"parser.add_argument('--save', default='model.pt')\nfor i in x:\n    {line}\n"
    found = inspect(source, [])
    assert found.checkpoint == checkpoint and (not note or any(one.startswith(note) for one in found.notes))
    assert parse(plan_text("t.py", [], found), "plan.toml")


def test_of_many_calls_that_save_the_one_whose_name_differs_is_followed():
    source = """
def save(state, path):
    torch.save(state, path)
for step in range(9):
    save(state, f"out/step-{step}.pt")
save(state, "out/final.pt")
"""
    assert inspect(source, []).checkpoint == "out/step-*.pt"


@pytest.mark.parametrize(
    ("source", "line", "step", "loss"),
    [
        ("print(f'iter:{i:8,d} loss: {loss:.3f}')", "iter:  12,300 loss: 0.250", "12,300", "0.250"),
        ("print('iter:{:,} loss: {}'.format(i, loss))", "iter:1,234,567 loss: 1.5", "1,234,567", "1.5"),
        ("print(f'iter {i} step {s} | loss train: {a}, val: {b}')", "iter 8 step 2 | loss train: 3.2, val: 3.1", "2", "3.2"),
        ("print(f'val loss: {v}')\nprint(f'step {s} loss: {l}')", "step 3 loss: 0.5", "3", "0.5"),
        ("print(f'saved at step {s}')\nline = f'iter {i}, loss {l}'", "iter 5, loss 0.5", "5", "0.5"),
    ],
)  # fmt: skip
def test_the_line_of_a_step_goes_before_all_others(source, line, step, loss):
    found = inspect(source, [])
    assert re.search(found.step, line)[1] == step and re.search(found.loss, line)[1] == loss


def test_functions_that_call_one_another_take_no_time_without_end():
    source = "".join(
        f"def f{i}(path):\n" + "".join(f"    f{j}(path + '{j}')\n" for j in range(8)) + "    torch.save(x, path)\n"
        for i in range(8)
    )
    found = inspect(source + "f0('a')\n", [])  # each call followed would take hours
    assert found.checkpoint.count("/") == 0
