"""Paint what the network finds: a mask a picture, and picture, truth, prediction and overlay side by side.

    alone:  python -m kgorch.workloads.camouflage.predict --data animals --weights outputs/camouflage.safetensors

Goes on where it was cut, with any number of ranks: each picture is a file of its own. Axes: H rows, W columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.camouflage.data import Pair, Pairs, Sample, read
from kgorch.workloads.camouflage.model import CamouflageNet, enlarged, iou_parts
from kgorch.workloads.camouflage.trained import weights_of
from kgorch.workloads.common.files import picture, tell_left_out
from kgorch.workloads.common.precision import finite

if TYPE_CHECKING:
    from kgorch import Session

RED, SHARE = (255, 40, 40), 0.5
PANEL_PX, ROWS = 224, 4
"""Longest side of one picture in the side-by-sides, and how many of these overview.png holds."""


def main(
    data: str,
    part: str = "Test",
    valid: float = 0.1,
    stage: str = "stage2",
    size: int | None = None,
    global_batch: int = 32,
    weights: str | None = None,
    which: str | None = None,
    names: str = "*",
    skip_broken: bool = False,
    num_workers: int = 0,
) -> None:
    """Write masks/NAME.png at the pictures' own size, predictions/NAME.png, overview.png and scores.json to the output folder.

    --part is Test, or Validation: what a training with the same --valid has held out of Train.
    --stage is the one whose weights are taken, --which is best or final, where not the best that the plan keeps; --weights is
    a safetensors file instead, needed when run without kgorch. They say what network they are of, and the --size of
    the pictures that it was trained on, so neither need be told.
    """
    with attach() as session:
        found = weights_of(session, stage, which, file=weights)
        net = CamouflageNet.of(found)
        size = size or int(net.trained_size)
        if not size:
            raise KgorchError(
                f"{found.label}: it does not say on what size it was trained", next_step="give size, for example 320"
            )
        pairs = Pairs(
            session.data(data), part, size, names=names, valid=valid, skip_broken=skip_broken, session=session
        )
        net.to(session.device).eval()
        session.track(model=net)  # so that a cut stage knows how far it came
        tell_left_out(session, pairs.broken)
        loader = session.loader(pairs, global_batch, shuffle=False, drop_last=False, num_workers=num_workers)
        folders = [session.output / name for name in ("masks", "predictions")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for batch in session.steps(loader, 1):
            if session.weight:  # else this rank has no picture left, and was lent another rank's
                paint(session, net, pairs, batch, *folders)
        dist.barrier()  # what another rank has painted is scored, too
        made = pairs.pairs
        if session.quick:  # a few batches came
            made = [pair for pair in made if (folders[0] / f"{pair.name}.png").exists()]
        iou = score(session, made, folders[0])
        session.report(test_iou=iou)
        if session.rank == 0:
            scores = {"iou": iou, "part": part, "pictures": len(made), "size": size, "weights": found.facts}
            (session.output / "scores.json").write_text(json.dumps(scores) + "\n")
            overview(made, folders[1]).save(session.output / "overview.png")


@torch.no_grad()
def paint(
    session: Session, net: CamouflageNet, pairs: Pairs, batch: Sample, mask_folder: Path, side_folder: Path
) -> None:
    """One batch, in as many pieces as a training step is cut into."""
    count = session.microbatch or len(batch.image)
    for piece, indices in zip(batch.image.split(count), batch.index.split(count), strict=True):
        image = piece.to(session.device)
        logits_BCHW = finite(session, lambda image=image: net(image).mask).float().cpu()
        for logits_CHW, index in zip(logits_BCHW, indices.tolist(), strict=True):
            pair = pairs.pairs[index]
            image_HWC, truth_HW = read(pair)
            found_HW = (enlarged(logits_CHW[None], truth_HW.shape)[0, 0] > 0).numpy()
            Image.fromarray(found_HW.astype(np.uint8) * 255).save(mask_folder / f"{pair.name}.png")
            side_by_side(image_HWC, truth_HW > 0, found_HW).save(side_folder / f"{pair.name}.png")


def side_by_side(image_HWC: np.ndarray, truth_HW: np.ndarray, found_HW: np.ndarray) -> Image.Image:
    """The picture, the truth, what was found, and that in red over the picture."""
    red_HWC = np.where(found_HW[..., None], (1 - SHARE) * image_HWC + SHARE * np.array(RED), image_HWC)
    masks = [np.repeat(mask_HW[..., None] * 255, 3, 2) for mask_HW in (truth_HW, found_HW)]
    row = Image.fromarray(np.concatenate([image_HWC, *masks, red_HWC], 1).astype(np.uint8))
    scale = min(1.0, PANEL_PX / max(truth_HW.shape))
    return row.resize((round(row.width * scale), round(row.height * scale)), Image.Resampling.BOX)


def score(session: Session, made: Sequence[Pair], mask_folder: Path) -> float:
    """Mean IoU of the masks as they lie there, at the pictures' own size; each rank reads its share of them."""
    total = torch.zeros(2, dtype=torch.float64)
    for pair in made[session.rank :: session.world_size]:
        truth_HW, found_HW = read(pair)[1], picture(mask_folder / f"{pair.name}.png", "L")
        found, truth = torch.from_numpy(found_HW / 255 - 0.5), torch.from_numpy(truth_HW)
        total += iou_parts(found[None, None], truth[None, None])
    total = total.to(session.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def overview(made: Sequence[Pair], side_folder: Path) -> Image.Image:
    """Some of the side-by-sides, one below the other."""
    count = min(ROWS, len(made))
    chosen = [made[len(made) * number // count] for number in range(count)]
    rows = [Image.open(side_folder / f"{pair.name}.png") for pair in chosen]
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)))
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


if __name__ == "__main__":
    cli.run(main)
