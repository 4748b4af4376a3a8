"""Results of earlier trainings that a script writes over while `kgorch check` probes it."""

from __future__ import annotations

from kgorch.launch.verdicts import WARN
from kgorch.preflight import overwritten_files


def test_files_that_are_written_over_are_named_but_not_those_of_kgorch_itself(tmp_path):
    home, results = tmp_path / "state", tmp_path / "results"
    for path in (tmp_path / "train.py", results / "net.pt", home / "kgorch.db"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("before")
    looked = overwritten_files.PlanFolder(tmp_path, home)
    (home / "kgorch.db").write_text("a session more")
    (results / "new.pt").write_text("nothing was lost")
    assert not list(looked.lines())
    (results / "net.pt").write_text("of two steps")
    [line] = looked.lines()
    assert line.verdict == WARN and "net.pt" in line.said and "kgorch.db" not in line.said
