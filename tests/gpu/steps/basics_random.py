"""Random states that are put back, dropout of an LSTM, and half precision."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu.step import Probes, Report
from gpu.steps.common import make_deterministic

probes = Probes()


@probes(limit_s=60)
def random_states(report: Report) -> None:
    """A step is repeated under the random states that it began with."""
    from kgorch.worker.rng_state import RngCache

    device = torch.device(report.device, 0) if report.is_on_gpu else torch.device("cpu")
    chance, net = RngCache(device), nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(device)
    x = torch.randn(32, 64, device=device)
    before = chance.now()
    first = net(x)
    chance.back_to(before)
    report.check("dropout after its state was put back", torch.equal(first, net(x)))


@probes(limit_s=90)
def lstm_dropout(report: Report) -> None:
    """cuDNN keeps the dropout between an LSTM's layers in a state of its own, which no checkpoint holds. Putting the generator's
    state back before every step makes it a function of that: the same in a new process."""
    for every in (True, False):
        name = "states put back before every step" if every else "as they are"
        whole = in_a_fork(report, functools.partial(_lstm_steps, report.device, every, None))
        resumed = in_a_fork(report, functools.partial(_lstm_steps, report.device, every, whole["state"]))
        result = [a == b for a, b in zip(whole["outputs"][2:], resumed["outputs"], strict=True)]
        if every:
            report.check(f"steps 2, 3, 4 in a new process equal those in the old one, {name}", result, [True] * 3)
        else:
            report.note(f"the same, {name}", result)


def _lstm_steps(device: str, every: bool, state: list[int] | None) -> dict[str, object]:
    """Hashes of the outputs of steps 0 to 4, or of 2 to 4 from the generator's state before step 2."""
    from kgorch.worker.rng_state import RngCache

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuDNN's LSTM multiplies by cuBLAS
    on = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    torch.manual_seed(1)
    lstm = nn.LSTM(32, 64, num_layers=2, dropout=0.5, batch_first=True).to(on)
    x, chance, outputs, state_before = torch.ones(8, 16, 32, device=on), RngCache(on), [], []
    if state is not None:
        _set_state(on, torch.tensor(state, dtype=torch.uint8))
    for step in range(5) if state is None else range(2, 5):
        if step == 2:
            state_before = (torch.cuda.get_rng_state(on) if device == "cuda" else torch.get_rng_state()).tolist()
        if every:
            chance.back_to(chance.now())
        out = lstm(x)[0].detach().cpu().contiguous()
        outputs.append(hashlib.sha256(out.numpy().tobytes()).hexdigest())
    return {"outputs": outputs, "state": state_before}


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def in_a_fork(report: Report, work: Callable[[], dict[str, object]]) -> dict[str, Any]:
    """What `work` returns, done in a new process. The caller must not have used CUDA."""
    path = report.folder / "returned"
    path.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            path.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@probes(limit_s=60)
def half_precision(report: Report) -> None:
    """One process that plays two ranks halves gradients, not the loss: half a loss is not half its gradients in fp16."""
    make_deterministic(report.device)
    torch.manual_seed(0)
    channels, side = (64, 64) if report.is_on_gpu else (8, 8)
    layers = [
        nn.Conv2d(3, channels, 3),
        nn.GELU(),
        nn.Conv2d(channels, channels, 3),
        nn.GELU(),
        nn.Conv2d(channels, 8, 3),
    ]
    net, x = nn.Sequential(*layers).to(report.device), torch.randn(8, 3, side, side, device=report.device)

    def gradients(dtype: torch.dtype, weight: float, scale: float) -> list[torch.Tensor]:
        net.zero_grad(set_to_none=True)
        with torch.autocast(report.device, dtype, enabled=dtype is not torch.float32):
            out = net(x)
        (out.float().pow(2).mean() * weight * scale).backward()
        return [part.grad.clone() for part in net.parameters() if part.grad is not None]

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scale in (1.0, 65536.0):
            whole, half, again = (gradients(dtype, weight, scale) for weight in (1.0, 0.5, 1.0))
            differing = sum(int((a * 0.5 != b).sum()) for a, b in zip(whole, half, strict=True))
            name = str(dtype).removeprefix("torch.")
            report.check(f"a backward twice, {name}, scale {scale:.0f}", all(map(torch.equal, whole, again)))
            report.note(f"gradients that half the loss does not halve, {name}, scale {scale:.0f}", differing)
