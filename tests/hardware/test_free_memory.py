"""What the kernel counts, what the driver gives back, what the allocator is told."""

from __future__ import annotations

from kgorch.hardware import devices
from kgorch.launch import shim
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system import host_memory as host


def _environment(tmp_path, monkeypatch, expandable=True, **person):
    for name in shim.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in person.items():
        monkeypatch.setenv(name, value)
    launch = LaunchSpec(
        run="r", run_id="1", stage="train", attempt="1.1", folder=str(tmp_path), entry="t.py", workdir="/", ranks=1,
        socket="", checkpoints="", output="", plan_hash="", settings={"expandable_segments": expandable},
    )  # fmt: skip
    return shim.environment(launch, tmp_path, 0)


def test_expandable_segments_go_beside_what_the_person_has_set(tmp_path, monkeypatch):
    older, newer = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    assert _environment(tmp_path, monkeypatch)[older] == "expandable_segments:True"
    theirs = "max_split_size_mb:128,expandable_segments:False"
    both = "max_split_size_mb:128,expandable_segments:True"
    assert _environment(tmp_path, monkeypatch, **{older: theirs})[older] == both
    found = _environment(tmp_path, monkeypatch, **{newer: theirs})
    assert found[newer] == both and older not in found
    assert older not in _environment(tmp_path, monkeypatch, expandable=False)


def test_the_kernels_count_is_our_own_groups_of_either_version(tmp_path, monkeypatch):
    for version, name in ((1, "memory.oom_control"), (2, "memory.events")):
        folder = tmp_path / str(version) / "job"
        folder.mkdir(parents=True)
        (folder / name).write_text(f"low 0\noom_kill {version + 2}\n")
        monkeypatch.setattr(host, "_groups", lambda: [(version, tmp_path / str(version), "/job")])  # noqa: B023
        assert host.oom_kill_count() == version + 2
    monkeypatch.setattr(host, "_groups", lambda: [(2, tmp_path / "2", "/gone")])
    assert host.oom_kill_count() >= 0, "the machine's own count"


def test_memory_is_waited_for_until_it_is_as_before_the_first_attempt(monkeypatch):
    readings = iter([[1 << 30], [9 << 30], [5 << 30], [1 << 30]])
    monkeypatch.setattr(devices, "used_memory", lambda _: next(readings))
    held = devices.GpuMemoryBaseline()
    assert held.wait_until_released() == "" and held.wait_until_released() == "" and not list(readings)
    monkeypatch.setattr(devices, "used_memory", lambda _: [9 << 30])
    assert held.wait_until_released(timeout_s=0.3) == "more is in use than before the first attempt: GPU 0: 8192 MiB"
    monkeypatch.setattr(devices, "used_memory", lambda _: None)
    assert held.wait_until_released() == "", "without a driver there is nothing to wait for"
