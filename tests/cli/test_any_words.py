"""Any words after `kgorch`: an answer or a mistake with its next step, never a traceback, never a hang.

In this process, and without what a verb would set going: sessions, the daemon's loop, probes, systemd. All before that is real.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from answered import ALLOWED, PLAN, code_of, make_state, verbs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgorch.cli.commands import VERBS
from kgorch.errors import ExitCode

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))

BLOCKS = {"--follow", "-f", "--watch", "--detach", "--yes", "-y", "--serve", "--every", "--to"}
"""They go on until somebody ends them, begin a process, ask the network, or take away the runs that the others look at."""

ALWAYS = {"check": ["--no-probe"], "systemd install": ["--into", "units"], "systemd uninstall": ["--into", "units"]}
"""What keeps a verb from the machine outside the test."""


KNOWN = dict(verbs())

words = st.one_of(
    st.sampled_from(
        [
            "", ".", "..", "-", "--", "---", "ink", "ink/1", "ink/99999999999999999999", "ink/-1", "ink/²", "digits", "plan.toml",
            "odd.toml", "folder", "missing/deep/plan.toml", "new.txt", "0", "-1", "1e309", "nan", "inf", "9" * 400, "0x10", "١٢",
            "18:30", "2026-11-22T03:00+01:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00+14:00", "24:00", "5m", "-5m",
            "1e400s", "nan h", "15GiB", "-3GB", "1e300TiB", "loss", "loss:max", "1.1", "a=b", "=", "name=", "session.wall=",
            "stage.train=5", "stage.train.args.x={",
            "stage..=1", "session.wall=nan", "quota.hours=1e400", "session=[]", "\udcff", "\x1b[2J", "☃",
            "x" * 5000, "a\nb", "%s%n", "{}", "workloads/vqa", "workloads/../x", "kgorch.service", "' OR 1=1 --",
        ]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0/"), max_size=6),
)  # fmt: skip


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    typed = draw(st.sampled_from(sorted(KNOWN)))
    options = [name for param in KNOWN[typed].params for name in (*param.opts, *param.secondary_opts) if name[0] == "-"]
    option = st.sampled_from([*options, "-h", "--unknown"]).filter(lambda name: name not in BLOCKS)
    rest = draw(st.lists(option | words | st.tuples(option, words).map("=".join), max_size=5))
    unsafe = draw(st.booleans()) and not isinstance(KNOWN[typed], click.Group) and " ".join(typed) not in ALWAYS
    before = draw(st.lists(words, max_size=1)) if unsafe else []  # in the midst of a verb's own words
    return [*typed, *ALWAYS.get(" ".join(typed), []), *before, *rest]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with plans, one of them broken, and a state folder with a run that is over and one that waits."""
    root = tmp_path_factory.mktemp("words")
    here = root / "above" / "here"  # `kgorch init ..` writes into the folder above
    (here / "folder").mkdir(parents=True)
    (here / "plan.toml").write_text(PLAN)
    (here / "t.py").write_text("")
    (here / "odd.toml").write_bytes(b"name = \xff\n[[stage]\n")
    make_state(root / "home", here)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("KGORCH_HOME", str(root / "home"))
        patch.setenv("XDG_CONFIG_HOME", str(root / "config"))
        for verb in ("start", "resume"):
            patch.setattr(f"kgorch.cli.commands.training.{verb}.run_session", lambda *_, **__: int(ExitCode.SUSPENDED))
        patch.setattr("kgorch.scheduler.daemon.Daemon.run", lambda _: None)
        patch.setattr("kgorch.web.server.Server.run", lambda *_, **__: None)
        patch.setattr("kgorch.cli.commands.unattended.daemon.os.execv", lambda *_: sys.exit(0))
        yield root


def test_every_verb_is_among_the_words_drawn():
    assert {typed[0] for typed in KNOWN} == set(VERBS)


@given(args=commands())
@settings(
    max_examples=400 * FUZZ, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_words_are_answered_or_told_what_is_wrong(place, capfd, args):
    code = code_of(args)
    told = capfd.readouterr()
    assert code in ALLOWED, (args, told.err)
    assert "Traceback" not in told.err
    if code == ExitCode.MISTAKE:
        assert told.err.strip(), args
    assert {path.name for path in place.iterdir()} <= {"above", "home", "config"}, args
