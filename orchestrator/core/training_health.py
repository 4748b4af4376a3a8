"""What is done when a training goes bad: a loss or a weight that is no number, a loss far above those before it.

`[health] nan` of the plan is a list of *remedies*. A trouble soon after the one before takes the next of them; one after long
quiet begins at the first again; when none is left, the run ends with the first cause. What has been done is told by the
past alone (steps and the remedies taken there), so ranks that hold the same past choose alike without asking each other.

A remedy becomes a *change*, an entry of the schedule that later attempts do again at the same step (worker/health.py):

    {"step": 41, "skip": true}               the batch's gradients are dropped: its step changes nothing
    {"step": 41, "skip": true, "lr": 0.5}    and rates are halved from there on
    {"step": 40, "amp": "bf16"}              before step 40; also {"scaler": "reset"}, {"arguments": {…}} of the stage

Dropping costs a batch; a trouble that was seen only when the weights had been changed by it costs the steps since the newest
good state besides, because another attempt begins there.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LOSS, SPIKE, WEIGHTS = "loss", "spike", "weights"
"""What went bad: a loss that is no number, a loss far above those before it, weights found bad at a save."""

DEFAULT = ("skip", "skip", "skip", "rollback", "lr/2")
"""Without a list in the plan: a handful of bad samples is left out, then the rate is to blame."""

SOON, QUIET = 50, 1000
"""Steps from one trouble to the next: up to SOON the last remedy did not help, beyond QUIET it is another matter."""

WINDOW, WARM_UP = 200, 50
"""Losses that a spike is measured against, and how many there must be."""

EXAMPLES = ("skip", "rollback", "reset_scaler", "amp=bf16", "amp=off", "lr/2", "{ set = { amp = false } }")


@dataclass(frozen=True, slots=True)
class Remedy:
    """Attributes:
    name: as the plan writes it, or `set amp=false`.
    change: what it makes of the training besides dropping the batch.
    """

    name: str
    change: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_in_process(self) -> bool:
        """Whether the ranks can take it without another attempt, as long as the weights are good."""
        return self.name != "rollback" and "arguments" not in self.change

    def helps(self, kind: str) -> bool:
        return kind != SPIKE or not self.change.keys() & {"scaler", "amp"}


@dataclass(frozen=True, slots=True)
class Trouble:
    """What a rank saw.

    Attributes:
        call: which of the step's backwards it was in. since: the newest step at which the weights are known to be good.
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
        """The first step that may be to blame."""
        return self.since if self.kind == WEIGHTS else self.step

    def said(self) -> str:
        return f"rank {self.rank}: {self.what}" if self.rank >= 0 else f"another rank: {self.what}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A remedy of the past, and why it was taken: of a trouble that began at `step` or later and was seen at `seen`."""

    step: int
    remedy: str
    why: str
    seen: int


def parse_remedy(written: str | Mapping[str, Any]) -> Remedy:
    """A remedy of the plan's list.

    Raises: ValueError, which says what is expected.
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
        said = " ".join(f"{name}={json.dumps(value)}" for name, value in written["set"].items())
        return Remedy(f"set {said}", {"arguments": dict(written["set"])})
    raise ValueError(f"no remedy: {written!r:.60}; expected one like {', '.join(EXAMPLES)}")


def next_remedy(policy: Iterable[Remedy], past: Sequence[Taken], kind: str, step: int) -> Remedy | None:
    """What to do about a trouble that began at `step` or later; None when nothing is left."""
    left = [remedy for remedy in policy if remedy.helps(kind)]
    number = 0
    for before, after in zip(past, [*(taken.step for taken in past), step][1:], strict=True):
        number = _after(number, after - before.seen)
    return left[number] if number < len(left) else None


def chain(past: Sequence[Taken], step: int) -> list[Taken]:
    """Those of the past that a trouble at `step` belongs to, oldest first."""
    found: list[Taken] = []
    for taken in reversed(past):
        if step - taken.seen > QUIET:
            break
        found.insert(0, taken)
        step = taken.step
    return found


def change_of(remedy: Remedy, trouble: Trouble) -> dict[str, Any]:
    """The schedule's entry. With bad weights nobody knows which batch it was: the change begins at the last good state."""
    if trouble.kind == WEIGHTS:
        return {"step": trouble.since, "seen": trouble.step, **remedy.change}
    called = {"call": trouble.call} if trouble.call else {}
    return {"step": trouble.step, "skip": True, **called, **remedy.change}


def check_change(change: Mapping[str, Any]) -> None:
    """Raises: ValueError for what change_of() would not have made, without its step: it may come from elsewhere."""
    counts = all(type(change.get(name, 0)) is int for name in ("seen", "call"))
    lr, arguments = change.get("lr", 1.0), change.get("arguments", {})
    named = isinstance(arguments, Mapping) and all(isinstance(name, str) for name in arguments)
    lowers = isinstance(lr, float) and 0 < lr <= 1
    if not (counts and named and lowers and change.get("amp", "off") in ("bf16", "off") and "step" not in change):
        raise ValueError(f"no change of a remedy: {dict(change)!r:.80}")


def exhausted(past: Sequence[Taken], trouble: Trouble) -> str:
    """The cause that ends a run: the first trouble by time, and what was done about it."""
    if not (before := chain(past, trouble.begins)):
        return f"{trouble.said()} ([health] nan names no remedy)"
    tried = ", ".join(taken.remedy for taken in before)
    return f"{before[0].why} (the remedies of [health] nan are exhausted: {tried}; then {trouble.said()})"


class Spike:
    """A loss further above the median of the last ones than so many robust deviations.

    The deviation is the median of distances from the median, times 1.4826 as for a normal distribution; at least 1% of the
    median, so that a loss that hardly moves is no spike when it does.

    Args:
        factor: so many deviations; None for no spikes.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def sees(self, loss: float) -> str:
        """What is wrong with it, else ""."""
        if self._factor is None:
            return ""
        if (count := len(self._sorted)) >= WARM_UP and loss > self._sorted[
            count * 9 // 10
        ]:  # else it is an ordinary one
            middle = self._sorted[count // 2]
            spread = 1.4826 * sorted(abs(value - middle) for value in self._sorted)[count // 2]
            away = (loss - middle) / max(spread, 0.01 * abs(middle), 1e-30)
            if away > self._factor:
                return f"loss {loss:.4g} is {away:.0f} deviations above the last {count} (median {middle:.4g})"
        return ""

    def learn(self, loss: float) -> None:
        """One of the last ones."""
        if self._factor is not None:
            self._recent.append(loss)
            bisect.insort(self._sorted, loss)
            if len(self._recent) > WINDOW:
                del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def forget(self) -> None:
        """The loss is on another level now."""
        self._recent.clear()
        self._sorted.clear()


def _after(number: int, steps: int) -> int:
    if steps > QUIET:
        return 0
    return number + 1 if steps <= SOON else number
