"""A sample as a few lines: one a GPU, one of the host, one of the ranks. What was not measured is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from orchestrator.cli import render

SLOWED = {4: "power cap", 8: "slowed by hardware", 32: "heat", 64: "heat", 128: "power brake"}
"""NVML's bits for clocks that are lower than the work would have them; being idle is none."""

Values = Mapping[str, float]


def rows(values: Values) -> Iterator[tuple[str, str]]:
    gpus = sorted({int(found[1]) for key in values if (found := re.match(r"gpu(\d+)\.", key))})
    lines = [(f"gpu {index}", _gpu(_below(values, f"gpu{index}."))) for index in gpus]
    lines += [("host", _host(_below(values, "host."))), ("ranks", _ranks(values))]
    return ((label, ", ".join(part for part in parts if part)) for label, parts in lines if any(parts))


def _below(values: Values, prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _gpu(found: Values) -> list[str]:
    slowed = dict.fromkeys(word for bit, word in SLOWED.items() if int(found.get("throttle", 0)) & bit)
    return [
        _figure(found, "util", "{:.0f}% util"),
        _of(found, "mem_used", "mem_total"),
        _figure(found, "temp_c", "{:.0f} °C"),
        _figure(found, "power_w", "{:.0f}") + _figure(found, "power_limit_w", " of {:.0f}") + " W" if "power_w" in found else "",
        f"clocks lowered: {', '.join(slowed)}" if slowed else "",
        _figure(found, "ecc", "{:.0f} memory errors") if found.get("ecc") else "",
    ]  # fmt: skip


def _host(found: Values) -> list[str]:
    free = f"{render.size(found['disk_free'])} free for checkpoints" if "disk_free" in found else ""
    rates = [
        f"{render.size(found[key])}/s {word}"
        for key, word in (("disk_read_bps", "read"), ("disk_write_bps", "written"))
        if key in found
    ]
    return [_figure(found, "cpu", "cpu {:.0f}%"), _of(found, "mem_used", "mem_total"), *rates, free]


def _ranks(values: Values) -> list[str]:
    """The slowest, most waiting and fullest of them each."""
    every: dict[str, float] = {}
    for key, value in values.items():
        if found := re.fullmatch(r"rank\d+\.(\w+)", key):
            every[found[1]] = max(value, every.get(found[1], value))
    return [
        f"{render.duration(every['step_s'])} a step" if "step_s" in every else "",
        f"{100 * every['data_wait']:.0f}% of it waiting for data" if "data_wait" in every else "",
        f"{_of(every, 'reserved', 'total')} reserved" if "reserved" in every else "",
        f"{render.size(every['rss'])} of host memory" if "rss" in every else "",
    ]


def _figure(found: Values, key: str, form: str) -> str:
    return form.format(found[key]) if key in found else ""


def _of(found: Values, key: str, total: str) -> str:
    """`12.1 of 15.0 GiB`"""
    if key not in found:
        return ""
    if total not in found:
        return render.size(found[key])
    return f"{found[key] / 2**30:.1f} of {found[total] / 2**30:.1f} GiB"
