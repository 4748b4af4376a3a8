"""The places that kgorch knows, and what a plan need not say of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaceProfile:
    """A place, as far as it is known without asking it.

    Attributes:
        implementation: `module:class`; the class takes a private folder that outlives processes.
        accelerator: where the plan names none; empty for none.
        session_s: how long a session lasts where the plan does not say.
        longest_s: upper limit of that; None for none.
        poll_s: least seconds between two requests for a run, unless the plan says otherwise.
        login_requests: that a visit makes before its first request, because the client asks whose the credentials are.
        has_kgorch: whether kgorch's dependencies are there; else they travel in the bundle.
    """

    implementation: str
    accelerator: str
    session_s: float
    longest_s: float | None = None
    poll_s: float = 60.0
    login_requests: int = 0
    has_kgorch: bool = False


PLACES: Mapping[str, PlaceProfile] = {
    # 12 h is the limit of batch sessions (the client's source, kaggle 2.2.5); 20 minutes of it are for the end by itself
    "kaggle": PlaceProfile(
        "kgorch.remote.places.kaggle.place:KagglePlace",
        "NvidiaTeslaT4",
        11 * 3600.0,
        12 * 3600.0 - 1200,
        login_requests=1,
    ),
    # a look costs nothing there
    "local": PlaceProfile("kgorch.remote.places.local.place:LocalPlace", "", 11 * 3600.0, poll_s=1.0, has_kgorch=True),
}
