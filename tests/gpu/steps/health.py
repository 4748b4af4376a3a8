"""Losses that are checked late, deterministic operations, and activation checkpointing with cuDNN."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gpu import delegate
from gpu.step import Probes, Report

probes = Probes()
STEPS, ON, OFF = 6, 2, 4


@probes(limit_s=60)
def recomputed_activations(report: Report) -> None:
    """Activation checkpointing, switched on and off during a training, changes no bit and saves memory."""
    from gpu.steps.common import make_deterministic

    make_deterministic(report.device)
    for precision in (torch.float32, torch.bfloat16, torch.float16):
        name = str(precision).removeprefix("torch.")
        with report.guard(f"equal weights with activations dropped between two steps, {name}"):
            (never, most), (toggled, less) = (_trained(report, precision, switches=on) for on in (False, True))
            same = never.keys() == toggled.keys() and all(torch.equal(never[key], toggled[key]) for key in never)
            report.check(f"equal weights with activations dropped between two steps, {name}", same)
            if report.on_gpu(f"memory of a step with activations dropped, {name}"):
                report.at_most(f"memory of a step with activations dropped, {name}", less / most, 0.8, "of the other")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = (
            nn.Conv3d(width, width, 3, padding=1),
            nn.BatchNorm3d(width),
            nn.Dropout3d(0.2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.lstm, self.last = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 1)

    def forward(self, x_NCDHW: torch.Tensor) -> torch.Tensor:
        x = self.first(x_NCDHW)
        for block in self.blocks:
            x = block(x)
        return self.last(self.lstm(x.mean((3, 4)).transpose(1, 2).contiguous())[0][:, -1])


def _trained(report: Report, precision: torch.dtype, *, switches: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Weights and buffers after all steps, and the peak memory of a step within the stretch with checkpointing.

    On a GPU a step's activations are large beside the workspace of cuBLAS, which is 32 MiB on an H100.
    """
    from kgorch.worker.memory.activation_checkpointing import ActivationCheckpointing

    torch.manual_seed(3)
    width, side = (16, 64) if report.is_on_gpu else (4, 6)
    net = Net(width).to(report.device)
    activations, optimizer = ActivationCheckpointing({"net": net}), torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(report.device, init_scale=256.0, enabled=precision is torch.float16)
    x_NCDHW, most = torch.randn(4, 1, 8, side, side).to(report.device), 0
    for step in range(STEPS):
        if switches and step == ON:
            activations.switch_on()
        if switches and step == OFF:
            activations.switch_off()
        if report.is_on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(report.device, precision, enabled=precision is not torch.float32):
            loss = net(x_NCDHW).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if report.is_on_gpu and step == ON + 1:
            most = torch.cuda.max_memory_allocated()
    return copy.deepcopy(net.state_dict()), most


@probes(limit_s=100)
def tests_with_the_gpu(report: Report) -> None:
    delegate.run_tests(
        report, ["worker/health/test_loss_guard.py", "worker/test_determinism.py", "worker/memory/test_activation.py"]
    )
