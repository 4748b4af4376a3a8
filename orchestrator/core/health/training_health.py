"""What is done about a health issue: a loss or weight that is not finite, or a loss far above the recent ones.

`[health] nan` of the plan is a list of *remedies*. An issue soon after the previous one takes the next remedy; one after a long
quiet time starts at the first again; when none is left, the run ends with the first cause. The choice depends on the past alone
(the steps and the remedies applied there), so ranks with the same past choose the same remedy without communication.

A remedy becomes a *change*, an entry of the schedule that later attempts repeat at the same step (worker/health/loss_guard.py):

    {"step": 41, "skip": true}               the batch's gradients are dropped: its step changes nothing
    {"step": 41, "skip": true, "lr": 0.5}    and learning rates are halved from there on
    {"step": 40, "amp": "bf16"}              before step 40; also {"scaler": "reset"}, {"arguments": {…}} of the stage

Dropping a batch costs that batch. An issue that is detected only after it has changed the weights also costs the steps since the
newest good state, because another attempt starts there.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LOSS, SPIKE, WEIGHTS = "loss", "spike", "weights"
"""Kinds of issues: a loss that is not finite, a loss far above the recent ones, weights that are not finite at a save."""

DEFAULT = ("skip", "skip", "skip", "rollback", "lr/2")
"""The remedies of a plan without a list: a handful of bad samples is skipped, then the learning rate is to blame."""

SOON, QUIET = 50, 1000
"""Steps from one issue to the next. Up to SOON the last remedy did not help; beyond QUIET the issues are unrelated."""

WINDOW, WARM_UP = 200, 50
"""Recent losses that a spike is compared with, at most and at least."""

EXAMPLES = ("skip", "rollback", "reset_scaler", "amp=bf16", "amp=off", "lr/2", "{ set = { amp = false } }")


@dataclass(frozen=True, slots=True)
class Remedy:
    """One entry of `[health] nan`.

    Attributes:
        name: as the plan writes it, or `set amp=false`.
        change: of the training, besides dropping the batch.
    """

    name: str
    change: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_in_process(self) -> bool:
        """Whether the ranks can apply it without another attempt, as long as the weights are good."""
        return self.name != "rollback" and "arguments" not in self.change

    def helps(self, kind: str) -> bool:
        """Whether it can help against an issue of that kind. A spike is a finite loss: no scaler and no number format causes it."""
        return kind != SPIKE or not self.change.keys() & {"scaler", "amp"}


@dataclass(frozen=True, slots=True)
class HealthIssue:
    """What a rank detected. Its record holds it as JSON (`as_dict`).

    Attributes:
        kind: LOSS, SPIKE or WEIGHTS.
        rank: that detected it; -1 for another rank than the one that reports it.
        step: at which it was detected.
        what: in words.
        call: which backward of the step it was in, from 0.
        since: the newest step at which the weights were good.
    """

    kind: str
    rank: int
    step: int
    what: str
    call: int = 0
    since: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def begins(self) -> int:
        """The first step that may have caused it."""
        return self.since if self.kind == WEIGHTS else self.step

    def describe(self) -> str:
        return f"rank {self.rank}: {self.what}" if self.rank >= 0 else f"another rank: {self.what}"


@dataclass(frozen=True, slots=True)
class PastRemedy:
    """A remedy that was applied.

    Attributes:
        step: first step that may have caused the issue.
        remedy: name.
        why: the issue in words.
        seen: step at which the issue was detected.
        went_back: another attempt began, and nothing was left out or changed: weights had gone bad since `step`.
    """

    step: int
    remedy: str
    why: str
    seen: int
    went_back: bool = False


def parse_remedy(written: str | Mapping[str, Any]) -> Remedy:
    """Parse a remedy of the plan's list: a string, or a table with `set`.

    Raises: ValueError saying what is expected.
    """
    if isinstance(written, str):
        text = re.sub(r"\s", "", written)
        if text in ("skip", "rollback"):
            return Remedy(text)
        if text == "reset_scaler":
            return Remedy(text, {"scaler": "reset"})
        if match := re.fullmatch("amp=(bf16|off)", text):
            return Remedy(text, {"amp": match[1]})
        if match := re.fullmatch(r"lr/([2-9]|[1-9]\d{1,2})", text):
            return Remedy(text, {"lr": 1 / int(match[1])})
    elif written.keys() == {"set"} and isinstance(written["set"], Mapping) and written["set"]:
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in written["set"].items())
        return Remedy(f"set {text}", {"arguments": dict(written["set"])})
    raise ValueError(f"no remedy: {written!r:.60}; expected one like {', '.join(EXAMPLES)}")


def next_remedy(policy: Iterable[Remedy], past: Sequence[PastRemedy], kind: str, step: int) -> Remedy | None:
    """The remedy for an issue that began at `step` or later; None when none is left."""
    remedies = list(policy)
    used, went_back = set[int](), False  # places in the list
    for before, after in zip(past, [*(item.step for item in past), step][1:], strict=True):
        steps = after - before.seen
        if steps > QUIET:
            used.clear()
        elif steps <= SOON and (place := _place_of(before, remedies, used)) is not None:
            used.add(place)
        went_back = after <= before.seen and (went_back or before.went_back)  # the same stretch of steps again
    names = [remedy.name for remedy in remedies]
    for place, remedy in enumerate(remedies):
        # Where weights went wrong a skip leaves nothing out (`name_of`): it would compute the same once more, as would a rollback
        # behind one. Of rollbacks alone the plan may ask for several.
        is_vain = kind == WEIGHTS and went_back and remedy.name in ("skip", "rollback") and "skip" in names[: place + 1]
        if place not in used and remedy.helps(kind) and not is_vain:
            return remedy
    return None


def _place_of(applied: PastRemedy, remedies: Sequence[Remedy], used: Container[int]) -> int | None:
    """Where in the list an applied remedy stands that is not used yet; None where the plan has another list now."""
    names = (applied.remedy, "skip") if applied.went_back else (applied.remedy,)
    return next((place for place, item in enumerate(remedies) if place not in used and item.name in names), None)


def related_remedies(past: Sequence[PastRemedy], step: int) -> list[PastRemedy]:
    """The past remedies that an issue at `step` continues, oldest first."""
    chain: list[PastRemedy] = []
    for item in reversed(past):
        if step - item.seen > QUIET:
            break
        chain.insert(0, item)
        step = item.step
    return chain


def change_of(remedy: Remedy, issue: HealthIssue) -> dict[str, Any]:
    """The schedule's entry for a remedy."""
    if issue.kind == WEIGHTS:  # which batch did it is not known: the change starts at the last good state
        return {"step": issue.since, "seen": issue.step, **remedy.change}
    call = {"call": issue.call} if issue.call else {}
    return {"step": issue.step, "skip": True, **call, **remedy.change}


def name_of(remedy: str, change: Mapping[str, Any]) -> str:
    """What a remedy has done, by its change: where weights went wrong nothing is left out, and `skip` only goes back."""
    return "rollback" if not changes_result(change) else remedy


def changes_result(change: Mapping[str, Any]) -> bool:
    """Whether a training with this change ends with another result."""
    return bool(change.keys() - {"step", "seen", "call"})


def check_change(change: Mapping[str, Any]) -> None:
    """Check an entry of an untrusted source, without its step. Raises: ValueError for what change_of() would not return."""
    counts = all(type(change.get(name, 0)) is int for name in ("seen", "call"))
    lr, arguments = change.get("lr", 1.0), change.get("arguments", {})
    has_names = isinstance(arguments, Mapping) and all(isinstance(name, str) for name in arguments)
    lowers = isinstance(lr, float) and 0 < lr <= 1
    if not (counts and has_names and lowers and change.get("amp", "off") in ("bf16", "off") and "step" not in change):
        raise ValueError(f"no change of a remedy: {dict(change)!r:.80}")


def exhaustion_cause(past: Sequence[PastRemedy], issue: HealthIssue) -> str:
    """The cause of the end of a run without remedies left: the first of the related issues, and what was done about it."""
    if not (before := related_remedies(past, issue.begins)):
        return f"{issue.describe()} ([health] nan names no remedy)"
    remedies = ", ".join(item.remedy for item in before)
    return f"{before[0].why} (the remedies of [health] nan are exhausted: {remedies}; then {issue.describe()})"


class SpikeDetector:
    """Detects a loss further above the median of the recent ones than `factor` robust standard deviations.

    The deviation is the median of distances from the median, times 1.4826 as for a normal distribution. It is at least 1% of the
    median, or a loss that has hardly moved would be a spike as soon as it does.

    Args:
        factor: number of deviations; None detects none.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        # The same losses by time and by size: a median each step must not cost a sort each step.
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def recent(self) -> list[float]:
        """The losses that a next one is compared with, oldest first."""
        return list(self._recent)

    def check(self, loss: float) -> str:
        """What is wrong with the loss, in words; "" for nothing."""
        if self._factor is None:
            return ""
        # The deviation needs a sort, so it is computed for the highest tenth alone.
        if (count := len(self._sorted)) >= WARM_UP and loss > self._sorted[count * 9 // 10]:
            middle = self._sorted[count // 2]
            spread = 1.4826 * sorted(abs(value - middle) for value in self._sorted)[count // 2]
            away = (loss - middle) / max(spread, 0.01 * abs(middle), 1e-30)
            if away > self._factor:
                return f"loss {loss:.4g} is {away:.0f} deviations above the last {count} (median {middle:.4g})"
        return ""

    def learn(self, loss: float) -> None:
        """Add the loss of a step that all ranks have taken to the recent ones."""
        if self._factor is not None:
            self._recent.append(loss)
            bisect.insort(self._sorted, loss)
            if len(self._recent) > WINDOW:
                del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def forget(self) -> None:
        """Start anew: the loss is on another level now, and no remedy has changed that."""
        self._recent.clear()
        self._sorted.clear()
