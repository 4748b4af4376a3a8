"""Steps, probes and checks: a kind of failure, a function that looks for it, and the results that the function writes.

This module imports neither PyTorch nor kgorch. `--list` is quick, and a broken installation fails a step, not the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OK, DIFFERS, SKIPPED, NOTE = "ok", "differs", "skipped", "note"
NEEDS_GPU = "needs a GPU"


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of failure to look for.

    Attributes:
        name: as typed on the command line.
        looks_for: the failures that it would catch, in one sentence.
        limit_s: seconds after which it is killed. The limits of the steps for one GPU add up to at most 50 minutes.
        gpus: number of GPUs that it needs.
        module: holds its probes; imported in the step's own process.
    """

    name: str
    looks_for: str
    limit_s: float
    gpus: int = 1
    module: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """What was expected and what was found.

    Attributes:
        verdict: OK, DIFFERS, SKIPPED (`found` is the reason) or NOTE (a figure without an expectation).
    """

    step: str
    probe: str
    check: str
    expected: str
    found: str
    verdict: str

    @property
    def ok(self) -> bool | None:
        """None for a skipped check."""
        return None if self.verdict == SKIPPED else self.verdict != DIFFERS

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def read_checks(path: Path) -> list[Check]:
    """The checks that a step wrote. The last line may be incomplete, because the step was killed; it is ignored."""
    checks = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(line)
            checks.append(Check(**{name: str(document[name]) for name in Check.__slots__}))
    return checks


class Report:
    """Where a probe writes its checks.

    Attributes:
        device: "cuda", or "cpu" in a rehearsal.
        gpus: number of GPUs of the machine.
        folder: an empty temporary folder for the probe.
        left_s: seconds that the probe may take.
    """

    def __init__(
        self, path: Path, step: str, probe: str, *, device: str, folder: Path, gpus: int, left_s: float
    ) -> None:
        self._path, self._step, self._probe = path, step, probe
        self.device, self.folder, self.gpus, self.left_s = device, folder, gpus, left_s

    @property
    def is_on_gpu(self) -> bool:
        return self.device == "cuda"

    def check(self, check: str, found: object, expected: object = True, *, ok: bool | None = None) -> None:
        """Write a check. `ok` defaults to `found == expected`."""
        self._write(check, expected, found, OK if (found == expected if ok is None else ok) else DIFFERS)

    def at_most(self, check: str, found: float | None, limit: float, unit: str = "s") -> None:
        text = "nothing" if found is None else f"{found:.3g} {unit}"
        self.check(check, text, f"at most {limit:g} {unit}", ok=found is not None and found <= limit)

    def at_least(self, check: str, found: float | None, limit: float, unit: str = "") -> None:
        text = "nothing" if found is None else f"{found:.3g} {unit}".strip()
        self.check(check, text, f"at least {limit:g} {unit}".strip(), ok=found is not None and found >= limit)

    def note(self, check: str, found: object) -> None:
        """Write a figure without an expectation."""
        self._write(check, "", found, NOTE)

    def skip(self, check: str, why: str = NEEDS_GPU) -> None:
        self._write(check, "", why, SKIPPED)

    def on_gpu(self, *checks: str) -> bool:
        """Whether the probe runs on a GPU. If not, the named checks are written as skipped."""
        if not self.is_on_gpu:
            for check in checks:
                self.skip(check)
        return self.is_on_gpu

    @contextlib.contextmanager
    def guard(self, check: str, expected: object = "no exception") -> Iterator[None]:
        """Record an exception in the block as the result of this check, and continue with the probe."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._write(check, expected, describe(error), DIFFERS)

    def record_exception(self, error: BaseException) -> None:
        """The probe ended with an exception. Its earlier checks remain."""
        self._write("runs to its end", "no exception", describe(error), DIFFERS)

    def _write(self, check: str, expected: object, found: object, verdict: str) -> None:
        entry = Check(self._step, self._probe, check, str(expected), str(found)[:600], verdict)
        line = json.dumps(asdict(entry)) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line.encode())  # at once: forked processes write to the same file
        finally:
            os.close(descriptor)


def describe(error: BaseException) -> str:
    """Type, first line and place of an error."""
    line = next(iter(str(error).strip().splitlines()), "")[:300]
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {line}{at}"


@dataclass(frozen=True, slots=True)
class Probe:
    """Attributes:
    quick: its rehearsal takes at most some 15 s of processor time.
    """

    name: str
    run: Callable[[Report], None]
    limit_s: float
    quick: bool


class Probes:
    """The probes of a step's module, in the order in which they are defined.

    probes = Probes()

    @probes(limit_s=30)
    def sequence_number(report): ...
    """

    def __init__(self) -> None:
        self.all: list[Probe] = []

    def __call__(
        self, *, limit_s: float, quick: bool = True, name: str = ""
    ) -> Callable[[Callable[[Report], None]], Callable[[Report], None]]:
        def register(function: Callable[[Report], None]) -> Callable[[Report], None]:
            self.all.append(Probe(name or function.__name__, function, limit_s, quick))
            return function

        return register
