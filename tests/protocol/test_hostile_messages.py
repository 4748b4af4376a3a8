"""Lines on the sockets from anybody: a message whose fields are what they are said to be, or ProtocolError; nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.protocol import codec, transport
from kgorch.protocol.codec import MAX_LINE_BYTES, PROTOCOL_VERSION, LineBuffer, ProtocolError
from kgorch.protocol.messages import MESSAGE_KINDS, Heartbeat, Message, Request, Response
from kgorch.system.sockets.control_socket import ControlSocket

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))
MANY = settings(max_examples=600 * FUZZ, deadline=None, database=None)

odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["", "\ud800", "\0", "x" * 3000, 2**63, -(2**63), 10**40, 1e308, "1", "__class__"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
plain = {"str": st.text(max_size=5), "int": st.integers(0, 9), "float": st.floats(0, 9), "bool": st.booleans()}
spans = st.dictionaries(st.just("rank0.json"), st.lists(st.integers(-1, 9) | odd, min_size=1, max_size=3), max_size=1)
values = plain | {
    "int | None": st.none() | plain["int"],
    "float | None": st.none() | plain["float"],
    "dict[str, Any]": st.dictionaries(st.text(max_size=5), odd, max_size=2),
    "dict[str, str]": st.dictionaries(st.text(max_size=5), plain["str"] | odd, max_size=2),
    "dict[str, float]": st.dictionaries(st.text(max_size=5), plain["float"] | odd, max_size=2),
    "dict[str, list[int]]": spans,
    "list[int]": st.lists(plain["int"] | odd, max_size=3),
    "list[list[str]]": st.lists(st.lists(plain["str"] | odd, max_size=3) | odd, max_size=3),
    "list[dict[str, list[int]]]": st.lists(spans | odd, max_size=2),
}


def is_of(value: object, declared: str) -> bool:
    """Whether the value is what the annotation says, to any depth; independent of the codec's own check."""
    match declared:
        case "Any":
            return True
        case "None" | "str" | "bool" | "int":
            return type(value).__name__ == declared.replace("None", "NoneType") and (
                declared != "int" or abs(value) < 2**63
            )
        case "float":
            return type(value) in (int, float) and math.isfinite(value) and abs(value) < 2**63
    if " | " in declared:
        return any(is_of(value, part) for part in declared.split(" | "))
    outer, _, inner = declared.removesuffix("]").partition("[")
    if outer == "list":
        return type(value) is list and all(is_of(item, inner) for item in value)
    return type(value) is dict and all(is_of(item, inner.removeprefix("str, ")) for item in value.values())


@st.composite
def documents(draw: st.DrawFn) -> object:
    """A message of a kind that there is, some of its fields as they should be and some not."""
    name, kind = draw(st.sampled_from(sorted(MESSAGE_KINDS.items())))
    document = {"v": draw(st.just(PROTOCOL_VERSION) | odd), "message": draw(st.just(name) | odd)}
    for item in dataclasses.fields(kind):
        right = values[str(item.type)]
        if draw(st.integers(0, 9)):
            document[item.name] = draw(right if draw(st.integers(0, 3)) else odd)
    return document | draw(st.dictionaries(st.text(max_size=5), odd, max_size=1))


def taken(line: bytes) -> Message | None:
    try:
        return codec.decode(line)
    except ProtocolError as error:
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
        assert is_of(value, str(item.type)), item
        repr(value).encode()
        json.dumps(value, ensure_ascii=False).encode()  # no lone surrogate: a file and the database take it
    assert codec.decode(codec.encode(message)) is not None


HELD = {
    "message": "Held",
    "attempt": "1.1",
    "run_id": "r",
    "stage": "s",
    "step": 1,
    "number": 1,
    "final": False,
    "at_s": 1.0,
}
FILLED = {"message": "Filled", "attempt": "1.1", "rank": 0, "number": 1, "slot": 0, "step": 1, "final": False}
FILLED |= {"persist": True, "began_s": 1.0, "blocking_s": 0.1}


@pytest.mark.parametrize(
    "document",
    [
        FILLED | {"files": {"rank0.json": ["0", 9]}},
        FILLED | {"files": {"rank0.json": [0, True]}},
        FILLED | {"files": {"rank0.json": {"0": 9}}},
        FILLED | {"files": {"../rank0.json": [0, 9]}},
        HELD | {"shares": [{"rank0.json": [0, 9]}, 3]},
        HELD | {"shares": [{"rank0.json": [0, -9]}]},
        HELD | {"shares": [[["rank0.json", [0, 9]]]]},
        {"message": "Vitals", "attempt": "1.1", "rank": 0, "values": {"rss": "9"}},
        {"message": "Vitals", "attempt": "1.1", "rank": 0, "values": {"rss": 10**40}},
        {
            "message": "Place",
            "attempt": "1.1",
            "rank": 0,
            "where": "x",
            "for_s": 1,
            "still_s": 1,
            "longest": {"x": None},
        },
        {"message": "Note", "attempt": "1.1", "kind": "fine", "facts": {"number": 1}},
    ],
    ids=lambda document: json.dumps(document)[13:17] + json.dumps(list(document.values())[-1])[:30],
)
def test_what_is_nested_in_a_message_is_checked_like_the_rest(document):
    assert taken(json.dumps(document | {"v": 1}).encode()) is None


def test_the_kinds_on_the_socket_and_their_fields_are_those_of_version_1():
    """A supervisor adopts ranks of an older kgorch: a class may be renamed, what it is called in a line may not."""
    fields = {name: [item.name for item in dataclasses.fields(kind)] for name, kind in MESSAGE_KINDS.items()}
    assert fields == json.loads(Path(__file__).with_name("messages_v1.json").read_text())


@MANY
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_refused(line):
    assert taken(line) is None


@MANY
@given(st.data())
def test_a_message_with_changed_bytes_is_taken_or_refused(data):
    line = bytearray(codec.encode(Heartbeat("1.1", 2, 30, 480, 0.5, 0.1, 40, 4, {"loss": 0.5})))
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
    lines, found, at = LineBuffer(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 9))
        found += lines.feed(stream[at : at + size])
        at += size
    assert found == stream.split(b"\n")[:-1]


def test_a_line_that_comes_byte_by_byte_costs_time_in_proportion_to_its_length():
    lines, began_s = LineBuffer(), time.process_time()
    for _ in range(MAX_LINE_BYTES):
        lines.feed(b"x")
    assert lines.feed(b"\n") == [b"x" * MAX_LINE_BYTES]
    assert time.process_time() - began_s < 20, "copied anew for each byte it takes minutes"


def test_descriptors_that_come_with_a_line_nobody_can_read_or_expects_are_closed():
    ours, theirs = socket.socketpair()
    before = open_files()
    for line in (b"{\n", codec.encode(Response(True)), b"x" * 100):
        transport.send(theirs, Response(False), [0, 1, 2])
        theirs.sendall(line)
        with contextlib.suppress(ProtocolError):
            while transport.receive_messages(ours, LineBuffer(), patience_s=0.0):
                pass
    transport.send(theirs, Response(True), [0, 1])
    theirs.sendall(b"no message\n")
    with pytest.raises(ProtocolError):
        for _ in range(3):
            transport.receive(ours, LineBuffer(), patience_s=1.0)
    assert open_files() == before
    ours.close()
    theirs.close()


def test_a_server_that_is_closed_leaves_no_descriptor_open(tmp_path):
    before = open_files()
    for _ in range(3):
        channel = ControlSocket(tmp_path / "control.sock", lambda message, reply: reply(Response(True)))
        with transport.connect(tmp_path / "control.sock") as peer:
            transport.send(peer, Request("ping"))
            assert peer.recv(4096)
            channel.close()
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
