"""A rank's eye on the training: losses and weights that are no numbers, spikes, and what all ranks do about them together.

On the CPU a loss is read at once, and the ranks vote before the step: they drop its gradients together, and no weight has
changed. On CUDA nobody waits for it: it is copied to the host and looked at a step or more later. By then the weights have taken
the step, unless a GradScaler has left it out, so all ranks end, and another attempt begins at the newest good state with that batch
left out.

A dropped batch goes through the script's loop as any other, now and whenever the step is done again: schedulers and counters
move on, `session.backward` returns NaN, and the optimizer finds no gradients (with a GradScaler: NaN, so that the scaler skips).

Before a save every rank looks at its share of modules and optimizers: a state that is no number is never saved.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from orchestrator.core import training_health
from orchestrator.core.codes import EventKind
from orchestrator.core.training_health import LOSS, WEIGHTS, Spike, Taken, Trouble
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.messages import JournalEntry, Message, RemedyApplied
from orchestrator.worker.host_copy import HostCopy
from orchestrator.worker.ladder import Ladder

SPIKE, NOT_FINITE, LATE = 1, 2, 3
"""What a rank says in the vote of a step: drop it; LATE: the weights have taken a bad step."""

BEHIND = 8
"""Losses on their way to the host; the oldest is waited for then, which was done long ago."""

SCALE = 65536.0
"""To which a GradScaler is reset: PyTorch's first. (Its own `init_scale` becomes the newest when it is restored.)"""

RATES = ("lr", "initial_lr", "max_lr", "min_lr")


class Unwell(RuntimeError):
    """This attempt ends, because the weights went bad or the remedy needs another one. `trouble`: what this rank saw."""

    def __init__(self, trouble: Trouble | None) -> None:
        super().__init__(trouble.what if trouble else "peerslost: another rank saw a loss or weight that is no number")
        self.trouble = trouble


class Health:
    """Args:
    late: losses are looked at when they have come to the host.
    """

    def __init__(
        self, launch: LaunchSpec, rank: int, ladder: Ladder, send: Callable[[Message], None], *, late: bool
    ) -> None:
        told = launch.health
        self._policy = [training_health.parse_remedy(written) for written in told.get("nan", ())]
        self._past = [Taken(**taken) for taken in told.get("past", ())]
        self._spike = Spike(told.get("spike"))
        self._entries = [entry for entry in launch.schedule if "settings" not in entry]
        self._attempt, self._rank, self._ladder, self._send = launch.attempt, rank, ladder, send
        self._arriving: deque[Arriving] | None = deque() if late else None
        self._tracked: Mapping[str, Any] = {}
        self._meant: set[str] = set()  # names of tensors that were no numbers from the start: masks, perhaps
        self._since = self._step = 0
        self._call = -1
        self._heard: list[torch.Tensor] = []
        self._losses: list[float] = []
        self._trouble: Trouble | None = None

    @property
    def is_on(self) -> bool:
        """Whether losses are looked at."""
        return bool(self._policy)

    # The schedule

    def begin(self, tracked: Mapping[str, Any], step: int) -> None:
        """Before the first step of an epoch: what an earlier attempt did up to here holds."""
        self._tracked = tracked
        for entry in self._entries:
            if entry["step"] < step and "amp" in entry:
                self._ladder.set_amp(entry["amp"])
        self._entries = [entry for entry in self._entries if entry["step"] >= step]
        self._since = max(self._since, step)
        self.boundary(step)

    def boundary(self, step: int) -> None:
        """What an earlier attempt did before this step is done again."""
        due = [entry for entry in self._entries if entry["step"] == step and "skip" not in entry]
        for entry in due:
            self._make(entry)
            self._entries.remove(entry)

    def leaves_out(self, step: int) -> bool:
        """Whether an earlier attempt dropped this backward; once a backward."""
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

    def hear(self, loss: torch.Tensor) -> None:
        """The mean loss of a batch, of each rank that this process plays."""
        if self.is_on:
            self._heard.append(loss)

    def listen(self) -> None:
        """What was heard of a step that is done once more is forgotten."""
        self._heard.clear()

    def judge(self, *, scaled: bool) -> int:
        """This rank's word in the vote: 0 when all is well.

        Args:
            scaled: a GradScaler leaves a step out by itself when its gradients are no numbers.
        """
        heard, self._losses = self._heard, []
        self._heard = []
        if self._arriving is None:
            return self._weigh([float(loss) for loss in heard], self._step, self._call, stepped=False)
        flag = max((self._weigh_late(arrived) for arrived in self._arrived()), default=0)
        if heard:
            self._arriving.append(Arriving(torch.stack(heard), self._step, self._call, scaled=scaled))
        return LATE if flag else 0

    def learn(self) -> None:
        """All ranks took the step."""
        for loss in filter(math.isfinite, self._losses):
            self._spike.learn(loss)
        self._losses = []

    def treat(self, worst: int) -> None:
        """All ranks drop this step, whose gradients are gone.

        Raises: Unwell where that is not enough.
        """
        kind = training_health.SPIKE if worst == SPIKE else LOSS
        remedy = None if worst == LATE else training_health.next_remedy(self._policy, self._past, kind, self._step)
        if remedy is None or not remedy.is_in_process:
            raise Unwell(self._trouble)
        what = "far above the last ones" if worst == SPIKE else "no number"
        trouble = self._trouble or Trouble(kind, -1, self._step, f"loss is {what} at step {self._step}", self._call)
        change = training_health.change_of(remedy, trouble)
        self._make(change)
        self._remember(remedy.name, trouble.said(), change)

    def _weigh(self, losses: list[float], step: int, call: int, *, stepped: bool) -> int:
        """`stepped`: the weights have taken the step since. That they are bad then tells nothing, unless it was dropped before."""
        self._losses = losses
        if bad := [loss for loss in losses if not math.isfinite(loss)]:
            was_dropped = any(0 <= step - taken.seen <= training_health.SOON for taken in self._past)
            if (not stepped or was_dropped) and (found := next(_not_finite(_weights(self._tracked)), None)):
                self._see(WEIGHTS, step, f"{found} is no number at step {step}, and so the loss", 0)
                return LATE
            self._see(LOSS, step, f"loss is {bad[0]} at step {step}", call)
            return NOT_FINITE
        for loss in losses:
            if not (said := self._spike.sees(loss)):
                continue
            if training_health.next_remedy(self._policy, self._past, training_health.SPIKE, step) is None:
                self._spike.forget()  # no remedy helped: this is its level now
                return 0
            self._see(training_health.SPIKE, step, f"{said} at step {step}", call)
            return SPIKE
        return 0

    def _weigh_late(self, arrived: Arriving) -> int:
        flag = self._weigh(arrived.losses.tolist(), arrived.step, arrived.call, stepped=not arrived.scaled)
        if not flag:
            self.learn()
        remedy = training_health.next_remedy(self._policy, self._past, LOSS, arrived.step)
        left_out = flag == NOT_FINITE and arrived.scaled and next(_not_finite(self._buffers()), None) is None
        if left_out and remedy and remedy.name == "skip":
            assert self._trouble
            self._remember(remedy.name, f"{self._trouble.said()}; the GradScaler skipped it", {"step": arrived.step})
            self._trouble = None
            return 0
        return flag

    def _remember(self, remedy: str, why: str, change: Mapping[str, Any]) -> None:
        self._past.append(Taken(change["step"], remedy, why, change["step"]))
        told = RemedyApplied(self._attempt, remedy, why, dict(change))
        self._ladder.changes.add(told, tells=self._rank == 0 or self._arriving is not None)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Of the tracked modules, as BatchNorm's statistics: a forward has changed them, whoever leaves the step out."""
        modules = {name: thing for name, thing in self._tracked.items() if isinstance(thing, torch.nn.Module)}
        found = {f"{name}.{key}": item for name, module in modules.items() for key, item in module.named_buffers()}
        return {name: item for name, item in found.items() if name not in self._meant}

    def _arrived(self, *, wait: bool = False) -> Iterator[Arriving]:
        while self._arriving and (wait or len(self._arriving) > BEHIND or self._arriving[0].is_there()):
            arrived = self._arriving.popleft()
            arrived.wait()
            yield arrived

    def _see(self, kind: str, step: int, what: str, call: int) -> None:
        self._trouble = Trouble(kind, self._rank, step, what, call, self._since)
        self._send(
            JournalEntry(
                self._attempt, EventKind.HEALTH_ISSUE, {"rank": str(self._rank), "step": str(step), "what": what}
            )
        )

    # The weights

    def know(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The state as it begins: what is no number then is meant so."""
        self._meant = set(_not_finite(tensors))

    def look(self, tensors: Mapping[str, torch.Tensor], step: int, vote: Callable[[int], int]) -> float:
        """Before a save at `step`, all ranks together, each at its share of the state. Returns the seconds that it took.

        Raises: Unwell on all ranks.
        """
        began_s = time.monotonic()
        flags = [self._weigh_late(arrived) for arrived in self._arrived(wait=True)]
        if not any(flags):
            shown = {name: tensor for name, tensor in tensors.items() if name not in self._meant}
            if found := next(_not_finite(shown), None):
                self._see(WEIGHTS, step, f"{found} is no number at step {step}: not saved", 0)
                flags.append(LATE)
        took_s = time.monotonic() - began_s
        if vote(LATE if any(flags) else 0):
            raise Unwell(self._trouble)
        self._since = step
        return took_s


class Arriving:
    """Losses on their way to the host."""

    def __init__(self, losses: torch.Tensor, step: int, call: int, *, scaled: bool) -> None:
        self.step, self.call, self.scaled = step, call, scaled
        self._copy = HostCopy(losses)
        self.losses, self.is_there, self.wait = self._copy.values, self._copy.is_complete, self._copy.wait


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names of tensors that hold what is no number. A sum tells, in one pass and one wait a device, unless it overflows.

    Optimizers keep counters of steps on the CPU beside moments on the GPU: moving each of them there would be a wait each.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor
    with torch.no_grad():
        finite = [torch.isfinite(torch.stack([_sum(item) for item in group.values()])) for group in by_device.values()]
        for group, well in zip(by_device.values(), finite, strict=True):  # waits begin when all devices are at work
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
    """A scheduler and those that it leads (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)
