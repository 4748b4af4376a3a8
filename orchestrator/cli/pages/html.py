"""Renders the templates of this folder: self-contained HTML, every text escaped, no script."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kgorch.cli.display import render
from kgorch.cli.pages import chart
from kgorch.core import text as texts

MAX_TEXT = 600
"""Characters of one text: a name or an error message may have megabytes. --json has all."""


def page(template: str, **values: Any) -> str:
    """The HTML of a template."""
    # finalize sees each value before it is escaped: control characters and bidirectional overrides go, markup is escaped
    environment = Environment(
        loader=PackageLoader("kgorch.cli", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": render.duration,
        "size": render.size,
        "words": render.words,
        "number": number,
        "date": date,
    }
    environment.globals |= {"geometry": chart}
    return environment.get_template(template).render(**values)


def _harmless(value: Any) -> Any:
    if not isinstance(value, str) or isinstance(value, Markup | chart.Coordinates):
        return "–" if value is None else value
    return texts.printable(value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…")


def number(value: float | None) -> str:
    """Six significant digits; `nan` for null, which stands for NaN and infinities."""
    return "nan" if value is None else f"{value:.6g}"


def date(stamp: str | None) -> str:
    """`2026-11-24 02:21 UTC`: a report is read elsewhere, and later."""
    return "–" if not stamp else f"{stamp[:10]} {stamp[11:16]} UTC"
