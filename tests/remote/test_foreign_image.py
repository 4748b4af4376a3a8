"""A session on an image that has PyTorch, and of kgorch's own dependencies none, or one that is too old.

The image is a Python whose packages are links to this one's. The wheels are put together from what is installed here: no index
is asked.
"""

from __future__ import annotations

import re
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from kgorch.remote import bundle, wheels

BIG = {"torch", "numpy", "pip", "setuptools"}


def closure(names: set[str]) -> set[str]:
    """Distributions that these need, by their plain names; those that are not installed here are not needed here."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(plain(name))
        todo |= {plain(re.match(r"[\w.-]+", text)[0]) for text in needs if "extra ==" not in text} - found
    return found


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def repack(name: str, into: Path) -> Path:
    """The wheel that a distribution was installed from, without what was compiled since."""
    distribution = metadata.distribution(name)
    tag = re.search(r"^Tag: (.+)$", distribution.read_text("WHEEL"), re.MULTILINE)[1]
    path = into / f"{name.replace('-', '_')}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in distribution.files or []:
            if not str(file).startswith("..") and "__pycache__" not in str(file):
                archive.write(file.locate(), str(file))
    return path


@pytest.fixture
def image(tmp_path):
    folder = tmp_path / "image"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    [theirs] = (folder / "lib").glob("python*/site-packages")
    for name in closure(BIG):
        for top in {Path(str(file)).parts[0] for file in metadata.distribution(name).files or []} - {
            "..",
            "__pycache__",
        }:
            if not (theirs / top).exists():
                (theirs / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    old = theirs / "SQLAlchemy-1.4.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: SQLAlchemy\nVersion: 1.4.0\n")
    (old / "RECORD").write_text("")
    (theirs / "sqlalchemy").mkdir()
    (theirs / "sqlalchemy" / "__init__.py").write_text("raise ImportError('the image has an old one')\n")
    return folder


def test_a_session_brings_what_the_image_lacks_and_leaves_the_image_as_it_is(sessions, image, tmp_path, monkeypatch):
    ours = closure({"kgorch"}) - closure(BIG) - {"kgorch"}
    assert {"sqlalchemy", "pydantic", "click", "xxhash"} <= ours
    (tmp_path / "repacked").mkdir()
    made = [repack(name, tmp_path / "repacked") for name in sorted(ours)]
    monkeypatch.setattr(wheels, "dependency_wheels", lambda cache, pythons: made)
    source = sessions.plan(epochs=1, sleep=0.0)
    pythons = (f"{sys.version_info.major}.{sys.version_info.minor}",)
    source = bundle.BundleSource(source.plan, source.plan_text, [], source.workdir, pythons)
    sessions.bundle = bundle.build(source, sessions.folder / "bundles")
    before = sorted(str(path) for path in image.rglob("*") if "__pycache__" not in path.parts)
    record, printed = sessions.run(sessions.order(), python=image / "bin" / "python")
    assert (record.outcome, record.step) == ("finished", 6) and "ERROR" not in printed, printed
    assert sorted(str(path) for path in image.rglob("*") if "__pycache__" not in path.parts) == before
