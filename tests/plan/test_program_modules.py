"""What `kgorch adopt` finds in the modules of a program, and in the flags that it is called with."""

from __future__ import annotations

import ast
import re
import tracemalloc

import pytest
from click.testing import CliRunner

from kgorch.cli import cli
from kgorch.errors import KgorchError
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
    own = program_modules.imported(tmp_path / "train.py", MAIN, tmp_path)
    assert len(own.sources) == 4
    found = inspect(MAIN, ["--output_dir", "runs"], own)
    assert (found.checkpoint, found.again) == ("runs/checkpoint_*.pth", ["--resume", "{checkpoint}"])
    assert found.launcher == "none", "nothing that is called makes a process group"
    others = [text.replace("    torch.save", "    is_first()\n    torch.save") for text in own.sources]
    assert inspect(MAIN, [], own._replace(sources=others)).launcher == "torchrun"


@pytest.mark.parametrize(
    ("line", "call", "checkpoint"),
    [
        ("from utils import misc", "misc.keep(f'out/{epoch}.pt')", "out/*.pt"),
        ("from utils import misc as m", "m.keep(f'out/{epoch}.pt')", "out/*.pt"),
        ("import utils.misc", "utils.misc.keep(f'out/{epoch}.pt')", "out/*.pt"),
        ("import utils.misc as m", "m.keep(f'out/{epoch}.pt')", "out/*.pt"),
        ("import utils.misc as m", "m.Keeper('out').keep(epoch)", "out/*.pt"),
        ("from utils.misc import Keeper", "Keeper('out').keep(epoch)", "out/*.pt"),
        ("from utils import misc", "torch.save(state, f'out/{epoch}.pt')", "out/*.pt"),  # another `save` than misc's
        ("from utils import misc", "thing.keep(f'out/{epoch}.pt')", ""),
        ("import utils", "utils.keep(f'out/{epoch}.pt')", "out/*.pt"),  # which takes it from a module of its own
    ],
)
def test_a_function_is_followed_that_is_called_through_its_module(line, call, checkpoint, tmp_path):
    misc = """
import torch
def keep(path): torch.save(1, path)
def save(path): torch.save(1, "elsewhere/" + path)
class Keeper:
    def __init__(self, folder): self.folder = folder
    def keep(self, number): torch.save(1, f"{self.folder}/{number}.pt")
"""
    main = f"import torch\n{line}\nfor epoch in range(9):\n    {call}\n    misc.save\n"
    written(tmp_path, {"utils/__init__.py": "from .misc import keep", "utils/misc.py": misc})
    own = program_modules.imported(tmp_path / "train.py", main, tmp_path)
    assert inspect(main, [], own).checkpoint == checkpoint


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
    main = f"import broken, deep, loop, utf, gone, link, {'x' * 300}\nfrom ...above import x\nfrom . import sibling\n"
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
    found = program_modules.imported(inside / "train.py", main, inside)
    assert found.sources == ["import loop, train", "import loop"]
    monkeypatch.setattr(program_modules, "MOST_MODULES", 1)
    assert program_modules.imported(inside / "train.py", main, inside).sources == ["import loop, train"]
    monkeypatch.setattr(program_modules, "MOST_BYTES", 3)
    assert program_modules.imported(inside / "train.py", main, inside).sources == []


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
        ('parser.add_argument("-r", "--restart", default="")', ["--restart", "{checkpoint}"]),
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
    text = plan_text("t.py", [], inspect('parser.add_argument("--resume-from")', []))
    assert '# again = ["--resume-from", "{checkpoint}"]\n' in text and parse(text, "plan.toml")


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


@pytest.mark.parametrize(
    "line",
    [
        "torch.save(x, 'work/e_{}.pt'.format(epoch))",
        "torch.save(x, '{0}/e_{1:03d}.pt'.format(args.output, epoch))",
        "torch.save(x, '{folder}/e_{epoch}.pt'.format(folder=args.output, epoch=epoch))",
        "torch.save(x, 'work/e_%03d.pt' % (epoch + 1))",
        "torch.save(x, '%s/e_%d.pt' % (args.output, epoch))",
        "torch.save(x, '%(folder)s/e_%(epoch)d.pt' % {'folder': args.output, 'epoch': epoch})",
        "torch.save(x, Path(args.output).joinpath(f'e_{epoch}.pt'))",
        "torch.save(x, Path(args.output, f'e_{epoch}.pt'))",
        "torch.save(x, (Path(args.output) / f'e_{epoch}').with_suffix('.pt'))",
        "torch.save(x, os.sep.join([args.output, '_'.join(('e', str(epoch))) + '.pt']))",
        "torch.save(x, (args.none or args.output) + f'/e_{epoch}.pt')",
        "torch.save(x, f'{args.output}/e_best.pt' if is_best else f'{args.output}/e_{epoch}.pt')",
        "torch.save(x, f'{args.output}/e_{epoch}.pt' if args.output else f'other/{epoch}.pt')",
        "for path in [Path(args.output) / ('e_%s.pt' % epoch)]: torch.save(x, path)",
        "pickle.dump(x, open(f'work/e_{epoch}.pt', 'wb'))",
        "dcp.save(x, checkpoint_id=f'work/e_{epoch}.pt')",
        "eqx.tree_serialise_leaves(f'work/e_{epoch}.pt', x)",
        "model.save(f'work/e_{epoch}.pt')",
    ],
)
def test_a_place_is_read_however_it_is_put_together(line):
    source = "parser.add_argument('--output', default='work')\nargs = parser.parse_args()\nfor epoch in range(9):\n"
    assert inspect(f"{source}    {line}\n", []).checkpoint == "work/e_*.pt"


def test_the_place_of_a_callback_of_keras_is_read():
    callback = "keras.callbacks.ModelCheckpoint('out/{epoch:03d}-{val_loss:.2f}.keras')"
    found = inspect(f"fit(callbacks=[{callback}])\nmodel.save('out/last.keras')", [])
    assert found.checkpoint == "out/*-*.keras" and not any("saved once" in note for note in found.notes)


@pytest.mark.parametrize(
    "text", ["{", "{0", "}", "{a.b}", "{0[x]}", "{!}", "%", "%(", "%(a)", "{:{}}", "{99999999999}", "*%s{}"]
)
def test_a_broken_format_is_an_unknown_place(text):
    for line in (
        f"{text!r}.format(epoch)",
        f"{text!r} % epoch",
        f"{text!r} % (epoch, {{}})",
        f"{text!r}.format(*x, **y)",
    ):
        found = inspect(f"for epoch in x:\n    torch.save(x, 'out/' + {line})\n", [])
        assert found.checkpoint.startswith("out/"), "what is known of it stays"


def test_a_function_that_hands_on_what_it_is_given_saves(tmp_path):
    misc = """
import torch
def save_on_master(*args, **kwargs):
    if is_first():
        torch.save(*args, **kwargs)
def save_model(args, epoch, model, scaler):
    folder = Path(args.output_dir)
    for path in [folder / ("checkpoint-%s.pth" % str(epoch))]:
        save_on_master({"model": model}, path)
"""
    main = "import util.misc as misc\nfor epoch in range(9):\n    misc.save_model(args=args, epoch=epoch, model=1, scaler=2)\n"
    written(tmp_path, {"util/misc.py": misc})
    own = program_modules.imported(tmp_path / "train.py", main, tmp_path)
    assert inspect(main, ["--output_dir", "out"], own).checkpoint == "out/checkpoint-*.pth"
    of_deepspeed = "model.save_checkpoint(save_dir=args.output_dir, tag='tag-%s' % epoch)"
    own = own._replace(sources=[misc.replace('save_on_master({"model": model}, path)', of_deepspeed)])
    assert inspect(main, ["--output_dir", "out"], own).checkpoint == "out/tag-*"


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
        ("print(f'Epoch [{e}/{n}] loss: {l}')", "Epoch [3/10] loss: 0.5", "3", "0.5"),
        ("print('Epoch: [{}]'.format(e))\nprint(f'loss {l}')", "Epoch: [3] loss 0.5", "3", "0.5"),
        ("print(f'epoch {e} loss {l}')\nprint(f'step {s}')", "epoch 3 loss 0.5 step 70", "70", "0.5"),
        ("print(f'epoch {e} step {s} loss {l}')", "epoch 3 step 70 loss 0.5", "70", "0.5"),
        ("print(f'saved at step {s}')\nline = f'iter {i}, loss {l}'", "iter 5, loss 0.5", "5", "0.5"),
    ],
)  # fmt: skip
def test_the_line_of_a_step_goes_before_all_others(source, line, step, loss):
    found = inspect(source, [])
    assert re.search(found.step, line)[1] == step and re.search(found.loss, line)[1] == loss


ARGPARSE = """
import argparse, os, time, torch
parser = argparse.ArgumentParser()
parser.add_argument("-o", "--output-dir", "--out", default="out")
parser.add_argument("--epoch", type=int, default=1)
parser.add_argument("--weights", dest="place", default="w")
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
args.out = unknown()
for epoch in range(args.epoch):
    save = epoch % 10 == 0
    SAVES
"""


@pytest.mark.parametrize(
    ("line", "words", "checkpoint"),
    [
        ("torch.save(x, os.path.join(args.output_dir, f'{epoch}.pt'))", "-o runs/a", "runs/a/*.pt"),
        ("torch.save(x, os.path.join(args.output_dir, f'{epoch}.pt'))", "--out runs/a", "runs/a/*.pt"),
        ("torch.save(x, os.path.join(args.output_dir, f'{epoch}.pt'))", "--out=runs/a", "runs/a/*.pt"),
        ("torch.save(x, os.path.join(args.place, f'{epoch}.pt'))", "--weights b", "b/*.pt"),
        ("torch.save(x, f'out/model_{epoch}.pt')", "--epoch 200", "out/model_*.pt"),
        ("path = f'a/{epoch}'; path += '.pt'; torch.save(x, path)", "", "a/*.pt"),
        ("[torch.save(x, f'a/{epoch}.pt') for epoch in y]", "--epoch 3", "a/*.pt"),
        ("torch.save(x, path := f'a/{epoch}.pt')", "", ""),
        ("if (path := f'a/{epoch}.pt'): torch.save(x, path)", "", "a/*.pt"),
        ("path: str = f'a/{epoch}.pt'; torch.save(x, path)", "", "a/*.pt"),
        ("engine.save_checkpoint('ckpt', f'step_{epoch}')", "", "ckpt/step_*"),
        ("engine.save_checkpoint('ckpt', tag=f'step_{epoch}')", "", "ckpt/step_*"),
        ("engine.save_checkpoint('ckpt', state)", "", "ckpt"),
    ],
)
def test_a_place_is_that_of_the_flags_in_every_spelling_and_of_no_variable_of_the_same_name(line, words, checkpoint):
    assert inspect(ARGPARSE.replace("SAVES", line), words.split()).checkpoint == checkpoint


@pytest.mark.parametrize(
    ("option", "words", "is_off"),
    [
        ('"--keep", action="store_true"', "", True),
        ('"--keep", action="store_true", default=True', "", False),
        ('"--no-keep", dest="keep", action="store_false"', "", False),
        ('"--no-keep", dest="keep", action="store_false"', "--no-keep", True),
        ('"--keep", action=argparse.BooleanOptionalAction, default=True', "", False),
        ('"--keep", action=argparse.BooleanOptionalAction, default=True', "--no-keep", True),
        ('"--keep", action=argparse.BooleanOptionalAction', "--keep", False),
        ('"--keep", action="append"', "", False),
        ('"--keep", required=True', "", False),
        ('"--keep", type=int, default=0', "", True),
        ('"--keep", type=int, default=0', "--keep 3", False),
        ('"--keep", default=unknown()', "", False),
    ],
)
def test_a_switch_is_off_as_its_option_says(option, words, is_off):
    saves = "for i in x:\n    if args.keep:\n        torch.save(x, f'a/{i}.pt')\n"
    source = f"import argparse\nparser.add_argument({option})\n{saves}"
    assert inspect(source, words.split()).is_off is is_off


@pytest.mark.parametrize("test", ["args.local_rank == 0", "save", "args.out"])
def test_a_test_of_what_the_program_or_its_launcher_sets_is_no_reason_to_say_that_it_does_not_save(test):
    found = inspect(ARGPARSE.replace("SAVES", f"if {test}: torch.save(x, f'a/{{epoch}}.pt')"), [])
    assert found.checkpoint == "a/*.pt" and not found.is_off


@pytest.mark.parametrize(
    "option",
    [
        '"--vae_ckpt_path"', '"--wandb_resume_id"', '"--resume_epoch", type=int', '"--resume", type=int',
        '"--resume", type=str2bool', '"--restore_steps", type=float',
    ],
)  # fmt: skip
def test_an_option_that_takes_no_checkpoint_is_not_how_a_program_continues(option):
    source = f"parser.add_argument({option})\nfor i in x:\n    torch.save(x, 'a.pt')\n"
    assert inspect(source, []).again == []


def test_a_folder_of_a_run_and_weights_that_are_saved_once_are_told():
    source = """
import time, torch
name = f"run_{time.time()}"
for step in range(9): pass
torch.save(model, f"runs/{name}/model.pt")
"""
    found = inspect(source, [])
    assert found.checkpoint == "runs/run_*/model.pt" and any("is saved once" in note for note in found.notes)
    assert not any("is saved once" in note for note in inspect(MAIN, []).notes)


def test_files_that_are_saved_beside_one_another_are_told():
    source = """
for i in x:
    torch.save(a, f"out/generator_{i}.pth")
    torch.save(b, f"out/optim_{i}.pth")
    torch.save(a, "out/best.pth")
"""
    found = inspect(source, [])
    [note] = [note for note in found.notes if "it saves" in note]
    assert {found.checkpoint, *re.findall(r"out/\w+_\*\.pth", note)} == {"out/generator_*.pth", "out/optim_*.pth"}
    assert not any(
        "it saves" in note for note in inspect(source.replace('f"out/optim_{i}.pth"', '"out/last.pt"'), []).notes
    )


@pytest.mark.parametrize(
    ("line", "stop"),
    [
        ("signal.signal(signal.SIGTERM, handler)", "SIGTERM"),
        ("for one in (signal.SIGUSR1, signal.SIGINT): signal.signal(one, handler)", "SIGUSR1"),
        ("from signal import SIGTERM, signal\nsignal(SIGTERM, handler)", "SIGTERM"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", ""),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGUSR1, handler)", "SIGUSR1"),
        ("os.kill(pid, signal.SIGTERM)", ""),
    ],
)
def test_a_signal_that_is_ignored_or_sent_is_not_handled(line, stop):
    assert inspect(line, []).stop == stop


@pytest.mark.parametrize(
    ("source", "launcher"),
    [
        ("import deepspeed\ndeepspeed.init_distributed()", "torchrun"),
        (
            "from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(net)\nDistributedSampler(data)",
            "torchrun",
        ),
        ("import torch.multiprocessing as mp\ndist.init_process_group()\nmp.spawn(main)", "none"),
        ("from detectron2.engine import launch\nDistributedDataParallel(net)\nlaunch(main, 2)", "none"),
    ],
)
def test_the_launcher_is_that_of_a_program_that_does_not_start_its_ranks_itself(source, launcher):
    assert inspect(source, []).launcher == launcher


def test_the_loss_of_a_validation_is_not_read_for_that_of_the_training():
    found = inspect("print(f'step {s} eval_loss: {v}')\nprint(f'step {s} loss: {l}')", [])
    assert re.search(found.loss, "step 3 loss: 0.5")[1] == "0.5" and not re.search(found.loss, "step 3 eval_loss: 0.4")


def test_a_program_is_read_in_its_own_encoding(tmp_path):
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbffor i in x: torch.save(x, 'a.pt')")
    (tmp_path / "latin.py").write_bytes(
        "# -*- coding: latin-1 -*-\nfor i in x: torch.save(x, 'Größe.pt')".encode("latin-1")
    )
    texts = [program_modules.text_of(tmp_path / name) for name in ("bom.py", "latin.py")]
    assert [inspect(text, []).checkpoint for text in texts] == ["a.pt", "Größe.pt"]
    words = ["adopt", str(tmp_path / "odd.py"), "--out", str(tmp_path / "plan.toml")]
    for content, why in ((b"# coding: no-such-one\n", "no-such-one"), (b"#" * (2 << 20), "more than 1048576 bytes")):
        (tmp_path / "odd.py").write_bytes(content)
        with pytest.raises(KgorchError, match="cannot be parsed") as caught:
            CliRunner().invoke(cli, words, catch_exceptions=False)
        assert why in str(caught.value)


def test_a_module_that_a_link_leads_out_of_the_folder_is_not_read(tmp_path):
    written(
        tmp_path, {"plan/train.py": "import linked, folder.inner", "other/secret.py": "x = 1", "other/inner.py": ""}
    )
    (tmp_path / "plan/linked.py").symlink_to(tmp_path / "other/secret.py")
    (tmp_path / "plan/folder").symlink_to(tmp_path / "other")
    main = "import linked, folder.inner"
    assert program_modules.imported(tmp_path / "plan/train.py", main, tmp_path / "plan") == ([], set())


@pytest.mark.parametrize("encoding", ["hex", "rot13", "bz2"])
def test_an_encoding_that_is_none_of_a_text_is_told_and_a_module_in_it_left_out(tmp_path, encoding, monkeypatch):
    written(tmp_path, {"train.py": "import odd", "odd.py": f"# coding: {encoding}\n"})
    assert program_modules.imported(tmp_path / "train.py", "import odd", tmp_path).sources == []
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KgorchError, match="cannot be parsed"):
        CliRunner().invoke(cli, ["adopt", "odd.py", "--print"], catch_exceptions=False)


@pytest.mark.parametrize("word", ["a\x7fb.pt", "a\nb.pt", "\ud800.pt"])
def test_a_place_that_nobody_can_read_is_unknown(word):
    assert inspect(f"for i in x:\n    torch.save(x, {word!r})\n", []).checkpoint == ""


def test_words_that_no_plan_can_hold_are_refused_and_all_others_kept(tmp_path, monkeypatch):
    written(tmp_path, {"train.py": ""})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KgorchError, match="not UTF-8"):
        CliRunner().invoke(cli, ["adopt", "train.py", "--print", "--", "--out=\udcff"], catch_exceptions=False)
    done = CliRunner().invoke(cli, ["adopt", "train.py", "--print", "--", "a\x7fb"], catch_exceptions=False)
    assert parse(done.stdout, "plan.toml").stage[0].argv == ["a\x7fb"]


def test_a_text_that_is_repeated_many_times_does_not_fill_the_memory():
    source = f"a = {'q' * 4000!r}\nd = f'{'{a}' * 900}.pt'\nfor i in y:\n    torch.save(m, d)\n"
    tracemalloc.start()
    assert inspect(source, []).checkpoint == ""
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_names_that_are_given_one_value_and_calls_of_one_function_are_looked_at_once(monkeypatch):
    looks, walk = [], ast.walk
    monkeypatch.setattr(ast, "walk", lambda node: (looks.append(1) or one for one in walk(node)))
    for line in (
        "a = " * 200 + "[" + "a," * 200 + "]\n",
        "def f():\n" + "  x = 1\n" * 200 + "for i in y:\n" + "  f()\n" * 200,
    ):
        looks.clear()
        inspect(line, [])
        nodes = sum(1 for _ in walk(ast.parse(line)))
        assert len(looks) < 40 * nodes, "and not the square of it"


def test_functions_that_call_one_another_take_no_time_without_end():
    source = "".join(
        f"def f{i}(path):\n" + "".join(f"    f{j}(path + '{j}')\n" for j in range(8)) + "    torch.save(x, path)\n"
        for i in range(8)
    )
    found = inspect(source + "f0('a')\n", [])  # each call followed would take hours
    assert found.checkpoint.count("/") == 0
