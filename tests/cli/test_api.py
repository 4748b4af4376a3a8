"""kgorch from Python: the verbs by their names, and a run in the cell of a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

import pytest
from answered import make_state
from harness import wait_until

import kgorch as package
from kgorch import api
from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.db import curves, runs, sessions
from kgorch.db.engine import open_database
from kgorch.errors import KgorchError, NotFound
from kgorch.notebook import picture
from kgorch.notebook.cell import LiveCell
from kgorch.report import metrics, run_view
from kgorch.system.sockets import control_socket

LEARNS = {"epochs": 4, "sleep": 0.15}
ODD = '</text><script>alert(1)</script>\x1b[31m"&\u202eדice\ud800'


@pytest.fixture
def state(kgorch, monkeypatch):
    """A finished run `ink`; `digits`, with a metric of an odd name."""
    make_state(kgorch.home, kgorch.folder)
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(kgorch.home))
    engine = open_database(kgorch.home)
    [attempt] = sessions.attempts(engine, "digits")
    at_s = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
    records = [
        Record(step, step - 5, 1, at_s, {"loss": Value(1 / step, 5), "step": Value(float("nan"), 5)})
        for step in range(5, 1005, 5)
    ]
    curves.write(engine, attempt.id, [metric_curve.encode(record) for record in records])
    engine.dispose()
    return kgorch


def test_the_state_of_a_run_is_typed_and_has_all_the_fields_of_json(state):
    found = package.status("digits")
    assert isinstance(found, package.RunStatus)
    assert (found.run, found.step, found.steps_total, found.metrics) == ("digits", 10, 40, {"dice": 0.5})
    assert found.checkpoint_step == 10 and not found.is_training and found.wall_at and found.wall_at.tzinfo
    assert set(found.fields) == set(state.status("digits"))
    with pytest.raises(NotFound, match="did you mean 'digits'"):
        package.status("digit")


def test_runs_metrics_and_sessions_are_data_frames_where_pandas_is_installed(state):
    pandas = pytest.importorskip("pandas")
    found = package.runs()
    assert isinstance(found, pandas.DataFrame) and set(found["run"]) == {"ink", "digits"}
    curve = package.metrics("digits")
    assert list(curve.columns) == ["stage", "step", "epoch", "at", "steps", "loss", "step (metric)"]
    assert len(curve) == 200 and curve["loss"].iloc[0] == 0.2 and curve["step (metric)"].isna().all()
    assert str(curve["at"].dtype).startswith("datetime64")
    assert list(package.metrics("digits", names=["loss"]).columns)[5:] == ["loss"]
    assert list(package.metrics("digits", names="loss").columns)[5:] == ["loss"]
    assert list(package.history("digits")["phase"]) == ["suspended"]


def test_a_metric_or_stage_that_was_never_reported_is_a_mistake_as_on_the_command_line(state):
    for wanted, told in (
        ({"names": "los"}, "no metric 'los' (did you mean 'loss'?)"),
        ({"stage": "tran"}, "did you mean 'train'"),
    ):
        with pytest.raises(NotFound, match=re.escape(told)):
            package.metrics("digits", **wanted)


def test_without_pandas_they_are_lists_of_dictionaries(state, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [first, *_] = package.metrics("digits")
    assert first["step"] == 5 and first["loss"] == 0.2 and first["at"] == datetime(2026, 11, 25, 12, tzinfo=UTC)
    assert {row["run"] for row in package.runs()} == {"ink", "digits"}


def test_the_package_stays_cheap_and_a_look_loads_no_library_that_it_does_not_need(state):
    program = (
        "import sys, kgorch; before = {*sys.modules}; kgorch.status('digits');"
        "print(*[name for name in ('kgorch.api',) if name in before]);"
        "print(*{'torch', 'pandas', 'pydantic', 'IPython', 'apscheduler', 'sqlalchemy.dialects.postgresql'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], env=state.env(), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


def test_an_action_fails_with_the_words_of_the_verb(state):
    with pytest.raises(KgorchError, match="digits is not running under a supervisor") as caught:
        package.save("digits")
    assert caught.value.next_step == "kgorch status digits"
    with pytest.raises(KgorchError, match=r"there is no plan .*none\.toml"):
        package.start(state.folder / "none.toml")
    with pytest.raises(KgorchError):
        package.resume("--json")  # no option, but a run that does not exist


def test_a_traceback_of_a_verb_is_not_lost():
    error = api._error_from("Traceback (most recent call last):\n  x\nValueError: odd\n", 1)
    assert "status 1" in error.what and error.facts[-1] == "ValueError: odd"


# The picture of a cell


def view_of(state) -> dict:
    engine = open_database(state.home)
    try:
        return run_view.of_run(engine, runs.newest(engine, "digits"))
    finally:
        engine.dispose()


def test_a_picture_is_small_and_valid_whatever_a_training_reports(state):
    view = view_of(state) | {"metrics": {ODD: 0.5, "x" * 10_000: None}, "why": ODD, "notices": [ODD]}
    for points in ([], [(1.0, 1e308), (2.0, -1e308)], [(1.0, 0.0), (1.0, 0.0)]):
        svg = picture.svg(view, ODD, points)
        root = ElementTree.fromstring(svg)
        assert {child.tag.rpartition("}")[2] for child in root.iter()} <= {
            "svg",
            "title",
            "rect",
            "text",
            "path",
            "polyline",
        }
        assert len(svg.encode()) < 20_000 and "nan" not in svg.replace("nan</", "") and "\u202e" not in svg


def test_a_picture_shows_how_far_the_stage_and_the_session_are(state):
    view = view_of(state)
    view["session"] |= {"started_at": "2026-11-25T10:00:00Z", "wall_at": "2026-11-25T12:00:00Z", "left_s": 3600.0}
    root = ElementTree.fromstring(picture.svg(view, "loss (train)", [(0.0, 1.0), (10.0, 0.25)]))
    widths = [float(item.get("width")) for item in root.iter() if item.get("rx")]
    assert widths == [616.0, 154.0, 616.0, 308.0], "10 of 40 steps, one of two hours"
    texts = [item.text for item in root.iter() if item.tag.endswith("text")]
    assert "loss (train)  last 0.25, between 0.25 and 1" in texts and any(
        "1h 00m to its time limit" in text for text in texts
    )


def test_the_curve_is_of_the_metric_that_the_plan_names_and_keeps_its_spikes(state):
    engine = open_database(state.home)
    curve = metrics.of_run(engine, runs.newest(engine, "digits"))
    engine.dispose()
    title, points = picture.curve_of(curve, "train", None)
    assert title == "loss (train)" and len(points) <= picture.MAX_POINTS and points[0] == (5.0, 0.2)
    assert picture.curve_of(curve, "predict", "step") == ("", []), "NaN alone"
    spiky = [(float(x), 9.0 if x == 777 else 1.0) for x in range(1000)]
    assert (777.0, 9.0) in picture.thinned(spiky, 100) and len(picture.thinned(spiky, 100)) <= 100


# In a real kernel


def execute(kgorch, cells: list[str]):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (the dev extra)")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(kgorch.folder)}}
    client = nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3", resources=resources)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"KGORCH_HOME": str(kgorch.home), "XDG_CONFIG_HOME": str(kgorch.home)}.items():
            patch.setenv(name, value)
        client.execute()
    return notebook, nbformat.writes(notebook)


@pytest.mark.parametrize("widgets", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_cell_that_trains_leaves_one_small_picture(kgorch, widgets):
    if widgets:
        pytest.importorskip("ipywidgets")
    kgorch.plan(args=LEARNS)
    hidden = "" if widgets else "import sys; sys.modules['ipywidgets'] = None\n"
    notebook, stored = execute(
        kgorch,
        [
            f"{hidden}from kgorch import notebook\ncell = notebook.start('plan.toml', metric='loss')",
            "import kgorch\nprint(kgorch.status().state, len(kgorch.metrics()))",
        ],
    )
    [output] = notebook.cells[0].outputs
    svg = ElementTree.fromstring(output["data"]["image/svg+xml"])
    texts = [item.text for item in svg.iter() if item.tag.endswith("text")]
    assert texts[0].endswith("finished") and any(text.startswith("loss (train)  last ") for text in texts)
    assert output["data"]["text/plain"].startswith("test: finished, train step ")
    assert notebook.cells[1].outputs[0]["text"].startswith("finished ")
    assert len(stored) < 40_000, "whatever it lasts: the picture is replaced"


class Pictures:
    """What a cell has drawn."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.text = ""

    def show(self, svg: str) -> None:
        self.shown.append(svg)

    def close(self, svg: str, text: str) -> None:
        self.text = text


def test_a_view_outlives_a_state_folder_that_cannot_be_used_and_ends_with_its_session(kgorch, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(kgorch.home))
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    unusable = kgorch.plan(args={"epochs": 1000, "sleep": 0.1}) / "home"  # below a file; the supervisor keeps its own
    supervisor = kgorch.background("start", "plan.toml")
    kgorch.wait_for_step(2)
    pictures = Pictures()
    cell = LiveCell("test/1", None, 0.1, pictures)
    cell.follow_in_background()
    wait_until(lambda: pictures.shown)
    monkeypatch.setenv("KGORCH_HOME", str(unusable))
    cell._thread.join(timeout=2.0)
    assert cell._thread.is_alive()
    before = len(pictures.shown)
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    wait_until(lambda: len(pictures.shown) > before + 1)
    monkeypatch.setenv("KGORCH_HOME", str(unusable))
    assert (answer := control_socket.ask(kgorch.home / "runs/test/1/control.sock", "stop")) and answer.ok
    assert supervisor.wait(timeout=60) == 10
    cell._thread.join(timeout=30)
    assert not cell._thread.is_alive() and pictures.text, "a notebook that runs by itself would wait for its wall"


def test_outside_a_notebook_it_says_where_to_look(state):
    from kgorch import notebook

    with pytest.raises(KgorchError, match="no notebook to draw in"):
        notebook.watch("digits")
    assert not os.environ.get("JPY_PARENT_PID")


def test_what_the_page_on_notebooks_types_exists():
    page = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    compile(block, "notebooks.md", "exec")
    named = set(re.findall(r"\bkgorch\.(\w+)", block))
    assert len(named) >= 8 and named <= {*package.__all__, "notebook"}, named - {*package.__all__}
    assert set(re.findall(r"\bnotebook\.(\w+)\(", block)) == {"start", "watch"}


@pytest.mark.slow
def test_a_run_is_started_watched_saved_stopped_and_resumed_from_python(kgorch, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(kgorch.home))
    plan = kgorch.plan(args={"epochs": 1000, "sleep": 0.1})
    started = package.start(plan, settings={"session.margin": "4s"})
    assert started.run == "test" and started.state == "active"
    kgorch.wait_for_step(2, within_s=120)
    assert package.status("test").is_training
    saved = package.save("test")
    assert saved.checkpoint_step and saved.checkpoint_step >= 2
    assert package.stop("test").phase == "suspended"
    again = package.resume()
    assert again and again.run == "test"
    kgorch.wait_for_step(saved.checkpoint_step, within_s=120)
    assert package.stop().phase == "suspended"
    assert list(package.history("test")[["number", "phase"]].itertuples(index=False, name=None)) == [
        (1, "suspended"), (2, "suspended"),
    ]  # fmt: skip
