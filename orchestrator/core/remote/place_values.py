"""What is asked of a place that runs sessions (remote/place.py), and what it answers. Plain values, without any client's types."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trouble(StrEnum):
    """Why a place did not do what was asked.

    After UNANSWERED nobody knows whether it was done; after UNATTACHED it was; after every other one it was not.
    """

    UNANSWERED = "unanswered"  # network, deadline, 5xx, an answer that cannot be read
    BUSY = "busy"  # 429: ask later
    LOGIN = "login"  # no valid credentials, or those of another account
    SLOTS = "slots"  # as many sessions run as the account may have at once
    QUOTA = "quota"  # the account's hours are spent
    ABSENT = "absent"  # there is no such thing, or it is somebody else's
    REFUSED = "refused"  # any other definite no
    NO_CLIENT = "no_client"  # the place's client is not installed
    UNATTACHED = "unattached"  # accepted, and it runs, but without one of its inputs: it ends at once by itself


class PlaceError(Exception):
    """A place did not do what was asked.

    Attributes:
        trouble: what kind.
        message: of the place, as it came: foreign text, to be cleaned before it is shown.
        retry_after_s: seconds that the place wants to be left alone; None where it does not say.
    """

    def __init__(self, trouble: Trouble, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.trouble, self.message, self.retry_after_s = trouble, message, retry_after_s


class RemoteStatus(StrEnum):
    """Of a session, as the place says. The session's own record outranks it."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETE = "complete"
    ERROR = "error"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"  # a word that is not known, or no answer: never taken for an end

    @property
    def is_over(self) -> bool:
        return self in (RemoteStatus.COMPLETE, RemoteStatus.ERROR, RemoteStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """A session to be started at a place.

    Attributes:
        name: of the session there, unique in the account: letters, digits, `-`; at most 50 characters.
        nonce: random hexadecimal digits, committed to the database before anything is sent.
        run, run_id, number: which session of which run it is; `number` counts from 1.
        bundle: reference of the stored bundle.
        source: name of the session whose output is attached as the state to go on from; empty for the first one.
        expected_step: step of the newest verified checkpoint in that output; -1 for none.
        session_s: seconds after which the session ends by itself (the plan's wall, seen from inside).
        timeout_s: seconds after which the place may kill it; larger than `session_s`.
        accelerator: in the place's own words.
        internet: whether it may reach the internet.
        datasets, competitions: further inputs, in the place's own words.
    """

    name: str
    nonce: str
    run: str
    run_id: str
    number: int
    bundle: str
    source: str
    expected_step: int
    session_s: int
    timeout_s: int
    accelerator: str
    internet: bool
    datasets: tuple[str, ...] = ()
    competitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pushed:
    """A session that the place has accepted.

    Attributes:
        version: the place's count of pushes under this name: more than 1 tells that it was pushed twice.
        reference: what the place calls it.
        url: where a person can look at it.
    """

    version: int
    reference: str
    url: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a place says of a session.

    Attributes:
        word: the place's own word for the status.
        message: why it failed, where the place says so; foreign text.
        version: see Pushed; 0 where it was not asked for.
    """

    status: RemoteStatus
    word: str
    message: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class PlaceQuota:
    """Hours of an account, in seconds of the place's own reckoning.

    Attributes:
        refreshes_at: ISO 8601 in UTC; empty where the place does not say.
    """

    used_s: float
    reserved_s: float
    allowed_s: float
    refreshes_at: str

    @property
    def left_s(self) -> float:
        return max(0.0, self.allowed_s - self.used_s - self.reserved_s)


@dataclass(frozen=True, slots=True)
class Account:
    """Who is logged in: `name` in the place's own words, and how (`token`, `key`, `oauth`, `none needed`)."""

    name: str
    means: str
