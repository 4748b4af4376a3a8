"""[stage.foreign]: what a plan may say of a program that saves and resumes by itself, and what is told of mistakes."""

from __future__ import annotations

import pytest

from kgorch.errors import PlanError
from kgorch.plan import check_entries, parse

GOOD = r"""
name = "x"
[[stage]]
name = "train"
entry = "train.py"
argv = ["config/small.py", "--compile=False"]
flags = "--key=value"
args = { lr = 0.1, resume_from = "a" }
[stage.foreign]
checkpoint = "out/checkpoint-*"
incomplete = ["*.tmp"]
settled = "5s"
first = ["--new"]
again = ["--resume", "{checkpoint}"]
stop = { signal = "SIGUSR1", grace = "90s" }
step = { log = 'step (\d+)' }
metrics = { loss = { log = 'loss ([\d.]+)' }, acc = { file = "out/log.json", key = "eval.acc" } }
latest = "out/latest"
"""


def test_a_complete_section_is_handed_to_the_agent_as_it_stands():
    section = parse(GOOD, "plan.toml").stage[0].foreign
    assert section.as_launch() == {
        "checkpoint": "out/checkpoint-*",
        "incomplete": ["*.tmp"],
        "settled_s": 5.0,
        "first": ["--new"],
        "again": ["--resume", "{checkpoint}"],
        "latest": {"file": "out/latest", "link": None, "text": "{name}"},
        "stop": {"signal": "SIGUSR1", "file": None, "grace_s": 90.0},
        "step": {"log": r"step (\d+)", "file": None, "key": None},
        "metrics": {
            "loss": {"log": r"loss ([\d.]+)", "file": None, "key": None},
            "acc": {"log": None, "file": "out/log.json", "key": "eval.acc"},
        },
    }


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"--compile=False"]', '"--lr=3"]', "plan.toml:6: stage.train.argv: the flag --lr is given twice: in argv and in args"),
        ('["--resume"', '["--lr"', "plan.toml:14: stage.train.foreign.again: the flag --lr is given twice: in foreign.again and"),
        ('["--new"]', '["--compile"]', "plan.toml:13: stage.train.foreign.first: the flag --compile is given twice"),
        ('checkpoint = "out/checkpoint-*"', "", "plan.toml:14: stage.train.foreign.again: again says how to continue from a"),
        ('"out/checkpoint-*"', '"../out"', "plan.toml:10: stage.train.foreign.checkpoint: expected a path relative to the plan's"),
        ('"out/checkpoint-*"', '"/out"', "plan.toml:10: stage.train.foreign.checkpoint: expected a path relative to the plan's"),
        ('"out/checkpoint-*"', '"."', "plan.toml:10: stage.train.foreign.checkpoint: expected a path relative to the plan's"),
        ('["*.tmp"]', '["a/b"]', 'plan.toml:11: stage.train.foreign.incomplete: expected names without "/"'),
        ("'step (\\d+)'", "'step ('", "plan.toml:16: stage.train.foreign.step.log: expected a regular expression"),
        ("'step (\\d+)'", "'step'", "plan.toml:16: stage.train.foreign.step.log: expected a group around the number"),
        ("{ log = 'step (\\d+)' }", "{}", "plan.toml:16: stage.train.foreign.step: expected log = "),
        (', key = "eval.acc"', "", "plan.toml:17: stage.train.foreign.metrics.acc.file: expected log = '…' alone, or file"),
        ('"SIGUSR1"', '"SIGKILL"', 'to end it without notice write stop = "kill"'),
        ('"SIGUSR1"', '"USR1"', "plan.toml:15: stage.train.foreign.stop.signal: expected one of SIGTERM"),
        ('{ signal = "SIGUSR1", grace = "90s" }', '"die"', 'plan.toml:15: stage.train.foreign.stop: expected "kill", or a table'),
        ('signal = "SIGUSR1"', 'signal = "SIGUSR1", file = "a"', "expected one way to stop the program, found signal and file"),
        ('"out/latest"', '"out/l*"', "plan.toml:18: stage.train.foreign.latest.file: expected one path, without wildcards"),
        ('"out/latest"', '"../latest"', "plan.toml:18: stage.train.foreign.latest.file: expected a path relative to the plan's"),
        ('"out/latest"', '"out/checkpoint-last"', "plan.toml:18: stage.train.foreign.latest.file: out/checkpoint-last is a"),
        ('"out/latest"', '"out/checkpoint-1/latest"', "plan.toml:18: stage.train.foreign.latest.file: out/checkpoint-1 is a"),
        ('"out/latest"', '{ file = "a", link = "b" }', "plan.toml:18: stage.train.foreign.latest.file: expected file or link"),
        ('"out/latest"', '{ file = "a", text = "{step}" }', "plan.toml:18: stage.train.foreign.latest.text: expected a text"),
        ('"out/latest"', "{ text = \"{name}\" }", "plan.toml:18: stage.train.foreign.latest.file: expected file or link"),
        ("again =", "agian =", "unknown key (did you mean 'again'?)"),
        ('entry = "train.py"', 'entry = "a.b:main"', "is a script, \"-m package.module\" or an executable, not a function"),
        ('entry = "train.py"', 'entry = "-mx"', 'plan.toml:5: stage.train.entry: expected "module:function" or the path of a'),
        ('flags = "--key=value"', 'flags = "--key=val"', "did you mean '--key=value'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line_and_what_to_write(old, new, told):
    assert old in GOOD
    with pytest.raises(PlanError) as caught:
        parse(GOOD.replace(old, new), "plan.toml")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "place", ["./out/checkpoint-*", "out//checkpoint-*", "out/checkpoint-*/", "out/./checkpoint-*"]
)
def test_a_place_means_the_same_however_it_is_written(place):
    text = GOOD.replace('"out/checkpoint-*"', f'"{place}"').replace('"out/log.json"', '"./out//log.json"')
    assert (
        parse(text, "plan.toml").stage[0].foreign.as_launch() == parse(GOOD, "plan.toml").stage[0].foreign.as_launch()
    )


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (
            'entry = "train.py"\nlauncher = "none"',
            '"none" starts programs of [stage.foreign] only; others need torchrun',
        ),
        ('entry = "./run.sh"', "(an executable needs [stage.foreign])"),
        ('entry = "a.b:c"\nargv = ["x"]', "a function takes no words: give them as args, by name"),
        ('entry = "t.py"\nargv = ["--lr=3"]\nargs = { lr = 4 }', "the flag --lr is given twice: in argv and in args"),
    ],
)
def test_what_needs_a_foreign_program_or_a_command_line_is_told_to_others(stage, told):
    with pytest.raises(PlanError) as caught:
        parse(f'name = "x"\n[[stage]]\nname = "t"\n{stage}\n', "plan.toml")
    assert told in str(caught.value)


def test_a_quick_test_of_a_foreign_stage_is_refused_with_what_does_it_instead():
    with pytest.raises(PlanError, match="kgorch check runs it briefly"):
        parse(GOOD + '[[stage]]\nname = "quick"\nquick_test_of = "train"\n', "plan.toml")


def test_the_hash_follows_the_command_line_and_not_how_the_program_is_watched():
    base = parse(GOOD, "plan.toml").hash
    assert parse(GOOD.replace("90s", "30s").replace('"5s"', '"6s"'), "plan.toml").hash == base
    others = [
        GOOD.replace("small.py", "large.py"),
        GOOD.replace("--new", "--old"),
        GOOD.replace("--key=value", "key=value"),
    ]
    assert len({base, *(parse(text, "plan.toml").hash for text in others)}) == 4
    plain = 'name = "x"\n[[stage]]\nname = "t"\nentry = "t.py"\n'
    explicit = plain + 'argv = []\nflags = "--key value"\nlauncher = "torchrun"\n'
    assert parse(plain, "plan.toml").hash == parse(explicit, "plan.toml").hash


def test_programs_and_modules_that_do_not_exist_are_told_before_a_start(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "go.py").touch()
    (tmp_path / "plain.sh").touch()

    def check(entry):
        text = GOOD.replace('"train.py"', f'"{entry}"').replace("SIGUSR1", "SIGTERM")
        check_entries(parse(text, "plan.toml"), tmp_path)

    check("-m pack.go")
    check("sh")
    for entry, told in [
        ("-m pack", "is a package without a __main__.py"),
        ("-m pack.gone", "there is no module 'pack.gone'"),
        ("./gone.sh", "there is no program './gone.sh'"),
        ("no-such-program-anywhere", "and the folders of PATH"),
        ("plain.sh", "is not executable"),
    ]:
        with pytest.raises(PlanError, match=told):
            check(entry)
