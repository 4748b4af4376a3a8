"""This rank's position on the memory ladder: the settings in force, and their changes together with all ranks.

A *rung* is one step of the plan's ladder of settings that need less memory (core/memory/memory_ladder.py). The ranks choose the
same rung without communication: they hold the same settings and facts, and take it at the same moment, after a vote in a step or at
a boundary on which the board has agreed. One rank reports it to the supervisor: the first that lacked memory, else rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from kgorch.core.codes import EventKind
from kgorch.core.memory import memory_ladder
from kgorch.core.memory.memory_ladder import MemoryFacts, Rung, Settings
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry, Message, RungApplied
from kgorch.worker.memory import activation_checkpointing
from kgorch.worker.memory.activation_checkpointing import ActivationCheckpointing
from kgorch.worker.memory.adjustment_log import AdjustmentLog
from kgorch.worker.memory.oom import LadderEnds

WITH_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
"""Options of a DataLoader that need loading workers."""


class Ladder:
    """The memory settings of one rank.

    Attributes:
        settings: in force now.
        activations: activation checkpointing of the tracked modules, switched as the settings say.
        changes: rungs and remedies so far, for the manifest.
    """

    def __init__(self, launch: LaunchSpec, device: torch.device, send: Callable[[Message], None]) -> None:
        self.settings = self._base = Settings.from_dict(launch.settings)
        self._rungs: Sequence[Rung] = [memory_ladder.parse_rung(rung) for rung in launch.ladder]
        self._facts = MemoryFacts(device=device.type)
        self._schedule = [change for change in launch.schedule if "settings" in change]
        self._attempt, self._stage, self._device, self._send = launch.attempt, launch.stage, device, send
        self.changes = AdjustmentLog(launch, send)
        self.activations = ActivationCheckpointing({})
        self._reported: MemoryFacts | None = None
        self._splits = True  # batches, on this rank

    @property
    def has_rungs(self) -> bool:
        """Whether the plan has a ladder."""
        return bool(self._rungs)

    @property
    def is_microbatched(self) -> bool:
        """Whether the largest share of a step is computed in parts. The same on every rank."""
        return self.settings.microbatch is not None and self.settings.microbatch < self._facts.batch

    @property
    def has_batchnorm(self) -> bool:
        """A tracked module has a BatchNorm that is not frozen: then a microbatch changes the result."""
        return self._facts.batchnorm

    @property
    def most_workers(self) -> int:
        """The most loading workers that a loader of the script has asked for."""
        return self._facts.num_workers

    def loader_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """A DataLoader's options as far as the settings allow what the script asks for."""
        allowed = dict(options)
        allowed["num_workers"] = self.asked_workers(allowed.get("num_workers", 0))
        if not allowed["num_workers"]:  # DataLoader refuses these without workers
            allowed = {name: value for name, value in allowed.items() if name not in WITH_WORKERS}
        if self.settings.pin_memory is False:
            allowed["pin_memory"] = False
        return allowed

    def autocast(self, dtype: torch.dtype) -> tuple[torch.dtype, bool]:
        """The type that autocast uses instead of `dtype` after a NaN, and whether it is still allowed."""
        amp = self.settings.amp
        if amp != "bf16":
            return dtype, amp != "off"
        # GPUs before Ampere have no bfloat16 arithmetic.
        is_slow = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) < (8, 0)
        return torch.bfloat16, not is_slow

    def try_out(self, settings: Settings) -> None:
        """Apply settings for a trial (probe/probe.py), and drop the schedule."""
        self._schedule.clear()
        self._apply(settings)

    def set_modules(self, tracked: Mapping[str, nn.Module]) -> None:
        """Find out what the tracked modules allow. An average of weights is left out, because it is never trained."""
        trained = {name: module for name, module in tracked.items() if not isinstance(module, AveragedModel)}
        self.activations = ActivationCheckpointing(trained)
        has_batchnorm = activation_checkpointing.has_batchnorm(trained.values())
        self._facts = replace(self._facts, blocks=len(self.activations.blocks), batchnorm=has_batchnorm)

    def asked_workers(self, count: int) -> int:
        """The number of loading workers that the settings allow of those that the script asks for."""
        self._facts = replace(self._facts, num_workers=max(self._facts.num_workers, count))
        return self.settings.workers(count)

    def begin(self, step: int, samples: int) -> None:
        """Apply the settings that were in force at this step in earlier attempts.

        Args:
            samples: of the largest rank's share of the step.
        """
        self._facts = replace(self._facts, batch=samples)
        due = [change for change in self._schedule if change["step"] <= step]
        self._schedule = [change for change in self._schedule if change["step"] > step]
        if due:
            self._apply(Settings.from_dict(due[-1]["settings"]))

    @property
    def next_change(self) -> int | None:
        """The step before which the schedule changes the settings next; None for never."""
        return self._schedule[0]["step"] if self._schedule else None

    def change(self, step: int) -> None:
        """Repeat the changes that an earlier attempt made before this step."""
        while self._schedule and self._schedule[0]["step"] <= step:
            self._apply(Settings.from_dict(self._schedule.pop(0)["settings"]))

    def report_lack(self, rank: int, step: int, said: str) -> None:
        """Record an out-of-memory in the journal, before anything else can fail."""
        facts = {"rank": str(rank), "step": str(step), "what": said}
        self._send(JournalEntry(self._attempt, EventKind.OUT_OF_MEMORY, facts))

    def report_facts(self, rank: int, *, splits: bool = True) -> None:
        """Send the facts on which the supervisor's choice of a rung depends, when they have changed.

        Args:
            splits: False from the first batch on that could not be split. The other ranks do not know of it, so the rungs that
                ranks take together do not depend on it.
        """
        self._splits = self._splits and splits
        facts = replace(self._facts, divides=self._facts.divides and self._splits)
        if rank == 0 and facts != self._reported:
            self._reported = facts
            words = {name: str(value) for name, value in facts.as_dict().items()} | {"stage": self._stage}
            self._send(JournalEntry(self._attempt, EventKind.MEMORY_FACTS, words))

    def report_use(self, rank: int, *, is_used: bool) -> None:
        """The same on all ranks: whether the script has its batches computed by session.backward. Else no microbatch helps it."""
        self._facts = replace(self._facts, divides=is_used)
        self.report_facts(rank)

    def down(self, step: int, why: str, *, tells: bool, must: bool) -> None:
        """Take the next rung, before `step`.

        Args:
            why: for the journal.
            tells: this rank reports it to the supervisor.
            must: memory has run out. Otherwise it may run out soon: then a rung that needs a new process or changes the result is
                not taken.

        Raises:
            LadderEnds: `must`, and no rung is left that this process can take.
        """
        choice = memory_ladder.next_rung(self._rungs, self.settings, self._base, self._facts)
        if choice is None or not choice[0].is_in_process or (choice[0].changes_result and not must):
            if must:
                raise LadderEnds(why)
            return
        rung, after = choice
        self._schedule.clear()  # an earlier rung invalidates what followed it in earlier attempts
        self._apply(after)
        changes = rung.changes_result
        message = RungApplied(self._attempt, step, rung.name, why, after.as_dict(), changes_result=changes)
        self.changes.add(message, tells=tells)

    def up(self, step: int, *, tells: bool) -> None:
        """Undo the last rung that was taken in this process; nothing where there is none."""
        above = memory_ladder.levels(
            memory_ladder.in_order(self._rungs, self._facts), self.settings, self._base, self._facts
        )
        if len(above) < 2:
            return
        self._schedule.clear()
        self._apply(above[-2])
        why = "there has been room for long"
        message = RungApplied(self._attempt, step, "one rung up", why, above[-2].as_dict(), up=True)
        self.changes.add(message, tells=tells)

    def empty_cache(self, step: int) -> None:
        """Empty the allocator's cache, if the settings ask for it before this step."""
        if self.settings.empty_cache and step % self.settings.empty_cache == 0 and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def set_amp(self, amp: str) -> None:
        """Set the autocast type: a remedy against NaN (health/loss_guard.py) that no rung changes."""
        self.settings = replace(self.settings, amp=amp)

    def _apply(self, settings: Settings) -> None:
        if settings.activation_checkpointing:
            self.activations.switch_on()
        else:
            self.activations.switch_off()
        self.settings = replace(settings, amp=self.settings.amp)


def manifest_entries(settings: Settings) -> dict[str, Any]:
    """The settings on which the bits of a training depend, for `versions` of a manifest."""
    return {
        "microbatch": str(settings.microbatch or "whole"),
        "activations": "dropped" if settings.activation_checkpointing else "kept",
    }
