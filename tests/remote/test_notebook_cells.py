"""The cells of docs/kaggle.md and docs/colab.md, on a machine with the mounts, variables and the terminal of those notebooks.

What is not alike: the image (this Python's packages without kgorch), Drive (a folder), and who presses the buttons.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import kaggle_machine
import psutil
import pytest
from harness import PROGRAMS, Terminal, processes_of, wait_until

from kgorch.remote import wheels

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not kaggle_machine.is_available(), reason="needs root and unshare")


def cells(page: str) -> list[str]:
    """What a person pastes: the blocks of shell commands, without the notebook's `!`."""
    found = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(found) == 2 and all(cell.startswith("!") for cell in found)
    return [cell.removeprefix("!").strip() for cell in found]


@pytest.fixture
def image(tmp_path):
    """A Python with all packages of this one but kgorch, into which pip may install."""
    folder = tmp_path / "image"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    [ours] = [path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_relative_to(sys.prefix)]
    [theirs] = (folder / "lib").glob("python*/site-packages")
    for path in ours.iterdir():
        if "kgorch" not in path.name and not (theirs / path.name).exists():
            (theirs / path.name).symlink_to(path)
    pip = folder / "bin" / "pip"
    pip.write_text(f"#!{folder}/bin/python\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n")
    pip.chmod(0o755)
    return folder


@dataclass
class Notebook:
    """Sessions of one notebook: each with a machine of its own, and a terminal of 80 columns behind its cells."""

    folder: Path
    image: Path
    page: str
    variables: dict[str, str]

    def start(self, mounts: list[tuple[Path, str, str]], inside: str) -> Terminal:
        env = kaggle_machine.environ() | {"PATH": f"{self.image}/bin:{os.environ['PATH']}", "TERM": "xterm"}
        env = {key: value for key, value in env.items() if not key.startswith("KAGGLE_")} | self.variables
        (self.folder / "tmp").mkdir(exist_ok=True)
        shutil.rmtree(self.folder / "tmp" / "code", ignore_errors=True)
        text = "\n".join(f"{cell} || exit" for cell in cells(self.page)).replace("/tmp/code", f"{self.folder}/tmp/code")
        words = kaggle_machine.command_with_mounts(self.folder / "root", mounts, inside, ["sh", "-c", text])
        return Terminal(words, self.folder, env, 80, 24, 240)


def code(folder: Path, sleep: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in PROGRAMS.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "plan.toml").write_text(
        'name = "test"\n[[stage]]\nname = "train"\nentry = "learns.py"\nranks = 1\n'
        f'args = {{ epochs = 4, sleep = {sleep} }}\n[checkpoint]\nevery = "1s"\n'
    )


def end_of_first(terminal: Terminal, checkpoints: Path, pattern: str) -> Terminal:
    """Stop kgorch as soon as there is a checkpoint, as the wall would."""
    wait_until(lambda: list(checkpoints.glob(pattern)) or terminal.process.poll() is not None, within_s=120)
    assert terminal.process.poll() is None, terminal.end().text
    own = psutil.Process(terminal.process.pid).children(recursive=True)
    [supervisor] = [one for one in own if "start" in one.cmdline() and one.cmdline()[1].endswith("bin/kgorch")]
    supervisor.send_signal(signal.SIGTERM)
    return terminal.end()


def test_the_cells_of_the_kaggle_page_go_on_from_the_output_that_was_attached(tmp_path, image):
    attached, code_folder = tmp_path / "input", tmp_path / "input/datasets/me/my-code"
    code(code_folder, sleep=1.0)
    (attached / "datasets/me/kgorch-wheels").mkdir()
    wheels.own_wheel(attached / "datasets/me/kgorch-wheels")
    notebook = Notebook(tmp_path, image, "kaggle.md", kaggle_machine.VARIABLES)
    mounts = [(attached, "/kaggle/input", "ro"), (tmp_path / "first", "/kaggle/working", "rw")]
    first = end_of_first(
        notebook.start(mounts, "/kaggle/working"), tmp_path / "first", "kgorch/runs/*/*/checkpoints/*/*/manifest.json"
    )
    assert "saved: step" in first.text and "attach this session's output to the next one" in first.text, first.text
    assert "\x1b" not in first.text, "a notebook keeps every byte"

    code(code_folder, sleep=0.0)
    (tmp_path / "first").rename(attached / "notebooks")  # Kaggle mounts it below notebooks/OWNER/SLUG
    mounts[1] = (tmp_path / "second", "/kaggle/working", "rw")
    second = notebook.start(mounts, "/kaggle/working").end()
    assert second.code == 0 and "test is finished" in second.text, second.text
    assert "found step" in second.text.replace("\r\n", "") and "/kaggle/input/notebooks" in second.text
    assert not processes_of(tmp_path / "second")


@pytest.mark.slow
def test_the_cells_of_the_colab_page_go_on_from_what_drive_has(tmp_path, image):
    drive = tmp_path / "drive"
    code(drive / "my-code", sleep=1.0)
    (drive / "kgorch-wheels").mkdir()
    wheels.own_wheel(drive / "kgorch-wheels")
    notebook = Notebook(tmp_path, image, "colab.md", {"COLAB_RELEASE_TAG": "release", "HOME": "/content"})
    mounts = [(tmp_path / "first", "/content", "rw"), (drive, "/content/drive/MyDrive", "rw")]
    first = end_of_first(notebook.start(mounts, "/content"), drive, "kgorch/test-*/train/*/manifest.json")
    assert "the checkpoints are in /content/drive/MyDrive/kgorch" in first.text.replace("\r\n", ""), first.text
    code(drive / "my-code", sleep=0.0)
    mounts[0] = (tmp_path / "second", "/content", "rw")
    second = notebook.start(mounts, "/content").end()
    assert second.code == 0 and "test is finished" in second.text, second.text
    assert "found step" in second.text
