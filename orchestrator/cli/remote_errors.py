"""What a place has refused, as an error for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kgorch.cli.display import render
from kgorch.core.remote.place_values import PlaceError, Trouble
from kgorch.errors import KgorchError

NEXT = {
    Trouble.LOGIN: "log in to the place again, then try again",
    Trouble.NO_CLIENT: "install the place's client: pip install 'kgorch[{place}]'",
    Trouble.UNANSWERED: "try again; see whether the network and the place are up",
    Trouble.BUSY: "try again later",
}


@contextlib.contextmanager
def place_errors(place: str) -> Iterator[None]:
    """Raises: KgorchError in place of PlaceError."""
    try:
        yield
    except PlaceError as error:
        wait = f" (it asks for {error.retry_after_s:.0f} s)" if error.retry_after_s else ""
        raise KgorchError(
            f"{place}: {error.trouble}{wait}",
            render.printable(error.message)[:500],
            next_step=NEXT.get(error.trouble, "kgorch remote check").format(place=place),
        ) from None
