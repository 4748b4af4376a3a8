"""The steps, ordered by risk: what would make every training on a GPU fail comes first."""

from __future__ import annotations

from gpu.step import Step

STEPS = (
    Step(
        "basics",
        "a training that fails in its first seconds on CUDA: the process group, the drain protocol, host memory that cannot be"
        " registered, errors that are not recognised as a lack of memory, random states, waits for the device",
        300,
        module="gpu.steps.basics",
    ),
    Step(
        "machine",
        "a machine that fails by itself (its kernel, its Python): the tests of ladder and snapshots with the GPUs hidden",
        200,
        module="gpu.steps.machine",
    ),
    Step(
        "health",
        "a NaN that is seen too late or not at all, and activation checkpointing that changes bits, with cuDNN",
        120,
        module="gpu.steps.health",
    ),
    Step(
        "memory",
        "real lack of memory in a real training: rungs not taken, other bits than those of a run that had used them from that"
        " step, memory that is lost with every rung",
        240,
        module="gpu.steps.memory",
    ),
    Step(
        "ranks",
        "other bits after a resume, or after 2 → 1 → 2 processes, above all in half precision; two ranks share the GPU over gloo",
        540,
        module="gpu.steps.ranks",
    ),
    Step(
        "failures",
        "a rank that fails or hangs while its GPU is busy: no record, no end, memory that is not given back",
        400,
        module="gpu.steps.failures",
    ),
    Step(
        "speed",
        "saves that hold the training up longer than a copy to pinned memory, snapshots too far apart, steps that cost more",
        150,
        module="gpu.steps.speed",
    ),
    Step(
        "workloads",
        "a reference training that, cut by time limits, does not end with the bits of one that was not",
        300,
        module="gpu.steps.workloads",
    ),
    Step(
        "trainers",
        "a program of Transformers, Lightning or Accelerate that, stopped and killed, ends with other bits than one that was not",
        590,
        module="gpu.steps.trainers",
    ),
    Step(
        "nvml",
        "GPU figures in `kgorch status` that are not the driver's, and CUDA contexts of processes that should have none",
        90,
        module="gpu.steps.nvml",
    ),
    Step(
        "two-gpus-first-steps",
        "any training on two GPUs: NCCL, and the sequence number that the drain protocol counts by",
        120,
        2,
        "gpu.steps.two_gpus_first_steps",
    ),
    Step(
        "two-gpus-memory",
        "ranks that wait for each other for ever when one lacks memory, in forward, backward, or with unused parameters",
        300,
        2,
        "gpu.steps.two_gpus_memory",
    ),
    Step(
        "two-gpus-kill",
        "a killed rank, torchrun or everything: minutes to the next step, GPU memory that is not given back",
        300,
        2,
        "gpu.steps.two_gpus_kill",
    ),
    Step(
        "two-gpus-exception",
        "an exception on one rank while the other waits in an all-reduce: minutes to the end, the wrong cause",
        120,
        2,
        "gpu.steps.two_gpus_exception",
    ),
    Step(
        "two-gpus-alone",
        "NCCL's own time-out ending a run in which rank 0 validates alone",
        150,
        2,
        "gpu.steps.two_gpus_alone",
    ),
    Step(
        "two-gpus-ranks",
        "other bits after 2 → 1 → 2 GPUs over NCCL: fp32, bf16, fp16; SyncBatchNorm taken for something that one GPU can play",
        300,
        2,
        "gpu.steps.two_gpus_ranks",
    ),
    Step(
        "two-gpus-nccl-memory",
        "no room for NCCL's own buffers: a hang, or an error that is not recognised as a lack of memory",
        120,
        2,
        "gpu.steps.two_gpus_nccl_memory",
    ),
    Step(
        "two-gpus-wall",
        "a session on two GPUs that is not saved and gone by its time limit",
        120,
        2,
        "gpu.steps.two_gpus_wall",
    ),
)


class NoSuchStep(LookupError):
    """A name that is no step's."""


def select(names: tuple[str, ...]) -> list[tuple[Step, tuple[str, ...]]]:
    """The steps of these names in their own order, each with the probes that were named (`step.probe`); none means all.

    A name may also be the beginning of several, as "two-gpus". No names: every step.

    Raises: NoSuchStep.
    """
    selection: dict[str, list[str]] = {}
    for name in names:
        step_name, _, probe = name.partition(".")
        matches = [step.name for step in STEPS if step.name == step_name]
        matches = matches or [step.name for step in STEPS if step.name.startswith(f"{step_name}-")]
        if not matches:
            raise NoSuchStep(name)
        for match in matches:
            selection.setdefault(match, []).extend([probe] if probe else [])
    return [(step, tuple(selection.get(step.name, ()))) for step in STEPS if not names or step.name in selection]
