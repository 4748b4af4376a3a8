"""What torch.compile has compiled stays with the run: the next session finds it."""

from __future__ import annotations

import json

import pytest

from kgorch.launch import shim
from kgorch.protocol.launch_spec import LaunchSpec


def test_caches_lie_in_the_runs_folder_unless_a_person_has_named_another(tmp_path, monkeypatch):
    for name in shim.COMPILER_CACHES:
        monkeypatch.delenv(name, raising=False)
    launch = LaunchSpec(
        "r", "id", "s", "1.1", str(tmp_path / "1.1"), "e:f", ".", 1, "s", "c", "o", "h", keeper=str(tmp_path / "k")
    )
    found = shim.environment(launch, tmp_path, 3)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled" / "inductor")
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "compiled" / "triton")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    found = shim.environment(launch, tmp_path, 3)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/mine" and found["TRITON_CACHE_DIR"].endswith("triton")


@pytest.mark.slow
def test_the_second_session_of_a_compiled_training_compiles_nothing(kgorch, monkeypatch):
    for (
        name
    ) in shim.COMPILER_CACHES:  # importing the compiler sets them, which another test in this process may have done
        monkeypatch.delenv(name, raising=False)
    plan = kgorch.plan("compiles.py", args={"steps": 60, "sleep": 0.2}, every="600s")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(2, within_s=240)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    stopped_at = kgorch.status()["step"]
    kgorch("start", "--set", "stage.train.args.sleep=0.0", str(plan))

    (folder,) = kgorch.home.glob("runs/*/1")
    first, second = (json.loads((folder / "outputs" / f"from{step}.json").read_text()) for step in (0, stopped_at))
    assert first["folder"] == second["folder"] == str(folder / "compiled" / "inductor")
    assert first["fxgraph_cache_miss"] > 0 and "autograd_cache_hit" not in first, first
    assert second["autograd_cache_hit"] > 0 and "fxgraph_cache_miss" not in second, second
