"""A built wheel in environments of its own: with PyTorch, which it leaves alone, and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
MAX_BYTES = 2_000_000
"""The budget of the wheel and of the sdist, each."""

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, code: int = 0, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist of the files that git knows, in a folder, and in a second one the wheel that the sdist builds."""
    first, second, tree = (tmp_path_factory.mktemp(name) for name in ("first", "second", "tree"))
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for path in listed:
        if (ROOT / path).is_symlink() or (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tree / path, follow_symlinks=False)
    build("sdist", tree, first)
    build("wheel", tree, first)
    [sdist] = first.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(second, filter="data")
    build("wheel", next(second.iterdir()), second)
    return first, second


def build(kind: str, tree: Path, out: Path) -> None:
    hook = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run(sys.executable, "-c", hook, cwd=tree, SOURCE_DATE_EPOCH="1700000000")


@pytest.fixture
def installed(built, tmp_path):
    """Makes an environment with the wheel, and with links to what is installed here but for the names that are left out."""

    def make(*left_out: str) -> Path:
        folder = tmp_path / "env"
        run(sys.executable, "-m", "venv", folder, cwd=tmp_path)
        [theirs] = (folder / "lib").glob("python*/site-packages")
        pip = {item.name for item in theirs.iterdir()}
        for item in SITE.iterdir():
            if (
                item.name not in pip
                and "kgorch" not in item.name
                and not item.name.startswith(("__pycache__", *left_out))
            ):
                (theirs / item.name).symlink_to(item)
        [wheel] = built[0].glob("*.whl")
        run(folder / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
        return folder / "bin"

    return make


def test_tree_and_sdist_build_the_same_wheel_within_the_budget_with_one_package_and_its_types(built):
    [wheel], [sdist] = built[0].glob("*.whl"), built[0].glob("*.tar.gz")
    assert next(built[1].glob("*.whl")).read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"kgorch"}
    needed = (
        "py.typed",
        "cli/template.toml",
        "db/migrations/schema.sql",
        "workloads/vqa/plan.toml",
        "worker/example.py",
    )
    assert {f"kgorch/{name}" for name in needed} <= set(names)
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "kgorch/worker/session.py"} <= members
    assert max(wheel.stat().st_size, sdist.stat().st_size) < MAX_BYTES


def test_the_example_trains_from_the_wheel_and_no_requirement_replaces_pytorch(installed, tmp_path):
    programs, work = installed(), tmp_path / "work"
    work.mkdir()
    home = {"KGORCH_HOME": str(tmp_path / "home")}
    where = run(programs / "python", "-c", "import kgorch, torch; print(kgorch.__file__, torch.__file__)", cwd=work)
    assert str(tmp_path / "env") in where.split()[0]
    run(programs / "kgorch", "init", cwd=work)
    said = run(programs / "kgorch", "start", "plan.toml", "--set", "stage.train.args.epochs=1", cwd=work, **home)
    assert "is finished" in said
    needs = run(
        programs / "python",
        "-c",
        "from importlib import metadata; print(*metadata.requires('kgorch'), sep='\\n')",
        cwd=work,
    )
    assert not [line for line in needs.splitlines() if line.startswith("torch") and "extra ==" not in line]
    run(programs / "pip", "check", cwd=work)


OTHER_PYTHONS = (pytest.param("3.12", marks=pytest.mark.soak), "3.13", "3.14")
"""What fails between two versions that pass is rare."""

IMPORT_ALL = '''
import importlib, pkgutil, sys, kgorch
extras = set("""
    torch psycopg kaggle kagglesdk wandb mlflow tensorboard prometheus_client starlette uvicorn IPython apprise pyarrow plotext
    requests PIL tifffile rasterio torchmetrics transformers lightning accelerate
""".split())
scripts = ("kgorch.db.migrations.env", "kgorch.remote.bootstrap")  # they act when they are imported
count = 0
for module in pkgutil.walk_packages(kgorch.__path__, "kgorch.", onerror=lambda name: None):
    if module.name.endswith("__main__") or ".versions." in module.name or module.name in scripts:
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in extras:
            raise
print(count)
'''


def python_of(version: str) -> str | None:
    """An interpreter of this version: on PATH, or one that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_the_wheel_and_its_requirements_install_on_another_python_and_every_module_is_imported(
    version, built, tmp_path
):
    if (python := python_of(version)) is None:
        pytest.skip(f"no Python {version} here")
    env, [wheel] = tmp_path / "env", built[0].glob("*.whl")
    run(python, "-m", "venv", env, cwd=tmp_path)
    try:
        run(env / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    except AssertionError as error:
        if "ConnectionError" in str(error) or "NewConnectionError" in str(error):
            pytest.skip("no package index can be reached")
        raise
    assert f"python  {version}." in run(env / "bin" / "kgorch", "version", cwd=tmp_path)
    assert int(run(env / "bin" / "python", "-W", "error::SyntaxWarning", "-c", IMPORT_ALL, cwd=tmp_path)) > 250
    run(env / "bin" / "kgorch", "init", cwd=tmp_path)
    assert "pip install torch" in run(
        env / "bin" / "kgorch", "start", cwd=tmp_path, code=2, KGORCH_HOME=str(tmp_path / "home")
    )


def test_without_pytorch_the_command_line_works_and_a_start_says_what_to_install(installed, tmp_path):
    programs, work = installed("torch", "functorch"), tmp_path / "work"
    work.mkdir()
    home = {"KGORCH_HOME": str(tmp_path / "home")}
    assert "not installed" in run(programs / "kgorch", "version", cwd=work)
    run(programs / "kgorch", "init", cwd=work)
    said = run(programs / "kgorch", "start", "plan.toml", cwd=work, code=2, **home)
    assert "PyTorch is not installed" in said and "pip install torch" in said
    assert not list(Path(home["KGORCH_HOME"]).glob("runs/*/*/attempts/*"))
    run(programs / "kgorch", "status", cwd=work, **home)
