"""The script is one file that an old Python can read, and no text of a user is more than text in it; what it leaves is in order."""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import sqlite3
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import PLAN, checkpoint

from kgorch.core.remote.place_values import SessionOrder
from kgorch.db import checkpoints as rows
from kgorch.db import runs
from kgorch.db.engine import open_database
from kgorch.remote import bootstrap
from kgorch.remote.session import inputs, output
from kgorch.remote.session.common import Ended

ORDER = SessionOrder(
    name="kgorch-ink-1", nonce="ab" * 8, run="ink", run_id="0123456789ab", number=2, bundle="me/kgorch-x", source="s-1",
    expected_step=18, session_s=100, timeout_s=160, accelerator="NvidiaTeslaT4", internet=False,
)  # fmt: skip

texts = st.text(max_size=30) | st.sampled_from(
    [
        '");import os;os.abort()#',
        "\\",
        '\\"',
        "'''",
        '"""',
        "\n# kgorch-push: run=x",
        "\u2028",
        "\ud800",
        "\0",
        "{}",
        "é\r",
    ]
)


def test_the_script_is_read_by_python_3_8_and_imports_the_standard_library_alone():
    tree = ast.parse(bootstrap.render(ORDER), feature_version=(3, 8))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names}
    assert "venv" in names and "sqlite3" in names, "the whole program is in it"


def test_the_second_line_names_the_push_and_the_same_order_makes_the_same_script():
    script = bootstrap.render(ORDER)
    assert script.splitlines()[0].startswith("#") and script.isascii()
    assert script.splitlines()[1] == f"# kgorch-push: run=ink session=2 nonce={'ab' * 8}"
    assert script == bootstrap.render(ORDER) != bootstrap.render(replace(ORDER, nonce="cd" * 8))


@settings(max_examples=300, deadline=None, database=None)
@given(texts, texts, texts, st.lists(texts, max_size=3))
def test_no_text_of_an_order_breaks_out_of_it(source, accelerator, bundle, datasets):
    order = replace(ORDER, source=source or "s", accelerator=accelerator, bundle=bundle, datasets=tuple(datasets))
    script = bootstrap.render(order)
    assert script.isascii() and script.split("\n")[:2] == bootstrap.render(ORDER).split("\n")[:2]
    plain, changed = (ast.parse(text).body for text in (bootstrap.render(ORDER), script))
    assert [ast.dump(node) for node in plain[:-1]] == [ast.dump(node) for node in changed[:-1]]
    [literal] = changed[-1].value.args
    assert json.loads(literal.value) == json.loads(json.dumps(asdict(order)))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "x\n__import__('os').abort()"},
        {"nonce": "xyz"},
        {"nonce": "ab" * 8 + "\nimport os"},
        {"run_id": "../x"},
        {"number": 0},
        {"source": ""},
        {"session_s": 200},
        {"session_s": 0},
    ],
)
def test_an_order_that_could_break_out_or_begin_anew_is_not_rendered(changes):
    with pytest.raises(ValueError, match=r"\w"):
        bootstrap.render(replace(ORDER, **changes))


# What is found


def test_the_search_ends_in_folders_of_a_million_names_and_follows_no_link(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_NAMES", 50)
    many = tmp_path / "datasets" / "a-many"
    for number in range(200):
        (many / f"{number:04}").mkdir(parents=True)
    for path in ("datasets/me/b", "notebooks/me/c", "deep/1/2/3/4/5/6/7/8/9"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "datasets/me/b/kgorch-bundle.json").touch()
    (tmp_path / "notebooks/me/c/kgorch-session.json").touch()
    (tmp_path / "deep/1/2/3/4/5/6/7/8/9/kgorch-bundle.json").touch()
    (tmp_path / "notebooks/linked").symlink_to(tmp_path / "datasets/me")
    bundles, outputs = inputs.search(tmp_path)
    assert bundles == [tmp_path / "datasets/me/b"] and outputs == [tmp_path / "notebooks/me/c"]
    monkeypatch.setattr(inputs, "MAX_FOLDERS", 3)
    assert inputs.search(tmp_path) == ([], [])
    assert inputs.search(tmp_path / "absent") == ([], [])


def test_a_bundle_restores_no_file_outside_of_its_folder(tmp_path):
    (tmp_path / "f0001").write_text("x")
    for path in ("../evil", "/etc/evil", "a/../../evil", ""):
        entry = {"stored": "f0001", "path": path, "bytes": 1, "sha256": "", "executable": False}
        with pytest.raises(Ended, match="outside of its folder"):
            inputs.unpack(tmp_path, {"files": [entry]}, tmp_path / "work")
    assert not (tmp_path / "evil").exists()


# What is left


@pytest.fixture
def home(tmp_path):
    """A state folder with checkpoints of two stages: one that is finished, one whose second is the best; one not verified."""
    home = tmp_path / "output" / "kgorch"
    engine = open_database(home)
    folder = home / "runs/ink/1"
    columns = {"id": "r1", "name": "ink", "number": 1, "plan": PLAN, "overrides": [], "plan_hash": "h", "workdir": "/"}
    runs.create(
        engine, **columns, folder=str(folder), checkpoints=str(folder / "checkpoints"), stages=["train", "predict"]
    )
    made = [("train", 10, False, ""), ("train", 20, True, ""), *(("predict", step, False, "") for step in (1, 3, 4))]
    for stage, step, final, best in [*made, ("predict", 2, False, "loss:min"), ("predict", 5, False, "")]:
        path = checkpoint(folder / "checkpoints", step, stage=stage, final=final)
        state = "broken" if (stage, step) == ("predict", 5) else "verified"
        rows.record(
            engine, "r1", str(path), stage=stage, step=step, final=final, bytes=1, save_duration_s=1.0, state=state
        )
        if best:
            with engine.begin() as connection:
                connection.exec_driver_sql("update checkpoints set best = ? where path like ?", (best, f"%{path.name}"))
    for session in (1, 2):
        (folder / "attempts" / f"{session}.1").mkdir(parents=True)
        (folder / "attempts" / f"{session}.1" / "rank0.log").write_bytes(b"x" * 100_000)
    engine.dispose()
    return home


def names(home):
    return sorted(
        f"{path.parent.name}/{path.name.split('-', 1)[1]}" for path in home.glob("runs/*/*/checkpoints/*/step-*")
    )


def test_checkpoints_are_those_that_the_database_calls_verified_and_that_are_whole(home):
    found = output.checkpoints(home, "r1")
    assert [(item["stage"], item["step"]) for item in found] == [
        ("train", 10), ("train", 20), ("predict", 1), ("predict", 2), ("predict", 3), ("predict", 4)
    ]  # fmt: skip
    (found[-1]["folder"] / "rank0.safetensors").write_bytes(b"")
    assert output.checkpoints(home, "r1")[-1]["step"] == 3
    assert output.checkpoints(home, "r2") == []


def test_without_a_database_the_manifests_count(home):
    (home / "kgorch.db").write_bytes(b"no database at all" * 100)
    assert {(item["stage"], item["step"]) for item in output.checkpoints(home, "r1")} >= {("train", 20), ("predict", 4)}
    assert not output.is_finished(home, "r1")


def test_pruning_keeps_the_newest_the_best_and_what_closes_a_stage(home):
    output.prune(home, output.checkpoints(home, "r1"), 10**9, home.parent)
    assert names(home) == ["predict/00000002", "predict/00000004", "train/00000020-final"]
    assert len(list(home.glob("runs/ink/1/attempts/*"))) == 2


def test_an_output_that_is_too_large_loses_logs_then_the_best_and_never_the_newest(home):
    output.prune(home, output.checkpoints(home, "r1"), output.size_of(home.parent) - 90_000, home.parent)
    assert [path.name for path in home.glob("runs/ink/1/attempts/*")] == ["2.1"], "the older one's logs"
    output.prune(home, output.checkpoints(home, "r1"), 10, home.parent)
    assert names(home) == ["predict/00000004", "train/00000020-final"]


def test_where_no_checkpoint_is_known_to_be_whole_nothing_is_deleted(home):
    output.prune(home, [], 10, home.parent)
    assert len(names(home)) == 7


def test_nothing_is_left_that_a_place_may_not_store(home):
    place = home.parent
    os.mkfifo(place / "pipe")
    (place / "link").symlink_to("/etc/passwd")
    (place / "folder").symlink_to("/etc")
    (home / "runs/ink/lock").touch()
    held = socket.socket(socket.AF_UNIX)
    held.bind(str(home / "keeper.sock"))
    (place / "poetry.lock").touch()  # a training's own
    output.tidy(place, home)
    held.close()
    left = {str(path.relative_to(place)) for path in place.rglob("*")}
    assert not left & {"pipe", "link", "folder", "kgorch/runs/ink/lock", "kgorch/keeper.sock"}
    assert {"kgorch/kgorch.db", "poetry.lock"} <= left and len(names(home)) == 7


def test_the_database_is_one_file_afterwards_and_has_its_last_rows(home, tmp_path):
    database = sqlite3.connect(home / "kgorch.db")
    database.execute("pragma journal_mode = wal")
    database.execute("update runs set why = 'the last row'")
    database.commit()
    left = shutil.copytree(home, tmp_path / "left")  # as a SIGKILL leaves it
    assert (left / "kgorch.db-wal").stat().st_size
    output.close_database(left)
    assert not list(left.glob("kgorch.db-*"))
    assert sqlite3.connect(left / "kgorch.db").execute("select why from runs").fetchone() == ("the last row",)
    database.close()
