"""What the answers of the client's process mean: pure, with whatever a server may make of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.core.remote.place_values import PlaceError, PlaceQuota, RemoteStatus, SessionOrder, Trouble
from kgorch.remote.places.kaggle import answers, output_names, refusals
from kgorch.remote.places.kaggle.place import missing_files

ORDER = SessionOrder("kgorch-demo-001", "0123456789abcdef", "demo", "id", 1, "a/b", "", -1, 1, 2, "", False)
GOOD = {
    "push": {
        "ref": "/code/ada/kgorch-demo-001",
        "url": "https://k/code/ada/kgorch-demo-001",
        "version": 1,
        "error": "",
        "invalid": [],
    },
    "source": {
        "ref": "ada/kgorch-demo-001",
        "version": 1,
        "head": "#!\n# kgorch-push: run=demo session=1 nonce=0123456789abcdef\n",
    },
    "status": {"status": "COMPLETE", "message": ""},
    "quota": {
        "gpu": {"used_s": 1.0, "reserved_s": 0.0, "allowed_s": 3.0, "refreshes_at": "2026-11-28T00:00:00+00:00"},
        "tpu": None,
    },
    "account": {"name": "ada", "means": "OAUTH"},
    "output": {"files": 1},
    "file": {"file": "a/b"},
    "dataset_files": {"sizes": {"a": 1}},
}
READERS = {
    "push": lambda value: answers.pushed(value, "kgorch-demo-001"),
    "source": lambda value: answers.found_push(value, ORDER, "url"),
    "status": answers.sighting,
    "quota": answers.quota,
    "account": answers.account,
    "output": answers.file_count,
    "file": answers.file_of,
    "dataset_files": answers.sizes,
}

FUZZ = settings(max_examples=40 * int(os.environ.get("KGORCH_FUZZ", "1")))

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", READERS)
def test_a_good_answer_is_read(kind):
    assert READERS[kind](GOOD[kind]) is not None


@pytest.mark.parametrize("kind", READERS)
@FUZZ
@given(data=st.data())
def test_an_answer_with_one_field_of_any_value_is_read_or_raises_a_place_error(kind, data):
    value = json.loads(json.dumps(GOOD[kind]))
    target = value["gpu"] if kind == "quota" and data.draw(st.booleans()) else value
    name = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        del target[name]
    else:
        target[name] = data.draw(ANYTHING)
    try:
        READERS[kind](value)
    except PlaceError as error:
        assert error.trouble in (
            Trouble.UNANSWERED,
            Trouble.REFUSED,
            Trouble.UNATTACHED,
            Trouble.SLOTS,
            Trouble.QUOTA,
            Trouble.BUSY,
        )


@pytest.mark.parametrize("kind", READERS)
@FUZZ
@given(value=ANYTHING)
def test_any_value_is_read_or_raises_a_place_error(kind, value):
    try:
        READERS[kind](value)
    except PlaceError as error:
        assert error.trouble is Trouble.UNANSWERED


@given(line=st.binary(max_size=200) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_an_answer_or_raises_a_place_error(line):
    try:
        answers.parse(line)
    except PlaceError as error:
        assert error.trouble in Trouble


def test_a_line_as_deep_as_the_parser_is_refused():
    with pytest.raises(PlaceError, match="nested deeper"):
        answers.parse(b"[" * 100_000 + b"]" * 100_000)


@given(value=ANYTHING)
def test_a_pause_is_seconds_or_none(value):
    with pytest.raises(PlaceError) as error:
        answers.parse(json.dumps({"trouble": "busy", "message": "later", "retry_after_s": value}).encode())
    pause = error.value.retry_after_s
    assert error.value.trouble is Trouble.BUSY and (pause is None or 0 <= pause <= 86400)


def test_a_push_is_believed_for_our_name_alone():
    other = GOOD["push"] | {"ref": "/code/ada/kgorch-demo-0011", "url": "/kgorch-demo-0011"}
    with pytest.raises(PlaceError, match="instead of"):
        answers.pushed(other, "kgorch-demo-001")
    assert (
        answers.pushed(GOOD["push"] | {"ref": "ada/kgorch-demo-001 v3", "version": 3}, "kgorch-demo-001").version == 3
    )


@pytest.mark.parametrize(
    "head",
    [
        "", "one line", "#!\n# kgorch-push: nonce=0123456789abcdef0", "# kgorch-push: nonce=0123456789abcdef\n",
        "#!\n\n# kgorch-push: nonce=0123456789abcdef", "#!\nprint('# kgorch-push: nonce=0123456789abcdef')",
    ],
)  # fmt: skip
def test_only_the_nonce_on_line_two_is_ours(head):
    with pytest.raises(PlaceError) as error:
        answers.found_push(GOOD["source"] | {"head": head}, ORDER, "")
    assert error.value.trouble is Trouble.REFUSED
    assert answers.found_push(GOOD["source"], replace(ORDER, run="another"), "").version == 1


def test_a_quota_without_gpus_is_none_and_what_is_left_leaves_out_what_is_reserved():
    assert answers.quota({"gpu": None, "tpu": None}) is None
    assert PlaceQuota(1.0, 2.0, 10.0, "").left_s == 7.0


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("Maximum batch GPU session count of 2 reached.", Trouble.SLOTS),
        ("Maximum batch CPU session count of 5 reached.", Trouble.SLOTS),
        ("Maximum weekly GPU quota of 30.00 hours reached.", Trouble.QUOTA),
        ("Your GPU quota for this week has been exceeded", Trouble.QUOTA),
        ("Too many requests", Trouble.BUSY),
        ("Unauthenticated", Trouble.LOGIN),
        ("The kernel source is too long", Trouble.REFUSED),
        ("x" * 10**6 + "quota exceeded", Trouble.REFUSED),
    ],
)
def test_a_refusal_in_words_is_classified(text, trouble):
    assert refusals.trouble_of_text(text) is trouble


@FUZZ
@given(text=st.text(max_size=300), status=st.integers(-1, 10**6))
def test_any_status_and_text_have_a_trouble(text, status):
    assert refusals.trouble_of_text(text) in Trouble and refusals.trouble_of_status(status, text) in Trouble
    pause = refusals.retry_after_s(text)
    assert pause is None or 0 <= pause <= refusals.MAX_RETRY_AFTER_S


@pytest.mark.parametrize("header", ["Wed, 21 Oct 2026 07:28:00 GMT", "-3", "nan", "1e9", "", None, "٣"])
def test_a_pause_that_is_no_number_of_seconds_is_none(header):
    assert refusals.retry_after_s(header) is None


@given(
    name=st.text(max_size=50)
    | st.lists(st.sampled_from(["..", ".", "a", "", "\0", "~", "\\"]), max_size=6).map("/".join)
)
def test_a_name_that_is_taken_lies_below_the_folder(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp() / "below"
    try:
        checked = output_names.check(name)
    except output_names.OutsideError:
        return
    resolved = (folder / checked).resolve()
    assert resolved.is_relative_to(folder) and resolved != folder


def test_names_are_wanted_by_their_whole_or_their_last_part():
    names = ["kgorch/kgorch.db", "kgorch-session.json", "x/../kgorch-other", "kgorch/runs/a.log"]
    assert output_names.wanted(names, ["kgorch.db", "kgorch-session.json"]) == names[:2]
    assert output_names.wanted(names, ["kgorch/runs/*"]) == names[3:]
    with pytest.raises(output_names.OutsideError):
        output_names.wanted(names, ["*"])


def test_a_bundle_is_whole_when_each_file_is_listed_with_its_size_or_unpacked():
    stored = {"f0001": 5, "x.whl": 7, "code.tar.gz": 9}
    assert missing_files(stored, {"f0001": 5, "x.whl": 7, "code/train.py": 1}) == []
    assert missing_files(stored, {"f0001": 4, "x/METADATA": 7}) == ["f0001", "code.tar.gz"]


def test_every_word_of_kaggle_for_a_status_is_known():
    assert {answers.sighting({"status": word, "message": ""}).status for word in answers.STATUSES} == {
        *RemoteStatus
    } - {RemoteStatus.UNKNOWN}
    assert answers.sighting({"status": "PAUSED", "message": ""}).status is RemoteStatus.UNKNOWN
