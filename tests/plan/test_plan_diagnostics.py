"""A mistake in a file is told in the words of TOML, with its line; whatever is named as a plan, nothing hangs."""

from __future__ import annotations

import os
import socket
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.errors import PlanError
from kgorch.plan import Plan, dotted_keys, load, parse
from kgorch.plan.diagnostics import validate
from kgorch.plan.plan_file import PLAN
from kgorch.plan.toml_document import MAX_BYTES, TomlDocument
from kgorch.plan.toml_lines import lines_of
from kgorch.plan.toml_values import format_value

PYDANTICS = (
    "Input should", "should match", "Field required", "value_error", "union", "Value error", "Extra inputs", "instance of",
    "unable to", "at least 1 item", "valid dictionary", "pydantic", "literal[", "constrained", "another value", "_type",
)  # fmt: skip

WRONG = [
    "3", "-1", "0", "2.5", "nan", "inf", "-inf", "1e300", "9223372036854775807", "true", '""', '"x y"', '"-5m"', '"5 hours"',
    '"☃"', '"a:b"', '"/"', "[]", "[[1]]", "[3]", '[""]', '["a b"]', "[{ a = 1 }]", "{}", "{ a = 1 }", "{ set = 3 }",
    "2024-01-01", "07:32:00", "1979-05-27T07:32:00Z", '["' + "x" * 5000 + '"]', '"' + "x" * 5000 + '"',
    "[" + ", ".join(['"https://a"'] * 9) + "]", '["**/x"]', '["nosuch"]', "[true]",
]  # fmt: skip

BEFORE = {"weights.": 'file = "a.pt"'}
"""What a table must have besides the key that is tried."""


def plan_with(key: str, value: str) -> tuple[str, int]:
    """A plan that is right but for one value, and the line of it."""
    above, _, name = key.rpartition(".")
    top, stage = ['name = "ink"', ""], ["[[stage]]", 'name = "train"', 'entry = "t.py"']
    if not above and key != "stage":
        lines = [line for line in top if not line.startswith(f"{key} =")] + [f"{name} = {value}", *stage]
    elif key == "stage":
        lines = [*top, f"stage = {value}"]
    elif above == "stage":
        lines = [*top, *(line for line in stage if not line.startswith(f"{name} =")), f"{name} = {value}"]
    else:
        more = [BEFORE["weights."]] if above == "stage.weights" and name != "file" else []
        lines = [*top, *stage, f"[{above}]", *more, f"{name} = {value}"]
    return "\n".join(lines) + "\n# the end", lines.index(f"{name} = {value}") + 1


@pytest.mark.parametrize("key", list(dotted_keys(Plan)))
def test_a_wrong_value_of_any_key_is_told_with_its_line_and_without_pydantics_words(key):
    refused = 0
    for value in WRONG:
        text, line = plan_with(key, value)
        try:
            parse(text, "plan.toml")
        except PlanError as error:
            refused += 1
            told = str(error)
            assert not [word for word in PYDANTICS if word in told.replace(value, "")], told
            assert f"\n  plan.toml:{line}: " in told, (value, told)
            assert len(told.splitlines()) <= 11 and max(map(len, told.splitlines())) < 600, told
            assert "\nnext: kgorch explain " in told, told
    assert refused >= (0 if key in ("stage.args", "checkpoint.mirror_options") else 5), refused


@settings(max_examples=400, deadline=None)
@given(
    key=st.sampled_from(list(dotted_keys(Plan))),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abstwl", min_size=1, max_size=4), inner, max_size=2),
        max_leaves=5,
    ),
)  # fmt: skip
def test_any_value_of_any_key_is_taken_or_told_without_pydantics_words(key, value):
    found = tomllib.loads(plan_with(key, "0")[0])
    at = found
    *above, name = key.split(".")
    for part in above:
        at = at[part][0] if isinstance(at[part], list) else at[part]
    at[name] = value
    try:
        validate(Plan, TomlDocument(found, "", "plan.toml"), PLAN)
    except PlanError as error:
        told = str(error).replace(format_value(value), "")
        assert not [word for word in PYDANTICS if word in told], told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('name = "x"\n[stage]\nname = "a"\nentry = "t.py"', "plan.toml:2: stage: every stage is a table in double brackets"),
        ('name = "x"\n[stage.train]\nentry = "t.py"', 'write [[stage]] and name = "train" instead of [stage.train]'),
        ('name = "x"\nstage = []', "plan.toml:2: stage: expected at least one [[stage]]"),
        ('name = "my run"', 'plan.toml:1: name: expected 1 to 64 letters, digits, \'.\', \'_\' or \'-\''),
        ('name = "my run"', 'found "my run" (for example "my-run")'),
        ('name = "a/b"', '(for example "a-b")'),
        ('name = "x"\n[[session]]\nwall = "5m"', "plan.toml:2: session: expected a single table: write [session] instead of"),
        ('name = "x"\nstage = [{ name = "t", entry = "t.py", ranks = "two" }]',
         'plan.toml:2: stage.t.ranks: expected "auto" or a whole number; found "two"\n'),
        ('name = "x"\nstage = [\n  { name = "t", entry = "t.py" },\n  { name = "t", entry = "t.py" },\n]',
         "plan.toml:4: stage 2: name: two stages are named 't'\n"),
        ('name = "x"\nstage = [{ name = "t", entry = "t.py", epochs = 3 }]', "goes into args = { epochs = … }"),
        ('name = "x"\nwall = "5m"\nstage = [{ name = "t", entry = "t.py" }]', "unknown key (did you mean 'session.wall'?)"),
        ('name = "x"\n[[stage]]\nname = "t"\nentry = "t.py"\nseed = 3',
         "plan.toml:5: stage.t.seed: unknown key (did you mean 'seed', which goes above the first [table]?)"),
        ('name = "x"\n[checkpoint]\nkeep = { best = "dice" }', 'expected a reported metric and min or max, such as "accuracy:max"'),
    ],
)  # fmt: skip
def test_the_mistakes_that_people_make_are_told_with_what_to_write(text, told):
    with pytest.raises(PlanError) as caught:
        parse(text, "plan.toml")
    assert told in str(caught.value)


def test_a_value_by_set_is_told_by_what_was_typed_and_not_by_a_line_of_the_file():
    text = 'name = "x"\nstage = [{ name = "t", entry = "t.py", args = { epochs = 3 } }]\n[session]\nwall = "1h"'
    for typed, told in [
        ("session.wall=-5m", "\n  --set session.wall=-5m: session.wall: expected a duration"),
        ("wall=5m", "\n  --set wall=5m: wall: unknown key (did you mean 'session.wall'?)"),
        ("epochs=5", "(did you mean 'stage.t.args.epochs'?)"),
        ("stage.t.ranks=two", "\n  --set stage.t.ranks=two: stage.t.ranks: expected"),
    ]:
        with pytest.raises(PlanError) as caught:
            parse(text, "plan.toml", [typed])
        assert told in str(caught.value) and "plan.toml:" not in str(caught.value)
    with pytest.raises(PlanError) as caught:
        parse(text, "plan.toml", ["notify.urls=['s3cr3t']"])
    assert "s3cr3t" not in str(caught.value)


def test_a_date_among_the_arguments_is_told_by_its_own_key_and_line():
    text = 'name = "x"\n[[stage]]\nname = "t"\nentry = "t.py"\n[stage.args]\nlr = 1\ndata = { days = [2024-01-01] }'
    with pytest.raises(PlanError) as caught:
        parse(text, "plan.toml", ["stage.t.args.lr=0.1"])
    assert "plan.toml:7: stage.t.args.data.days.0: expected" in str(caught.value)
    assert "a date goes in quotes); found 2024-01-01" in str(caught.value) and "--set" not in str(caught.value)


def test_a_value_that_a_quick_test_takes_over_is_told_once():
    text = (
        'name = "x"\nstage = [{ name = "quick", quick_test_of = "t" }, { name = "t", entry = "t.py", ranks = "two" }]'
    )
    with pytest.raises(PlanError) as caught:
        parse(text, "plan.toml")
    assert len(caught.value.facts) == 1 and "stage.t.ranks" in caught.value.facts[0]


def test_the_places_of_keys_are_found_in_all_that_toml_can_be_written_as():
    text = '''\
# "a" = [
name = """
[not.a.table]
x = 1""" # end
"quoted key" = 1
'lit.eral' = "#]"
a.b . c = 1.5
list = [ # {
  1, [2,
  3], { k = "v", in.ner = [1] },
]
[t] # ]
k = 'v'
[t."u.v"]
deep = { a = { b = 1 }, c = [] }
[[stage]]
name = "one"
[stage.args]
x = 1
[[stage]]
name = "two"
args = { x = """
""", y = 2 }
[[stage.sub]]
z = 1979-05-27 07:32:00
'''
    assert tomllib.loads(text)
    places = lines_of(text)
    assert {place: places[place] for place in [
        ("name",), ("quoted key",), ("lit.eral",), ("a", "b", "c"), ("list",), ("list", 0), ("list", 1, 1),
        ("list", 2, "in", "ner"), ("t",), ("t", "k"), ("t", "u.v"), ("t", "u.v", "deep", "a", "b"),
        ("stage", 0, "name"), ("stage", 0, "args", "x"),
        ("stage", 1), ("stage", 1, "args", "x"), ("stage", 1, "args", "y"), ("stage", 1, "sub", 0, "z"),
    ]} == {
        ("name",): 2, ("quoted key",): 5, ("lit.eral",): 6, ("a", "b", "c"): 7, ("list",): 8, ("list", 0): 9, ("list", 1, 1): 10,
        ("list", 2, "in", "ner"): 10, ("t",): 12, ("t", "k"): 13, ("t", "u.v"): 14, ("t", "u.v", "deep", "a", "b"): 15,
        ("stage", 0, "name"): 17, ("stage", 0, "args", "x"): 19, ("stage", 1): 20, ("stage", 1, "args", "x"): 22,
        ("stage", 1, "args", "y"): 23, ("stage", 1, "sub", 0, "z"): 25,
    }  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.text("ab[]{}=.\"'#,\n 1\\", max_size=60))
def test_whatever_tomllib_takes_has_its_places_found(text):
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    places = lines_of(text)
    for key, value in found.items():
        assert (key,) in places, (text, places)
        for inner in value if isinstance(value, dict) else ():
            assert (key, inner) in places, (text, places)


def test_a_number_of_more_digits_than_python_converts_is_a_mistake_and_no_bug():
    digits = "1" * 5000
    with pytest.raises(PlanError, match="an integer has too many digits"):
        parse(f"seed = {digits}", "plan.toml")
    with pytest.raises(PlanError, match="too many digits"):
        parse('name = "x"', "plan.toml", [f"seed={digits}"])


# What may be named as a plan

GOOD = 'name = "ink"\n[[stage]]\nname = "träin"\nentry = "t.py"\n'.replace("ä", "a") + "# ä\n"


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path):
    (tmp_path / "plan.toml").write_bytes(GOOD.encode("utf-8-sig"))
    assert load(tmp_path / "plan.toml")[0].name == "ink"
    assert load(tmp_path / "plan.toml")[1] == GOOD


def a_fifo(path):
    os.mkfifo(path)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def a_large_file(path):
    with open(path, "wb") as file:
        file.truncate(1 << 30)


def a_loop(path):
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "there is no plan"),
        (a_fifo, "is a pipe (FIFO), not a file"),
        (a_socket, "cannot be read"),
        (lambda path: path.mkdir(), "is a folder, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.symlink_to("/dev/tty"), "cannot be read|is a device"),
        (lambda path: path.symlink_to("nowhere"), "there is no plan"),
        (a_loop, "cannot be read"),
        (a_large_file, "is too large for a plan"),
        (lambda path: path.write_bytes(GOOD.encode("latin-1")), "plan.toml:5: byte 0xe4 is not UTF-8"),
        (lambda path: path.write_bytes(GOOD.encode("latin-1")), "next: save it as UTF-8"),
        (lambda path: path.write_bytes(GOOD.encode("utf-16")), "is UTF-16, expected UTF-8"),
        (lambda path: path.write_bytes(b"\x00" * 100), "is not TOML"),
        (lambda path: path.write_text("name = 'x'\n[[stage"), "plan.toml:2: "),
    ],
)
@pytest.mark.timeout(20)
def test_whatever_is_named_as_a_plan_is_answered_at_once(tmp_path, monkeypatch, make, told):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "plan.toml")
    with pytest.raises(PlanError) as caught:
        load(tmp_path / "plan.toml")
    assert any(word in str(caught.value) for word in told.split("|")), str(caught.value)
    assert caught.value.next_step and "--force" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_plan_that_may_not_be_read_is_told_with_what_to_type(tmp_path):
    (tmp_path / "plan.toml").write_text(GOOD)
    (tmp_path / "plan.toml").chmod(0)
    with pytest.raises(PlanError, match="chmod u"):
        load(tmp_path / "plan.toml")


def test_a_script_or_a_folder_in_the_place_of_a_plan_is_named(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(PlanError, match="is a Python script, not a plan"):
        load(tmp_path / "train.py")
    (tmp_path / "plan.toml").write_text(GOOD)
    with pytest.raises(PlanError, match=f"name the file in it: {tmp_path}/plan.toml"):
        load(tmp_path)
    with pytest.raises(PlanError, match=r"there is no plan .*/plan.tml \(did you mean 'plan.toml'\?\)"):
        load(tmp_path / "plan.tml")


def test_a_plan_that_grows_while_it_is_read_is_bounded(tmp_path):
    (tmp_path / "plan.toml").write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(PlanError, match="too large"):
        load(tmp_path / "plan.toml")
