"""This rank's place on the memory ladder: the settings in force, and going over to others together with all ranks.

The ranks choose alike without asking each other (core/memory_ladder.py): they hold the same settings and the same facts, and take
a rung at the same moment, after a vote in a step or at a boundary on which the board agreed. One tells the supervisor: the
first that lacked memory, else rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from orchestrator.core import memory_ladder
from orchestrator.core.codes import EventKind
from orchestrator.core.memory_ladder import Facts, Rung, Settings
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.messages import JournalEntry, Message, RungApplied
from orchestrator.worker import activation
from orchestrator.worker.activation import Activations
from orchestrator.worker.changes import Changes
from orchestrator.worker.oom import LadderEnds


class Ladder:
    """Attributes:
    settings: what is in force now. activations: of the tracked modules, switched as the settings say.
    changes: of settings and by remedies, for the manifest.
    """

    def __init__(self, launch: LaunchSpec, device: torch.device, send: Callable[[Message], None]) -> None:
        self.settings = self._base = Settings.of(launch.settings)
        self._rungs: Sequence[Rung] = [memory_ladder.parse_rung(rung) for rung in launch.ladder]
        self._facts = Facts(device=device.type)
        self._schedule = [change for change in launch.schedule if "settings" in change]
        self._attempt, self._stage, self._device, self._send = launch.attempt, launch.stage, device, send
        self.changes = Changes(launch, send)
        self.activations = Activations({})
        self._told: Facts | None = None

    @property
    def is_there(self) -> bool:
        return bool(self._rungs)

    @property
    def is_microbatched(self) -> bool:
        """Whether the largest share of a step is taken in parts: the same answer on every rank."""
        return self.settings.microbatch is not None and self.settings.microbatch < self._facts.batch

    @property
    def has_batchnorm(self) -> bool:
        return self._facts.batchnorm

    @property
    def most_workers(self) -> int:
        return self._facts.num_workers

    def hold(self, settings: Settings) -> None:
        """Go over to settings that are only tried out (worker/probe.py)."""
        self._schedule.clear()
        self._apply(settings)

    def learn(self, tracked: Mapping[str, nn.Module]) -> None:
        """What the tracked modules allow; once they are all built. An average of weights is never trained."""
        trained = {name: module for name, module in tracked.items() if not isinstance(module, AveragedModel)}
        self.activations = Activations(trained)
        has_batchnorm = activation.has_batchnorm(trained.values())
        self._facts = replace(self._facts, blocks=len(self.activations.blocks), batchnorm=has_batchnorm)

    def asked_workers(self, count: int) -> int:
        """A loader's workers as they stand, of as many as the script asks for."""
        self._facts = replace(self._facts, num_workers=max(self._facts.num_workers, count))
        return self.settings.workers(count)

    def begin(self, step: int, samples: int) -> None:
        """Before the first step, once it is known: go over to what was in force there."""
        self._facts = replace(self._facts, batch=samples)
        passed = [change for change in self._schedule if change["step"] <= step]
        self._schedule = [change for change in self._schedule if change["step"] > step]
        if passed:
            self._apply(Settings.of(passed[-1]["settings"]))

    @property
    def next_change(self) -> int | None:
        """The step before which the schedule changes something."""
        return self._schedule[0]["step"] if self._schedule else None

    def change(self, step: int) -> None:
        """What an earlier attempt did before this step is done again."""
        while self._schedule and self._schedule[0]["step"] <= step:
            self._apply(Settings.of(self._schedule.pop(0)["settings"]))

    def tell_lack(self, rank: int, step: int, said: str) -> None:
        """For the journal, before anything else can go wrong."""
        facts = {"rank": str(rank), "step": str(step), "what": said}
        self._send(JournalEntry(self._attempt, EventKind.OUT_OF_MEMORY, facts))

    def tell(self, rank: int) -> None:
        """What the supervisor's choice hangs on, when it has changed."""
        if rank == 0 and self._facts != self._told:
            self._told = self._facts
            facts = {name: str(value) for name, value in self._facts.as_dict().items()} | {"stage": self._stage}
            self._send(JournalEntry(self._attempt, EventKind.MEMORY_FACTS, facts))

    def down(self, step: int, why: str, *, tells: bool, must: bool) -> None:
        """Take the next rung, before `step`.

        Args:
            tells: this rank tells the supervisor.
            must: memory has run out; else it only may soon, and what needs another process is left.
        Raises: LadderEnds.
        """
        found = memory_ladder.next_rung(self._rungs, self.settings, self._base, self._facts)
        if found is None or not found[0].is_in_process or (found[0].changes_result and not must):
            if must:
                raise LadderEnds(why)
            return
        rung, after = found
        self._schedule.clear()  # what followed then does not follow now
        self._apply(after)
        changes = rung.changes_result
        told = RungApplied(self._attempt, step, rung.name, why, after.as_dict(), changes_result=changes)
        self.changes.add(told, tells=tells)

    def up(self, step: int, *, tells: bool) -> None:
        """Undo the last rung that was taken in process."""
        above = memory_ladder.levels(
            memory_ladder.in_order(self._rungs, self._facts), self.settings, self._base, self._facts
        )
        if len(above) < 2:
            return
        self._schedule.clear()
        self._apply(above[-2])
        why = "there has been room for long"
        told = RungApplied(self._attempt, step, "one rung up", why, above[-2].as_dict(), up=True)
        self.changes.add(told, tells=tells)

    def tidy(self, step: int) -> None:
        """Between two steps: the allocator's cache, where the settings say so."""
        if self.settings.empty_cache and step % self.settings.empty_cache == 0 and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def set_amp(self, amp: str) -> None:
        """What is asked for after a NaN (worker/health.py); no rung changes it."""
        self.settings = replace(self.settings, amp=amp)

    def _apply(self, settings: Settings) -> None:
        if settings.activation_checkpointing:
            self.activations.switch_on()
        else:
            self.activations.switch_off()
        self.settings = replace(settings, amp=self.settings.amp)


def plain_of(settings: Settings) -> dict[str, Any]:
    """For a manifest's versions: what a training's bits hang on besides its plan."""
    return {
        "microbatch": str(settings.microbatch or "whole"),
        "activations": "dropped" if settings.activation_checkpointing else "kept",
    }
