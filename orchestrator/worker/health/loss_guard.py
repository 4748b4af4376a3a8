"""Detection of losses and weights that are not finite, and of loss spikes; and what all ranks do about them together.

On the CPU a loss is read at once, and the ranks vote before the step: they drop its gradients together, and no weight has changed.
On CUDA no rank waits for the loss: it is copied to the host and checked one or more steps later. By then the weights have been
updated, unless a GradScaler has skipped the step. So all ranks end, and another attempt starts at the newest good state with that
batch left out.

A dropped batch goes through the script's loop like any other, now and whenever the step is repeated: schedulers and counters
advance, `session.backward` returns NaN, and the optimizer finds no gradients (with a GradScaler: NaN gradients, so that it skips).

Before a save every rank checks its share of modules and optimizers: a state that is not finite is never saved.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from kgorch.core.codes import EventKind
from kgorch.core.health import training_health
from kgorch.core.health.training_health import LOSS, WEIGHTS, HealthIssue, PastRemedy, SpikeDetector
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry, Message, RemedyApplied
from kgorch.worker import local_tensors
from kgorch.worker.telemetry.host_copy import HostCopy

SPIKE, NOT_FINITE, LATE = 1, 2, 3
"""Flags of a rank in the vote of a step. SPIKE, NOT_FINITE: drop the step; LATE: the weights have been updated by a bad step."""

BEHIND = 8
"""Limit of losses on their way to the host. With more, the oldest is waited for, which was computed long ago."""

SCALE = 65536.0
"""Scale to which a GradScaler is reset: PyTorch's default. (Its own `init_scale` is overwritten when it is restored.)"""

RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Keys of a parameter group that a lower learning rate scales."""


class Unwell(RuntimeError):
    """The attempt ends because the weights are not finite, or because the remedy needs a new attempt.

    Attributes:
        trouble: what this rank has detected; None on the other ranks.
    """

    def __init__(self, trouble: HealthIssue | None) -> None:
        super().__init__(trouble.what if trouble else "peerslost: another rank saw a loss or weight that is no number")
        self.trouble = trouble


class RemedyLog(Protocol):
    """Where remedies are recorded: memory/adjustment_log.py."""

    def add(self, message: RemedyApplied, *, tells: bool) -> None: ...


class Adjustable(Protocol):
    """The settings that a remedy changes: memory/ladder.py."""

    @property
    def changes(self) -> RemedyLog: ...

    def set_amp(self, amp: str) -> None: ...


class LossGuard:
    """The checks of one rank.

    Args:
        ladder: settings that a remedy changes.
        send: queues a message for the supervisor.
        late: losses are checked when they have arrived on the host, instead of at once.
    """

    def __init__(
        self, launch: LaunchSpec, rank: int, ladder: Adjustable, send: Callable[[Message], None], *, late: bool
    ) -> None:
        options = launch.health
        self._policy = [training_health.parse_remedy(text) for text in options.get("nan", ())]
        self._past = [PastRemedy(**taken) for taken in options.get("past", ())]
        self._spike = SpikeDetector(options.get("spike"))
        self._entries = [entry for entry in launch.schedule if "settings" not in entry]
        self._attempt, self._rank, self._ladder, self._send = launch.attempt, rank, ladder, send
        # None on the CPU, where a loss can be read at once.
        self._arriving: deque[PendingLosses] | None = deque() if late else None
        self._tracked: Mapping[str, Any] = {}
        self._never_finite: set[str] = set()  # tensors that were not finite from the start: masks, for example
        self._since = self._step = 0
        self._call = -1
        self._recorded: list[torch.Tensor] = []
        self._losses: list[float] = []
        self._trouble: HealthIssue | None = None

    @property
    def is_on(self) -> bool:
        """Whether losses are checked."""
        return bool(self._policy)

    @property
    def recent_losses(self) -> list[float]:
        """What spikes are told by, for a checkpoint; empty where they are not looked for."""
        return self._spike.recent

    def restore_losses(self, losses: Any) -> None:
        """Go on with the `recent_losses` of a checkpoint."""
        self._spike.forget()
        for loss in losses if isinstance(losses, list) else ():
            if isinstance(loss, float) and math.isfinite(loss):
                self._spike.learn(loss)

    # The schedule

    def begin(self, tracked: Mapping[str, Any], step: int) -> None:
        """Before the first step of an epoch: apply what earlier attempts have changed up to here."""
        self._tracked = tracked
        for entry in self._entries:
            if entry["step"] < step and "amp" in entry:
                self._ladder.set_amp(entry["amp"])
        self._entries = [entry for entry in self._entries if entry["step"] >= step]
        self._since = max(self._since, step)
        self.boundary(step)

    def boundary(self, step: int) -> None:
        """Repeat the changes that an earlier attempt made before this step."""
        if not self._entries:  # nearly always
            return
        due = [entry for entry in self._entries if entry["step"] == step and "skip" not in entry]
        for entry in due:
            self._make(entry)
            self._entries.remove(entry)

    def skips(self, step: int) -> bool:
        """Whether an earlier attempt dropped this backward. Call it once per backward."""
        self._call = self._call + 1 if step == self._step else 0
        self._step, self._trouble = step, None
        for entry in self._entries:
            if (entry["step"], entry.get("call", 0)) == (step, self._call) and "skip" in entry:
                self._make(entry)
                self._entries.remove(entry)
                return True
        return False

    def _make(self, change: Mapping[str, Any]) -> None:
        for thing in self._tracked.values():
            if "lr" in change and isinstance(thing, torch.optim.Optimizer):
                _lower(thing.param_groups, RATES, change["lr"])
            elif "lr" in change and (hasattr(thing, "base_lrs") or hasattr(thing, "_schedulers")):
                for scheduler in _with_parts(thing):
                    _lower([vars(scheduler)], ("base_lrs", "_last_lr"), change["lr"])
            elif "scaler" in change and isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
                thing.load_state_dict(thing.state_dict() | {"scale": SCALE, "_growth_tracker": 0})
        if "amp" in change:
            self._ladder.set_amp(change["amp"])

    # The loss of a step

    def add_loss(self, loss: torch.Tensor) -> None:
        """Record the mean loss of a batch: a scalar tensor, for each rank that this process plays."""
        if self.is_on:
            self._recorded.append(loss)

    def forget_losses(self) -> None:
        """Forget the losses of a step that is computed once more."""
        self._recorded.clear()

    def flag_of_step(self, *, scaled: bool) -> int:
        """This rank's flag in the vote; 0 when all is well.

        Args:
            scaled: a GradScaler is used, which skips a step by itself when its gradients are not finite.
        """
        batch_losses, self._losses = self._recorded, []
        self._recorded = []
        if self._arriving is None:
            return self._weigh([*map(float, batch_losses)], self._step, self._call, stepped=False)
        # What a vote before this one has seen holds: another rank had run out of memory, and the step is done once more.
        is_late = self._trouble is not None or any(self._weigh_late(arrived) for arrived in self._arrived())
        if batch_losses:
            self._arriving.append(PendingLosses(torch.stack(batch_losses), self._step, self._call, scaled=scaled))
        return LATE if is_late else 0

    def accept_step(self) -> None:
        """All ranks have taken the step: its losses are part of the reference for spikes."""
        for loss in filter(math.isfinite, self._losses):
            self._spike.learn(loss)
        self._losses = []

    def apply_remedy(self, worst: int) -> None:
        """All ranks drop this step, whose gradients are gone, and apply the next remedy.

        Args:
            worst: the highest flag of the vote.

        Raises:
            Unwell: the remedy needs a new attempt, or the weights are affected.
        """
        kind = training_health.SPIKE if worst == SPIKE else LOSS
        remedy = None if worst == LATE else training_health.next_remedy(self._policy, self._past, kind, self._step)
        if remedy is None or not remedy.is_in_process:
            raise Unwell(self._trouble)
        what = "far above the last ones" if worst == SPIKE else "no number"
        trouble = self._trouble or HealthIssue(kind, -1, self._step, f"loss is {what} at step {self._step}", self._call)
        change = training_health.change_of(remedy, trouble)
        self._make(change)
        self._remember(remedy.name, trouble.describe(), change)

    def _weigh(self, losses: list[float], step: int, call: int, *, stepped: bool) -> int:
        """The flag of these losses.

        Args:
            stepped: the weights have been updated since. That they are not finite then proves nothing, unless the step had been
                dropped before.
        """
        self._losses = losses
        if not all(map(math.isfinite, losses)):
            was_dropped = any(0 <= step - taken.seen <= training_health.SOON for taken in self._past)
            if (not stepped or was_dropped) and (bad_name := next(_not_finite(_weights(self._tracked)), None)):
                self._see(WEIGHTS, step, f"{bad_name} is no number at step {step}, and so the loss", 0)
                return LATE
            bad = next(loss for loss in losses if not math.isfinite(loss))
            self._see(LOSS, step, f"loss is {bad} at step {step}", call)
            return NOT_FINITE
        for loss in losses:
            if not (reason := self._spike.check(loss)):
                continue
            if training_health.next_remedy(self._policy, self._past, training_health.SPIKE, step) is None:
                self._spike.forget()  # no remedy has helped, so this is the new level of the loss
                return 0
            self._see(training_health.SPIKE, step, f"{reason} at step {step}", call)
            return SPIKE
        return 0

    def _weigh_late(self, arrived: PendingLosses) -> int:
        flag = self._weigh(arrived.losses.tolist(), arrived.step, arrived.call, stepped=not arrived.scaled)
        if not flag:
            self.accept_step()
        remedy = training_health.next_remedy(self._policy, self._past, LOSS, arrived.step)
        left_out = flag == NOT_FINITE and arrived.scaled and next(_not_finite(self._buffers()), None) is None
        is_known = any((taken.step, taken.remedy) == (arrived.step, "skip") for taken in self._past)
        if left_out and (is_known or (remedy and remedy.name == "skip")):
            assert self._trouble
            if not is_known:
                self._remember("skip", f"{self._trouble.describe()}; the GradScaler skipped it", {"step": arrived.step})
            self._trouble = None
            return 0
        return flag

    def _remember(self, remedy: str, why: str, change: Mapping[str, Any]) -> None:
        self._past.append(PastRemedy(change["step"], remedy, why, change["step"]))
        message = RemedyApplied(self._attempt, remedy, why, dict(change))
        self._ladder.changes.add(message, tells=self._rank == 0 or self._arriving is not None)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Of the tracked modules, as BatchNorm's statistics: a forward has changed them, whoever leaves the step out."""
        modules = {name: thing for name, thing in self._tracked.items() if isinstance(thing, torch.nn.Module)}
        buffers = {f"{name}.{key}": item for name, module in modules.items() for key, item in module.named_buffers()}
        return {name: item for name, item in buffers.items() if name not in self._never_finite}

    def _arrived(self, *, wait: bool = False) -> Iterator[PendingLosses]:
        while self._arriving and (wait or len(self._arriving) > BEHIND or self._arriving[0].is_there()):
            arrived = self._arriving.popleft()
            arrived.wait()
            yield arrived

    def _see(self, kind: str, step: int, what: str, call: int) -> None:
        self._trouble = HealthIssue(kind, self._rank, step, what, call, self._since)
        self._send(
            JournalEntry(
                self._attempt, EventKind.HEALTH_ISSUE, {"rank": str(self._rank), "step": str(step), "what": what}
            )
        )

    # The weights

    def set_baseline(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Learn the state at the beginning: tensors that are not finite then are so on purpose."""
        self._never_finite = set(_not_finite(tensors))

    def check_state(self, tensors: Mapping[str, torch.Tensor], step: int, vote: Callable[[int], int]) -> float:
        """Check this rank's share of the state before a save at `step`. All ranks call it together.

        Args:
            vote: the highest flag of all ranks.

        Returns:
            Seconds that the check took, without the vote.

        Raises:
            Unwell: on all ranks, when a loss or tensor of any rank is not finite.
        """
        began_s = time.monotonic()
        flags = [self._weigh_late(arrived) for arrived in self._arrived(wait=True)]
        if not any(flags):
            checked_tensors = {name: tensor for name, tensor in tensors.items() if name not in self._never_finite}
            if bad_name := next(_not_finite(checked_tensors), None):
                self._see(WEIGHTS, step, f"{bad_name} is no number at step {step}: not saved", 0)
                flags.append(LATE)
        took_s = time.monotonic() - began_s
        if vote(LATE if any(flags) else 0):
            raise Unwell(self._trouble)
        self._since = step
        return took_s


class PendingLosses:
    """Losses on their way to the host.

    Attributes:
        losses: shape (backwards of the step,); valid once `is_there` returns true.
        step, call: of the backward.
        scaled: with a GradScaler.
    """

    def __init__(self, losses: torch.Tensor, step: int, call: int, *, scaled: bool) -> None:
        self.step, self.call, self.scaled = step, call, scaled
        self._copy = HostCopy(losses)
        self.losses, self.is_there, self.wait = self._copy.values, self._copy.is_complete, self._copy.wait


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names of the tensors that have a value that is not finite.

    A sum shows it in one pass, with one synchronisation per device; a sum that overflows is checked element by element. Optimizers
    keep step counters on the CPU beside moments on the GPU, and moving each of them would be a synchronisation each.
    Of sharded tensors this rank's pieces count.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in ((name, local_tensors.local(tensor)) for name, tensor in tensors.items()):
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor
    with torch.no_grad():
        finite = [torch.isfinite(torch.stack([_sum(item) for item in group.values()])) for group in by_device.values()]
        for group, well in zip(by_device.values(), finite, strict=True):  # wait only after all devices have their work
            for (name, tensor), is_well in zip(group.items(), well.tolist(), strict=True):
                if not is_well and not torch.isfinite(tensor.float()).all():
                    yield name


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else None).float()


def _weights(tracked: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    modules = {name: thing for name, thing in tracked.items() if isinstance(thing, torch.nn.Module)}
    return {f"{name}.{key}": weight for name, module in modules.items() for key, weight in module.named_parameters()}


def _lower(groups: list[dict[str, Any]], names: tuple[str, ...], by: float) -> None:
    for group in groups:
        for name in names:
            value = group.get(name)
            if isinstance(value, torch.Tensor):
                value.mul_(by)
            elif isinstance(value, list):
                group[name] = [rate * by for rate in value]
            elif isinstance(value, int | float):
                group[name] = value * by


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler and the schedulers inside it (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)
