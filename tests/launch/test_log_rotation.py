"""Logs of a training that prints without end: bounded on disk, whole as far as they are kept, and quick to look at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import PROGRAMS

from kgorch.cli import cli
from kgorch.cli.commands.inspection import logs
from kgorch.launch import log_rotation

LIMIT = 256 << 10


def flood(path: Path, lines: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(PROGRAMS / "floods.py"), str(lines), str(path), "0.002"])


def numbers(content: bytes) -> list[int]:
    """Of whole lines."""
    return [int(line[5:12]) for line in content.split(b"\n") if line.startswith(b"line ") and len(line) == 93]


@pytest.mark.parametrize("collapses", [True, False])
def test_a_log_that_is_cut_while_it_is_written_keeps_its_newest_lines_and_its_first(tmp_path, monkeypatch, collapses):
    path, lines = tmp_path / "rank0.log", 30_000
    path.write_bytes(b"x" * 8192)
    with open(path, "rb+") as file:
        can = log_rotation._collapse_start(file.fileno(), 4096)
    path.unlink()
    if collapses and not can:
        pytest.skip("this file system cannot cut off a file's beginning")
    if not collapses:
        monkeypatch.setattr(log_rotation, "_collapse_start", lambda *_: False)
    writer, times = flood(path, lines), 0
    while writer.poll() is None:
        if path.exists():
            times += log_rotation.rotate(path, LIMIT)
            older = log_rotation.older_part(path)
            assert not older.exists() or older.stat().st_size <= LIMIT + (1 << 20)
    assert times > 3 and sorted(tmp_path.iterdir()) == [
        path,
        log_rotation.older_part(path),
        log_rotation.first_part(path),
    ]
    found = numbers(log_rotation.older_part(path).read_bytes() + path.read_bytes())
    assert found == sorted(set(found)) and found[-1] == lines - 1, "a line is lost at the end, or stands there twice"
    if collapses:
        assert found == list(range(found[0], lines)), "a line is lost"
    assert numbers(log_rotation.first_part(path).read_bytes())[:100] == list(range(100))


def test_a_log_that_cannot_be_kept_is_cut_all_the_same(tmp_path, monkeypatch):
    path = tmp_path / "rank0.log"
    path.write_bytes(b"x" * (2 * LIMIT))

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_rotation, "_append", is_full)
    assert log_rotation.rotate(path, LIMIT) and path.stat().st_size <= 4096 and list(tmp_path.iterdir()) == [path]


def test_a_training_that_prints_400_megabytes_fills_no_disk_and_its_log_is_shown_at_once(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan("floods.py", every="60s")))
    assert supervisor.wait(timeout=200) == 0, supervisor.communicate()[0][-3000:]
    found = {path.name: path.stat().st_size for path in kgorch.attempt().glob("rank0.log*")}
    assert set(found) == {"rank0.log", "rank0.log.1", "rank0.log.first"}
    assert found["rank0.log.1"] == log_rotation.LOG_BYTES and found["rank0.log.first"] == log_rotation.FIRST_BYTES
    assert sum(found.values()) < 300 << 20, found
    shown = kgorch("logs", "-n", "5").stdout.splitlines()
    assert len(shown) == 5 and shown[-1] == "trained to the end"
    assert shown[0] == "x" * logs.LINE_BYTES + f" [and {1_000_000 - logs.LINE_BYTES} bytes more]"


@pytest.fixture
def shown(kgorch, monkeypatch):
    """What `kgorch logs` prints of a log's content, and of its older part."""
    from kgorch.db import runs, sessions
    from kgorch.db.engine import open_database

    engine = open_database(kgorch.home)
    folder = kgorch.folder / "1.1"
    folder.mkdir()
    run = runs.create(
        engine, id="id", name="test", number=1, folder=str(folder), workdir="/", checkpoints="/", plan="", overrides=[],
        plan_hash="h", stages=["train"],
    )  # fmt: skip
    session = sessions.open_session(engine, run.id, boot_id="b", step=0, first_step=0)
    sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=lambda _: str(folder))

    def show(content: bytes, *options: str, before: bytes | None = None) -> bytes:
        path = folder / "rank0.log"
        path.write_bytes(content)
        if before is not None:
            log_rotation.older_part(path).write_bytes(before)
        return CliRunner().invoke(cli, ["logs", *options], env=kgorch.env(), catch_exceptions=False).stdout_bytes

    return show


def test_the_last_lines_are_found_across_blocks_and_in_the_older_part(shown, monkeypatch):
    monkeypatch.setattr(logs, "BLOCK_BYTES", 7)
    lines = [b"%d" % number * (number % 5) for number in range(30)]
    content = b"\n".join(lines)
    for count in (1, 2, 29, 30, 31):
        assert shown(content, "-n", str(count)) == b"\n".join(lines[-count:])
        assert shown(content + b"\n", "-n", str(count)) == b"\n".join(lines[-count:]) + b"\n"
    for cut in (0, 10, 25, len(content) - 1):
        for count in (1, 5, 20, 30, 40):
            assert shown(content[cut:], "-n", str(count), before=content[:cut]) == b"\n".join(lines[-count:]), (
                cut,
                count,
            )
        assert shown(content[cut:], "-n", "0", before=content[:cut]) == content


def test_a_long_line_is_cut_and_a_progress_bar_is_not(shown):
    bar = b"".join(b"\r%3d%% %s" % (percent, b"#" * 300) for percent in range(100)) + b"\n"
    assert shown(b"x" * 50_000 + b"\nshort\n" + bar) == b"x" * 10_000 + b" [and 40000 bytes more]\nshort\n" + bar
    assert shown(b"y" * 20_000) == b"y" * 10_000 + b" [and 10000 bytes more]\n"


def test_of_a_line_as_large_as_a_disk_the_end_alone_is_read(shown, monkeypatch):
    monkeypatch.setattr(logs, "BACK_BYTES", 1 << 20)
    assert shown(b"z" * (8 << 20) + b"\nlast\n").endswith(b" bytes more]\nlast\n")
