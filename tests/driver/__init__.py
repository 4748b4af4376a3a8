"""A driver with two Tesla T4, or any other number of them, that the real pynvml loads (nvml.c); its figures and faults change
while it is in use.

driver = build(tmp_path)
kgorch.extra_env |= driver.env
driver.set(0, mem_used=12 << 30, util=87)
driver.fail("nvmlDeviceGetMemoryInfo", "hang")
driver.heal()
driver.be(gpus=1, cuda="12.4", uuids=["GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"])
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

MIB = 1 << 20
FIGURES = {
    "mem_total": 15360 * MIB,
    "mem_used": 3 * MIB,
    "util": 0,
    "temp_c": 40,
    "power_mw": 10_000,
    "power_limit_mw": 70_000,
    "sm_mhz": 1590,
    "mem_mhz": 5000,
    "throttle": 1,
    "ecc": 0,
    "processes": 0,
    "xid": 0,  # the newest XID error
    "lost": 0,  # 1: GPU is lost; it has no handle, and calls with an older one fail
    "forbidden": 0,  # 1: it has no handle for lack of permission
    "mig": 0,  # 1: MIG mode is on
}
Fault = Literal["not_supported", "function_not_found", "gpu_is_lost", "not_loaded", "hang", "unknown"]


@dataclass
class Driver:
    """`env`: to be added to a process's environment, so that it finds this driver."""

    script: Path
    env: dict[str, str]
    figures: list[dict[str, int]] = field(default_factory=lambda: [dict(FIGURES), dict(FIGURES)])
    faults: dict[str, Fault] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def be(
        self, *, gpus: int | None = None, cuda: str = "", uuids: Sequence[str] = (), migs: Sequence[str] = ()
    ) -> None:
        """What else it tells.

        Args:
            gpus: how many there are, at most 8.
            cuda: the newest CUDA that it takes, as "12.4"; a driver that is not asked to be so does not say.
            uuids: of the GPUs, GPU 0 first; where none is given they are GPU-00000000-0000-…, GPU-00000001-0000-…
            migs: the UUID of the one MIG instance of each GPU; its figures are the whole GPU's.
        """
        if gpus is not None:
            self.figures = [*self.figures, *(dict(FIGURES) for _ in range(gpus))][:gpus]
        if cuda:
            major, minor = cuda.split(".")
            self.names["cuda"] = str(1000 * int(major) + 10 * int(minor))
        for key, values in (("uuid", uuids), ("mig_uuid", migs)):
            self.names |= {f"gpu{gpu}.{key}": value for gpu, value in enumerate(values)}
        self._write()

    def set(self, gpu: int, **figures: int) -> None:
        """Names as in FIGURES; bytes, percent, milliwatts."""
        assert figures.keys() <= FIGURES.keys(), figures
        self.figures[gpu] |= figures
        self._write()

    def fail(self, function: str, how: Fault) -> None:
        """`function` as the library exports it: nvmlInitWithFlags, nvmlDeviceGetCount_v2, nvmlDeviceGetMemoryInfo, …"""
        self.faults[function] = how
        self._write()

    def heal(self) -> None:
        """No faults any more; a call that hangs returns, a GPU that was lost is there."""
        self.faults.clear()
        for figures in self.figures:
            figures["lost"] = figures["forbidden"] = 0
        self._write()

    def _write(self) -> None:
        lines = [f"gpus {len(self.figures)}", *(f"{name} {value}" for name, value in self.names.items())]
        lines += [f"gpu{gpu}.{name} {value}" for gpu, named in enumerate(self.figures) for name, value in named.items()]
        lines += [f"fail {function} {how}" for function, how in self.faults.items()]
        aside = self.script.with_suffix(".new")
        aside.write_text("\n".join(lines) + "\n")
        aside.rename(self.script)


def build(folder: Path, *, absent: Iterable[str] = ()) -> Driver:
    """Compile it below `folder`; functions in `absent` it lacks altogether. Skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    place = folder / "driver"
    place.mkdir()
    renamed = [f"-D{name}=lacking_{name}" for name in absent]
    source, library = Path(__file__).with_name("nvml.c"), place / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", *renamed, "-o", library, source], check=True)
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("LD_LIBRARY_PATH")]))
    driver = Driver(place / "script", {"LD_LIBRARY_PATH": path, "KGORCH_TEST_DRIVER": str(place / "script")})
    driver._write()
    return driver
