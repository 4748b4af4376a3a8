"""Machines that a plan can be estimated for without having one (`kgorch check PLAN --on NAME`): what is known of them, and what is
assumed. Every assumption is printed with the estimate, and `--assume` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """Attributes:
    gpu, gpus: model and number. memory_bytes: of one GPU, as PyTorch tells it.
    half, full: floating point operations a second of one GPU by its data sheet, in half precision and in float32.
    bytes_s: bytes a second of a GPU's memory, by its data sheet.
    bus_bytes_s: bytes a second between two GPUs; assumed.
    cores, ram_bytes: of the host. platform: profile with the time limit of a session, quota and disk.
    sources: where the figures come from.
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
        """What a GPU holds besides PyTorch's tensors."""
        return CONTEXT + WORKSPACES + (COMMUNICATION if self.gpus > 1 else 0)


CONTEXT = 512 * MIB
"""CUDA's context and the code of loaded kernels. Source: core/memory_fit.py, CONTEXT."""

WORKSPACES = 512 * MIB
"""cuDNN's and cuBLAS's workspaces, and what the allocator rounds up and cannot join; assumed. cuBLAS takes 8 MiB a stream and
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


def _t4(gpus: int) -> Machine:
    return Machine("T4", gpus, int(14.74 * GIB), 65e12, 8.1e12, 320e9, 4, _KAGGLE_RAM, "kaggle", _T4)


MACHINES: Mapping[str, Machine] = {
    "t4": _t4(1),
    "t4x2": _t4(2),
    "p100": Machine("P100", 1, int(15.89 * GIB), 18.7e12, 9.3e12, 732e9, 4, _KAGGLE_RAM, "kaggle", _P100),
}


@dataclass(frozen=True, slots=True)
class Assumed:
    """What nobody can know without the machine or the data. Durations in seconds; None: from the model.

    Attributes:
        compute, memory: shares of the data sheet's operations and bytes a second that a training reaches.
        launch: seconds that the host takes to start one operation.
        disk: bytes a second of the disk for checkpoints.
        samples, validation: of the real data set, training and scored each epoch.
        epoch: an epoch without its evaluation, as somebody has measured it; first_epoch: the first one of each session, the same.
        evaluation: after each epoch. besides: of stages that take no training step, all together.
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
    def by_model(self) -> Assumed:
        """Without the durations that somebody has measured."""
        return replace(self, epoch=None, first_epoch=None, evaluation=None)


SHARES = ("compute", "memory")
"""Names of Assumed that are shares of 1."""


def rates(machine: Machine, assumed: Assumed) -> dict[str, float]:
    """What a training is assumed to reach on one of its GPUs, as the ranks take it (worker/estimate.py)."""
    return {
        "half": assumed.compute * machine.half,
        "full": assumed.compute * machine.full,
        "bytes": assumed.memory * machine.bytes_s,
        "launch_s": assumed.launch,
        "bus": machine.bus_bytes_s,
    }
