"""Results of checks: of the machine, and of the files that a plan reads."""

from __future__ import annotations

from typing import NamedTuple

from kgorch.errors import KgorchError

PASS, WARN, FAIL = "pass", "warn", "fail"


class CheckLine(NamedTuple):
    """A line of `kgorch check`, with the names of its fields in --json (docs/json.md).

    Attributes:
        name: of the check.
        verdict: PASS, WARN or FAIL.
        said: the result, as one sentence.
        do: what to type or change; empty where nothing is to be done.
    """

    name: str
    verdict: str
    said: str
    do: str = ""


ERROR_CODES = {"torch": "KG904", "gpus": "KG305", "mig": "KG305", "cores": "KG305", "cuda": "KG408"}
INPUT_CODE = "KG106"
"""Error codes (core/error_codes.py) of the checks of launch/requirements.py by their names, and of those of the inputs."""


class Check(NamedTuple):
    """The result of a check in the parts of an error (KgorchError), since a start that is refused raises one.

    Attributes:
        name: of the check.
        verdict: PASS, WARN or FAIL.
        what: what is the matter, and where.
        facts: what was expected and what there is.
        do: what to type or change; empty where nothing is to be done.
    """

    name: str
    verdict: str
    what: str
    facts: tuple[str, ...] = ()
    do: str = ""

    @staticmethod
    def failed(name: str, error: KgorchError) -> Check:
        """The check that an error stands for."""
        return Check(name, FAIL, error.what, error.facts, error.next_step or "")

    def line(self) -> CheckLine:
        """For `kgorch check`."""
        return CheckLine(self.name, self.verdict, "; ".join((self.what, *self.facts)), self.do)

    @property
    def text(self) -> str:
        """For a note, with the advice in it."""
        return "; ".join(part for part in (self.what, *self.facts, self.do) if part)

    def refuse(self) -> None:
        """Raise the error that refuses a start. Raises: KgorchError where the check failed."""
        if self.verdict == FAIL:
            code = ERROR_CODES.get(self.name, INPUT_CODE)
            raise KgorchError(self.what, *self.facts, next_step=self.do, error_code=code)
