"""Files that are replaced in one step, and copies that are hashed on the way."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import xxhash

from kgorch.system import file_hash, files


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path, durable):
    path = tmp_path / "a.json"
    path.write_text("former")
    with files.replacement(path, durable=durable, sync_parent=durable) as file:
        file.write(b"new")
        assert path.read_text() == "former"
        assert file.name == f"{path}.part"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_former_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("former")
    with pytest.raises(ValueError), files.replacement(path) as file:
        file.write(b"half")
        raise ValueError
    assert path.read_text() == "former" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_overwritten(tmp_path):
    (tmp_path / "a.part").write_text("longer than the new content")
    files.write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_no_link_under_the_temporary_name_is_followed(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "a.part").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        files.write(tmp_path / "a", b"new")
    assert (tmp_path / "theirs").read_text() == "theirs" and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("umask", "mode", "expected"), [(0o077, 0o644, 0o644), (0o022, None, 0o644), (0o077, None, 0o600)]
)
def test_permissions_are_those_asked_for_or_what_the_umask_leaves(tmp_path, umask, mode, expected):
    before = os.umask(umask)
    try:
        files.write(tmp_path / "a", b"", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == expected


def test_a_copy_is_hashed_on_the_way(tmp_path):
    content, target, sizes = os.urandom(1000), io.BytesIO(), []
    digest, count = file_hash.copy_and_hash(
        file_hash.chunks_of(io.BytesIO(content), 300), target, on_chunk=sizes.append
    )
    assert target.getvalue() == content and count == 1000 and sizes == [300, 300, 300, 100]
    assert digest == xxhash.xxh3_128(content).hexdigest() == file_hash.hash_chunks([content[:7], content[7:]])


def test_a_source_that_grew_is_not_read_to_its_end():
    target = io.BytesIO()
    _, count = file_hash.copy_and_hash([b"12345", b"67890", b"rest"], target, max_bytes=7)
    assert count == 10 and target.getvalue() == b"12345"


def test_a_forked_process_closes_what_it_has_inherited_and_nothing_else(tmp_path):
    opened = [os.open(tmp_path / "a", os.O_CREAT | os.O_RDONLY) for _ in range(30)]
    far, kept, (look, tell) = os.dup2(opened[0], 5000), opened[3], os.pipe()
    pid = os.fork()
    if pid == 0:
        files.close_inherited(keep=[kept, tell])
        os.write(tell, " ".join(path.name for path in Path("/proc/self/fd").iterdir()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    left = {int(number) for number in os.read(look, 1000).split()}
    for number in (*opened, far, look, tell):
        os.close(number)
    assert {0, 1, 2, kept, tell} < left and len(left) == 6  # with the list's own
