"""Lines on the sockets from anybody: a message whose fields are what they are said to be, or WireError; nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import wire
from orchestrator.system.sockets.control_socket import ControlSocket

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))
MANY = settings(max_examples=600 * FUZZ, deadline=None, database=None)
KINDS = get_args(wire.Message)

odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["", "\ud800", "\0", "x" * 3000, 2**63, -(2**63), 10**40, 1e308, "1", "__class__"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
values = {"str": st.text(max_size=5), "int": st.integers(0, 9), "float": st.floats(0, 9), "bool": st.booleans()}


@st.composite
def documents(draw: st.DrawFn) -> object:
    """A message of a kind that there is, some of its fields as they should be and some not."""
    kind = draw(st.sampled_from(KINDS))
    document = {"v": draw(st.just(wire.VERSION) | odd), "message": draw(st.just(kind.__name__) | odd)}
    for item in dataclasses.fields(kind):
        right = values.get(str(item.type), st.just({}) if "dict[" in str(item.type)[:5] else st.just([]))
        if draw(st.integers(0, 9)):
            document[item.name] = draw(right if draw(st.integers(0, 3)) else odd)
    return document | draw(st.dictionaries(st.text(max_size=5), odd, max_size=1))


def taken(line: bytes) -> wire.Message | None:
    try:
        return wire.decode(line)
    except wire.WireError as error:
        assert len(str(error)) < 400
        return None


@MANY
@given(documents())
def test_any_document_is_a_message_as_it_is_declared_or_refused(document):
    message = taken(json.dumps(document).encode())
    if message is None:
        return
    for item in dataclasses.fields(message):
        value = getattr(message, item.name)
        kind = str(item.type)
        assert kind in wire._FITS and isinstance(value, wire._FITS[kind])
        if kind in ("int", "float"):
            assert not isinstance(value, bool) and math.isfinite(value) and abs(value) < 2**63
        if kind == "str":
            value.encode()  # no lone surrogate: a file and the database take it
    assert wire.decode(wire.encode(message)) is not None


@MANY
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_refused(line):
    assert taken(line) is None


@MANY
@given(st.data())
def test_a_message_with_changed_bytes_is_taken_or_refused(data):
    line = bytearray(wire.encode(wire.Beat("1.1", 2, 30, 480, 0.5, 0.1, 40, 4, {"loss": 0.5})))
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    taken(bytes(line))


def test_nested_deeper_than_python_goes_is_refused():
    assert taken(b'{"v":1,"message":' + b"[" * 100_000) is None
    assert taken(b"[" * 100_000 + b"]" * 100_000) is None


@given(st.lists(st.binary(max_size=30), max_size=6), st.data())
@settings(max_examples=300, deadline=None)
def test_lines_are_the_same_however_the_stream_is_cut(chunks, data):
    stream = b"\n".join(chunk.replace(b"\n", b"") for chunk in chunks) + b"\n"
    lines, found, at = wire.Lines(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 9))
        found += lines.feed(stream[at : at + size])
        at += size
    assert found == stream.split(b"\n")[:-1]


def test_a_line_that_comes_byte_by_byte_costs_time_in_proportion_to_its_length():
    lines, began_s = wire.Lines(), time.process_time()
    for _ in range(wire.MAX_LINE_BYTES):
        lines.feed(b"x")
    assert lines.feed(b"\n") == [b"x" * wire.MAX_LINE_BYTES]
    assert time.process_time() - began_s < 20, "copied anew for each byte it takes minutes"


def test_descriptors_that_come_with_a_line_nobody_can_read_or_expects_are_closed():
    ours, theirs = socket.socketpair()
    before = open_files()
    for line in (b"{\n", wire.encode(wire.Answer(True)), b"x" * 100):
        wire.send(theirs, wire.Answer(False), [0, 1, 2])
        theirs.sendall(line)
        with contextlib.suppress(wire.WireError):
            while wire.messages(ours, wire.Lines(), patience_s=0.0):
                pass
    wire.send(theirs, wire.Answer(True), [0, 1])
    theirs.sendall(b"no message\n")
    with pytest.raises(wire.WireError):
        for _ in range(3):
            wire.receive(ours, wire.Lines(), patience_s=1.0)
    assert open_files() == before
    ours.close()
    theirs.close()


def test_a_server_that_is_closed_leaves_no_descriptor_open(tmp_path):
    before = open_files()
    for _ in range(3):
        channel = ControlSocket(tmp_path / "control.sock", lambda message, reply: reply(wire.Answer(True)))
        with wire.connect(tmp_path / "control.sock") as peer:
            wire.send(peer, wire.Ask("ping"))
            assert peer.recv(4096)
            channel.close()
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
