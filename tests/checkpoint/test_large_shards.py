"""A shard of many gigabytes is read like a small one. The file is sparse: nothing of it is written."""

from __future__ import annotations

import json
import struct

import pytest

from kgorch.checkpoint import safetensors_header


@pytest.mark.parametrize("count", [2, 40, 20_000])
def test_tensors_that_begin_far_behind_the_first_gigabyte_are_found(tmp_path, count):
    each = 4 * 1024 * 65_536
    table = {
        f"layer{number:05}.weight": {
            "dtype": "F32", "shape": [1024, 65_536], "data_offsets": [number * each, (number + 1) * each],
        } for number in range(count)
    }  # fmt: skip
    text = json.dumps(table).encode()
    path = tmp_path / "rank0.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * each)
    spans = safetensors_header.read(tmp_path, path.name)
    last = spans[f"layer{count - 1:05}.weight"]
    assert len(spans) == count and last.start + last.size == path.stat().st_size
