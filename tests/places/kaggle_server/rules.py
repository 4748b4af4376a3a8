"""How the stand-in behaves where Kaggle's ways are only reported, or where a test wants other figures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Rules:
    """The defaults are the strictest that was reported.

    Attributes:
        slots: GPU sessions at a time ("Maximum batch GPU session count of 2 reached").
        quota_s: seconds of GPU time in a week.
        used_s: of it, used by others than this server's sessions.
        factors: seconds that a second of a session costs, by machine shape.
        queue_s: seconds from push to start.
        ready_s: seconds from the creation of a data set until it is READY.
        page: files of a page of any listing at most, whatever was asked for.
        absent_status: HTTP status for what is not there; 403 is reported for private things, 404 for others.
        keeps_error_output: whether the output of a session in ERROR can be fetched; reports differ. It is never attached.
        older_mounts: `/kaggle/input/<slug>` instead of `/kaggle/input/datasets/<owner>/<slug>` and `…/notebooks/…`.
        unpacks_wheels: whether a wheel is unpacked in a data set as a zip is; nobody knows.
        max_timeout_s: longest session.
        killed_after_s: a session that begins is killed after so many seconds, whatever was ordered; None: as it was ordered.
        competitions: those whose data the account may use.
        url_s: seconds that the address of an output file holds.
    """

    slots: int = 2
    cpu_slots: int = 5
    quota_s: float = 30 * 3600.0
    used_s: float = 0.0
    factors: dict[str, float] = field(default_factory=lambda: {"NvidiaTeslaT4": 2.0})
    queue_s: float = 0.0
    ready_s: float = 0.3
    page: int = 20
    absent_status: int = 403
    keeps_error_output: bool = True
    older_mounts: bool = False
    unpacks_wheels: bool = False
    max_timeout_s: int = 12 * 3600
    killed_after_s: float | None = None
    competitions: frozenset[str] = frozenset({"titanic"})
    url_s: float = 600.0
