"""The facts of a machine that belong to its results: `python -m gpu.machine` prints them as JSON.

The question is asked in a process of its own, because PyTorch may be broken and the caller must not initialise CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ASK_S = 120.0


def ask(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The facts, from a process of its own; `error` says why there are none."""
    tests = Path(__file__).resolve().parents[1]
    env = dict(os.environ if environ is None else environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tests), str(tests.parent), env.get("PYTHONPATH", "")]))
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        process = subprocess.run(
            [sys.executable, "-m", "gpu.machine"],
            env=env,
            cwd=tests.parent,
            capture_output=True,
            text=True,
            timeout=ASK_S,
        )
        facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"PyTorch has not answered within {ASK_S:.0f} s", "gpus": [], "driver_gpus": []}
    except (ValueError, IndexError):
        last = next(iter(process.stderr.strip().splitlines()[-1:]), f"exit status {process.returncode}")
        return {"error": last, "gpus": [], "driver_gpus": []}
    return facts


def facts() -> dict[str, Any]:
    result: dict[str, Any] = {
        "gpus": [],
        "driver_gpus": [],
        "driver": "",
        "python": platform.python_version(),
        "kernel": os.uname().release,
        "cores": os.cpu_count(),
        "error": "",
        "missing": _missing(),
    }
    result |= _driver()
    try:
        import torch
    except Exception as error:  # not installed, or its libraries do not fit the driver
        return result | {"error": f"{type(error).__name__}: {error}"}
    result["torch"] = torch.__version__
    result["cuda"] = str(torch.version.cuda or "")
    with contextlib.suppress(Exception):
        result["cudnn"] = str(torch.backends.cudnn.version() or "")
    with contextlib.suppress(Exception):
        result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            result["gpus"].append(
                {
                    "name": properties.name,
                    "memory": properties.total_memory,
                    "capability": f"{properties.major}.{properties.minor}",
                }
            )
    return result


def _driver() -> dict[str, Any]:
    """Driver version and names of all GPUs by NVML; empty without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, or no binding for it
        return {}
    with contextlib.suppress(Exception):
        names = [
            _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(number)))
            for number in range(pynvml.nvmlDeviceGetCount())
        ]
        return {"driver": _text(pynvml.nvmlSystemGetDriverVersion()), "driver_gpus": names}
    return {}


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _missing() -> list[str]:
    """Packages that kgorch or its tests need and that are not installed."""
    import importlib.util

    packages = (
        "torch", "numpy", "apscheduler", "sqlalchemy", "alembic", "pydantic", "click", "rich", "psutil", "pynvml", "safetensors",
        "xxhash", "fsspec", "pytest", "hypothesis",
    )  # fmt: skip
    return [name for name in packages if importlib.util.find_spec(name) is None]


if __name__ == "__main__":
    print(json.dumps(facts()))
