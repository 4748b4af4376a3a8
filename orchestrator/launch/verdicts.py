"""What a look at the machine, or at what a plan reads, came to."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.errors import KgorchError

PASS, WARN, FAIL = "pass", "warn", "fail"


class Line(NamedTuple):
    """A line of `kgorch check`. `do`: what to type or change; empty where nothing is to be done."""

    name: str
    verdict: str
    said: str
    do: str = ""


class Check(NamedTuple):
    """The same with its facts apart, as an error has them.

    `what`: what is the matter, and where; `facts`: what was expected and what is; `do`: as in Line.
    """

    name: str
    verdict: str
    what: str
    facts: tuple[str, ...] = ()
    do: str = ""

    @staticmethod
    def failed(name: str, error: KgorchError) -> Check:
        return Check(name, FAIL, error.what, error.facts, error.next_step or "")

    def line(self) -> Line:
        return Line(self.name, self.verdict, "; ".join((self.what, *self.facts)), self.do)

    @property
    def text(self) -> str:
        return "; ".join(part for part in (self.what, *self.facts, self.do) if part)

    def refuse(self) -> None:
        """Raises: KgorchError where it failed."""
        if self.verdict == FAIL:
            raise KgorchError(self.what, *self.facts, next_step=self.do)
