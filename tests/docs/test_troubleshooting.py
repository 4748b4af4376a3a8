"""Every error has a code, every code a text, and docs/troubleshooting.md has both."""

from __future__ import annotations

import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from answered import code_of

from kgorch.cli import cli, error_help
from kgorch.cli.commands.plan import explain
from kgorch.core.error_codes import BY_MODULE
from kgorch.report import failure

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
TOPICS = error_help.topics()
GENERATOR = runpy.run_path(str(ROOT / "docs" / "troubleshooting.py"))
sites = functools.cache(GENERATOR["sites"])  # not at the import, which each process of pytest-xdist makes
TYPED = [
    (code, line.strip())
    for code, topic in TOPICS.items()
    for line in topic.text.splitlines()
    if re.match(r"    (\w+=\S+ )?kgorch ", line)
]


def test_the_page_is_what_the_source_says():
    assert PAGE.read_text() == GENERATOR["page"](), "python docs/troubleshooting.py (or make docs) writes it anew"


def test_every_place_that_constructs_an_error_has_a_code_with_a_text():
    assert len(sites()) > 350
    without = [site.where for site in sites() if not site.codes or not set(site.codes) <= set(TOPICS)]
    assert not without, "give error_code=, or the module a code in core/error_codes.py"


def test_every_code_has_an_error():
    used = {code for site in sites() if site.message for code in site.codes}
    # their message is that of every training that failed
    of_failures = {failure.HANG, failure.NO_STEP}
    assert set(TOPICS) == used | of_failures and not of_failures & used
    assert {failure.OTHER_FAILURE, *failure.FAILURES.values()} <= used


def test_every_module_of_the_table_constructs_an_error():
    modules = {
        "kgorch." + site.where.split(".py")[0].removeprefix("orchestrator/").replace("/", ".") for site in sites()
    }
    unused = {name for name in BY_MODULE if not any(f"{module}.".startswith(f"{name}.") for module in modules)}
    assert not unused


def test_the_title_and_the_lines_of_a_topic_are_short():
    for code, topic in TOPICS.items():
        assert len(topic.title) <= 80 and max(map(len, topic.text.splitlines())) <= 150, code
        assert error_help.AREAS[code[2]]


@pytest.mark.parametrize(("code", "line"), TYPED, ids=lambda value: value)
def test_what_a_topic_tells_to_type_is_a_command(code, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = shlex.split(re.sub(r"^\w+=\S+ ", "", line).replace("PLAN", "plan.toml").replace("RUN", "ink"))[1:]
    command: click.Command = cli
    context = cli.make_context("kgorch", list(words), obj=words) if "--help" not in words else None
    while context and isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    if context and words[0] == "explain":
        assert explain._matches(words[1])


def test_explain_prints_what_the_page_has(capfd):
    page = PAGE.read_text()
    for code in TOPICS:
        assert code_of(["explain", code.lower()]) == 0
        printed = capfd.readouterr().out
        assert f"## {printed}" in page and printed.startswith(f"{code} ")


def test_explain_lists_the_codes_and_names_near_ones(capfd):
    assert code_of(["explain", "codes"]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == list(TOPICS)
    assert code_of(["explain", "KG240"]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: there is no error code KG240 [KG108]\n  KG2") and "kgorch explain codes" in told


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("start nope.toml", "KG102"),
        ("check broken.toml", "KG101"),
        ("start missing.toml", "KG103"),
        ("start missing.toml --set wall", "KG104"),
        ("status ink", "KG109"),
        ("starte", "KG108"),
        ("start --nope", "KG108"),
    ],
)
def test_a_command_that_fails_shows_the_code_at_the_end_of_its_first_line(typed, code, tmp_path):
    (tmp_path / "broken.toml").write_text("name = 'ink'\nwal = 3\n")
    (tmp_path / "missing.toml").write_text("name = 'ink'\n[[stage]]\nname = 'train'\nentry = 'train.py'\n")
    done = subprocess.run(
        [sys.executable, "-m", "kgorch.cli", *typed.split()], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "KGORCH_HOME": str(tmp_path / "home"), "COLUMNS": "200"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[0].endswith(f" [{code}]"), done


def test_a_bug_shows_its_traceback_and_then_the_code(tmp_path):
    program = (
        "import kgorch.cli.commands.general.version as version, kgorch.cli as cli\n"
        "version.command.callback = lambda *_, **__: 1 / 0\n"
        "cli.main(['version'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert done.stderr.endswith("error: this is a bug of kgorch [KG901]\nnext: kgorch explain KG901\n")
