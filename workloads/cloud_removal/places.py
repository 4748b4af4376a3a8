"""Which images belong to one place, and to which part: from a list, or from the folders of SEN12MS-CR as they are unpacked.

A list is a CSV in one of three forms; its paths are relative to the folder of the images, wherever the list itself lies:

    split,s1,s2,s2_cloudy                          this first line, then train, val or test and three paths
    1,s1,s2_cloudfree,s2_cloudy,FILE               GLF-CR's data.csv: no first line; 1 train, 2 val, 3 test; three folders, one name
    1,S1DIR,S2DIR,CLOUDYDIR,S2FILE,S1FILE,CLOUDYFILE   the same with a name for each

Without a list the folders are searched at any depth for s1_N, s2_N and s2_cloudy_N, and divided by region as was published.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kgorch.workloads.common.files import DataError
from kgorch.workloads.common.listing import THREADS

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")
KINDS = ("s1", "s2", "s2_cloudy")
NUMBERED: dict[str, Part] = {"1": "train", "2": "val", "3": "test"}

HELD_OUT: dict[str, Part] = {
    **dict.fromkeys(
        (
            "ROIs1158_spring_17", "ROIs1868_summer_17", "ROIs1868_summer_19", "ROIs1868_summer_80", "ROIs1868_summer_127",
            "ROIs1970_fall_65", "ROIs2017_winter_22", "ROIs2017_winter_84", "ROIs2017_winter_107", "ROIs2017_winter_130",
        ),
        "val",
    ),
    **dict.fromkeys(
        (
            "ROIs1158_spring_31", "ROIs1158_spring_44", "ROIs1158_spring_106", "ROIs1158_spring_123", "ROIs1158_spring_140",
            "ROIs1868_summer_73", "ROIs1868_summer_119", "ROIs1970_fall_139", "ROIs2017_winter_63", "ROIs2017_winter_108",
        ),
        "test",
    ),
}  # fmt: skip
"""Season and number of the regions that are not trained on, as the data loader of SEN12MS-CR's authors has it (UnCRtainTS).

Patches of one region overlap by half, so a division by patch would score what was trained on.
"""

FOLDER = re.compile(r"(s1|s2|s2_cloudy)_(\d+)")
FILE = re.compile(r"(ROIs\d+_[a-z]+)_(s1|s2|s2_cloudy)_(\d+)_p(\d+)\.tif")


@dataclass(frozen=True, slots=True)
class Scene:
    """The three files of one place: paths relative to the folder of the images."""

    s1: str
    s2: str
    s2_cloudy: str

    @property
    def name(self) -> str:
        return Path(self.s2_cloudy).stem


@dataclass(frozen=True)
class Places:
    """Attributes:
    scenes: part and files, in the list's order; of folders by season, region and patch.
    incomplete: part, and what was said of a place of which an image is missing.
    where: the list or the folder, for messages.
    """

    scenes: list[tuple[Part, Scene]]
    incomplete: list[tuple[Part, str]]
    where: str


def find_places(root: str | os.PathLike[str], table: str | None = None) -> Places:
    """The places of `table`; without one, of data.csv in `root`; without that, of its folders.

    Raises:
        DataError: naming the first line that is wrong, or what was looked for.
    """
    path = Path(table) if table is not None else Path(root, "data.csv")
    if table is not None or path.exists():
        return Places(list(listed(path)), [], str(path))
    regions = list(regions_in(Path(root)))
    return Places(
        [(part_of(region), scene) for region in regions for scene in scenes_of(region)],
        [(part_of(region), said) for region in regions for said in region["incomplete"]],
        str(root),
    )


def listed(table: Path) -> Iterator[tuple[Part, Scene]]:
    """The lines of a list. Raises DataError."""
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            lines = [(number, line) for number, line in enumerate(csv.reader(file, skipinitialspace=True), 1) if line]
    except (OSError, ValueError, csv.Error) as problem:
        raise DataError(
            f"there is no list of images at {table}", f"expected a CSV, found: {problem}",
            next_step="correct `data_list`; without it, data.csv in `data` is read, or its folders are searched",
        ) from problem  # fmt: skip
    if not lines:
        raise DataError(f"{table} is empty", "expected a line a place", next_step="write it again")
    head = lines[0][1]
    if head[0] in NUMBERED:
        for number, line in lines:
            if len(line) not in (5, 7) or line[0] not in NUMBERED or not all(line):
                raise DataError(
                    f"{table}:{number}: no line of GLF-CR's list",
                    "expected 1, 2 or 3, the folders of s1, s2 and s2_cloudy, and one file name or three, "
                    f"found {','.join(line):.200}",
                    next_step="correct this line, or leave it out",
                )
            s2, s1, cloudy = line[4:] if len(line) == 7 else line[4:] * 3  # in this order, as their program writes them
            yield NUMBERED[line[0]], Scene(f"{line[1]}/{s1}", f"{line[2]}/{s2}", f"{line[3]}/{cloudy}")
        return
    if missing := [name for name in ("split", *KINDS) if name not in head]:
        raise DataError(
            f"{table} has no column {missing[0]!r}", f"found {','.join(head):.200}",
            next_step="its first line names the columns (split,s1,s2,s2_cloudy), or it is a list of GLF-CR, "
            "each line of which begins with 1, 2 or 3",
        )  # fmt: skip
    for number, line in lines[1:]:
        values = dict(zip(head, line, strict=False))
        part = next((part for part in PARTS if part == values.get("split")), None)
        if part is None or not all(values.get(kind) for kind in KINDS):
            raise DataError(
                f"{table}:{number}: {values.get('split')!r} is no split" if part is None
                else f"{table}:{number}: a path is missing",
                f"expected {', '.join(PARTS)} and three paths, found {','.join(line):.200}",
                next_step="correct this line, or leave it out",
            )  # fmt: skip
        yield part, Scene(*(values[kind] for kind in KINDS))


def region_folders(root: Path) -> list[str]:
    """Folders of one sensor and one region below root, sorted. They are not opened. Raises DataError where there are none."""
    found: list[str] = []
    for folder, below, _ in os.walk(root):
        found += [os.path.relpath(os.path.join(folder, name), root) for name in below if FOLDER.fullmatch(name)]
        below[:] = [name for name in below if not FOLDER.fullmatch(name)]
    if not found:
        raise DataError(
            f"there are no images in {root}",
            "expected data.csv, or the folders of SEN12MS-CR (s1_102, s2_102 and s2_cloudy_102, at any depth), "
            f"found {', '.join(sorted(path.name for path in root.glob('*'))[:5]) or 'nothing'}",
            next_step="correct `data`, name the list (`data_list`), or make images: "
            f"python -m kgorch.workloads.cloud_removal.make_scenes {root}",
        )
    return sorted(found)


def regions_in(root: Path) -> Iterator[dict[str, Any]]:
    """Each region: its season and number, the folder of each sensor, the patches that all three have, and which lack one."""
    folders = region_folders(root)
    with ThreadPoolExecutor(THREADS) as threads:  # on a network disk each listing waits
        names = list(threads.map(os.listdir, (root / folder for folder in folders)))
    held: dict[tuple[str, int], dict[str, tuple[str, set[int]]]] = {}
    for folder, those in zip(folders, names, strict=True):
        for name in those:
            if match := FILE.fullmatch(name):
                season, kind, region, patch = match.groups()
                held.setdefault((season, int(region)), {}).setdefault(kind, (folder, set()))[1].add(int(patch))
    for (season, region), kinds in sorted(held.items()):
        patches = [kinds.get(kind, ("", set()))[1] for kind in KINDS]
        whole = set.intersection(*patches)
        yield {
            "season": season,
            "region": region,
            "folders": [kinds.get(kind, ("", set()))[0] for kind in KINDS],
            "patches": sorted(whole),
            "incomplete": [
                f"{season}_{region}_p{patch} has no image of "
                + " and ".join(kind for kind, those in zip(KINDS, patches, strict=True) if patch not in those)
                for patch in sorted(set.union(*patches) - whole)
            ],
        }


def part_of(region: dict[str, Any]) -> Part:
    return HELD_OUT.get(f"{region['season']}_{region['region']}", "train")


def scenes_of(region: dict[str, Any]) -> Iterator[Scene]:
    for patch in region["patches"]:
        yield Scene(
            *(
                f"{folder}/{region['season']}_{kind}_{region['region']}_p{patch}.tif"
                for kind, folder in zip(KINDS, region["folders"], strict=True)
            )
        )
