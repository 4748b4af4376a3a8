"""The stages of surface detection, each alone: train, predict from overlapping tiles, package, submit."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from kgorch.errors import KgorchError
from kgorch.workloads.surface_detection import make_volumes, package, submit
from kgorch.workloads.surface_detection.predict import best_of
from kgorch.workloads.surface_detection.volumes import header, stack_of, write

ROOT = Path(__file__).parents[2]


def alone(folder: Path, module: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"kgorch.workloads.surface_detection.{module}", *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_alone_it_trains_predicts_with_a_score_and_packs_what_the_competition_takes(tmp_path: Path) -> None:
    make_volumes.make(tmp_path / "data", train=3, test=1, size=24, seed=0)
    small = ("--data", "data", "--width", "4", "--depth", "1", "--patch", "16")
    said = alone(
        tmp_path,
        "train",
        *small,
        "--epochs",
        "4",
        "--patches",
        "8",
        "--global-batch",
        "8",
        "--valid",
        "1",
        "--lr",
        "2e-3",
    )
    assert "weights; 16 patches an epoch, 8 to score" in said and "rate: warm-up 2 epochs, cosines of 10;" in said
    kept = ("--weights", "outputs/surface.safetensors")
    alone(tmp_path, "predict", *small, *kept, "--part", "valid", "--valid", "1")
    facts = json.loads((tmp_path / "outputs/predictions.json").read_text())
    assert facts["weights"]["checkpoint"] == "outputs/surface.safetensors" and 0.2 < facts["volumes"][0]["dice"] < 1
    alone(tmp_path, "predict", *small, *kept, "--mirrored", "1", "--blend", "hann")
    mask = np.stack(stack_of(tmp_path / "outputs/predictions/1003.tif").pages())
    assert mask.shape == (24, 24, 24) and mask.dtype == np.uint8 and set(np.unique(mask)) <= {0, 1}
    said = alone(tmp_path, "package", "--data", "data", "--message", "mine")
    assert "kaggle competitions submit -c vesuvius-challenge-surface-detection -f " in said and "-m mine" in said
    assert zipfile.ZipFile(tmp_path / "outputs/submission.zip").namelist() == ["1003.tif"]


def test_a_limit_is_of_the_volumes_to_train_on_and_the_validation_stays_whole(tmp_path: Path) -> None:
    make_volumes.make(tmp_path / "data", train=5, test=1, size=16, seed=0)
    small = ("--data", "data", "--width", "4", "--depth", "1", "--patch", "16", "--patches", "2", "--global-batch", "2")
    said = alone(tmp_path, "train", *small, "--epochs", "1", "--warmup", "0", "--valid", "3", "--limit", "1")
    assert "weights; 2 patches an epoch, 6 to score" in said


def test_a_mask_is_a_deflated_stack_of_8_bit_pages_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    mask = np.random.default_rng(0).integers(0, 2, (5, 6, 7)).astype(bool)
    for name in ("a.tif", "b.tif"):
        write(tmp_path / name, mask)
    assert (
        header(tmp_path / "a.tif") == (5, 6, 7)
        and (tmp_path / "a.tif").read_bytes() == (tmp_path / "b.tif").read_bytes()
    )
    np.testing.assert_array_equal(np.stack(stack_of(tmp_path / "a.tif").pages()), mask)
    with Image.open(tmp_path / "a.tif") as stack:
        assert stack.info["compression"] == "tiff_adobe_deflate" and stack.n_frames == 5


def test_missing_masks_are_named_and_the_archives_bytes_depend_on_them_alone(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "7.tif", np.ones((2, 3, 3)))
    with pytest.raises(KgorchError, match=r"(?s)1 of 2 masks are missing.*found no 8\.tif.*run the predict stage"):
        package.masks(tmp_path, ["7", "8"])
    first = package.write_archive(tmp_path / "a.zip", [tmp_path / "7.tif"]).read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert package.write_archive(tmp_path / "b.zip", [tmp_path / "7.tif"]).read_bytes() == first


def test_a_test_volume_that_predict_left_out_is_named_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    make_volumes.make(tmp_path / "data", train=3, test=2, size=16, seed=0)
    broken = tmp_path / "data/test_images/1004.tif"
    broken.write_bytes(broken.read_bytes()[:300])
    small = ("--data", "data", "--width", "4", "--depth", "1", "--patch", "16", "--patches", "2", "--global-batch", "2")
    alone(tmp_path, "train", *small, "--epochs", "1", "--warmup", "0", "--valid", "1")
    alone(
        tmp_path, "predict", *small[:8], "--weights", "outputs/surface.safetensors", "--mirrored", "1", "--skip-broken", "true"
    )  # fmt: skip
    [left_out] = json.loads((tmp_path / "outputs/predictions.json").read_text())["left_out"]
    assert "1004.tif cannot be read" in left_out
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        KgorchError, match=r"(?s)1 of 2 masks are missing.*predict left out: 1004\.tif cannot"
    ) as caught:
        package.main("data")
    assert "to its end" not in str(caught.value)


def test_a_quick_test_packs_the_masks_that_there_are(tmp_path: Path, monkeypatch) -> None:
    make_volumes.make(tmp_path / "data", train=0, test=2, size=16, seed=0)
    (tmp_path / "outputs/predictions").mkdir(parents=True)
    write(tmp_path / "outputs/predictions/1000.tif", np.zeros((16, 16, 16)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KgorchError, match="1 of 2 masks are missing"):
        package.main("data")
    monkeypatch.setattr(package, "launch", lambda: SimpleNamespace(quick=True))
    package.main("data")
    assert zipfile.ZipFile(tmp_path / "outputs/submission.zip").namelist() == ["1000.tif"]


def test_packaging_needs_no_torch(tmp_path: Path) -> None:
    make_volumes.make(tmp_path / "data", train=0, test=1, size=16, seed=0)
    (tmp_path / "outputs/predictions").mkdir(parents=True)
    write(tmp_path / "outputs/predictions/1000.tif", np.zeros((16, 16, 16)))
    script = "import sys; sys.modules['torch'] = None; from kgorch.workloads.surface_detection.package import main; main('data')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "outputs/submission.zip").is_file()


def test_the_threshold_of_the_best_epoch_is_read_from_the_table(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,dice,threshold\n1,0.5,0.3\n3,0.7,0.6\n5,0.6,0.4\n")
    assert best_of(tmp_path / "metrics.csv") == 0.6
    with pytest.raises(KgorchError, match="training has left no threshold"):
        best_of(tmp_path / "none.csv")


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch) -> Path:
    """A program that plays Kaggle's client, on PATH: it lists what was submitted. No proof of the real one."""
    program, log = tmp_path / "bin" / "kaggle", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(f"""#!{sys.executable}
import json, pathlib, sys
log = pathlib.Path({str(log)!r})
words = sys.argv[1:]
with log.open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[1] == "submissions":
    made = [json.loads(line) for line in log.read_text().splitlines()]
    print("Warning: looks like an outdated client")
    print(json.dumps([{{"description": w[w.index("-m") + 1], "status": "PENDING"}} for w in made if w[1] == "submit"]))
else:
    print("Successfully submitted")
""")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(submit, "PAUSE_S", 0.0)
    return log


def test_an_archive_is_handed_in_once_however_often_the_stage_runs(tmp_path: Path, kaggle: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))  # this environment's own client must not be found
    archive = tmp_path / "submission.zip"
    archive.write_bytes(b"masks")
    for _ in range(2):
        facts = submit.submit(archive, submit.COMPETITION, "mine", submit.client, wait_s=0)
        assert facts["status"] == "PENDING" and facts["description"].startswith("mine ")
    asked = [json.loads(line) for line in kaggle.read_text().splitlines()]
    made = [words for words in asked if words[1] == "submit"]
    assert made == [
        ["competitions", "submit", "-c", submit.COMPETITION, "-f", str(archive), "-m", facts["description"]]
    ]


def test_a_submission_that_the_list_does_not_show_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "submission.zip").write_bytes(b"masks")
    with pytest.raises(KgorchError, match=r"(?s)does not list the submission.*400 - Bad Request"):
        submit.submit(
            tmp_path / "submission.zip",
            "c",
            "m",
            lambda words, _: "[]" if "submissions" in words else "400 - Bad Request",
            wait_s=0,
        )
