"""The contract of a place: a service that runs sessions which this machine does not run itself.

Each method blocks until the place has answered or a deadline of its own has passed, and raises PlaceError. Nothing is tried again
in here: the driver decides that (core/remote), because it must first commit what it is about to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from kgorch.core.remote.place_values import Account, PlaceQuota, Pushed, SessionOrder, Sighting

RECORD_NAME = "kgorch-session.json"
"""File in a session's output: its own record, written by the bootstrap at the end. It outranks what the place says."""

RECORD_BYTES = 64 << 10

OnBytes = Callable[[int, int], None]
"""Gets how many bytes of a file have come, and how many it has; 0 where nobody says. Now and then, for each large file."""


def unwatched(done_bytes: int, total_bytes: int) -> None:
    """An OnBytes that tells nobody."""


class Place(Protocol):
    """One account at one place.

    Attributes:
        name: as in `[remote] on`.
    """

    name: str

    def account(self) -> Account:
        """Who is logged in. Raises: PlaceError."""

    def quota(self) -> PlaceQuota | None:
        """What is left of the account's hours; None for a place without any. Raises: PlaceError."""

    def running(self) -> int | None:
        """How many sessions of the account run or wait; None where the place cannot tell cheaply. Raises: PlaceError."""

    def store_bundle(self, folder: Path, name: str) -> str:
        """Store the files in `folder` as the bundle called `name`, unless it is there.

        A bundle is named by its contents, so a second call after a doubt goes on where the first one ended.

        Returns: its reference. Raises: PlaceError.
        """

    def is_bundle_ready(self, reference: str) -> bool:
        """Whether sessions can attach it, with all its bytes. Raises: PlaceError."""

    def push(self, order: SessionOrder, script: str) -> Pushed:
        """Start a session. It counts only when this returns. Raises: PlaceError."""

    def find_push(self, order: SessionOrder) -> Pushed | None:
        """After a doubt: the session of this name with this nonce; None where there is no session of this name.

        Raises: PlaceError (REFUSED where another nonce lies under the name).
        """

    def look(self, name: str) -> Sighting:
        """How a session is. One request. Raises: PlaceError."""

    def collect(
        self,
        name: str,
        folder: Path,
        patterns: tuple[str, ...] = (RECORD_NAME, "kgorch.db"),
        on_bytes: OnBytes = unwatched,
    ) -> list[Path]:
        """Fetch files of a session's output whose names match, into `folder`; the caller reads them as foreign.

        Args:
            patterns: file names, or `*` for everything.
        Returns: the files, below `folder`, with their folders. Raises: PlaceError.
        """

    def log(self, name: str, *, follow: bool = False) -> Iterator[str]:
        """Lines of a session's output, foreign text. Raises: PlaceError."""

    def stop(self, name: str) -> str:
        """Have a session end, if the place can.

        Returns: what a person must know or do, in a sentence. Raises: PlaceError.
        """

    def delete(self, name: str) -> None:
        """Remove a session that is over, with its output. Raises: PlaceError."""

    def close(self) -> None:
        """End what this object has started on this machine; sessions go on."""
