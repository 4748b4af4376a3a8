"""A run goes on where nothing of it lies but what another session left, on a disk that cannot be written."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from harness import processes_of, wait_until


@pytest.fixture
def carried_over(tmp_path):
    """Mounts a folder read-only in another place, as a platform does with what an earlier session left."""
    place = tmp_path / "input"
    place.mkdir()

    def mount(folder):
        for words in (["--bind", str(folder), str(place)], ["-o", "remount,ro,bind", str(place)]):
            if subprocess.run(["mount", *words], capture_output=True).returncode:
                pytest.skip("no right to mount")
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], capture_output=True)


def test_a_run_goes_on_from_a_read_only_source_with_the_bits_of_an_uninterrupted_one(kgorch, tmp_path, carried_over):
    alone = replace(kgorch, home=tmp_path / "alone")
    training = {"epochs": 6, "sleep": 0.0}
    alone("start", str(alone.plan(ranks=2, args=training, every="600s")))

    first = replace(kgorch, home=tmp_path / "first")
    plan = first.plan(
        ranks=2, args=training | {"sleep": 0.4}, every="1s", extra=f'[resume]\nsources = ["{tmp_path}/input/**"]'
    )
    first.background("start", str(plan))
    wait_until(lambda: len(first.checkpoints()) > 1)
    first.kill_everything()
    wait_until(lambda: not processes_of(first.home))
    newest = first.checkpoints()[-1]
    step = int(newest.name.split("-")[1])
    assert 0 < step < 36
    place = carried_over(first.home)

    done = kgorch("start", str(plan), "--set", "stage.train.args.sleep=0.0")
    assert f"found step {step} of stage train in {place}" in done.stderr and "verified" in done.stderr
    cut, gone_on = kgorch.history()
    assert cut["phase"] == "cut_off" and cut["attempts"][0]["outcome"] == "lost"
    assert gone_on["stages"] == [{"name": "train", "first_step": step, "last_step": 36}]
    [copied] = kgorch.events("checkpoint_imported")
    assert copied["facts"]["source"] == str(place / newest.relative_to(first.home))
    assert kgorch.export() == alone.export()


@pytest.mark.soak
def test_two_runs_of_one_name_exit_2_and_the_word_that_is_offered_chooses(kgorch, tmp_path):
    extra = f'[resume]\nsources = ["{tmp_path}/old/**"]'
    for name in ("a", "b"):
        old = replace(kgorch, home=tmp_path / "old" / name)
        old("start", str(old.plan(ranks=1, args={"epochs": 1, "sleep": 0.0}, extra=extra)), "--fresh")
    plan = str(tmp_path / "work" / "plan.toml")
    done = kgorch("start", plan, code=2)
    lines = [line.strip() for line in done.stderr.splitlines() if "step 6 of train" in line]
    assert len(lines) == 2 and str(tmp_path / "old" / "a") in done.stderr and "--run RUN_ID" in done.stderr
    chosen = lines[1].split(":")[0]
    assert "--fresh" in kgorch("start", plan, "--fresh", "--run", chosen, code=2).stderr
    assert "is finished" in kgorch("start", plan, "--detach", "--run", chosen).stdout
    [row] = kgorch.events("run_chosen")
    assert row["facts"]["run"] == chosen
