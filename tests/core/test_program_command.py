"""Arguments become flags as the documentation's table says, in the order of the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kgorch.core import program_command
from kgorch.core.program_command import FlagStyle, flag_names, flags_of, launch_command, module_of

ARGS = {"lr": 0.1, "amp": True, "compile": False, "tags": ["a", "b"], "none": [], "name": "x y", "table": {"a": 1}}


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("--key value", ["--lr", "0.1", "--amp", "--tags", "a", "b", "--name", "x y", "--table", '{"a": 1}']),
        ("--key=value", ["--lr=0.1", "--amp=True", "--compile=False", "--tags=a", "--tags=b", "--name=x y", '--table={"a": 1}']),
        ("key=value", ["lr=0.1", "amp=true", "compile=false", "tags=[a,b]", "none=[]", "name=x y", 'table={"a": 1}']),
    ],
)  # fmt: skip
def test_each_style_writes_numbers_truths_lists_and_tables_in_its_own_way(style, words):
    assert flags_of(ARGS, style) == words


def test_the_page_for_users_shows_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "your-training.md").read_text()
    rows = [line for line in (program_command.__doc__ or "").splitlines() if line.startswith("|")]
    assert len(rows) == 7 and all(row in page for row in rows)


def test_a_flag_of_literal_words_is_known_by_its_name_in_any_style():
    assert list(flag_names(["config.py", "--lr=3", "--amp", "-v", "--", "a=b"], FlagStyle.SPACE)) == ["lr", "amp"]
    assert list(flag_names(["+model.lr=3", "run"], FlagStyle.BARE)) == ["model.lr"]


@pytest.mark.parametrize(
    ("entry", "module"), [("-m a.b", "a.b"), ("-m a", "a"), ("-m  a", ""), ("-ma", ""), ("a.b:c", ""), ("-m a-b", "")]
)
def test_a_module_is_named_as_python_takes_it(entry, module):
    assert module_of(entry) == module


@pytest.mark.parametrize(
    ("launcher", "entry", "ends"),
    [
        ("none", "train.py", "PY train.py"),
        ("none", "-m a.b", "PY -m a.b"),
        ("none", "./run.sh", "./run.sh"),
        ("torchrun", "train.py", "--max-restarts=0 train.py"),
        ("torchrun", "-m a.b", "--max-restarts=0 -m a.b"),
        ("torchrun", "./run.sh", "--max-restarts=0 --no-python ./run.sh"),
        ("accelerate", "train.py", "--num_processes=2 --multi_gpu train.py"),
        ("accelerate", "./run.sh", "--num_processes=2 --multi_gpu --no_python ./run.sh"),
    ],
)
def test_a_launcher_is_told_what_kind_of_program_it_starts(launcher, entry, ends):
    words = launch_command(launcher, entry, 2, python="PY", on_gpu=launcher == "accelerate")
    assert " ".join(words).endswith(ends)
    assert launcher == "none" or re.search(r"=2\b", " ".join(words))


def test_on_cpus_torchrun_starts_the_processes_of_accelerate_which_would_start_one():
    words = launch_command("accelerate", "train.py", 2, python="PY", on_gpu=False)
    assert words == launch_command("torchrun", "train.py", 2, python="PY", on_gpu=False)
    one = launch_command("accelerate", "train.py", 1, python="PY", on_gpu=False)
    assert " ".join(one).endswith("accelerate.commands.launch --num_machines=1 --num_processes=1 --cpu train.py")
