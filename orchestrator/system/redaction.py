"""Removal of secrets from text before it is logged, stored or sent: known values, `token=…`, and credentials of URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

MIN_SECRET_LENGTH = 6
"""Characters; shorter values of variables would mask half of every line."""

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Both start at a word boundary and use possessive quantifiers: a line may be one word of a megabyte.
_ASSIGNED = re.compile(
    r"(?i)(?<![\w.-])(?=[\w.-]*?(?:token|key|secret|passw|credential))([\w.-]++[\"']?\s*+[=:]\s*+[\"']?+)([^\s\"',;&]+)"
)
_URL = re.compile(r"(?<!\w)(\w++://)(?:[^\s/?#]*@)?([^\s?#\"'<>]*)(\?[^\s#\"'<>]*)?")

_LOGIN = re.compile(r"(?<!/)//([^/]*)@")  # up to the last @ before the path: a password may hold one


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Values of the variables whose names say that they are secret, longest first."""
    values = {value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET_LENGTH}
    return sorted(values, key=len, reverse=True)


def replace_values(text: str, secrets: Iterable[str], mask: str = MASK) -> str:
    """`text` with each of these values replaced. Longest first, else a secret that contains another one shows its rest."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, mask)
    return text


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without these values, without what `token=…` and the like assign, and without user and query of URLs."""
    text = replace_values(text, secrets)
    text = _URL.sub(lambda match: match[1] + match[2] + ("?" + MASK if match[3] else ""), text)
    return _ASSIGNED.sub(rf"\1{MASK}", text)


def url_credentials(url: str) -> list[str]:
    """What stands before the `@` of a URL, whole and in its parts."""
    return [part for login in _LOGIN.findall(url) for part in (login, *login.split(":"))]


def without_credentials(url: str) -> str:
    """A URL without user and password."""
    return _LOGIN.sub("//", url)


def public_form(url: str) -> str:
    """What may be shown of a notification target's URL.

    Scheme and host for http(s), the scheme alone for others, whose host may be a token; the variable's name where the URL
    begins with `${VARIABLE}`.
    """
    if variable := re.match(r"\$\{\w+\}", url):
        return variable[0]
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        return "URL"
    host = re.split(r"[/?#\\]", rest, maxsplit=1)[0].rpartition("@")[2]  # an @ further on belongs to the path
    is_public = scheme.lower() in ("http", "https") and re.fullmatch(r"[\w.\-]+(:\d+)?", host)
    return f"{scheme}://{host if is_public else '…'}"
