"""A database on a disk that several machines share keeps no write-ahead log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from kgorch.db import shared_disk
from kgorch.db.engine import open_database

MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
36 22 0:40 / /shared rw,noatime - nfs4 server:/export rw
37 36 0:41 / /shared/scratch rw - tmpfs tmpfs rw
38 22 0:42 /sub /my\\040disk rw master:3 - lustre 10.0.0.1@tcp:/fs rw,flock
39 22 0:43 / /twice rw - nfs server:/a rw
40 22 0:44 / /twice rw - ext4 /dev/vdb rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/mira/kgorch.db", False),
        ("/shared/kgorch.db", True),
        ("/shared/scratch/kgorch.db", False),
        ("/sharedmore/kgorch.db", False),
        ("/my disk/a/kgorch.db", True),
        ("/twice/kgorch.db", False),
    ],
)
def test_the_nearest_mount_tells(path, expected, tmp_path):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert shared_disk.is_on_network(Path(path), tmp_path / "mountinfo") is expected


def test_this_machines_own_disk_is_none():
    assert not shared_disk.is_on_network(Path("/proc/self/status")) and shared_disk.MOUNTS.exists()


def test_such_a_database_has_a_rollback_journal_and_several_processes_write_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_disk, "is_on_network", lambda path: True)
    engine = open_database(tmp_path)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "truncate"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
    with engine.connect() as connection:
        columns = connection.execute(text("SELECT count(*) FROM pragma_table_info('pools')")).scalar()
    values = ", ".join(["?", *["''"] * (columns - 1)])
    program = (
        "import sqlite3, sys; base = sqlite3.connect(sys.argv[1], timeout=60)\n"
        f'for i in range(50):\n with base: base.execute("INSERT INTO pools VALUES ({values})", (f"{{sys.argv[2]}}{{i}}",))\n'
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "kgorch.db"), name], stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [(b"", 0)] * 2
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM pools")).scalar() == 100
        assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
    assert not list(tmp_path.glob("*-wal"))
    monkeypatch.undo()  # as for the machine that exports the disk
    exporting = open_database(tmp_path)
    for one in (exporting, engine):
        with one.connect() as connection:
            assert connection.execute(text("PRAGMA journal_mode")).scalar() in ("truncate", "delete")
        one.dispose()
