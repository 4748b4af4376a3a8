"""A model that is sharded over ranks (FSDP2), through a wall, SIGKILLs and a lack of memory."""

from __future__ import annotations

import os
import signal
import time

import pytest
from harness import Kgorch, wait_until
from safetensors.torch import load_file

from kgorch.checkpoint.verify import verify_checkpoint

pytestmark = pytest.mark.slow

STEPS = 10 * 4
TRAINING = {"epochs": 10, "sleep": 0.0, "mesh": "fsdp"}


@pytest.mark.timeout(1500)
def test_fsdp2_cut_by_a_wall_a_killed_rank_and_a_kill_of_everything_has_the_same_bits(kgorch, tmp_path):
    alone = Kgorch(tmp_path / "alone", tmp_path / "alone" / "home")
    alone.folder.mkdir()
    began_s = time.monotonic()
    alone("start", str(alone.plan("shards.py", ranks=4, args=TRAINING, every="600s")), timeout_s=600)
    took_s = time.monotonic() - began_s

    # A wall that this machine reaches in the midst of the steps: twice its whole run without sleeps.
    wall_s = max(40, round(2 * took_s))
    args = TRAINING | {"sleep": 1.5 * wall_s / STEPS}
    # Four ranks on two cores: a stop two steps ahead and a save may take longer than the usual three seconds beside other load.
    plan = kgorch.plan("shards.py", ranks=4, args=args, wall=f"{wall_s}s", margin="10s", every="2s")
    assert kgorch("start", str(plan), code=None, timeout_s=600).returncode == 10
    suspended = kgorch.status()
    assert suspended["session"]["ended_at"] and 0 < suspended["step"] < STEPS
    assert max(row["step"] for row in kgorch.look("checkpoints", "list", "test")) == suspended["step"]
    kgorch("checkpoints", "verify", "test")

    def start():
        return kgorch.background("start", str(plan), "--set", "session.wall=2h", "--set", "stage.train.args.sleep=0.5")

    supervisor = start()
    at = kgorch.wait_for_step(suspended["step"] + 3, within_s=300)["step"]
    first = kgorch.attempt()
    os.kill(kgorch.pids()["rank2"], signal.SIGKILL)
    wait_until(lambda: kgorch.attempt() != first and (kgorch.attempt() / "launch.json").exists(), within_s=120)
    kgorch.wait_for_step(at + 2, within_s=300)
    kgorch.kill_everything()
    supervisor.wait()
    kgorch("start", str(plan), "--set", "session.wall=2h", timeout_s=900)

    view = kgorch.status()
    assert (view["state"], view["step"]) == ("finished", STEPS)
    assert view["exactness"]["sharding"].startswith("mesh 4 (dp): each rank saves the pieces that it holds")
    assert kgorch.export() == alone.export()
    out = kgorch.folder / "model.safetensors"
    kgorch("checkpoints", "export", "test", str(out), "--only", "model")
    weights = load_file(out)
    assert weights["last.weight"].shape == (3, 10) and weights["blocks.1.inner.weight"].shape == (20, 10)


@pytest.mark.timeout(900)
def test_a_rank_of_fsdp2_that_lacks_memory_has_all_start_again_with_the_next_rung(kgorch):
    args = TRAINING | {"epochs": 3, "fails_at": 5, "fits": 4, "sleep": 0.3}
    plan = kgorch.plan("shards.py", ranks=2, args=args, every="2s", extra='[memory]\nladder = ["microbatch/2"]')
    kgorch("start", str(plan), timeout_s=600)
    assert kgorch.events("rung_taken")
    attempts = sorted(kgorch.home.glob("runs/*/*/attempts/*/rank0.log"))
    assert len(attempts) >= 2 and "microbatch 4" in attempts[-1].read_text()
    assert any("can't allocate memory" in path.with_name("rank1.log").read_text() for path in attempts)
    view = kgorch.status()
    assert view["step"] == 3 * 4
    assert "a rung starts the ranks again" in view["exactness"]["sharding"]


@pytest.mark.timeout(900)
def test_a_crash_of_a_rank_restores_from_memory_and_the_best_and_the_mirror_hold_all_pieces(kgorch, tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    args = TRAINING | {"epochs": 16, "sleep": 0.4, "measures": True}
    plan = kgorch.plan("shards.py", ranks=2, args=args, every="10m")
    keeps = ("--set", f"checkpoint.mirror={mirror}", "--set", "checkpoint.keep.best=score:min")
    supervisor = kgorch.background("start", str(plan), *keeps)
    kgorch.wait_for_step(13, within_s=200)
    # on a busy machine a copy takes long, and the next one comes the later
    wait_until(lambda: (kgorch.status()["snapshot"] or {}).get("step", 0) > 4, what="a newer state in memory")
    os.kill(kgorch.pids()["rank1"], signal.SIGKILL)
    assert supervisor.wait(timeout=300) == 0, supervisor.communicate()
    again = kgorch.events("launched")[-1]["facts"]
    assert again["from"] == "memory" and again["step"] > again["step_on_disk"] == 4, again

    rows = kgorch.look("checkpoints", "list", "test")
    best = [row for row in rows if row["best"]]
    assert [row["step"] for row in best] == [4] and best[0]["measured"]["score"] == 4, rows
    for words in ((), ("--best",)):
        out = kgorch.folder / f"whole{len(words)}.safetensors"
        kgorch("checkpoints", "export", "test", str(out), *words)
        assert load_file(out)["blocks.1.inner.weight"].shape == (20, 10)
    copies = [path.parent for path in mirror.rglob("manifest.json")]
    assert copies and all(verify_checkpoint(copy).sharded for copy in copies)
