"""The package `kgorch`: what a training script imports, what an installation contains, and names of before."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kgorch
from kgorch.core.former_names import current_name
from kgorch.core.plan_compatibility import compare_plans
from kgorch.errors import KgorchError, PlanError
from kgorch.plan import check_entries, parse
from kgorch.worker import entry

ROOT = Path(__file__).parents[2]


def python(program: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", program], cwd=cwd, env=env, capture_output=True, text=True)


def test_a_training_script_finds_its_names_without_loading_pytorch():
    done = python("import sys; from kgorch import KgorchError, attach, output_folder; print(*sys.modules)")
    assert not {"torch", "sqlalchemy", "click", "pydantic", "numpy"} & set(done.stdout.split()), done.stderr


def test_the_package_itself_loads_no_other_module():
    done = python("import sys; before = {*sys.modules}; import kgorch; print(*{*sys.modules} - before)")
    assert [name for name in done.stdout.split() if name.startswith("kgorch")] == ["kgorch"], done.stderr


def test_every_public_name_exists():
    for name in kgorch.__all__:
        assert getattr(kgorch, name).__module__.startswith("kgorch."), name
    with pytest.raises(AttributeError, match="'kgorch' has no attribute 'atach'"):
        _ = kgorch.atach


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("from orchestrator.worker import attach", "from kgorch import attach"),
        ("import orchestrator", "kgorch"),
        ("from db import runs", "'kgorch.db'"),
        ("import workloads.common.files", "'kgorch.workloads'"),
    ],
)
def test_a_folder_of_the_checkout_is_not_imported_by_its_own_name(statement, named):
    done = python(statement)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and named in last


def test_a_folder_named_kgorch_in_the_working_directory_does_not_hide_the_package(tmp_path):
    (tmp_path / "kgorch").mkdir()  # as the state folder on Kaggle
    done = subprocess.run(
        [sys.executable, "-m", "kgorch.cli", "version"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and kgorch.__version__ in done.stdout, done.stderr


def test_an_installation_contains_one_package_with_all_of_its_folders():
    setuptools = pytest.importorskip("setuptools")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set(setuptools.find_namespace_packages(str(ROOT), **settings["packages"]["find"]))
    assert {name.partition(".")[0] for name in found} == {"kgorch"}
    listed = subprocess.run(["git", "ls-files", "*__init__.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    folders = {Path(path).parent.as_posix() for path in listed.stdout.split()}
    packages = {
        name.replace("/", ".").replace("orchestrator", "kgorch", 1) if top == "orchestrator" else f"kgorch.{name.replace('/', '.')}"
        for name in folders
        if (top := name.partition("/")[0]) in ("orchestrator", "db", "workloads")
    }  # fmt: skip
    assert packages <= found
    for package, patterns in settings["package-data"].items():
        for pattern in patterns:
            assert list(ROOT.joinpath(*package.split(".")).glob(pattern)), f"{package}: no {pattern}"


PLAN = 'name = "moved"\n[[stage]]\nname = "train"\nentry = "workloads.timeseries.train:main"\n'


def test_a_plan_of_before_still_names_a_reference_training(tmp_path):
    pytest.importorskip("torch")
    check_entries(parse(PLAN, "plan.toml"), tmp_path)
    assert entry.function_of("workloads.timeseries.train:main").__module__ == "kgorch.workloads.timeseries.train"
    with pytest.raises(PlanError, match=r"there is no module 'workloads\.none'"):
        check_entries(parse(PLAN.replace("timeseries.train", "none"), "plan.toml"), tmp_path)


def test_a_package_workloads_beside_the_plan_comes_first(tmp_path, monkeypatch):
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "own.py").write_text("def main(): pass\n")
    check_entries(parse(PLAN.replace("timeseries.train", "own"), "plan.toml"), tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # the folder has no __init__.py, so the checkout's, where it is in the path, would come first
    (tmp_path / "workloads" / "__init__.py").touch()
    assert entry.function_of("workloads.own:main").__module__ == "workloads.own"
    for name in ("workloads", "workloads.own"):
        sys.modules.pop(name, None)


def test_a_run_goes_on_with_a_plan_that_has_the_new_name():
    old, new = (
        parse(text, "plan.toml").model_dump(mode="json")
        for text in (PLAN, PLAN.replace("workloads.", "kgorch.workloads."))
    )
    assert not compare_plans(old, new, started=["train"], finished=[]).refusals
    assert current_name("train.py") == "train.py" and current_name("my.workloads.x:main") == "my.workloads.x:main"


def test_a_script_that_imports_the_former_package_is_told_the_new_one():
    error = ModuleNotFoundError("No module named 'orchestrator'", name="orchestrator")
    entry.name_package(error)
    assert str(error) == "No module named 'orchestrator'; the package of kgorch is `kgorch`: from kgorch import attach"
    for other in (ModuleNotFoundError("No module named 'db'", name="db"), KgorchError("orchestrator")):
        before = str(other)
        entry.name_package(other)
        assert str(other) == before
