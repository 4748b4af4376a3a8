"""Why a training is slower than its machine allows, and the one change to make: telemetry samples in, findings out.

The band says whether there is anything to gain: a GPU that is busy at least 80% of the time is well used, 60 to 80% is fair, less
is bad. The cause follows from figures that only one cause explains. *Waiting for data*: the time that ranks spend in fetching a
batch. *Throttled*: the driver's bits and the clocks. *Communication*: GPUs that are busy and draw little power (a collective spins
and computes nothing), or ranks that neither compute nor wait for data. *Small batch* and *CPU bound*: a rank's process that keeps a
core busy while its GPU idles; which of the two depends on whether memory has room for a larger microbatch. Each finding names its
figures; a cause whose figures were not measured is not reported.

Savings are upper bounds of the share of the time, as if the cause were gone altogether.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

GOOD, FAIR, BAD = "good", "fair", "bad"
GOOD_FROM, FAIR_FROM, AT_BEST = 80.0, 60.0, 95.0

WAITS = 0.1
"""Share of the time: less waiting for data is not worth a change."""

FULL = 90.0
"""Percent of a core, or of all cores, from which they count as busy."""

IDLE = 50.0
"""Percent of a core, below which a process waits for something most of the time."""

HALF = 0.5
"""Share of a GPU's memory up to which a microbatch twice as large fits, because nothing grows more than twice. Share of its power
limit below which a busy GPU does not compute (a choice, not a measurement)."""

OFTEN = 0.1
"""Share of the samples from which throttling costs something."""

POWER_CAP, HEAT, HARDWARE = 0x4, 0x20 | 0x40, 0x8 | 0x80
"""NVML's bits for reasons of reduced clocks. The power cap alone is no finding: a small card runs so at full load."""

GPU = r"(?:node\d+\.)?gpu\d+"
"""A GPU in the keys of a sample, of any node."""

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """What is known of the training besides its samples; None where it is not.

    Attributes:
        workers: loading processes of a rank.
        cores: of the machine.
        batch: samples of a rank's share of a step.
        microbatch: samples of one forward.
        cached: the plan copies its data to a local disk.
    """

    workers: int | None = None
    ranks: int | None = None
    cores: int | None = None
    batch: int | None = None
    microbatch: int | None = None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of lost time.

    Attributes:
        cause: waiting_for_data, cpu_bound, small_batch, communication, throttled, memory_tight or unexplained.
        what: the cause in words.
        change: what to change in the plan or the script.
        saves: share of the time that the change saves at most; None where that cannot be estimated.
        figures: on which the finding rests.
    """

    cause: str
    what: str
    change: str
    saves: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advice:
    """All findings of a training.

    Attributes:
        of: `gpu`, or `cpu` without one.
        percent: how busy it is; None when nothing was measured.
        band: GOOD, FAIR or BAD; None when nothing was measured.
        findings: the largest saving first.
    """

    of: str
    percent: float | None
    band: str | None
    findings: tuple[Finding, ...]


def advise(samples: Sequence[Values], facts: TrainingSetup | None = None) -> Advice:
    """The findings of a training. Samples before its first step are ignored where they can be recognized."""
    summary = SampleSummary(samples, facts or TrainingSetup())
    percent = summary.percent
    causes = (_throttled, _waiting_for_data, _held_by_cpu, _communication, _memory_tight)
    findings = [finding for cause in causes if (finding := cause(summary))]
    if not findings and summary.band in (FAIR, BAD):
        findings = [_unexplained(summary)]
    findings.sort(key=lambda finding: -(finding.saves or 0.0))
    return Advice("gpu" if summary.has_gpu else "cpu", percent, summary.band, tuple(findings))


def band_of(percent: float) -> str:
    return GOOD if percent >= GOOD_FROM else FAIR if percent >= FAIR_FROM else BAD


class SampleSummary:
    """The figures of samples that distinguish the causes. A figure is None when it was not measured."""

    def __init__(self, samples: Sequence[Values], facts: TrainingSetup) -> None:
        rows = [{key: value for key, value in row.items() if _is_figure(value)} for row in samples]
        training = [row for row in rows if any(key.startswith("rank") and key.endswith(".step_s") for key in row)]
        self.rows, self.facts = training or rows, facts
        self.columns: dict[str, list[float]] = {}
        for row in self.rows:
            for key, value in row.items():
                self.columns.setdefault(key, []).append(value)

    def every(self, pattern: str) -> list[float]:
        """All values of all samples whose name matches."""
        return [value for key, values in self.columns.items() if re.fullmatch(pattern, key) for value in values]

    def mean(self, pattern: str) -> float | None:
        return _mean(self.every(pattern))

    def each(self, name: str) -> dict[str, float]:
        """The mean of a figure by rank: `rank0`, `rank1` …"""
        columns = {key: values for key, values in self.columns.items() if re.fullmatch(rf"rank\d+\.{name}", key)}
        return {key.partition(".")[0]: sum(values) / len(values) for key, values in columns.items()}

    @property
    def has_gpu(self) -> bool:
        return self.mean(rf"{GPU}\.util") is not None

    @property
    def percent(self) -> float | None:
        """How busy the GPUs are; without one, how busy each rank keeps its core."""
        percent = self.mean(rf"{GPU}\.util") if self.has_gpu else self.mean(r"rank\d+\.cpu")
        return None if percent is None else min(max(percent, 0.0), 100.0)

    @property
    def band(self) -> str | None:
        return None if self.percent is None else band_of(self.percent)

    @property
    def data_wait(self) -> float:
        """Share of the time of the rank that waits most, because the others wait for it."""
        return min(max([0.0, *self.each("data_wait").values()]), 1.0)

    @property
    def workers(self) -> int | None:
        """Loading processes of a rank; None where none is known but some use the CPU: the script has a loader of its own."""
        unknown = self.facts.workers == 0 and self.mean(r"rank\d+\.loaders") is not None
        return None if unknown else self.facts.workers

    @property
    def ranks(self) -> int:
        ranks = {key.partition(".")[0] for key in self.columns if key.startswith("rank")}
        return max(1, self.facts.ranks or len(ranks))

    @property
    def cores(self) -> int:
        return max(0, int(self.mean(r"host\.cores") or self.facts.cores or 0))

    @property
    def used_memory(self) -> float | None:
        """The highest share of a GPU's memory that was in use."""
        shares = []
        for key, values in self.columns.items():
            if match := re.fullmatch(rf"({GPU})\.mem_used(\.max)?", key):
                total = max(self.columns.get(f"{match[1]}.mem_total", [0.0]))
                shares += [max(values) / total] if total > 0 else []
        return _share(max(shares)) if shares else None

    def with_bits(self, bits: int) -> float:
        """The share of the samples in which some GPU showed one of these bits."""
        keys = [key for key in self.columns if re.fullmatch(rf"{GPU}\.throttle", key)]
        masks = [[int(row[key]) for key in keys if key in row] for row in self.rows]
        is_set = [any(mask & bits for mask in row) for row in masks if row]
        return sum(is_set) / len(is_set) if is_set else 0.0


def _throttled(summary: SampleSummary) -> Finding | None:
    hot, cut = summary.with_bits(HEAT), summary.with_bits(HARDWARE)
    if max(hot, cut) < OFTEN:
        return None
    clocks = summary.every(rf"{GPU}\.sm_mhz")
    clock, best = _mean(clocks), max(clocks, default=0.0)
    saves = _share(1 - clock / best) if clock is not None and best > 0 else None
    degrees = summary.mean(rf"{GPU}\.temp_c(\.max)?")
    at = f" at {degrees:.0f} °C" if degrees is not None else ""
    figures = _figures(throttled=max(hot, cut), sm_mhz=clock, sm_mhz_best=best or None, temp_c=degrees)
    if hot >= cut:
        what = f"the GPU is slowed down by heat in {hot:.0%} of the samples{at}"
        return Finding("throttled", what, "cool it: see to fans and air, or set a lower power limit", saves, figures)
    what = f"the GPU's hardware slows it down in {cut:.0%} of the samples{at}"
    return Finding("throttled", what, "see to its power supply; another machine is faster", saves, figures)


def _waiting_for_data(summary: SampleSummary) -> Finding | None:
    waits, by_rank = summary.data_wait, summary.each("data_wait")
    if waits < WAITS:
        return None
    host, cores, ranks = summary.mean(r"host\.cpu"), summary.cores, summary.ranks
    loaders, read_bps = summary.mean(r"rank\d+\.loaders"), summary.mean(r"host\.disk_read_bps")
    what = f"ranks wait for data {waits:.0%} of the time"
    if min(by_rank.values()) < waits - 0.2:
        what = (
            f"{max(by_rank, key=lambda rank: by_rank[rank])} waits for data {waits:.0%} of the time, the others for it"
        )
    if summary.workers is not None:
        what += f" (num_workers {summary.workers}, ranks {ranks}, cores {cores or 'unknown'})"
    figures = _figures(
        data_wait=waits, host_cpu=host, cores=cores or None, workers=summary.workers, loaders=loaders, disk_read_bps=read_bps
    )  # fmt: skip
    change, saves = _loading_change(summary, waits, host, loaders)
    return Finding("waiting_for_data", what, change, saves, figures)


def _loading_change(
    summary: SampleSummary, waits: float, host: float | None, loaders: float | None
) -> tuple[str, float]:
    """The change and its saving: more loading processes while cores are free, else a local disk, else less work a sample."""
    workers, fitting = summary.workers, max(1, summary.cores // summary.ranks)
    if workers == 0:
        wanted = min(4, fitting)
        return f"num_workers = {wanted}: loading beside the training", _share(1 - max(1 - waits, waits / wanted))
    if host is not None and host >= FULL:
        if workers is not None and summary.cores and workers * summary.ranks > summary.cores:
            return f"num_workers = {fitting}: more processes than cores only take turns", waits
        return "prepare samples once and keep them ready (decoded, resized): every core is busy loading", waits
    rests = (
        loaders is not None and workers and loaders / workers < IDLE
    )  # the loading processes wait, too: more of them would not help
    if workers is not None and workers < fitting and not rests:
        return f"num_workers = {fitting}: as many as there are cores for", _share(1 - max(1 - waits, workers / fitting))
    if not summary.facts.cached:
        return '[data] cache = ["the folder of the data"]: read it from a local disk', waits
    return "fewer and larger files: the loading processes wait for the disk, not for cores", waits


def _held_by_cpu(summary: SampleSummary) -> Finding | None:
    """A rank's process keeps its core busy: too little work at a time for the GPU, or too few threads without one."""
    cpu, percent = summary.mean(r"rank\d+\.cpu"), summary.percent
    if cpu is None or percent is None or cpu < FULL or summary.data_wait >= WAITS:
        return None
    if not summary.has_gpu:
        return _few_threads(summary, cpu)
    if percent >= GOOD_FROM:
        return None
    memory, step_s, facts = summary.used_memory, summary.mean(r"rank\d+\.step_s"), summary.facts
    saves = _share(1 - percent / AT_BEST)
    figures = _figures(util=percent, rank_cpu=cpu, memory_used=memory, step_s=step_s, microbatch=facts.microbatch)
    busy = f"the GPU is busy {percent:.0f}% while each rank keeps a core full"
    if memory is not None and memory <= HALF:
        smaller = facts.microbatch is not None and (facts.batch is None or facts.microbatch < facts.batch)
        change = (
            f"memory.microbatch = {2 * (facts.microbatch or 1)}: the same result in larger parts"
            if smaller
            else "a batch twice as large (the learning rate with it): the memory has room"
        )
        return Finding("small_batch", f"{busy} and {memory:.0%} of its memory is used", change, saves, figures)
    return Finding("cpu_bound", busy, "torch.compile(model), or fewer, larger operations a step", saves, figures)


def _few_threads(summary: SampleSummary, cpu: float) -> Finding | None:
    threads, host = summary.cores // summary.ranks, summary.mean(r"host\.cpu")
    if threads < 2 or cpu > 1.5 * 100 or host is None or host >= FULL:
        return None
    what = f"{summary.ranks} ranks compute on one core each, of {summary.cores} that are busy {host:.0f}%"
    saves = _share(1 - host / 100)
    figures = _figures(rank_cpu=cpu, host_cpu=host, cores=summary.cores, ranks=summary.ranks)
    return Finding("cpu_bound", what, f"OMP_NUM_THREADS={threads}, which torchrun sets to 1", saves, figures)


def _communication(summary: SampleSummary) -> Finding | None:
    percent, cpu = summary.percent, summary.mean(r"rank\d+\.cpu")
    if summary.ranks < 2 or percent is None or summary.data_wait >= WAITS:
        return None
    power, limit = summary.mean(rf"{GPU}\.power_w"), summary.mean(rf"{GPU}\.power_limit_w")
    change = "halve what is sent: DDP's bf16_compress_hook; it rounds the gradients"
    if summary.has_gpu and percent >= GOOD_FROM and power is not None and limit and limit > 0 and power / limit < HALF:
        what = f"the GPUs are busy {percent:.0f}% at {power / limit:.0%} of their power: they wait for each other"
        figures = _figures(util=percent, power_w=power, power_limit_w=limit, ranks=summary.ranks)
        return Finding("communication", what, change, _share(1 - power / limit), figures)
    if percent < GOOD_FROM and cpu is not None and cpu < IDLE:
        what = f"{summary.ranks} ranks use {cpu:.0f}% of a core each and do not wait for data: they wait for each other"
        figures = _figures(util=percent, rank_cpu=cpu, ranks=summary.ranks)
        return Finding("communication", what, change, _share(1 - max(percent, cpu) / AT_BEST), figures)
    return None


def _memory_tight(summary: SampleSummary) -> Finding | None:
    """The allocator had to flush its cache and retry, which waits for the GPU each time."""
    rising = 0.0
    for rank in summary.each("alloc_retries"):
        counts = summary.columns[f"{rank}.alloc_retries"]
        rising = max(rising, counts[-1] - counts[0])
    if rising < 1:
        return None
    what = f"the allocator ran out of memory and tried again {rising:.0f} times"
    figures = _figures(alloc_retries=rising, memory_used=summary.used_memory)
    return Finding("memory_tight", what, 'ladder = ["expandable_segments", …], or a smaller microbatch', None, figures)


def _unexplained(summary: SampleSummary) -> Finding:
    figures = _figures(util=summary.percent, rank_cpu=summary.mean(r"rank\d+\.cpu"), data_wait=summary.data_wait)
    what = (
        f"{'the GPU' if summary.has_gpu else 'each rank'} is busy {summary.percent or 0:.0f}%, and no figure tells why"
    )
    return Finding("unexplained", what, "look where a rank stands: py-spy dump --pid PID", None, figures)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e18


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _figures(**values: float | None) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], *, top: float, width: int = 60) -> str:
    """Values over time as block characters, each the mean of its interval; a blank where nothing was measured."""
    return "".join(
        " " if mean is None else BLOCKS[round(_share(mean / top if top > 0 else 0.0) * (len(BLOCKS) - 1))]
        for mean in _interval_means(values, width)
    )


def _interval_means(values: Sequence[float | None], width: int) -> Iterator[float | None]:
    count = min(width, len(values))
    for number in range(count):
        part = values[number * len(values) // count : (number + 1) * len(values) // count]
        yield _mean([value for value in part if value is not None and _is_figure(value)])
