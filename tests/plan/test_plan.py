"""plan.toml: what is taken, and how a mistake is told."""

from __future__ import annotations

import math
import tomllib
from enum import IntEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.core.durations import parse_duration_s
from kgorch.errors import PlanError
from kgorch.plan import Plan, check_entries, load, parse, parse_size_bytes
from kgorch.plan.toml_values import toml_literal

GOOD = """\
name = "ink"
[[stage]]
name = "train"
entry = "package.train:main"
ranks = 2
args = { data = "d", epochs = 40 }
[[stage]]
name = "predict"
entry = "predict.py"
[session]
wall = "9h"
margin = "1m 30s"
[checkpoint]
every = "60m"
keep = { last = 3, best = "dice:max" }
disk = "15GiB"
[memory]
microbatch = 16
ladder = ["microbatch/2", { set = { crop = 96 }, changes_result = true }]
[quota]
hours = 30
resets = "Sat 00:00 UTC"
[resume]
sources = ["/kaggle/input/**"]
"""


def test_a_plan_with_every_part_is_read_in_plain_units():
    plan = parse(GOOD, "plan.toml")
    assert plan.session.wall == 9 * 3600 and plan.session.margin == 90
    assert plan.checkpoint.every == 3600 and plan.checkpoint.disk == 15 << 30
    assert [stage.ranks for stage in plan.stage] == [2, "auto"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("wall =", "wal ="), "plan.toml:11: session.wal: unknown key (did you mean 'wall'?)"),
        (('"9h"', '"9 hours"'), "plan.toml:11: session.wall: expected a duration such as"),
        (('"9h"', '"0s"'), "plan.toml:11: session.wall: expected a duration above 0"),
        (('"9h"', "-5"), "plan.toml:11: session.wall: expected a duration above 0"),
        (('"9h"', '"1m"'), "the margin (90 s) must be shorter than the session (60 s)"),
        (("last = 3", "lst = 3"), "plan.toml:15: checkpoint.keep.lst: unknown key (did you mean 'last'?)"),
        (("last = 3", "last = 0"), "plan.toml:15: checkpoint.keep.last"),
        (
            ("ranks = 2", "ranks = 0"),
            'plan.toml:5: stage.train.ranks: expected "auto" or a number of at least 1; found 0',
        ),
        (
            ('"predict.py"', '"predict"'),
            'plan.toml:9: stage.predict.entry: expected "module:function" or the path of a script',
        ),
        (('name = "predict"', 'name = "train"'), "plan.toml:8: stage 2: name: two stages are named 'train'\n"),
        (('name = "ink"', 'name = "../x"'), "plan.toml:1: name"),
        (('name = "ink"\n', ""), "name: required key is missing"),
        (("hours = 30", 'hours = "many"'), "plan.toml:21: quota.hours"),
        (("microbatch = 16", "microbatch = 2.5"), "plan.toml:18: memory.microbatch"),
        (('data = "d"', "data = 2024-01-01"), "a date goes in quotes"),
        (('"9h"', '"9999999d"'), "plan.toml:11: session.wall: expected a duration above 0 and at most 10 years"),
        (
            ("[quota]", '[health]\nnan = ["jump"]\n[quota]'),
            "plan.toml:21: health.nan: no remedy: 'jump'; expected one like skip",
        ),
        (("[quota]", "[health]\nspike = 0\n[quota]"), "plan.toml:21: health.spike: expected a number above 0; found 0"),
        (("[quota]", "[health]\nnans = []\n[quota]"), "unknown key (did you mean 'nan'?)"),
        (("[session]", "[session"), "plan.toml is not TOML"),
        (("ranks = 2", 'weights = "net.onnx"'), "plan.toml:5: stage.train.weights.file: expected a weights file"),
        (("ranks = 2", 'weights = { file = "n.pt", strct = false }'), "unknown key (did you mean 'strict'?)"),
        (("[session]", '[health]\nhang = { stp = "3s" }\n[session]'), "unknown key (did you mean 'step'?)"),
        (
            ("[session]", '[health]\nhang = "on"\n[session]'),
            'health.hang: expected "auto", "off" or a table of time-outs',
        ),
        (('disk = "15GiB"', "mirror = 3"), "plan.toml:16: checkpoint.mirror"),
    ],
)
def test_a_mistake_names_file_line_key_and_what_was_expected(change, said):
    with pytest.raises(PlanError) as caught:
        parse(GOOD.replace(*change, 1), "plan.toml")
    assert said in str(caught.value)


def test_overrides_reach_any_value_and_the_later_one_wins():
    plan = parse(
        GOOD,
        "plan.toml",
        [
            "session.margin=1s",
            "session.wall=30s",
            "session.wall=40s",
            "stage.train.args.lr=0.1",
            "checkpoint.keep.last=1",
            "name=other",
        ],
    )
    assert plan.session.wall == 40
    assert plan.stage[0].args == {"data": "d", "epochs": 40, "lr": 0.1}
    assert plan.checkpoint.keep.last == 1 and plan.name == "other"


@pytest.mark.parametrize("key", ['stage."v1.5".args.lr', "stage.'v1.5'.args.lr", ' stage . "v1.5" . args.lr '])
def test_an_override_names_a_stage_with_a_dot_in_quotes(key):
    text = GOOD.replace('name = "train"', 'name = "v1.5"')
    assert parse(text, "plan.toml", [f"{key}=0.1"]).stage[0].args["lr"] == 0.1
    with pytest.raises(PlanError) as caught:
        parse(text, "plan.toml", ["stage.v1.5.args.lr=0.1"])
    assert 'stage of the plan: "v1.5", predict' in caught.value.next_step


@pytest.mark.parametrize("key", ['"', 'a."b', 'a."b"c', '["a"]\n["b"]\nc'])
def test_a_key_whose_quotes_do_not_fit_is_a_mistake(key):
    with pytest.raises(PlanError):
        parse(GOOD, "plan.toml", [f"{key}=1"])


@pytest.mark.parametrize(
    "override", ["session.wall", "=3", "stage.nosuch.ranks=2", "stage.ranks=2", "name.x=3", "session.wal=3s"]
)
def test_an_override_that_reaches_nothing_is_a_mistake(override):
    with pytest.raises(PlanError):
        parse(GOOD.replace('margin = "1m 30s"\n', ""), "plan.toml", [override])


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("amp=False", "amp=false"),
        ("new=True", "new=true"),
        ("new=None", """'stage.train.args.new="None"'"""),
        ("epochs=.5", "epochs=0.5"),
        ("new=.01", "new=0.01"),
        ("epochs=007", "epochs=7"),
        ("epochs=many", """'stage.train.args.epochs="many"'"""),
        ("amp=yes", "amp=true"),
        ("optimizer.lr=1.", "optimizer.lr=1.0"),
        ("betas=[.9,.999]", "'stage.train.args.betas=[0.9, 0.999]'"),
        ("betas=.9,.999", "'stage.train.args.betas=[0.9, 0.999]'"),
        ("betas=none", """'stage.train.args.betas="none"'"""),
        ("optimizer=adam", """'stage.train.args.optimizer="adam"'"""),
        ('new={"lr": .1}', """'stage.train.args.new={"lr" = 0.1}'"""),
        ("new=[a,b]", """'stage.train.args.new="[a,b]"'"""),
    ],
)
def test_what_is_typed_for_an_argument_does_not_become_text_where_a_value_was_meant(tmp_path, typed, instead):
    path = tmp_path / "plan.toml"
    path.write_text(
        GOOD.replace("epochs = 40", "epochs = 40, amp = true, optimizer = { lr = 0.1 }, betas = [0.9, 0.99]")
    )
    with pytest.raises(PlanError) as caught:
        load(path, [f"stage.train.args.{typed}"])
    assert instead in caught.value.next_step, caught.value.next_step
    stored = parse(path.read_text(), "plan.toml", [f"stage.train.args.{typed}"])
    assert stored, "a run that keeps it goes on as it began"


@pytest.mark.parametrize(
    ("typed", "value"),
    [("data=a.npy", "a.npy"), ("new=adam", "adam"), ('epochs="many"', "many"), ("data='None'", "None"), ("epochs=1e3", 1e3)],
)  # fmt: skip
def test_text_for_an_argument_needs_no_quotes_where_nothing_else_can_be_meant(tmp_path, typed, value):
    path = tmp_path / "plan.toml"
    path.write_text(GOOD)
    plan, _ = load(path, [f"stage.train.args.{typed}"])
    assert plan.stage[0].args[typed.partition("=")[0]] == value


def test_the_hash_follows_what_the_bits_hang_on_and_nothing_else():
    base = parse(GOOD, "plan.toml").hash
    assert parse(GOOD, "plan.toml", ["session.wall=2h", "checkpoint.every=5s"]).hash == base
    assert parse(GOOD, "plan.toml", ["stage.train.args.epochs=41"]).hash != base
    levels = {parse(GOOD, "plan.toml", [f"deterministic={level}"]).hash for level in ("off", "warn", "strict")}
    assert len(levels) == 3 and base in levels


def test_starting_weights_are_a_path_or_a_table_and_the_hash_follows_them():
    bare, path, table = (
        parse(GOOD.replace("ranks = 2", line), "plan.toml")
        for line in ("", 'weights = "n.pt"', 'weights = { file = "n.pt", strict = false }')
    )
    assert path.stage[0].weights.model_dump() == {"file": "n.pt", "into": None, "prefix": "", "strict": True}
    assert len({bare.hash, path.hash, table.hash}) == 3
    old = 'name = "x"\n[[stage]]\nname = "t"\nentry = "t.py"\n'
    assert parse(old, "plan.toml").hash == "fad4322f258c0c2f", "a plan without them has the hash that it always had"


@pytest.mark.parametrize(
    ("told", "given"),
    [("auto", {}), ("off", None), ('{ step = "5m", evaluation = "1h" }', {"step": 300, "evaluation": 3600})],
)
def test_time_outs_of_hangs_are_named_by_place_or_learned_or_off(told, given):
    assert parse(GOOD, "plan.toml", [f"health.hang={told}"]).health.hang_s == given


def test_what_a_mirror_is_given_is_not_shown_in_an_error():
    with pytest.raises(PlanError) as caught:
        parse(GOOD.replace('disk = "15GiB"', 'mirror_options = "s3cr3t"'), "plan.toml")
    assert "checkpoint.mirror_options" in str(caught.value) and "s3cr3t" not in str(caught.value)


def test_the_plan_that_init_writes_is_valid_also_with_its_comments_taken_away():
    from importlib import resources

    text = resources.files("kgorch.cli").joinpath("template.toml").read_text()
    assert parse(text, "template").name == "my-run"
    keys = [
        line.removeprefix("# ") if line.startswith("# ") and (" = " in line or line.startswith("# [")) else line
        for line in text.splitlines()
    ]
    full = parse("\n".join(keys), "template")
    assert full.session.wall and full.quota.hours and full.resume.sources and full.memory.microbatch


@given(st.floats(0.001, 1e6), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_a_duration_is_its_number_times_its_unit(number, unit):
    factor = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert parse_duration_s(f"{number:.3f}{unit}") == pytest.approx(float(f"{number:.3f}") * factor)


def test_a_size_is_read_in_both_families_of_units():
    assert (
        parse_size_bytes("1GiB"),
        parse_size_bytes("1GB"),
        parse_size_bytes("512"),
        parse_size_bytes("1.5 KiB"),
    ) == (1 << 30, 10**9, 512, 1536)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.disk", "9" * 400 + "GiB"),
        ("checkpoint.disk", "0x" + "f" * 400),
        ("session.wall", "0x" + "f" * 400),
        ("session.wall", "9" * 400 + "h"),
    ],
)
def test_a_number_beyond_all_floats_is_a_mistake_and_no_bug(key, value):
    with pytest.raises(PlanError, match=f"{key}: expected a "):
        parse(GOOD, "plan.toml", [f"{key}={value}"])
    with pytest.raises(ValueError, match="expected a"):
        (parse_size_bytes if "disk" in key else parse_duration_s)(int(value, 16) if "0x" in value else value)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_plan_or_a_plan_error(text):
    try:
        assert isinstance(parse(text, "plan.toml"), Plan)
    except PlanError as error:
        assert "plan.toml" in str(error)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_place_is_taken_or_a_plan_error(data):
    place = data.draw(
        st.sampled_from(
            [
                "name",
                "seed",
                "session.wall",
                "session.margin",
                "checkpoint.every",
                "checkpoint.disk",
                "checkpoint.keep",
                "checkpoint.keep.best",
                "memory.ladder",
                "stage.train.ranks",
                "stage.train.args",
                "stage.train.entry",
                "quota.hours",
                "resume.sources",
            ]
        )
    )
    value = data.draw(
        st.text(max_size=20)
        | st.integers().map(str)
        | st.sampled_from(["[]", "{}", "nan", "inf", "1e400", "true", '""', "[[1]]", "0x10"])
    )
    try:
        assert isinstance(parse(GOOD, "plan.toml", [f"{place}={value}"]), Plan)
    except PlanError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('cache = ["."]', "the plan's folder itself"),
        ('cache = ["data", "data/images/"]', "'data/images' is inside 'data'"),
        ('cache = [""]', "expected a string that is not empty"),
        ('cashe = ["data"]', "did you mean 'cache'?"),
    ],
)
def test_data_to_be_cached_lie_apart_from_each_other_and_from_what_training_writes(data, said):
    with pytest.raises(PlanError) as caught:
        parse(GOOD + f"[data]\n{data}\n", "plan.toml")
    assert said in str(caught.value)


def test_data_to_be_cached_must_be_there(tmp_path):
    plan = parse(GOOD + '[data]\ncache = ["data"]\n', "plan.toml")
    with pytest.raises(PlanError, match=r"data.cache: there is no"):
        check_entries(plan, tmp_path)


QUICK = """
name = "x"
[[stage]]
name = "quick"
quick_test_of = "train"
args = { epochs = 1 }
[[stage]]
name = "train"
entry = "train.py"
ranks = 2
args = { epochs = 40, lr = 0.1 }
"""


def test_a_quick_test_takes_over_what_it_does_not_give_itself():
    quick, train = parse(QUICK, "plan.toml").stage
    assert (quick.entry, quick.ranks, quick.args) == (train.entry, 2, {"epochs": 1, "lr": 0.1})
    assert quick.quick_test_of == "train" and train.quick_test_of is None


def test_a_quick_test_with_an_entry_of_its_own_takes_over_no_argument():
    quick, _ = parse(
        QUICK.replace("args = { epochs = 1 }", 'entry = "look.py"\nargs = { fast = true }'), "plan.toml"
    ).stage
    assert (quick.entry, quick.args) == ("look.py", {"fast": True})


@pytest.mark.parametrize("tested", ["trian", "quick"])
def test_a_quick_test_of_no_other_stage_is_refused_and_the_stages_named(tested):
    with pytest.raises(PlanError) as caught:
        parse(QUICK.replace('quick_test_of = "train"', f'quick_test_of = "{tested}"'), "plan.toml")
    assert (
        ".quick_test_of: " in str(caught.value)
        and "is not a stage that can be tested" in str(caught.value)
        and "train" in str(caught.value)
    )


def test_a_rung_that_sets_an_argument_is_for_the_stages_that_have_it():
    text = """
name = "x"
stage = [
  { name = "train", entry = "train.py", args = { crop = 128 } }, { name = "predict", entry = "predict.py", args = { tile = 64 } },
]
[memory]
ladder = ["microbatch/2", { set = { crop = 96 } }, { set = { width = 8 } }]
"""
    plan = parse(text, "plan.toml")
    assert [rung.name for rung in plan.rungs_of("train")] == ["microbatch/2", "set crop=96", "set width=8"]
    assert [rung.name for rung in plan.rungs_of("predict")] == ["microbatch/2", "set width=8"], (
        "nobody gives width: all may have it"
    )


_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.dates()
    | st.datetimes(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=5,
)


@given(value=_VALUES)
@settings(max_examples=300, deadline=None)
def test_a_value_that_is_set_from_python_comes_out_of_toml_as_it_was(value):
    assert tomllib.loads(f"value = {toml_literal(value)}")["value"] == value


def test_a_number_of_another_type_comes_out_of_toml_as_a_number():
    """NumPy's float64 is a float and a member of an IntEnum an integer; the repr of either is no TOML."""
    numpy = pytest.importorskip("numpy")
    kind = IntEnum("kind", ["SMALL", "LARGE"])
    values = [numpy.float64(1e-3), kind.LARGE, *numpy.array([0.9, 0.999])]
    assert tomllib.loads(f"value = {toml_literal(values)}")["value"] == [1e-3, 2, 0.9, 0.999]


def test_what_toml_has_no_value_for_is_refused():
    assert math.isnan(tomllib.loads(f"value = {toml_literal(math.nan)}")["value"])
    for value in (None, {"mirror": [None]}, object()):
        with pytest.raises(TypeError, match="TOML has no value for"):
            toml_literal(value)
