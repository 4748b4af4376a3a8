"""What a plan requires of a machine before a session is opened: PyTorch, GPUs for its ranks, and the files that its stages read.

`check_accelerators` alone decides about the GPUs: `kgorch check` shows its results, and those that fail refuse a start.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kgorch.core.program_command import Launcher
from kgorch.hardware import devices, inventory, nvml
from kgorch.launch import inputs
from kgorch.launch.verdicts import FAIL, PASS, WARN, Check
from kgorch.plan import Plan, StageSection

OLDEST_PYTORCH = (2, 4)
"""The oldest release whose sources were checked (docs/gpu.md)."""


def check_gpus(plan: Plan, note: Callable[[str], None], *, platform: str = "") -> None:
    """Check the GPUs before a session is opened.

    Args:
        note: takes each warning, a line.
        platform: as in `check_accelerators`.
    Raises: KgorchError where the plan cannot train as it says.
    """
    # a driver that does not answer is no result: the locks of the GPUs refuse the session then (hardware/gpu_locks.py)
    try:
        checks = list(check_accelerators(devices.detect_accelerators(), plan, platform=platform))
    except nvml.DriverUnresponsive:
        return
    for check in checks:
        check.refuse()
    for check in checks:
        if check.verdict == WARN:
            note(check.text)


def check_stages(stages: Sequence[StageSection], workdir: Path, note: Callable[[str], None], *, platform: str) -> None:
    """Check what the stages need and read before a session is opened.

    Args:
        note: takes each warning, and the answer of each stage's own `preflight`.
    Raises: KgorchError where something is missing, or a stage's `preflight` refuses.
    """
    for check in [*check_pytorch(stages), *check_cores(stages), *inputs.check_paths(stages, workdir, platform)]:
        check.refuse()
        if check.verdict == WARN:
            note(check.text)
    for check in inputs.call_preflights(stages, workdir):
        check.refuse()
        note(f"{check.name}: {check.text}")


def check_pytorch(stages: Sequence[StageSection]) -> Iterator[Check]:
    """Check that PyTorch is installed and new enough, where a launcher of these stages needs it.

    kgorch does not depend on it: which build fits (CUDA, ROCm, a vendor's) only the user knows, and a machine that drives sessions
    elsewhere needs none.
    """
    if all(Launcher(stage.launcher) is Launcher.NONE for stage in stages):
        return
    least = ".".join(str(part) for part in OLDEST_PYTORCH)
    do = "install PyTorch into this environment, as pytorch.org/get-started says: pip install torch"
    version = inventory.version_of("torch")
    release = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None:
        what = "PyTorch is not installed; torchrun, which starts the ranks, belongs to it"
        yield Check("torch", FAIL, what, (f"Python: {sys.executable}",), do)
    elif release and tuple(int(part) for part in release.groups()) < OLDEST_PYTORCH:
        yield Check("torch", FAIL, f"PyTorch {version} is older than {least}", (f"Python: {sys.executable}",), do)
    else:
        cuda = devices.torch_cuda()
        build = "" if cuda is None else f", built for CUDA {cuda}" if cuda else ", built without CUDA"
        yield Check("torch", PASS, f"{version}{build}")


def check_accelerators(
    accelerators: devices.Accelerators, plan: Plan, *, elsewhere: bool = False, platform: str = ""
) -> Iterator[Check]:
    """Check that the plan's ranks find the GPUs that they need, and can use them. The first result is named "gpus".

    Args:
        elsewhere: the plan is meant for another machine: too few GPUs here are no failure.
        platform: its name (platforms/detect.py), for advice on where its settings switch a GPU on; may be empty.
    """
    visible, minimum = accelerators.visible, plan.session.gpus or 0
    count = len(visible.gpus)
    ranks = max(stage.ranks if isinstance(stage.ranks, int) else max(1, count) for stage in plan.stage)
    models = ", ".join(gpu.name for gpu in _visible_gpus(accelerators)) or "none"
    if visible.problem and accelerators.gpus:
        yield _invalid(accelerators)
    elif count < minimum and elsewhere:
        what = f"the plan needs {minimum}; visible: {count} ({models}): its ranks are probed here all the same"
        yield Check("gpus", WARN, what, do="kgorch check there, before a start")
    elif count < minimum:
        yield _missing(accelerators, minimum, platform)
    elif visible.is_hidden:
        what = f"none is visible: {_hides(accelerators)}; training would run on the CPU"
        yield Check("gpus", PASS, what, do="unset CUDA_VISIBLE_DEVICES to use them" if accelerators.gpus else "")
    elif count and ranks > count and accelerators.torch_cuda != "":
        what = f"{ranks} ranks share {_gpus_in_words(count)} ({models})"
        why = "NCCL refuses two ranks on one GPU, so they communicate over gloo, through host memory, which is slower"
        yield Check("gpus", WARN, what, (why,), 'ranks = "auto" starts one rank a GPU')
    else:
        yield Check("gpus", PASS, f"{count} visible ({models}); {ranks} ranks at most")
    if count:
        yield from _cuda(accelerators)
        yield from _mig(accelerators)


def _invalid(accelerators: devices.Accelerators) -> Check:
    visible, indices = accelerators.visible, ",".join(str(index) for index in accelerators.gpus)
    rest = ", of which CUDA would use only what comes before that entry" if visible.gpus else ""
    return Check(
        "gpus",
        FAIL,
        f"CUDA_VISIBLE_DEVICES is not valid: {visible.problem}",
        (f"found CUDA_VISIBLE_DEVICES={accelerators.text!r}{rest}",),
        f"unset CUDA_VISIBLE_DEVICES; or name GPUs that there are: export CUDA_VISIBLE_DEVICES={indices}",
    )


_SWITCH = {
    "kaggle": "in the notebook: Settings, Accelerator, {gpus} (of a pushed one: enable_gpu in kernel-metadata.json)",
    "colab": "Runtime, Change runtime type, T4 GPU",
}


def _missing(accelerators: devices.Accelerators, minimum: int, platform: str) -> Check:
    count, total = len(accelerators.visible.gpus), len(accelerators.gpus)
    if accelerators.visible.is_hidden:
        why, do = _hides(accelerators), "unset CUDA_VISIBLE_DEVICES"
    elif count < total:
        why, do = f"CUDA_VISIBLE_DEVICES={accelerators.text!r} leaves {count} of {total}", "unset CUDA_VISIBLE_DEVICES"
    elif count:
        why, do = f"the driver shows {_gpus_in_words(count)}", f"choose a machine with {minimum}"
    else:
        why = "the driver shows no GPU" if accelerators.inventory else "no NVIDIA driver answers"
        do = "switch the accelerator on, see what nvidia-smi says"
    if platform in _SWITCH and count == total:
        do = _SWITCH[platform].format(gpus="GPU T4 x2" if minimum == 2 else "GPU T4 x2 or GPU P100")
    what = f"the plan needs {_gpus_in_words(minimum)} (session.gpus = {minimum}), and CUDA sees {count or 'none'}"
    return Check("gpus", FAIL, what, (why,), f"{do}; or take session.gpus out of the plan")


def _cuda(accelerators: devices.Accelerators) -> Iterator[Check]:
    """Check that the driver supports the CUDA that PyTorch is built for. Minor versions are compatible within a major one."""
    inventory, cuda = accelerators.inventory, accelerators.torch_cuda
    if inventory is None or cuda is None:
        return
    on_cpu = "export CUDA_VISIBLE_DEVICES= to train on the CPU"
    if not cuda:
        what = "this PyTorch is built without CUDA and cannot use the GPUs: training would run on the CPU"
        yield Check("cuda", WARN, what, do=f"install a PyTorch built for CUDA; or {on_cpu} without this line")
        return
    if inventory.cuda is None:
        what = f"the driver {inventory.driver} does not say which CUDA it takes"
        yield Check("cuda", WARN, what, do="see what nvidia-smi says")
        return
    major, minor = inventory.cuda
    takes = f"the driver {inventory.driver} takes CUDA up to {major}.{minor}"
    if major >= int(cuda.split(".")[0]):
        yield Check("cuda", PASS, takes)
    else:
        what = f"the driver is too old for this PyTorch: {takes}, and PyTorch is built for CUDA {cuda}"
        do = f"update the driver; or install a PyTorch built for CUDA {major}; or {on_cpu}"
        yield Check("cuda", FAIL, what, do=do)


def _mig(accelerators: devices.Accelerators) -> Iterator[Check]:
    visible = accelerators.visible.gpus
    whole = "the memory and utilization that kgorch status shows are the whole GPU's"
    if any(gpu.is_mig for gpu in visible):
        what = "CUDA_VISIBLE_DEVICES names a MIG instance: a process can use one alone, so one rank trains on it"
        yield Check("mig", WARN, what, (whole,), 'ranks = 1, or "auto"')
    elif indices := [
        str(gpu.index) for gpu in visible if gpu.index is not None and accelerators.gpus[gpu.index].has_mig
    ]:
        what = f"GPU {', '.join(indices)}: MIG mode is on, and CUDA_VISIBLE_DEVICES names no instance"
        why = "CUDA takes the first instance that it finds, and no GPU at all where there is none"
        yield Check("mig", WARN, what, (why, whole), "nvidia-smi -L lists them; export CUDA_VISIBLE_DEVICES=MIG-<UUID>")


def _hides(accelerators: devices.Accelerators) -> str:
    value, count = repr(accelerators.text) if accelerators.text else "empty", len(accelerators.gpus)
    return f"CUDA_VISIBLE_DEVICES is {value} and hides {_gpus_in_words(count) if count else 'all GPUs'}"


def _gpus_in_words(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}"


def _visible_gpus(accelerators: devices.Accelerators) -> Iterator[devices.Gpu]:
    for gpu in accelerators.visible.gpus:
        yield accelerators.gpus[gpu.index] if gpu.index is not None else devices.Gpu(gpu.uuid, gpu.entry, has_mig=True)


def loading_workers(stage: StageSection) -> int:
    """DataLoader workers of a rank, by the stage's argument `num_workers`; 0 where it has none."""
    count = stage.args.get("num_workers")
    return count if isinstance(count, int) else 0


def check_cores(stages: Sequence[StageSection]) -> Iterator[Check]:
    """Compare the loading workers of all ranks with the cores of this machine; a warning for the stage that has most."""
    cores, worst = len(os.sched_getaffinity(0)), (0, 0, "")  # ranks, workers, stage
    with contextlib.suppress(nvml.DriverUnresponsive):
        for stage in stages:
            workers, ranks = loading_workers(stage), devices.rank_count(stage.ranks)
            if ranks * workers > max(cores, worst[0] * worst[1]):
                worst = ranks, workers, stage.name
    if worst[0]:
        ranks, workers, name = worst
        what = f"stage {name!r} has {ranks * workers} loading workers ({workers} a rank) on {cores} cores"
        yield Check("cores", WARN, what, do=f"num_workers = {cores // ranks}; kgorch doctor tells which number is best")
