"""A bundle holds what a session needs and nothing that must stay here; the same input makes the same bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kgorch
from kgorch.errors import KgorchError
from kgorch.plan import parse
from kgorch.remote import bundle, code_files, wheels
from kgorch.remote.bundle import BundleSource
from kgorch.remote.code_files import collect

PLAN = 'name = "ink"\n[[stage]]\nname = "train"\nentry = "train.py"\n'


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('trains')\n")
    return folder


def source(work, text=PLAN, overrides=()):
    return BundleSource(parse(text, "plan.toml", overrides), text, overrides, work)


def put(folder, path, content="x"):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def paths(found):
    return [file.path for file in found.files]


def reasons(found):
    return {item.path: item.reason for item in found.left_out}


# What goes along


def test_gitignore_decides_as_git_does(work):
    for path in (
        "data/a.npy",
        "logs/keep.txt",
        "logs/b.txt",
        "pkg/a.py",
        "pkg/tmp/x",
        "pkg/kept.log",
        "a.log",
        "deep/er/b.log",
    ):
        put(work, path)
    put(work, ".gitignore", "/data/\n*.log\nlogs/*\n!logs/keep.txt\n")
    put(work, "pkg/.gitignore", "tmp\n!kept.log\n")
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    theirs = subprocess.run(words, cwd=work, check=True, capture_output=True, text=True).stdout.split()
    found = collect(work)
    assert paths(found) == sorted(theirs, key=lambda path: path.split("/")) and "pkg/kept.log" in theirs
    assert reasons(found)["data/"] == ".gitignore" and reasons(found)["a.log"] == ".gitignore"


def test_the_gitignore_of_the_repository_above_holds_too(tmp_path, work):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    put(tmp_path, ".gitignore", "work/big/\n*.ckpt\n")
    put(work, "big/x")
    put(work, "a.ckpt")
    assert paths(collect(work)) == ["train.py"]


def test_a_plan_in_a_folder_that_the_repository_leaves_out_has_its_files_all_the_same(tmp_path, work):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    put(tmp_path, ".gitignore", "work\n")
    put(work, ".gitignore", "*.ckpt\n")
    put(work, "a.ckpt")
    assert paths(collect(work)) == [".gitignore", "train.py"]


@pytest.mark.parametrize(
    "path",
    [".env", ".env.local", "conf/kaggle.json", "access_token", "KAGGLE.JSON", "id_rsa", "id_ed25519.pub", "tls.pem", ".netrc"]
    + ["service-account-7.json", ".aws/config", ".ssh/known_hosts", "sub/.kaggle/x", ".git-credentials", "secrets.toml"],
)  # fmt: skip
def test_what_is_named_as_credentials_stays_here(work, path):
    put(work, path)
    found = collect(work)
    assert paths(found) == ["train.py"]
    assert any("credentials" in reason for reason in reasons(found).values())


@pytest.mark.parametrize(
    "content",
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
        "TOKEN = 'KGAT_0123456789abcdef0123456789abcdef'",
        '{"username":"me","key":"0123456789abcdef0123456789abcdef"}',
        "token: hf_abcdefghijklmnopqrstuvwxyz0123",
        "aws_id = AKIAABCDEFGHIJKLMNOP",
    ],
)
def test_a_file_with_a_key_in_it_stays_here_whatever_its_name(work, content):
    put(work, "notes.txt", content)
    found = collect(work)
    assert paths(found) == ["train.py"] and reasons(found) == {"notes.txt": "it contains a key or a token"}


def test_a_script_that_would_be_missing_is_refused_with_the_reason(work):
    put(work, "train.py", "TOKEN = 'KGAT_0123456789abcdef0123456789abcdef'")
    with pytest.raises(KgorchError) as error:
        bundle.preview(source(work))
    assert error.value.facts == ("it is left out: it contains a key or a token",)
    with pytest.raises(KgorchError, match=r"\.\./other\.py, would not be in the bundle"):
        bundle.preview(source(work, PLAN.replace("train.py", "../other.py")))


def test_links_special_files_state_and_environments_stay_here(work, tmp_path):
    put(tmp_path, "outside/secret.txt")
    (work / "link.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (work / "linked").symlink_to(tmp_path / "outside")
    os.mkfifo(work / "pipe")
    put(work, "state/kgorch.db")
    put(work, "fetched/kgorch-session.json")
    put(work, "old/kgorch-bundle.json")
    put(work, "env/pyvenv.cfg")
    put(work, "home/anything")
    put(work, "__pycache__/train.pyc")
    found = collect(work, [work / "home"])
    assert paths(found) == ["train.py"]
    assert reasons(found) == {
        "link.txt": "a link",
        "linked": "a link",
        "pipe": "not a regular file",
        "state/": "state of kgorch",
        "fetched/": "state of kgorch",
        "old/": "state of kgorch",
        "home/": "state of kgorch",
        "env/": "a virtual environment",
    }


def test_too_many_files_or_bytes_are_refused_and_the_largest_named(work, monkeypatch):
    monkeypatch.setattr(code_files, "MAX_BYTES", 1 << 20)
    put(work, "weights.bin", "x" * (2 << 20))
    with pytest.raises(KgorchError, match="has more than 1 MiB") as error:
        collect(work)
    assert error.value.facts[0] == "weights.bin: 2.1 MB" and ".gitignore" in str(error.value)
    monkeypatch.setattr(code_files, "MAX_FILES", 1)
    with pytest.raises(KgorchError, match="has more than 1 files"):
        collect(work)


# The bundle


def test_the_same_input_makes_the_same_bundle_and_a_change_another(work, tmp_path):
    first = bundle.build(source(work), tmp_path / "bundles")
    os.utime(work / "train.py", (1, 1))  # a checkout elsewhere has other times
    again = bundle.build(source(work), tmp_path / "elsewhere")
    assert (first.name, first.digest) == (again.name, again.digest) and len(first.name) == 47
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == {
        path.name: path.read_bytes() for path in again.folder.iterdir()
    }
    kept = first.folder.stat().st_ino
    assert bundle.build(source(work), tmp_path / "bundles").folder.stat().st_ino == kept
    for change in (
        lambda: put(work, "train.py", "print()"),
        lambda: (work / "train.py").chmod(0o755),
        lambda: put(work, "b.py"),
    ):
        change()
        assert bundle.build(source(work), tmp_path / "bundles").name not in (first.name, again.name)
    assert bundle.build(source(work, overrides=["seed=3"]), tmp_path / "bundles").name != first.name
    assert len(list((tmp_path / "bundles").iterdir())) == 5
    for old in (tmp_path / "bundles").iterdir():
        os.utime(old, (1, 1))
    assert bundle.build(source(work), tmp_path / "bundles").folder.is_dir()
    assert len(list((tmp_path / "bundles").iterdir())) == bundle.MAX_KEPT, "of those that nobody has used for a day"


def test_a_bundle_is_flat_plain_files_and_a_marker_with_their_paths(work, tmp_path):
    put(work, "pkg/model.py")
    (work / "train.py").chmod(0o755)
    made = bundle.build(source(work, overrides=["seed=3"]), tmp_path / "bundles")
    marker = json.loads((made.folder / "kgorch-bundle.json").read_text())
    stored = sorted(path.name for path in made.folder.iterdir())
    assert stored == sorted([*(file["stored"] for file in marker["files"]), "kgorch-bundle.json"])
    assert all(name.isalnum() for name in stored[:-1]), "no suffix by which a place would unpack it"
    by_path = {file["path"]: file for file in marker["files"]}
    wheel = f"wheels/kgorch-{kgorch.__version__}-py3-none-any.whl"
    assert list(by_path) == [wheel, "code/pkg/model.py", "code/train.py", "code/kgorch-plan.toml"]
    assert by_path["code/train.py"]["executable"] and not by_path["code/pkg/model.py"]["executable"]
    assert (made.folder / by_path["code/kgorch-plan.toml"]["stored"]).read_text() == PLAN
    assert marker["overrides"] == ["seed=3"] and made.bytes == sum(file["bytes"] for file in marker["files"])


def test_a_plan_whose_checkpoints_lie_elsewhere_is_refused(work):
    with pytest.raises(KgorchError, match=r"checkpoint\.dir"):
        bundle.preview(source(work, PLAN + '[checkpoint]\ndir = "ckpt"\n'))


# The wheels


def test_kgorchs_wheel_is_the_code_that_runs_here_and_pip_installs_it(tmp_path):
    first, again = wheels.own_wheel(tmp_path), (tmp_path / "again").mkdir() or wheels.own_wheel(tmp_path / "again")
    assert first.read_bytes() == again.read_bytes()
    package = Path(kgorch.__file__).parent
    with zipfile.ZipFile(first) as archive:
        names = set(archive.namelist())
        assert archive.read("kgorch/db/engine.py") == (package / "db" / "engine.py").read_bytes()
    assert {"kgorch/worker/entry.py", "kgorch/workloads/vqa/plan.toml", "kgorch/remote/session/program.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests", "kgorch/tests"))]
    words = [
        "-m",
        "pip",
        "install",
        "-q",
        "--isolated",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "there"),
        str(first),
    ]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    program = "import kgorch.cli.commands.training.start, kgorch; print(kgorch.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "there")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path / "there"))


def test_the_wheels_package_data_are_those_that_an_installation_has(tmp_path):
    setup = __import__("tomllib").loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]
    package = Path(kgorch.__file__).parents[1]
    wanted = {
        str(path.relative_to(package))
        for name, patterns in setup["package-data"].items()
        for pattern in patterns
        for path in (package / name.replace(".", "/")).glob(pattern)
    }
    with zipfile.ZipFile(wheels.own_wheel(tmp_path)) as archive:
        assert len(wanted) > 10 and wanted <= set(archive.namelist())


def test_dependencies_are_downloaded_once_for_a_set_of_requirements(tmp_path, monkeypatch):
    calls = []

    def download(into, python, requirements, constraints):
        calls.append((python, requirements))
        put(into, f"click-8-{python}.whl")

    monkeypatch.setattr(wheels, "_download", download)
    found = wheels.dependency_wheels(tmp_path, ("3.11", "3.12"))
    assert [path.name for path in found] == ["click-8-3.11.whl", "click-8-3.12.whl"]
    assert wheels.dependency_wheels(tmp_path, ("3.11", "3.12")) == found and len(calls) == 2
    put(tmp_path / "checkout", "kgorch.egg-info/PKG-INFO", "Metadata-Version: 2.1\nName: kgorch\nVersion: 9.9\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "checkout")])
    assert wheels.dependency_wheels(tmp_path, ("3.11", "3.12")) == found and len(calls) == 2, "wherever it is called"
    assert any(text.startswith("sqlalchemy") for text in calls[0][1])
    assert not [text for text in calls[0][1] if text.startswith(("torch", "numpy")) or "extra" in text]


def test_a_download_that_fails_says_what_pip_said_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(wheels.DownloadFailed, match=r"for Python 3\.12 cannot be downloaded") as error:
        wheels.dependency_wheels(tmp_path, ("3.12",))
    assert error.value.facts and not list(tmp_path.iterdir())


@pytest.mark.soak  # asks pip's index
def test_each_python_gets_wheels_of_all_dependencies_and_of_nothing_that_the_image_has(tmp_path):
    names = [path.name for path in wheels.dependency_wheels(tmp_path)]
    for python in wheels.PYTHONS:
        tag = "cp" + python.replace(".", "")
        assert [name for name in names if name.startswith("pydantic_core-") and f"-{tag}-" in name]
        assert [name for name in names if name.startswith("xxhash-") and f"-{tag}-" in name]
    assert not [name for name in names if name.startswith(("torch", "numpy", "nvidia_c"))]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.whl")) < 60e6
