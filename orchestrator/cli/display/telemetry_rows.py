"""A telemetry sample as lines of `kgorch status`: one a GPU, the host, the ranks; then other nodes.

A value that was not measured is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kgorch.cli.display import render

THROTTLE_REASONS = {4: "power cap", 8: "slowed by hardware", 32: "heat", 64: "heat", 128: "power brake"}
"""NVML's bits for clocks that are lower than the work allows; bit 1, an idle GPU, is left out."""

Values = Mapping[str, float]


def rows(values: Values) -> Iterator[tuple[str, str]]:
    """Label and text of each line. `gpu 1:0` is GPU 0 of node 1."""
    lines = [*_of_node(values, ""), ("ranks", _ranks(values))]
    for node in _numbers(values, "node"):
        lines += _of_node(_below(values, f"node{node}."), f"{node}:")
    return ((label, ", ".join(part for part in parts if part)) for label, parts in lines if any(parts))


def _of_node(values: Values, node: str) -> list[tuple[str, list[str]]]:
    gpus = [(f"gpu {node}{index}", _gpu(_below(values, f"gpu{index}."))) for index in _numbers(values, "gpu")]
    return [*gpus, (f"host {node}".rstrip(": "), _host(_below(values, "host.")))]


def _numbers(values: Values, what: str) -> list[int]:
    return sorted({int(match[1]) for key in values if (match := re.match(rf"{what}(\d+)\.", key))})


def _below(values: Values, prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _gpu(sample: Values) -> list[str]:
    reasons = dict.fromkeys(word for bit, word in THROTTLE_REASONS.items() if int(sample.get("throttle", 0)) & bit)
    return [
        _figure(sample, "util", "{:.0f}% util"),
        _of(sample, "mem_used", "mem_total"),
        _figure(sample, "temp_c", "{:.0f} °C"),
        _figure(sample, "power_w", "{:.0f}") + _figure(sample, "power_limit_w", " of {:.0f}") + " W" if "power_w" in sample else "",
        f"clocks throttled: {', '.join(reasons)}" if reasons else "",
        _figure(sample, "ecc", "{:.0f} memory errors") if sample.get("ecc") else "",
    ]  # fmt: skip


def _host(sample: Values) -> list[str]:
    free = f"{render.size(sample['disk_free'])} free for checkpoints" if "disk_free" in sample else ""
    rates = [
        f"{render.size(sample[key])}/s {word}"
        for key, word in (("disk_read_bps", "read"), ("disk_write_bps", "written"))
        if key in sample
    ]
    return [_figure(sample, "cpu", "cpu {:.0f}%"), _of(sample, "mem_used", "mem_total"), *rates, free]


def _ranks(values: Values) -> list[str]:
    """The maximum of each value over the ranks: the slowest one decides the pace, the fullest one runs out of memory."""
    every: dict[str, float] = {}
    for key, value in values.items():
        if match := re.fullmatch(r"rank\d+\.(\w+)", key):
            every[match[1]] = max(value, every.get(match[1], value))
    return [
        f"{render.duration(every['step_s'])} a step" if "step_s" in every else "",
        f"{100 * every['data_wait']:.0f}% of it waiting for data" if "data_wait" in every else "",
        f"{_of(every, 'reserved', 'total')} reserved" if "reserved" in every else "",
        f"{render.size(every['rss'])} of host memory" if "rss" in every else "",
    ]


def _figure(sample: Values, key: str, form: str) -> str:
    return form.format(sample[key]) if key in sample else ""


def _of(sample: Values, key: str, total: str) -> str:
    """`12.1 of 15.0 GiB`"""
    if key not in sample:
        return ""
    if total not in sample:
        return render.size(sample[key])
    return f"{sample[key] / 2**30:.1f} of {sample[total] / 2**30:.1f} GiB"
