"""`python -m storm`: what a person types, the episodes side by side, and the table at the end."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from storm import episode as episodes
from storm import invariants, schedule
from storm.episode import Outcome
from storm.schedule import Episode
from storm.shrink import smallest

PAST = Path(__file__).with_name("past")
KEPT = Path("build", "storm")
SHRINK_TRIES, SHRINK_S = 14, 900.0

err = Console(stderr=True, highlight=False, soft_wrap=True)


@click.command(context_settings={"show_default": True})
@click.option("--seed", type=int, help="Of the schedule; a fresh one by default, which is printed.")
@click.option("--minutes", type=float, default=10.0, help="No new fault comes after that.")
@click.option("--faults", type=int, help="No new episode is begun after so many faults.")
@click.option("--episode", "number", type=int, help="One episode of the seed alone.")
@click.option("--from", "first", type=int, default=0, help="The seed's first episode: where a storm was ended before.")
@click.option("--only", multiple=True, type=click.Choice(sorted(schedule.KINDS)), help="No other faults than these.")
@click.option("--replay", type=click.Path(path_type=Path, exists=True), help="One episode from a file.")
@click.option("--jobs", type=int, default=2, envvar="JOBS", help="Episodes beside one another.")
@click.option("--shrink/--no-shrink", default=True, help="Make a schedule that breaks something small.")
@click.option("--past/--no-past", default=True, help="Replay first what has broken something once (tests/storm/past).")
@click.option("--out", type=click.Path(path_type=Path), default=KEPT, help="Where what broke is kept.")
@click.option(
    "--references",
    type=click.Path(path_type=Path),
    help="Where uninterrupted runs of this code are kept for the next storm.",
)
@click.option("--json", "as_json", is_flag=True)
def main(
    seed: int | None,
    minutes: float,
    faults: int | None,
    number: int | None,
    first: int,
    only: tuple[str, ...],
    replay: Path | None,
    jobs: int,
    shrink: bool,
    past: bool,
    out: Path,
    references: Path | None,
    as_json: bool,
) -> None:
    """Run kgorch through a storm of faults, and see whether what it promises holds. Exit code 1 when something broke."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    err.print(f"storm: seed {seed}")
    began_s, out = time.monotonic(), out.absolute()
    if replay:
        wanted: Iterable[Episode] = [schedule.from_json(replay.read_text())]
    elif number is not None:
        wanted = [schedule.episode(seed, number, only)]
    else:
        wanted = _wanted(seed, first, only, past=past and not (only or first))
    with tempfile.TemporaryDirectory(prefix="storm-references-") as temporary:
        cache = (references or Path(temporary)).absolute()
        until_s = began_s + 60 * minutes if not replay else None
        found = list(_run(iter(wanted), cache, out, jobs, until_s, faults))
        broke = [outcome for outcome in found if outcome.broken]
        if shrink and not replay and (mendable := [item for item in broke if item.kept]):
            _shrink(min(mendable, key=lambda outcome: len(outcome.hits)), cache, out)
    took_s = time.monotonic() - began_s
    if as_json:
        click.echo(json.dumps({"seed": seed, "took_s": took_s, "episodes": [asdict(item) for item in found]}))
    _tell(found, seed, took_s)
    sys.exit(1 if broke else 0)


def _wanted(seed: int, first: int, only: tuple[str, ...], *, past: bool) -> Iterator[Episode]:
    if past:
        for path in sorted(PAST.glob("*.json")):
            yield schedule.from_json(path.read_text())
    yield from schedule.episodes(seed, only, first)


def _run(
    wanted: Iterator[Episode], cache: Path, out: Path, jobs: int, until_s: float | None, most: int | None
) -> Iterator[Outcome]:
    """So many at once, each in a process of its own, as long as there is time and faults are wanted."""
    running: set[Future[Outcome]] = set()
    injected = 0
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            is_over = until_s is not None and time.monotonic() > until_s
            enough = most is not None and injected + len(running) * schedule.FAULTS_AN_EPISODE / 2 >= most
            if not is_over and not enough:
                for episode in islice(wanted, jobs - len(running)):
                    running.add(pool.submit(_in_a_process, episode, cache, out, until_s))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for outcome in (future.result() for future in done):
                injected += _injected(outcome)
                _tell_one(outcome, injected)
                yield outcome


def _in_a_process(episode: Episode, cache: Path, out: Path, until_s: float | None) -> Outcome:
    """One that dies is told as broken, and ends no storm."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=episodes.end_with_the_storm) as alone:
            return alone.submit(episodes.run, episode, cache, out, until_s).result()
    except BrokenProcessPool:
        return Outcome(episode, broken=("harness: the episode's own process died",))


def _injected(outcome: Outcome) -> int:
    return sum(not hit.passed_over for hit in outcome.hits)


def _shrink(outcome: Outcome, cache: Path, out: Path) -> None:
    """Leave out faults as long as the same invariant breaks; it takes a run for each try."""
    kind, began_s = _invariant(outcome.broken[0]), time.monotonic()
    reached = outcome.episode.faults[: len(outcome.hits) or None]
    err.print(f"shrinking {outcome.episode.name}: {len(reached)} faults that break {kind}")

    def still_fails(faults: Sequence[schedule.Fault]) -> bool:
        if time.monotonic() - began_s > SHRINK_S:
            return False
        again = episodes.run(outcome.episode.with_faults(faults), cache, out / "shrinking")
        fails = any(_invariant(what) == kind for what in again.broken)
        err.print(f"  {'breaks' if fails else 'holds '}: {' '.join(fault.kind for fault in faults)}")
        return fails

    small = smallest(reached, still_fails, tries=SHRINK_TRIES)
    place = Path(outcome.kept) / "smallest.json"
    place.write_text(schedule.to_json(outcome.episode.with_faults(small), outcome.broken))
    err.print(f"smallest: {' '.join(fault.kind for fault in small)}\nnext: {_again(place)}")


def _invariant(what: str) -> str:
    """Its name, out of a line of what is broken."""
    return next((name for name in invariants.INVARIANTS if f"{name}: " in what), "harness")


def _again(path: Path) -> str:
    return f"PYTHONPATH=tests python -m storm --replay {path}"


def _tell_one(outcome: Outcome, injected: int) -> None:
    kinds = " ".join(f"({hit.kind})" if hit.passed_over else hit.kind for hit in outcome.hits)
    how = "BROKEN" if outcome.broken else "held"
    err.print(
        f"{outcome.episode.name} {how} in {outcome.took_s:.0f} s, {outcome.episode.program}, {outcome.episode.ranks} ranks,"
        f" {outcome.sessions} sessions, {outcome.not_reached} not reached, {injected} faults so far: {kinds}",
        markup=False,
    )
    for what in outcome.broken:
        err.print(f"  {what[:2000]}", markup=False)


def _tell(found: list[Outcome], seed: int, took_s: float) -> None:
    table = Table("fault", "injected", "recovered", "passed over", "longest")
    hits = [hit for outcome in found for hit in outcome.hits]
    for kind in sorted({hit.kind for hit in hits}):
        mine = [hit for hit in hits if hit.kind == kind]
        met = [hit for hit in mine if not hit.passed_over]
        over = sorted({hit.passed_over for hit in mine if hit.passed_over})
        table.add_row(
            kind, str(len(met)), str(sum(hit.recovered for hit in met)),
            f"{len(mine) - len(met)} ({', '.join(over)})" if over else "",
            f"{max((hit.took_s for hit in met), default=0):.0f} s",
        )  # fmt: skip
    err.print(table)
    injected, sessions = sum(_injected(outcome) for outcome in found), sum(outcome.sessions for outcome in found)
    broke = [outcome for outcome in found if outcome.broken]
    err.print(
        f"seed {seed}: {injected} faults in {len(found)} episodes and {sessions} sessions, {took_s / 60:.1f} min,"
        f" {injected / took_s * 60:.1f} faults a minute; {len(broke)} episodes broke an invariant"
    )
    for outcome in (item for item in broke if item.kept):
        err.print(f"next: {_again(Path(outcome.kept) / 'episode.json')}", soft_wrap=True)


if __name__ == "__main__":
    main()
