"""What a place does where nobody has said it, asked with small sessions that take no accelerator and train nothing.

Four sessions, one after another: one ends by itself and leaves odd files, one has its output attached and ends with status 1, one
runs over its limit, one asks for a version of the first one's output. They are deleted afterwards.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgorch.core.remote.place_values import (
    PlaceError,
    RemoteStatus,
    SessionOrder,
    Sighting,
    Trouble,
)
from kgorch.remote.bootstrap import PUSH_LINE
from kgorch.remote.place import Place
from kgorch.untrusted_io import parse_json, read_all

FACTS_NAME = "kgorch-probe.json"
BUNDLE_NAME, PLAIN_NAME = "kgorch-bundle.json", "f0001"
MANY = 600
"""Files in one folder of an output."""

SESSION_S, LIMIT_S, POLL_S, WITHIN_S = 30, 60, 10.0, 1800.0
"""Of each session: what it is told, what the place is told, between two looks, until it is given up (it may wait in a queue)."""

HEAD = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
out = Path(os.environ.get("KGORCH_REMOTE_OUTPUT", "/kaggle/working"))
into = Path(os.environ.get("KGORCH_REMOTE_INPUT", "/kaggle/input"))
attached = [str(path.relative_to(into)) for path in into.rglob("*") if path.is_file()][:5000] if into.is_dir() else []
facts = {"attached": attached, "python": sys.version.split()[0]}
"""
LEAVES = f"""
facts["venv"] = subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0
ticks = int(Path("/proc/1/stat").read_bytes().rpartition(b")")[2].split()[19])
facts["age_s"] = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
(out / "empty").touch()
(out / "link").symlink_to("empty")
os.chdir(out); server = socket.socket(socket.AF_UNIX); server.bind("socket")
(out / "many").mkdir()
for number in range({MANY}):
    (out / "many" / str(number)).write_text("x")
"""
RECORDS = f'(out / "{FACTS_NAME}").write_text(json.dumps(facts))\n'
FAILS, RUNS_OVER = "sys.exit(1)\n", f"time.sleep({10 * LIMIT_S})\n"


@dataclass(frozen=True, slots=True)
class PlaceFinding:
    """An answer of the place.

    Attributes:
        question: what was asked.
        answer: what was seen, in words; foreign text.
        needed: what kgorch relies on; empty where it manages either way.
        agrees: whether the answer is that one.
    """

    question: str
    answer: str
    needed: str = ""
    agrees: bool = True


class PlaceProbe:
    """The sessions of one probe.

    Args:
        folder: for what is sent and fetched.
        say: takes a line for each session that begins.
        poll_s: seconds between two looks.
    """

    def __init__(
        self, place: Place, folder: Path, say: Callable[[str], None] = lambda _: None, poll_s: float | None = None
    ) -> None:
        self._place, self._folder, self._say, self._poll_s = place, folder, say, poll_s or POLL_S
        self._id = secrets.token_hex(6)
        self._pushed: list[str] = []
        self._refusal = ""  # of the newest push's source
        self.findings: list[PlaceFinding] = []

    def run(self) -> list[PlaceFinding]:
        """Ask everything; a few minutes. Raises: PlaceError where the place does not answer at all."""
        try:
            bundle = self._bundle()
            first = self._ends_by_itself(bundle)
            second = self._fails(bundle, first)
            self._runs_over(bundle, second)
            self._takes_a_version(bundle, first)
        finally:
            self._clean()
        return self.findings

    def _bundle(self) -> str:
        folder = self._folder / "bundle"
        folder.mkdir(parents=True)
        (folder / BUNDLE_NAME).write_text("{}")
        (folder / PLAIN_NAME).write_bytes(b"PK\x03\x04 no archive")
        self._say("a bundle of two files")
        reference = self._place.store_bundle(folder, "kgorch-probe-bundle")
        self._wait(lambda: self._place.is_bundle_ready(reference), "the bundle")
        return reference

    def _ends_by_itself(self, bundle: str) -> str:
        self._say("a session that leaves odd files and ends by itself")
        name, seen = self._push(bundle, "", LEAVES + RECORDS, asks_again=True)
        facts, kept = self._output(name)
        self._add(
            "how a script that ends by itself is called", _word(seen), "complete", seen.status is RemoteStatus.COMPLETE
        )
        many = sum(path.startswith("many/") for path in kept)
        odd = [path for path in ("empty", "link", "socket") if path in kept]
        self._add(f"what of {MANY} files and an empty file, a link and a socket is kept", f"{many} files; {', '.join(odd)}",
                  f"{MANY} files", many == MANY)  # fmt: skip
        attached = [str(path) for path in facts.get("attached", [])]
        plain = any(path.rpartition("/")[2] == PLAIN_NAME for path in attached)
        self._add(
            "a file without a suffix in a bundle",
            "stays as it is" if plain else f"became {attached[:5]}",
            "stays",
            plain,
        )
        self._add("Python of the image", f"{facts.get('python')}, {'with' if facts.get('venv') else 'without'} venv")
        self._add("age of the container at the script's start", f"{facts.get('age_s')} s")
        return name

    def _fails(self, bundle: str, source: str) -> str:
        self._say("a session that has the first one's output, and ends with status 1")
        name, seen = self._push(bundle, source, RECORDS + FAILS)
        facts, kept = self._output(name)
        answer = self._attached(facts)
        self._add(
            "the output of a session that was complete, as an input", answer, "is attached", answer == "is attached"
        )
        self._add("how a script that ends with status 1 is called", _word(seen), "not complete",
                  seen.status is not RemoteStatus.COMPLETE)  # fmt: skip
        self._add("what of its output can be fetched", ", ".join(sorted(kept)[:5]) or "nothing")
        return name

    def _runs_over(self, bundle: str, source: str) -> None:
        self._say(f"a session that asks for that one's output, and runs over its limit of {LIMIT_S} s")
        name, seen = self._push(bundle, source, RECORDS + RUNS_OVER)
        facts, kept = self._output(name)
        self._add("the output of a session that failed, as an input", self._attached(facts))
        self._add("how a session that ran over its limit is called", _word(seen), "not complete",
                  seen.status is not RemoteStatus.COMPLETE)  # fmt: skip
        self._add("what of its output can be fetched", ", ".join(sorted(kept)[:5]) or "nothing")

    def _takes_a_version(self, bundle: str, source: str) -> None:
        self._say("a session that asks for a version of the first one's output")
        name, _ = self._push(bundle, f"{source}/1", RECORDS)
        self._add("NAME/VERSION as an input", self._attached(self._output(name)[0]))

    def _attached(self, facts: dict[str, Any]) -> str:
        """Whether the newest session had the output of another one, in words."""
        if self._refusal:
            return f"is refused: {self._refusal}"
        if "attached" not in facts:
            return "is taken; what was attached is not known"
        has_it = any(str(path).endswith(f"/{FACTS_NAME}") for path in facts["attached"])
        return "is attached" if has_it else "is taken, and not attached"

    def _push(self, bundle: str, source: str, script: str, *, asks_again: bool = False) -> tuple[str, Sighting]:
        """Push a session, without its source where that is refused, and wait for its end."""
        number = len(self._pushed) + 1
        name, nonce = f"kgorch-probe-{self._id}-{number}", secrets.token_hex(8)
        order = SessionOrder(
            name, nonce, "probe", self._id, number, bundle, source, -1, SESSION_S, LIMIT_S, accelerator="", internet=False
        )  # fmt: skip
        head = f"# A probe of kgorch.\n{PUSH_LINE.format(run='probe', number=number, nonce=nonce)}\n"
        self._pushed.append(name)
        refusal = ""
        try:
            self._place.push(order, head + HEAD + script)
        except PlaceError as error:
            refusal = error.message
            if source and error.trouble in (Trouble.REFUSED, Trouble.ABSENT):
                found = self._push(bundle, "", script)
                self._refusal = refusal
                return found
            if error.trouble is not Trouble.UNATTACHED:  # then it runs all the same
                raise
        if asks_again:
            self._add(
                "a push, right after its answer", "is found" if self._place.find_push(order) else "is not found yet"
            )
        self._refusal = refusal
        return name, self._wait(lambda: (seen := self._place.look(name)).status.is_over and seen, name)

    def _output(self, name: str) -> tuple[dict[str, Any], set[str]]:
        """The facts that the session wrote, and the names in its output; empty where there is none."""
        into = self._folder / name
        try:
            names = {str(path.relative_to(into)) for path in self._place.collect(name, into, ("*",))}
        except PlaceError as error:
            if error.trouble is Trouble.UNANSWERED:
                raise
            return {}, set()
        try:
            facts = parse_json(read_all(into, FACTS_NAME, 1 << 20))
        except (OSError, ValueError):
            facts = {}
        return facts if isinstance(facts, dict) else {}, names

    def _add(self, question: str, answer: str, needed: str = "", agrees: bool = True) -> None:
        self.findings.append(PlaceFinding(question, answer, needed, agrees))

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        until_s = time.monotonic() + WITHIN_S
        while not (value := condition()):
            if time.monotonic() > until_s:
                raise PlaceError(Trouble.UNANSWERED, f"{what} is not there after {WITHIN_S:.0f} s")
            time.sleep(self._poll_s)
        return value

    def _clean(self) -> None:
        for name in self._pushed:
            try:
                self._place.delete(name)
            except PlaceError as error:
                self._say(f"{name} stays at the place: {error.message}")


def _word(seen: Sighting) -> str:
    return f"{seen.word} ({seen.message})" if seen.message else seen.word
