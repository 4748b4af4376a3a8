"""What an HTTP status or a text of Kaggle's means as a Trouble. Pure.

Kaggle's client raises for an HTTP error, but reports a push that was refused as HTTP 200 with a text, and the text is all there is.
"""

from __future__ import annotations

import re

from kgorch.core.remote.place_values import Trouble

TEXTS: tuple[tuple[re.Pattern[str], Trouble], ...] = (
    # "Maximum batch GPU session count of 2 reached.": users' reports, among them Kaggle/kaggle-cli#185; also CPU and TPU
    (re.compile(r"maximum .{0,40}session count of \d+ reached", re.IGNORECASE), Trouble.SLOTS),
    # "Maximum weekly GPU quota of 30.00 hours reached.": users' reports
    (re.compile(r"maximum .{0,40}quota of [\d.]+ hours? reached", re.IGNORECASE), Trouble.QUOTA),
    (re.compile(r"\bquota\b.{0,80}\b(exceeded|reached|exhausted|used up)\b", re.IGNORECASE), Trouble.QUOTA),
    (re.compile(r"too many requests|rate limit", re.IGNORECASE), Trouble.BUSY),
    (re.compile(r"\bunauthenticated\b|invalid credentials", re.IGNORECASE), Trouble.LOGIN),
)
"""Texts of Kaggle's server, the first that matches; they are nobody's promise, so any other one is REFUSED."""

MAX_TEXT = 2000
"""Characters of a text that are looked at and kept."""

MAX_RETRY_AFTER_S = 24 * 3600.0


def trouble_of_text(text: str) -> Trouble:
    """Of a refusal that came as a text alone."""
    return next((trouble for pattern, trouble in TEXTS if pattern.search(text[:MAX_TEXT])), Trouble.REFUSED)


def trouble_of_status(status: int, text: str) -> Trouble:
    """Of an HTTP status that is no success.

    403 is ABSENT: Kaggle answers it for what is not there as well as for what is somebody else's (Kaggle/kaggle-cli#538).
    """
    if status == 401:
        return Trouble.LOGIN
    if status in (403, 404):
        return Trouble.ABSENT
    if status == 429:
        return Trouble.BUSY
    if 400 <= status < 500 and status not in (408, 425):
        return trouble_of_text(text)
    return Trouble.UNANSWERED  # 5xx, 408, and anything that is no HTTP status of a refusal


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None without one, and for a date, which Kaggle has not been seen to send."""
    if not header or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header.strip()):
        return None
    return min(float(header), MAX_RETRY_AFTER_S)
