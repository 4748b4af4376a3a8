"""Zip the masks as the competition takes them, and say how they are handed in; needs no PyTorch.

alone:  python -m kgorch.workloads.surface_detection.package --data volumes
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

from kgorch import KgorchError, output_folder
from kgorch.worker import launch
from kgorch.workloads import cli
from kgorch.workloads.surface_detection.submit import COMPETITION, command, shown
from kgorch.workloads.surface_detection.volumes import header, listed


def main(
    data: str,
    predictions: str = "predictions",
    archive: str = "submission.zip",
    copy_to: str | None = None,
    competition: str = COMPETITION,
    message: str = "kgorch",
) -> None:
    """Write the archive with ID.tif of every volume in test.csv; --predictions and --archive are below the output folder.

    --copy-to is a folder where the archive is to lie, too: on Kaggle /kaggle/working, where a notebook's submission is looked for.
    """
    output, told = output_folder(), launch()
    wanted = [row.id for row in listed(data, "test")]
    if told and told.quick:  # of a quick test or `kgorch check`, whose prediction has seen a few tiles
        wanted = [id for id in wanted if (output / predictions / f"{id}.tif").is_file()]
    path = write_archive(output / archive, masks(output / predictions, wanted))
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB", flush=True)
    if copy_to is not None:
        if Path(copy_to).is_dir():
            path = Path(shutil.copyfile(path, Path(copy_to, path.name)))
            print(f"copied to {path}", flush=True)
        else:
            print(f"not copied to {copy_to}: there is no such folder on this machine", flush=True)
    print(f"to hand it in:\n  {shown(command(competition, path, message))}", flush=True)


def masks(folder: Path, ids: list[str]) -> list[Path]:
    """The mask of each volume. Raises KgorchError for those that are missing or broken, by name."""
    found = [folder / f"{id}.tif" for id in ids]
    if missing := [path.name for path in found if not path.is_file()]:
        reasons = {
            name: said
            for said in left_out(folder.parent / "predictions.json")
            for name in missing
            if said.startswith(name)
        }
        raise KgorchError(
            f"{len(missing)} of {len(ids)} masks are missing",
            f"{folder}: expected a mask for each volume in test.csv, found no {', '.join(missing[:3])}",
            *(f"predict left out: {said}" for said in list(reasons.values())[:3]),
            next_step="fetch these volumes again, and predict anew with this run's weights (plan_predict.toml)"
            if len(reasons) == len(missing)
            else "run the predict stage to its end first, without limit and on the same data",
        )
    for path in found:
        header(path)
    return found


def left_out(path: Path) -> list[str]:
    """Why predict left volumes out, a line each, where it has ended and says so."""
    try:
        found = json.loads(path.read_text())["left_out"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [said.partition("\n")[0] for said in found if isinstance(said, str)] if isinstance(found, list) else []


def write_archive(path: Path, files: list[Path]) -> Path:
    """The files at the top of a zip whose bytes depend on theirs alone: no clock, user or platform in it."""
    aside = path.with_suffix(".part")
    with zipfile.ZipFile(aside, "w") as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr, entry.compress_type = 3, 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    aside.replace(path)
    return path


if __name__ == "__main__":
    cli.run(main)
