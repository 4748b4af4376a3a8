"""A file that a kill has cut off is told from a whole one, where its format can tell."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zipfile

import pytest

from kgorch.worker.foreign.file_formats import is_whole


def safetensors(size):
    header = json.dumps({"w": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * size)


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 1000)
        file.writestr("archive/data/0", b"y" * 1000)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "ckpt.pt"])
def test_each_file_that_is_cut_off_anywhere_is_not_whole(tmp_path, name):
    contents = {
        "model.safetensors": safetensors(50),
        "state.json": json.dumps({"step": 5, "loss": [1, 2]}).encode(),
        "ckpt.pt": archive(tmp_path / "ckpt.pt"),
    }
    content = contents[name]
    (tmp_path / name).write_bytes(content)
    assert is_whole(tmp_path, name) is True
    for length in range(4, len(content) - 1, max(1, len(content) // 20)):
        (tmp_path / name).write_bytes(content[:length])
        assert is_whole(tmp_path, name) is False, length


@pytest.mark.parametrize(
    "content", [b'{"a": 1}\n{"a": 2}\n', b'{"a": 1, "a": 2}', b"// so\n{}", b"[" * 200 + b"]" * 200]
)
def test_odd_json_that_is_not_cut_off_is_not_known_to_be_torn(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    assert is_whole(tmp_path, "state.json") is None


@pytest.mark.parametrize("content", [b"", b'{"a": "x}', b'{"a": {}', b'{"a": "\\"}', b'[{"a": "["}', b'{"a": "\\'])
def test_json_that_is_cut_off_behind_a_bracket_is_torn(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    assert is_whole(tmp_path, "state.json") is False


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"plain text"])
def test_other_formats_prove_nothing(tmp_path, content):
    (tmp_path / "state.bin").write_bytes(content)
    assert is_whole(tmp_path, "state.bin") is None


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"w": 3}', b'{"w": {"data_offsets": [0, "x"]}}', b'{"w": {"data_offsets": []}}', b"\xff\xff"],
)
def test_a_hostile_header_is_not_whole_and_raises_nothing(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert is_whole(tmp_path, "x.safetensors") is False
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + header)
    assert is_whole(tmp_path, "x.safetensors") is False


def test_what_is_no_file_is_not_whole(tmp_path):
    (tmp_path / "x.json").symlink_to("/etc/passwd")
    assert is_whole(tmp_path, "x.json") is False
    assert is_whole(tmp_path, "gone.json") is False


def test_an_archive_is_not_read_that_says_its_table_of_contents_is_huge(tmp_path):
    said = 600 << 20
    with open(tmp_path / "ckpt.pt", "wb") as file:
        file.write(b"PK\x03\x04" + bytes(26))
        file.seek(30 + said)  # a hole
        file.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0, 0, said, 30, 0))
    tracemalloc.start()
    assert is_whole(tmp_path, "ckpt.pt") is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
