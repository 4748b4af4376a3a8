"""What a plan's stages read is looked at before a session starts: `inputs` and `preflight`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from harness import command_lines

from kgorch.errors import PlanError
from kgorch.launch import inputs
from kgorch.plan import StageSection, check_entries, parse

PREFLIGHT = '''
"""Looks at the data of a test's plan."""

import os
import sys
import time

from kgorch.errors import KgorchError


class DataError(KgorchError):
    """As the workloads raise."""


def describes(data, **_):
    print("this goes to the log")
    gpus = os.environ["CUDA_VISIBLE_DEVICES"]
    return f"{len(os.listdir(data))} samples, GPUs {gpus!r}\\nand more"


def is_silent():
    pass


def refuses(data, least=100):
    raise DataError(f"{data} has too few samples", f"expected {least}", next_step="fetch the rest")


def breaks(data):
    return {}[data]


def hangs(data):
    sys.stderr.write("listing\\n")
    sys.stderr.flush()
    if os.fork() == 0:
        os.system(f"exec sleep 54321.{os.getppid()}")
    time.sleep(60)


def dies(data):
    os.abort()


def takes_what_is_not_there(data, sample_rate):
    return "never"
'''


def stage(function: str | None = None, **keys) -> StageSection:
    return StageSection(name="train", entry="a.py", args=keys.pop("args", {"data": "data"}), preflight=function, **keys)


def looked(folder: Path, value: str = "data", platform: str = "") -> inputs.Check:
    [check] = inputs.check_paths([stage(args={"data": value}, inputs=["data"])], folder, platform)
    return check


def called(folder: Path, function: str, **kwargs) -> inputs.Check:
    (folder / "looks.py").write_text(PREFLIGHT)
    [check] = inputs.call_preflights([stage(f"looks:{function}")], folder, **kwargs)
    return check


def test_a_file_and_a_folder_are_sound_once_a_first_file_could_be_read(tmp_path):
    deep = tmp_path / "data" / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "data" / ".hidden").write_text("no data")
    (tmp_path / "data" / "empty.png").touch()
    assert "every file" in looked(tmp_path).what
    (deep / "first.png").write_bytes(b"12345")
    assert looked(tmp_path).verdict == "pass"
    assert looked(tmp_path).what == f"{tmp_path}/data: a folder; a/b/first.png has 5 bytes"
    assert looked(tmp_path, "data/a/b/first.png").what.endswith("first.png: a file of 5 bytes")
    (tmp_path / "data" / "a" / "above").symlink_to(tmp_path / "data")
    (deep / "first.png").write_bytes(b"")
    assert "every file" in looked(tmp_path).what, "a link to a folder above is no way without an end"


def test_what_is_not_there_is_told_with_what_lies_beside_it_and_what_to_type(tmp_path):
    mounts = tmp_path / "input"
    (mounts / "datasets" / "somebody" / "cod10k" / "images").mkdir(parents=True)
    (mounts / "cod10-k").mkdir()
    check = looked(tmp_path, "input/cod10k/images", "kaggle")
    assert check.verdict == "fail"
    assert check.what == f"stage 'train', argument data = 'input/cod10k/images': there is no {mounts}/cod10k/images"
    assert check.facts == (
        f"{mounts} holds cod10-k/, datasets/ (did you mean 'cod10-k'?)",
        f"there is {mounts}/datasets/somebody/cod10k/images",
    )
    assert "Add Input" in check.do and check.do.endswith("--set stage.train.args.data=PATH")
    assert looked(tmp_path, "input/cod10k/images").do.startswith("correct it, in the plan")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.mkdir(), "holds no file"),
        (lambda path: (path / "a" / "b").mkdir(parents=True), "holds no file, only folders (2)"),
        (lambda path: path.touch(), "data is empty"),
        (lambda path: os.mkfifo(path), "is neither a file nor a folder"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, which is not there"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_holds_nothing_is_refused_by_what_is_the_matter_with_it(tmp_path, make, what):
    make(tmp_path / "data")
    check = looked(tmp_path)
    assert check.verdict == "fail" and what in check.what


def test_a_path_no_file_can_have_is_refused_too(tmp_path):
    assert "cannot be read: embedded null byte" in looked(tmp_path, "da\0ta").what
    assert "cannot be read: File name too long" in looked(tmp_path, "d" * 300).what


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "first.png").write_bytes(b"12345")

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(inputs.os, "open", refuse)  # root may read all there is
    check = looked(tmp_path)
    assert check.what.endswith(f"no file in {tmp_path}/data can be read")
    assert check.facts == (f"{tmp_path}/data/first.png: Permission denied",)
    assert check.do.startswith(f"see ls -ld {tmp_path}/data/first.png")


def test_a_folder_without_an_end_is_not_walked_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_ENTRIES", 20)
    for number in range(30):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
    check = looked(tmp_path)
    assert check.verdict == "pass" and "no file among its first 20 entries" in check.what


def test_the_stages_own_function_is_asked_without_gpus_and_its_first_line_is_shown(tmp_path):
    (tmp_path / "data").mkdir()
    check = called(tmp_path, "describes")
    assert (check.name, check.verdict, check.what) == ("stage train", "pass", "0 samples, GPUs ''")
    assert called(tmp_path, "is_silent").what == "passed"


@pytest.mark.parametrize(
    ("function", "what", "facts", "do"),
    [
        ("refuses", "data has too few samples", ["expected 100"], "fetch the rest"),
        ("breaks", "KeyError: 'data'", ["raised in looks.py:30"], ""),
        ("takes_what_is_not_there", "missing a required argument: 'sample_rate'", [], "give it in the stage's args"),
        ("dies", "looks:dies ended by SIGABRT and gave no answer", [], ""),
    ],
)
def test_what_the_stages_function_raises_is_a_failure_in_its_own_words(tmp_path, function, what, facts, do):
    check = called(tmp_path, function)
    assert check.verdict == "fail" and check.what.endswith(what)
    assert (list(check.facts), check.do) == (facts, do)


def test_a_function_that_takes_too_long_is_ended_with_all_that_it_started_and_stops_no_session(tmp_path):
    began_s = time.monotonic()
    check = called(tmp_path, "hangs", limit_s=5.0)
    assert time.monotonic() - began_s < 30
    assert check.verdict == "warn" and "not done after 5 s" in check.what and check.facts == ("listing",)
    assert not [line for line in command_lines() if f"54321.{os.getpid()}".encode() in line and b"sleep" in line]


PLAN = """
name = "a"
[[stage]]
name = "quick"
quick_test_of = "train"
[[stage]]
name = "train"
entry = "train.py"
args = { data = "data", lists = ["a.csv", "b.csv"], lr = 0.1 }
inputs = ["data", "lists"]
preflight = "looks:describes"
"""


def test_a_quick_test_takes_both_over_and_what_two_stages_share_is_looked_at_once(tmp_path):
    plan = parse(PLAN, "plan.toml")
    assert plan.stage[0].inputs == ["data", "lists"] and plan.stage[0].preflight == "looks:describes"
    checks = list(inputs.check_paths(plan.stage, tmp_path, ""))
    assert [check.what.partition(":")[0] for check in checks] == [
        "stage 'quick', argument data = 'data'",
        "stage 'quick', argument lists = 'a.csv'",
        "stage 'quick', argument lists = 'b.csv'",
    ]
    other = parse(PLAN.replace('of = "train"', 'of = "train"\nargs = { data = "few" }'), "plan.toml")
    assert other.stage[0].inputs == ["data", "lists"] and other.stage[0].args["data"] == "few"
    without = "\n".join(line for line in PLAN.splitlines() if not line.startswith(("inputs", "preflight")))
    assert parse(without, "plan.toml").hash == plan.hash, "no bit of the training hangs on what is looked at"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('inputs = ["dta"]', "plan.toml:10: stage.train.inputs.0: args has no \"dta\" (did you mean 'data'?)"),
        ('inputs = ["lr"]', "plan.toml:9: stage.train.args.lr: expected the path of a file or folder"),
        ('preflight = "looks.py"', 'plan.toml:10: stage.train.preflight: expected "module:function"; found "looks.py"'),
    ],
)
def test_a_mistake_in_either_key_is_told_by_its_line(line, said):
    text = PLAN.replace('inputs = ["data", "lists"]\npreflight = "looks:describes"', line)
    with pytest.raises(PlanError) as error:
        parse(text, "plan.toml")
    assert said in str(error.value)


def test_a_function_that_is_not_there_is_found_without_an_import(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "looks.py").write_text("import gone\ndef describe(data): ...")
    with pytest.raises(PlanError, match=r"looks.py has no 'describes' \(did you mean 'describe'\?\)") as error:
        check_entries(parse(PLAN, "plan.toml"), tmp_path)
    assert error.value.next_step == "correct the stage's preflight"


SEES = """

def sees(data, least):
    open("seen", "a").write("x")
    return f"{least} samples of {data}"
"""


def test_no_session_starts_without_the_data_and_a_stage_that_is_done_needs_none(kgorch):
    (kgorch.folder / "looks.py").write_text(PREFLIGHT + SEES)
    path = kgorch.plan("never_attaches.py", ranks=1, args={"say": "data"}, extra="[quota]\nhours = 30\n")
    keys = 'inputs = ["say"]\npreflight = "looks:sees"\nargs = { data = 0, least = 3, '
    path.write_text(path.read_text().replace("args = { ", keys, 1))
    found = json.loads(kgorch("check", str(path), "--no-probe", "--json", code=20).stdout)
    [row] = [line for line in found["preflight"] if line["name"] == "input say"]
    assert row["verdict"] == "fail" and f"there is no {kgorch.folder}/data" in row["said"]
    assert not (kgorch.folder / "seen").exists(), "nobody is asked of data that is not there"

    refused = kgorch("start", str(path), code=2).stderr
    assert f"error: stage 'train', argument say = 'data': there is no {kgorch.folder}/data" in refused
    assert "next: correct it, in the plan or by --set stage.train.args.say=PATH" in refused
    assert kgorch.history() == [], "no session was opened, so nothing is charged"

    (kgorch.folder / "data").write_text("something")
    assert "note: stage train: 3 samples of 0\n" in kgorch("start", str(path)).stderr
    assert (kgorch.folder / "seen").read_text() == "x"
    (kgorch.folder / "data").unlink()
    assert kgorch("check", str(path), "--no-probe").returncode == 0, "the stage is done"
