"""Durations and sizes as people read them, on a terminal and on a page."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """`9h 05m`, `12m 30s`, `4.2s`, `8ms`; `–` for None."""
    if seconds is None:
        return "–"
    if 0 < seconds < 0.95:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def size(count: float | None) -> str:
    """Bytes as `512 B`, `1.5 GiB`; `–` for None."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
