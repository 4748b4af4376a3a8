"""CUDA_VISIBLE_DEVICES is read as CUDA reads it, once, for all that asks which GPUs there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from driver import MIB, build
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.core import cuda_visible

UUIDS = {0: "GPU-5d5ba0d6-d33d", 1: "GPU-5d5b0000-1111", 2: "GPU-c0ffee00-2222"}

PLAIN = [
    (None, [0, 1, 2]),
    ("", []),
    ("  ", []),
    (",", []),
    ("-1", []),
    ("-2", []),
    ("NoDevFiles", []),
    ("0", [0]),
    ("2,1", [2, 1]),
    (" 1 , 0", [1, 0]),
    ("+1", [1]),
    ("0,", [0]),
    ("0,2,-1,1", [0, 2]),
    ("GPU-5d5ba0d6-d33d", [0]),
    ("GPU-c", [2]),
    ("GPU-c0ffee,GPU-5d5ba", [2, 0]),
]
WRONG = [
    ("0,7,1", [0], "there is no GPU 7"),
    ("0;1", [], "'0;1' is neither the index nor the UUID of a GPU"),
    ("0,,1", [0], "'' is neither"),
    (",0", [], "'' is neither"),
    ("cuda:0", [], "'cuda:0' is neither"),
    ("٣", [], "'٣' is neither"),
    ("9" * 5000, [], "is neither"),
    ("1,1", [], "'1' names a device for the second time"),
    ("GPU-c,GPU-c0ffee", [], "'GPU-c0ffee' names a device for the second time"),
    ("GPU-5d5b", [], "'GPU-5d5b' is the beginning of 2 UUIDs"),
    ("GPU-c,GPU-dead", [2], "no GPU has a UUID that begins with 'GPU-dead'"),
    ("c0ffee00-2222", [], "'c0ffee00-2222' is neither"),
    ("0,GPU-c", [0], "'GPU-c' is not an index like the first entry"),
    ("GPU-c,0", [2], "'0' is not a UUID like the first entry"),
    ("MIG-GPU-dead/1/0", [], "no GPU has a UUID that begins with 'GPU-dead'"),
    ("MIG-GPU-5d5ba0d6-d33d", [], "is neither MIG-<UUID> nor"),
]


def indices(text, uuids=UUIDS):
    return [gpu.index for gpu in cuda_visible.parse(text, uuids).gpus]


@pytest.mark.parametrize(("text", "expected"), PLAIN)
def test_what_is_valid_is_read_in_its_order(text, expected):
    visible = cuda_visible.parse(text, UUIDS)
    assert [(gpu.index, gpu.uuid) for gpu in visible.gpus] == [(index, UUIDS[index]) for index in expected]
    assert visible.problem == ""
    assert visible.is_hidden == (text is not None and not expected)


@pytest.mark.parametrize(("text", "expected", "problem"), WRONG)
def test_cuda_stops_at_the_first_entry_that_is_not_valid_and_the_problem_names_it(text, expected, problem):
    visible = cuda_visible.parse(text, UUIDS)
    assert [gpu.index for gpu in visible.gpus] == expected
    assert problem in visible.problem
    assert visible.problem.endswith("1 (GPU-5d5b0000-1111), 2 (GPU-c0ffee00-2222)")
    assert not visible.is_hidden


@pytest.mark.parametrize(
    ("text", "index"), [("MIG-c6d4f1ef-42e4,MIG-cba663e8", None), ("MIG-GPU-5d5ba0d6-d33d/1/0,MIG-GPU-c/2/0", 0)]
)
def test_a_process_uses_one_mig_instance_whatever_is_listed(text, index):
    [gpu] = cuda_visible.parse(text, UUIDS).gpus
    assert (gpu.index, gpu.entry, gpu.is_mig) == (index, text.partition(",")[0], True)
    assert cuda_visible.parse(f"{text},{text}", UUIDS).gpus == ()


def test_without_a_driver_what_is_well_formed_is_believed():
    assert indices("0,7", None) == [0, 7]
    assert [gpu.uuid for gpu in cuda_visible.parse("GPU-a,GPU-b", None).gpus] == ["GPU-a", "GPU-b"]
    assert cuda_visible.parse(None, None).gpus == ()
    assert "neither" in cuda_visible.parse("none", None).problem


WORDS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "-1",
        "-2",
        "-0",
        "+1",
        "",
        " 1",
        "1gpu",
        "GPU-",
        "GPU-5d5b",
        "GPU-5d5ba",
        "GPU-c",
        "GPU-c0ffee",
        "MIG-",
    ]
    + ["MIG-a", "MIG-GPU-c0ffee00-2222/1/0", "MIG-GPU-c/1/0", "MIG-GPU-c/1", "NoDevFiles", "all"]
)
LISTS = st.lists(WORDS, max_size=5).map(",".join)


@settings(deadline=None)
@given(st.none() | LISTS | st.text(max_size=30), st.none() | st.just(UUIDS) | st.just({}) | st.just({0: "", 1: ""}))
def test_no_text_is_too_odd_and_no_gpu_is_seen_twice_or_made_up(text, uuids):
    visible = cuda_visible.parse(text, uuids)
    entries = [entry.strip() for entry in (text or "").split(",")]
    if uuids is not None:
        assert len(visible.gpus) <= len(uuids)
        assert all(gpu.index in uuids or (gpu.is_mig and gpu.index is None) for gpu in visible.gpus)
    known = [gpu.index for gpu in visible.gpus if gpu.index is not None]
    assert len(set(known)) == len(known)
    if text is not None:
        assert [gpu.entry for gpu in visible.gpus] == entries[: len(visible.gpus)]
        assert visible.gpus or visible.problem or visible.is_hidden
    assert not (visible.is_hidden and (visible.gpus or visible.problem))


@settings(deadline=None)  # PyTorch is imported in the first example
@given(LISTS.filter(lambda text: not {" 1", "1gpu", "NoDevFiles"} & set(text.split(","))))
def test_pytorchs_own_reading_is_the_same(text):
    """Of the same GPUs; but for entries that PyTorch itself leaves to CUDA (MIG), and a device that is named again behind an entry
    that is not valid, where the documentation has CUDA stop before it."""
    import torch.cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", text)
        theirs = torch.cuda._parse_visible_devices()
    if theirs and isinstance(theirs[0], str):
        if theirs[0].startswith("MIG-"):
            return
        theirs = torch.cuda._transform_uuid_to_ordinals(theirs, list(UUIDS.values()))
    theirs = theirs[: next((place for place, index in enumerate(theirs) if index not in UUIDS), None)]
    mine = cuda_visible.parse(text, UUIDS)
    if mine.problem and not theirs:
        return
    assert [gpu.index for gpu in mine.gpus] == theirs


READ = """
import json, os, sys
from kgorch.core import cuda_visible
from kgorch.hardware import gpu_locks, devices, nvml
for text in json.loads(sys.argv[1]):
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    with nvml.library() as lib:
        uuids = nvml.gpu_uuids(lib)
    count = devices.visible_gpu_count(environ)
    print(json.dumps({
        "count": count,
        "memory": devices.used_memory(environ),
        "ranks": devices.gpu_of_rank(3, environ),
        "locks": [device.name for device in gpu_locks.visible_gpus(environ)],
        "telemetry": cuda_visible.indices(uuids, uuids, text),
        "name": devices.model_name(environ),
    }))
"""


def read(driver, *texts):
    """What each reader of the variable makes of these texts, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(texts)],
        env={**os.environ, **driver.env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def driver(tmp_path):
    made = build(tmp_path)
    made.be(gpus=3, uuids=UUIDS.values())
    for index in UUIDS:
        made.set(index, mem_used=(100 + index) * MIB)
    return made


def test_all_readers_of_the_variable_agree(driver):
    texts = [text for text, _ in PLAIN] + [text for text, _, _ in WRONG if "MIG" not in text and len(text) < 1000]
    for text, answers in zip(texts, read(driver, *texts), strict=True):
        expected = indices(text)
        assert answers == {
            "count": len(expected),
            "memory": [(100 + index) * MIB for index in expected] or None,
            "ranks": [expected[rank % len(expected)] if expected else None for rank in range(3)],
            "locks": [UUIDS[index] for index in expected],
            "telemetry": sorted(expected),
            "name": "Tesla T4" if expected else "cpu",
        }, text


def test_the_memory_of_a_gpu_that_is_named_by_the_beginning_of_its_uuid_is_waited_for(driver):
    [answers] = read(driver, "GPU-c0,GPU-5d5ba")
    assert answers["memory"] == [102 * MIB, 100 * MIB]
    assert answers["ranks"] == [2, 0, 2], "rank 2 shares the GPU of rank 0"


def test_the_figures_of_a_gpu_in_mig_mode_are_nobodys_memory(driver):
    driver.be(migs=["MIG-c6d4f1ef"])
    driver.set(0, mig=1)
    by_uuid, old_form, all_of_them = read(driver, "MIG-c6d4f1ef", "MIG-GPU-5d5ba0d6-d33d/1/0", None)
    assert (by_uuid["count"], by_uuid["name"], by_uuid["ranks"]) == (1, "Tesla T4", [None] * 3)
    assert by_uuid["telemetry"] == [0, 1, 2], "whose instance it is, is not known"
    assert by_uuid["locks"] == ["MIG-c6d4f1ef"]
    assert (old_form["count"], old_form["ranks"], old_form["telemetry"]) == (1, [None] * 3, [0])
    assert old_form["locks"] == ["MIG-GPU-5d5ba0d6-d33d_1_0"]
    assert all_of_them["ranks"] == [None, 1, 2]


@pytest.mark.parametrize("fault", ["lost", "forbidden"])
def test_a_gpu_that_does_not_answer_hides_no_other_one(driver, tmp_path, fault):
    driver.set(1, **{fault: 1})
    for answers in read(driver, None, "0,1,2"):
        assert (answers["count"], answers["name"]) == (3, "Tesla T4")
        assert answers["memory"] == [100 * MIB, 102 * MIB]
        assert answers["telemetry"] == [0, 1, 2]
    program = (
        "import json, pathlib, sys; from kgorch.hardware import inventory\n"
        "print(json.dumps(inventory.describe_host(pathlib.Path(sys.argv[1]))['gpus']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        env=os.environ | driver.env,
        capture_output=True,
        text=True,
        check=True,
    )
    t4 = {"name": "Tesla T4", "memory": 15360 * MIB}
    assert json.loads(done.stdout) == [t4, {"name": "a GPU that does not answer", "memory": None}, t4]


def test_a_driver_that_fails_leaves_the_variable_to_be_believed(driver):
    driver.fail("nvmlDeviceGetCount_v2", "unknown")
    program = (
        "from kgorch.hardware import devices, nvml\n"
        "count = devices.visible_gpu_count\n"
        "print(count({'CUDA_VISIBLE_DEVICES': '0,1'}), count({'CUDA_VISIBLE_DEVICES': ''}))\n"
        "print(devices.gpu_of_rank(2, {'CUDA_VISIBLE_DEVICES': '1'}), devices.gpu_of_rank(2, {}))\n"
        "try: devices.visible_gpu_count({})\n"
        "except nvml.DriverUnresponsive as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **driver.env}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:2] == ["2 0", "[1, 1] [0, 1]"]
    assert "the driver fails" in done.stdout


def test_a_deprecated_package_of_the_same_name_as_nvmls_is_no_matter_of_the_users(tmp_path):
    package = tmp_path / "other" / "pynvml"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys, warnings\n"
        "warnings.warn('The pynvml package is deprecated. Please install nvidia-ml-py instead.', FutureWarning)\n"
        f"sys.path.remove({str(package.parent)!r})\ndel sys.modules['pynvml']\nimport pynvml\n"
        "sys.modules['pynvml'] = pynvml\n"
    )
    program = "from kgorch.hardware import devices; print(devices.visible_gpu_count({}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **build(tmp_path).env, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("2\n", "")
