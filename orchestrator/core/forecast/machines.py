"""Machines that a plan can be estimated for without having one (`kgorch check PLAN --on NAME`).

A `MachineSpec` holds figures with a source, `Assumptions` what nobody can know without the machine or the data. The estimate
prints every assumption, and `--assume` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine by its data sheets.

    Attributes:
        gpu: model.
        gpus: number of GPUs.
        memory_bytes: of one GPU, as PyTorch reports it.
        half: floating point operations a second of one GPU in half precision.
        full: the same in float32.
        bytes_s: bytes a second of a GPU's memory.
        cores: of the host.
        ram_bytes: of the host.
        platform: profile with the time limit of a session, the quota and the disk.
        sources: where the figures come from.
        bus_bytes_s: bytes a second between two GPUs; assumed.
    """

    gpu: str
    gpus: int
    memory_bytes: int
    half: float
    full: float
    bytes_s: float
    cores: int
    ram_bytes: int
    platform: str
    sources: str
    bus_bytes_s: float = 5e9

    @property
    def reserved_bytes(self) -> int:
        """Bytes of a GPU that are not available to PyTorch's tensors."""
        return CONTEXT + WORKSPACES + (COMMUNICATION if self.gpus > 1 else 0)


CONTEXT = 512 * MIB
"""CUDA's context and the code of loaded kernels. Source: core/memory/memory_fit.py, CONTEXT."""

WORKSPACES = 512 * MIB
"""cuDNN's and cuBLAS's workspaces, and the allocator's rounding and fragmentation; assumed. cuBLAS takes 8 MiB a stream and
handle (CUBLAS_WORKSPACE_CONFIG in its documentation); cuDNN's benchmark may take far more, and less where memory lacks."""

COMMUNICATION = 256 * MIB
"""NCCL's buffers; assumed. NCCL_BUFFSIZE is 4 MiB for each channel, protocol and peer (NCCL's documentation)."""

_T4 = (
    "NVIDIA's T4 data sheet: 65 TFLOP/s in half precision, 8.1 in float32, 320 GB/s, 16 GB, of which PyTorch sees 14.74 GiB"
    " (users' error messages). Kaggle: 4 cores, some 30 GB of RAM"
)
_P100 = (
    "NVIDIA's P100 (PCIe, 16 GB) data sheet: 18.7 TFLOP/s in half precision, 9.3 in float32, 732 GB/s, of which PyTorch sees"
    " 15.89 GiB (users' error messages). Kaggle: 4 cores, some 30 GB of RAM"
)
_KAGGLE_RAM = 29 * GIB


def _t4(gpus: int) -> MachineSpec:
    return MachineSpec("T4", gpus, int(14.74 * GIB), 65e12, 8.1e12, 320e9, 4, _KAGGLE_RAM, "kaggle", _T4)


MACHINES: Mapping[str, MachineSpec] = {
    "t4": _t4(1),
    "t4x2": _t4(2),
    "p100": MachineSpec("P100", 1, int(15.89 * GIB), 18.7e12, 9.3e12, 732e9, 4, _KAGGLE_RAM, "kaggle", _P100),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What nobody can know without the machine or the data. Durations in seconds; None where the model computes them.

    Attributes:
        compute: share of the data sheet's operations a second that a training reaches, 0 to 1.
        memory: share of the data sheet's bytes a second, 0 to 1.
        launch: seconds that the host takes to start one operation.
        disk: bytes a second of the disk for checkpoints.
        samples: of the real training set.
        validation: samples that are scored after each epoch.
        epoch: an epoch without its evaluation, as somebody has measured it.
        first_epoch: the first epoch of each session, the same.
        evaluation: after each epoch.
        besides: all stages that take no training step together.
    """

    compute: float = 0.4
    memory: float = 0.7
    launch: float = 10e-6
    disk: float = 200e6
    samples: int | None = None
    validation: int | None = None
    epoch: float | None = None
    first_epoch: float | None = None
    evaluation: float | None = None
    besides: float = 0.0

    @property
    def by_model(self) -> Assumptions:
        """The same without measured durations: all of them come from the model."""
        return replace(self, epoch=None, first_epoch=None, evaluation=None)


SHARES = ("compute", "memory")
"""Fields of `Assumptions` that are shares of 1, to be checked when a user gives them."""


def rates(machine: MachineSpec, assumed: Assumptions) -> dict[str, float]:
    """Rates that a training reaches on one GPU, operations and bytes a second, as worker/probe/step_estimate.py reads them."""
    return {
        "half": assumed.compute * machine.half,
        "full": assumed.compute * machine.full,
        "bytes": assumed.memory * machine.bytes_s,
        "launch_s": assumed.launch,
        "bus": machine.bus_bytes_s,
    }
