"""From the name of a place to the place."""

from __future__ import annotations

import importlib
from pathlib import Path

from kgorch.core.remote.place_profiles import PLACES
from kgorch.errors import KgorchError, nearest
from kgorch.remote.place import Place


def open_place(name: str, home: Path) -> Place:
    """The place of that name; `close` ends what it has started.

    Args:
        home: the state folder; the place's own files are below it.
    Raises: KgorchError for an unknown name.
    """
    profile = PLACES.get(name)
    if profile is None:
        raise KgorchError(f"there is no place {name!r}{nearest(name, PLACES)}", f"known: {', '.join(sorted(PLACES))}")
    module, _, kind = profile.implementation.partition(":")
    folder = home / "places" / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    place: Place = getattr(importlib.import_module(module), kind)(folder)
    return place
