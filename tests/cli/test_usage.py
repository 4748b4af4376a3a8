"""What is typed wrongly, how help looks, what TAB offers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from answered import PLAN, code_of, make_state, verbs

from kgorch.cli import cli, completion
from kgorch.cli.commands import VERBS, module_of
from kgorch.errors import ExitCode
from kgorch.plan import check_entries, load


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a plan; a state folder, not made yet."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "plan.toml").write_text(PLAN + "args = { epochs = 3 }\n")
    (tmp_path / "work" / "t.py").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("KGORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def said(capfd, *words: str, code: int = ExitCode.MISTAKE) -> str:
    assert code_of(list(words)) == code
    told = capfd.readouterr()
    return told.err if code else told.out


@pytest.mark.parametrize(
    ("words", "expected", "next_step"),
    [
        (["start", "--wall", "5m"], "error: no such option: --wall", "next: kgorch start --set session.wall=5m"),
        (["start", "plan.toml", "--wall=5m"], "--wall", "next: kgorch start plan.toml --set session.wall=5m"),
        (["check", "--ranks", "2"], "--ranks", "next: kgorch check --set stage.NAME.ranks=2"),
        (["start", "--resume"], "error: no such option: --resume", "next: kgorch start    (continues"),
        (["start", "--frsh"], "(did you mean '--fresh'?)", "next: kgorch start --help"),
        (["start", "--until", "noon"], "error: invalid value for '--until'", "next: kgorch start --help"),
        (["start", "a.toml", "b.toml"], "error: got unexpected extra argument (b.toml)", "next: kgorch start --help"),
        (["start", "--fresh", "--run", "x"], "--fresh starts a new run", "next: kgorch start --help"),
        (["logs", "--rank", "x"], "'x' is not a valid integer", "next: kgorch logs --help"),
        (["rm"], "error: missing argument 'RUN...'", "next: kgorch status --all"),
        (["checkpoints", "export"], "error: missing argument 'RUN'", "next: kgorch status --all"),
        (["checkpoints", "exprt"], "no verb 'exprt' (did you mean 'export'?)", "next: kgorch checkpoints --help"),
        (["queue", "ad"], "no verb 'ad' (did you mean 'add'?); verbs: add, drop", "next: kgorch queue --help"),
        (["help", "stat"], "did you mean 'status'", "next: kgorch --help"),
        (["ls"], "error: no verb 'ls'; verbs: ", "next: kgorch status --all"),
        (["kill"], "error: no verb 'kill'; verbs: ", "next: kgorch stop"),
        (["remove", "x"], "error: no verb 'remove'; verbs: ", "next: kgorch rm --help"),
        (["--nosuch"], "error: no such option: --nosuch", "next: kgorch --help"),
        (["init", "--print", "--force"], "--print writes nothing", "next: kgorch init --help"),
    ],
)
def test_a_mistake_in_words_is_told_as_every_other_and_says_what_to_type(place, capfd, words, expected, next_step):
    told = said(capfd, *words)
    assert any(word in told for word in expected.split("|")) and next_step in told, told
    assert told.startswith("error: ") and "Usage" not in told and "Try '" not in told
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize("word", ["r", "rn", "rmm", "srm", "unistall", "dro", "prun"])
def test_a_verb_that_deletes_is_never_guessed(capfd, place, word):
    for words in ([word], ["checkpoints", word], ["queue", word], ["systemd", word]):
        told = said(capfd, *words)
        assert not [verb for verb in ("rm", "uninstall", "drop", "prune") if f"did you mean '{verb}'" in told], told


@pytest.mark.parametrize("words", [["start"], ["check", "--no-probe"], ["notify", "test"], ["queue", "add"]])
@pytest.mark.parametrize("plan", ["nowhere.toml", "broken.toml", "folder.toml", "latin.toml"])
def test_every_verb_that_takes_a_plan_tells_its_mistakes_alike(place, capfd, words, plan):
    (place / "work" / "broken.toml").write_text("[stage]\n")
    (place / "work" / "folder.toml").mkdir()
    (place / "work" / "latin.toml").write_bytes("name = 'é'".encode("latin-1"))
    told = said(capfd, *words, plan)
    assert told == said(capfd, "start", plan)
    assert "--force" not in told and "\nnext: " in told


def test_without_a_plan_the_one_of_the_folder_is_taken(place, capfd, monkeypatch):
    monkeypatch.setattr("kgorch.cli.commands.training.start.run_session", lambda *_, **__: int(ExitCode.SUSPENDED))
    assert code_of(["start"]) == ExitCode.SUSPENDED
    (place / "work" / "plan.toml").unlink()
    capfd.readouterr()
    told = said(capfd, "check")
    assert "there is no plan.toml in this folder" in told and "next: kgorch check PLAN; or kgorch init" in told


def test_a_plan_that_is_gone_leads_to_its_run_and_a_mistyped_one_to_no_other(place, capfd):
    make_state(place / "home", place / "work")
    assert "(did you mean 'plan.toml'?)" in said(capfd, "start", "plam.toml")
    (place / "work" / "plan.toml").unlink()
    told = said(capfd, "start", "plan.toml")
    assert "the run 'digits', which was started in that folder" in told and "next: kgorch resume digits" in told
    told = said(capfd, "start", "other.toml")
    assert "digits" not in told and "kgorch resume" not in told
    assert "next: kgorch resume digits" in said(capfd, "start", "digits.toml")
    assert "kgorch resume" not in said(capfd, "start", "ink.toml"), "that run is finished"


def test_a_mistyped_plan_makes_no_state_folder(place, capfd):
    said(capfd, "start", "nowhere.toml")
    assert not (place / "home").exists()


# Help


def shown_at(width: int, command: click.Command, path: tuple[str, ...]) -> list[str]:
    context = click.Context(
        command,
        info_name=" ".join(("kgorch", *path)),
        terminal_width=width,
        max_content_width=width,
        help_option_names=cli.context_settings["help_option_names"],  # click keeps the option that it makes first
    )
    return command.get_help(context).splitlines()


@pytest.mark.parametrize(("path", "command"), [((), cli), *verbs()], ids=str)
def test_no_line_of_help_is_wider_than_a_terminal_and_no_sentence_is_cut(path, command):
    lines = shown_at(80, command, path)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert not [line for line in lines if line.rstrip().endswith("...") and not line.startswith("Usage")]


def test_every_verb_is_once_in_the_help_and_its_module_is_named_like_it():
    lines = shown_at(80, cli, ())
    for verb in VERBS:
        assert sum(line.split()[:1] == [verb] and line.startswith("  ") for line in lines) == 1, verb
        assert module_of(verb).rpartition(".")[2] == verb and cli.get_command(click.Context(cli), verb).name == verb


def test_help_of_a_verb_is_what_its_option_shows(place, capfd):
    assert said(capfd, "help", "checkpoints", "export", code=0) == said(capfd, "checkpoints", "export", "-h", code=0)
    assert said(capfd, "help", code=0) == said(capfd, "--help", code=0)
    assert said(capfd, "version", code=0).startswith("kgorch ")


# init and explain


def test_init_writes_a_plan_and_a_script_and_never_over_one(place, capfd):
    plan, script = place / "work" / "plan.toml", place / "work" / "train.py"
    plan.unlink()
    assert "next: kgorch start plan.toml" in said(capfd, "init", code=0)
    template, example = plan.read_text(), script.read_text()
    check_entries(load(plan)[0], plan.parent)
    plan.write_text("mine")
    script.write_text("mine too")
    told = said(capfd, "init")
    assert "exists already; nothing was written" in told and "next: kgorch init --print" in told
    assert said(capfd, "init", "--print", code=0) == template and plan.read_text() == "mine"
    assert "the old plan.toml is kept as plan.toml.bak" in said(capfd, "init", "--force", code=0)
    assert (plan.read_text(), (place / "work" / "plan.toml.bak").read_text()) == (template, "mine")
    assert script.read_text() == "mine too" != example
    plan.write_text("mine again")
    assert "kept as plan.toml.bak2" in said(capfd, "init", "--force", code=0)
    assert (place / "work" / "plan.toml.bak2").read_text() == "mine again"
    assert (place / "work" / "plan.toml.bak").read_text() == "mine"
    assert not [path.name for path in plan.parent.iterdir() if path.name.startswith(".")]


def test_init_into_a_folder_writes_the_plan_there(place, capfd):
    (place / "work" / "new").mkdir()
    assert "next: kgorch start new/plan.toml" in said(capfd, "init", "new", code=0)
    assert (place / "work" / "new" / "train.py").exists()


def test_init_makes_the_folder_of_a_path_that_ends_as_one_does_and_tells_what_it_wrote(place, capfd):
    told = said(capfd, "init", "mine/", code=0)
    assert "wrote mine/plan.toml, a plan with" in told and "next: kgorch start mine/plan.toml" in told
    assert (place / "work" / "mine" / "plan.toml").exists()
    assert "wrote plans/digits, a plan with" in said(capfd, "init", "plans/digits", code=0)


def test_init_keeps_the_files_of_a_copied_training_that_it_replaces(place, capfd):
    said(capfd, "init", "--from", "timeseries", "mine", code=0)
    (place / "work" / "mine" / "train.py").write_text("mine")
    said(capfd, "init", "--from", "timeseries", "mine", "--force", code=0)
    assert (place / "work" / "mine" / "train.py.bak").read_text() == "mine"


def test_no_next_step_of_a_plans_mistake_leads_to_writing_over_it(place, capfd):
    plan = place / "work" / "plan.toml"
    for text in (
        "",
        "[stage]\n",
        "x = 1\n" + PLAN,
        "name = 'a b'\n" + PLAN.split("\n", 1)[1],
        "[[",
        PLAN + "ranks = 'x'",
    ):
        plan.write_text(text)
        seen = set()
        words = ["start", "plan.toml"]
        for _ in range(4):  # as often as a person obeys
            code = code_of(words)
            told = capfd.readouterr()
            typed = next((line for line in told.err.splitlines() if line.startswith("next: kgorch ")), None)
            if code != ExitCode.MISTAKE or typed is None or typed in seen:
                break
            seen.add(typed)
            words = typed.removeprefix("next: kgorch ").split("    ")[0].split()
        assert plan.read_text() == text


def every_key() -> list[str]:
    from kgorch.plan import Plan, dotted_keys

    return list(dotted_keys(Plan))


@pytest.mark.parametrize("key", every_key())
def test_every_key_of_a_plan_is_explained(place, capfd, key):
    head, *lines = said(capfd, "explain", key, code=0).splitlines()
    assert head == key
    assert key.split(".")[-1] in " ".join(lines), "the template says nothing of it"
    assert max(map(len, lines)) <= 100


def test_a_key_is_found_by_its_last_word_by_a_stages_name_and_when_mistyped(place, capfd):
    told = said(capfd, "explain", "wall", code=0)
    assert told.startswith("session.wall\n") and "\nplatform.wall\n" in told
    assert said(capfd, "explain", "stage.train.ranks", code=0) == said(capfd, "explain", "stage.ranks", code=0)
    assert said(capfd, "explain", "[session]", code=0) == said(capfd, "explain", "session", code=0)
    assert "(did you mean 'session.wall'?)" in said(capfd, "explain", "session.wal")
    assert set(said(capfd, "explain", code=0).splitlines()) == set(every_key())


# Completion


def offered(place: Path, line: str) -> list[str]:
    """What bash would be told; `line` ends where the cursor stands."""
    words = line.split(" ")
    env = {
        **os.environ, "_KGORCH_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
        "KGORCH_HOME": str(place / "home"),
    }  # fmt: skip
    program = (
        "import sys; from kgorch.cli import cli\n"
        "try: cli(prog_name='kgorch')\n"
        "finally: print('LOADED', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=place / "work", capture_output=True, text=True)
    loaded = set(done.stderr.partition("LOADED")[2].split())
    assert not loaded & {"torch", "alembic", "sqlalchemy", "pydantic", "rich", "psutil"}, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return [word.partition(",")[2] for word in done.stdout.split()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kgorch st", ["start", "status", "stop"]),
        ("kgorch status in", ["ink"]),
        ("kgorch rm ink di", ["digits"]),
        ("kgorch rm ink in", []),
        ("kgorch logs ink/", ["ink/1"]),
        ("kgorch checkpoints list d", ["digits"]),
        ("kgorch history ink --plot ", ["dice"]),
        ("kgorch history --plot d", ["dice"]),
        ("kgorch start pl", ["plan.toml"]),
        ("kgorch check sub/", ["sub/other.toml"]),
        ("kgorch queue add ", ["digits", "ink", "plan.toml", "sub/"]),
        ("kgorch start plan.toml --set session.w", ["session.wall="]),
        ("kgorch check --set stage.train.a", ["stage.train.args.epochs="]),
        ("kgorch explain checkpoint.k", ["checkpoint.keep"]),
        ("kgorch help checkpoints e", ["export"]),
    ],
)
def test_completion_offers_what_may_stand_there(place, line, expected):
    make_state(place / "home", place / "work")
    (place / "work" / "sub").mkdir()
    (place / "work" / "sub" / "other.toml").write_text(PLAN)
    (place / "work" / "sub" / "data.csv").write_text("")
    assert sorted(offered(place, line)) == expected


def test_completion_offers_nothing_that_a_shell_runs_or_a_terminal_obeys(place):
    (place / "work").mkdir(exist_ok=True)
    for name in (
        "x$(touch PWNED)",
        "x;ls",
        "x`ls`",
        "x\x1b]0;title\x07",
        "x\nrm -rf ~",
        "x&",
        "x>y",
        "x|y",
        "x'y",
        "x y",
        "x*",
        "xé",
    ):
        (place / "work" / f"{name}.toml").write_text("")
    (place / "work" / "plan.toml").write_text('[[stage]]\nname = "train"\nargs = { "$(touch PWNED)" = 1, fine = 2 }\n')
    assert offered(place, "kgorch check x") == ["xé.toml"]
    assert offered(place, "kgorch check plan.toml --set stage.train.args.") == ["stage.train.args.fine="]


def test_completion_makes_no_state_folder_and_survives_a_broken_one(place):
    assert offered(place, "kgorch status ") == []
    assert not (place / "home").exists()
    (place / "home").mkdir()
    (place / "home" / "kgorch.db").write_text("no database")
    assert offered(place, "kgorch status ") == []


def test_completion_waits_for_no_writer(place):
    import sqlite3
    import time

    make_state(place / "home", place / "work")
    with sqlite3.connect(place / "home" / "kgorch.db", isolation_level=None) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN EXCLUSIVE")
        began_s = time.monotonic()
        context = click.Context(cli)
        parameter = click.Argument(["run"])
        os.environ["KGORCH_HOME"] = str(place / "home")
        assert completion.runs(context, parameter, "") == []
        assert time.monotonic() - began_s < 10 * completion.LOCK_TIMEOUT_S
    other.close()


@pytest.mark.parametrize("words", [[], ["checkpoints"]])
def test_a_group_without_a_verb_shows_its_help_and_no_error(words, capfd):
    told = said(capfd, *words)
    assert told.startswith("Usage: kgorch") and "[KG" not in told


TRAINS = "import torch\nfor step in range(9):\n    torch.save(state, f'out/step-{step}.pt')\n"


@pytest.mark.parametrize(
    ("file", "module", "name"),
    [
        ("pkg/train.py", "pkg.train", "pkg-train"),
        ("pkg/__main__.py", "pkg", "pkg"),
        ("single.py", "single", "single"),
    ],
)
@pytest.mark.parametrize("is_quoted", [False, True])
def test_adopt_writes_a_plan_for_a_module_as_python_runs_it(place, capfd, file, module, name, is_quoted):
    """There was "no program -m", though a plan takes it. The module is read and not imported."""
    path = place / "work" / file
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").write_text("raise SystemExit('imported')\n")
    path.write_text(TRAINS)
    program = [f"-m {module}"] if is_quoted else ["-m", module]
    Path("plan.toml").unlink()
    said(capfd, "adopt", *program, "--out", "made.toml", "--", "--lr", "0.1", code=0)
    plan = load(Path("made.toml"))[0]
    [stage] = plan.stage
    assert (plan.name, stage.entry, stage.argv) == (name, f"-m {module}", ["--lr", "0.1"])
    assert stage.foreign.checkpoint == "out/step-*.pt"
    check_entries(plan, Path.cwd())
    Path("plan.toml").write_text("")
    said(capfd, "adopt", *program, "--out", "second.toml", code=0)
    assert load(Path("second.toml"))[0].name == f"{name}-second", "else one run of both"
    again = said(capfd, "adopt", *program, "--out", "made.toml", "--", "--lr", "0.1")
    assert f"kgorch adopt -m {module} --print -- --lr 0.1" in again


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-m"], "-m needs a module"),
        (["-m", "no such"], "-m needs a module"),
        (["-m", "nowhere.train"], "there is nothing that python -m nowhere.train would run"),
        (["-m", "empty"], "there is nothing that python -m empty would run"),
    ],
)
def test_a_module_that_is_not_found_is_said_with_what_to_type(place, capfd, words, expected):
    (place / "work" / "empty").mkdir()
    (place / "work" / "empty" / "__init__.py").write_text("")
    told = said(capfd, "adopt", *words, "--print")
    assert expected in told and "kgorch adopt -m package.module -- FLAGS" in told


@pytest.mark.parametrize(
    ("option", "flag", "is_noted"),
    [([], "--resume_from_checkpoint", True), (["--foreign"], "--resume_from_checkpoint", False), ([], "--lr", False)],
)
def test_adopt_says_why_a_loop_around_accelerate_is_not_carried(place, capfd, option, flag, is_noted):
    """Its help promises it; a loop that can continue by itself is left to do so, and nothing said that this was a choice."""
    source = f"from accelerate import Accelerator\nparser.add_argument('{flag}')\n"
    (place / "work" / "t.py").write_text(source)
    assert code_of(["adopt", "t.py", "--print", *option]) == 0
    told = capfd.readouterr()
    assert ("continues by itself" in told.err) == is_noted
    if is_noted:
        assert f"continues by itself ({flag})" in told.err and "delete launcher and [stage.foreign]" in told.err
        assert "launcher" in told.out and "[stage.foreign]" in told.out
