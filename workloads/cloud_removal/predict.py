"""Take the clouds out of the images listed as test: GeoTIFFs, pictures, and how near they come; goes on where it was cut.

    alone:  python -m kgorch.workloads.cloud_removal.predict --data scenes --weights outputs/cloud_removal.safetensors

Axes: B batch, C bands, H rows, W columns, N images, F figures.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import rasterio
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from kgorch import attach
from kgorch.workloads import cli
from kgorch.workloads.cloud_removal import authors
from kgorch.workloads.cloud_removal.data import FULL, DataError, Sample, Scenes, opened
from kgorch.workloads.cloud_removal.model import CloudRemover, scores
from kgorch.workloads.cloud_removal.places import Part, Scene
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.precision import finite
from kgorch.workloads.common.trained import trained

if TYPE_CHECKING:
    from kgorch import Session
    from kgorch.worker.checkpoint.stage_weights import Weights

RED_GREEN_BLUE, BRIGHT = [3, 2, 1], 0.3
"""Bands B4, B3 and B2, and the reflectance that is shown as white: little on the ground is brighter."""

FIGURES = ("psnr", "ssim", "cloudy_psnr")


class Scores(nn.Module):
    """The figures of each image, the same on every rank, so that a cut stage goes on with any number of them."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.register_buffer("figures_NF", torch.zeros(images, len(FIGURES)))

    def add(self, found_NF: Tensor) -> None:
        """What this rank found in this step, 0 elsewhere; all ranks call it together."""
        dist.all_reduce(found_NF)
        self.get_buffer("figures_NF").add_(found_NF)


def main(
    data: str,
    data_list: str | None = None,
    part: Part = "test",
    limit: int | None = None,
    global_batch: int = 8,
    width: int = 24,
    growth: int = 16,
    blocks: int = 2,
    layers: int = 2,
    window: int = 4,
    heads: int = 4,
    taps: int = 3,
    weights: str | None = None,
    which: str | None = None,
    skip_broken: bool = False,
    num_workers: int = 0,
) -> None:
    """Write predictions/NAME.tif, predictions/NAME.png, predictions.csv and predictions.json to the output folder.

    A picture shows, side by side, the cloudy image, radar, the prediction and the truth. --data, --data-list and --limit are as in
    train; --part is test or val; --global-batch is how many images all ranks together take in a step, one after another; the
    network's arguments are as they were in training; --which is best or final, where not the best that the plan keeps. --weights is
    a file instead, needed without kgorch or before a training: a safetensors file, or a .pth of GLF-CR's own programs (authors.py),
    for which the network's arguments must be those of plan.toml.
    """
    with attach() as session:
        scenes = Scenes(
            session.data(data), part, table=data_list, limit=limit, skip_broken=skip_broken, session=session
        )
        see_that_names_differ(scenes)
        net = CloudRemover(width, growth, blocks, layers, window=window, heads=heads, taps=taps)
        read = authors.read if weights and weights.endswith(".pth") else load_file
        found = trained(session, "train", file=weights, which=which, read=read)
        net.load_state_dict(found)
        net.to(session.device).eval()
        kept = Scores(len(scenes)).to(session.device)
        session.track(scores=kept)
        tell_left_out(session, scenes.left_out)
        folder = session.output / "predictions"
        folder.mkdir(parents=True, exist_ok=True)
        # Not one image a rank: a resume counts in batches, so their size must not depend on the number of ranks.
        loader = session.loader(
            scenes, global_batch, shuffle=False, drop_last=False, num_workers=num_workers, collate_fn=apart
        )
        for images in session.steps(loader, 1):
            found_NF = torch.zeros_like(kept.figures_NF)
            if not session.weight:  # this rank has no image left, and was lent another rank's
                images = []
            for image in images:
                batch = session.to_device(image)
                clear_BCHW = without_clouds(session, net, batch)
                found_NF[batch.index] = scores(clear_BCHW, batch)
                for number, clear_CHW in zip(batch.index.tolist(), clear_BCHW, strict=True):
                    write(folder, scenes, scenes.scenes[number], clear_CHW)
                draw(folder, scenes, batch, clear_BCHW)
            kept.add(found_NF)
        if session.rank == 0:
            summarise(session, scenes, kept.figures_NF, found)


def apart(samples: list[Sample]) -> list[Sample]:
    """Each a batch of one, because images may differ in size."""
    return [default_collate([sample]) for sample in samples]


def see_that_names_differ(scenes: Scenes) -> None:
    """Two images of one name would lie in one file."""
    seen: dict[str, str] = {}
    for scene in scenes.scenes:
        if scene.name in seen:
            raise DataError(
                f"two images are named {scene.name}", f"found {seen[scene.name]} and {scene.s2_cloudy}",
                next_step="rename one of them: predictions are named after the cloudy image",
            )  # fmt: skip
        seen[scene.name] = scene.s2_cloudy


@torch.no_grad()
def without_clouds(session: Session, net: CloudRemover, batch: Sample) -> Tensor:
    """[B, 13, H, W], 0..1."""
    return finite(session, lambda: net(batch.cloudy, batch.sar)).float().clamp(0, 1)


def write(folder: Path, scenes: Scenes, scene: Scene, clear_CHW: Tensor) -> None:
    """A GeoTIFF that lies where the cloudy image lies, in its units."""
    with opened(scenes.path(scene.s2_cloudy)) as cloudy:
        profile = {
            "driver": "GTiff",
            "count": cloudy.count,
            "height": cloudy.height,
            "width": cloudy.width,
            "dtype": cloudy.dtypes[0],
            "crs": cloudy.crs,
            "transform": cloudy.transform,
            "compress": "deflate",
        }
    aside = folder / f"{scene.name}.new"
    with rasterio.open(aside, "w", **profile) as file:
        file.write((clear_CHW * FULL).round().cpu().numpy().astype(profile["dtype"]))
    aside.replace(folder / f"{scene.name}.tif")


def draw(folder: Path, scenes: Scenes, batch: Sample, clear_BCHW: Tensor) -> None:
    """NAME.png of each image of the batch."""
    gap = 2
    for number, cloudy, sar, clear, truth in zip(
        batch.index.tolist(), batch.cloudy, batch.sar, clear_BCHW, batch.clear, strict=True
    ):
        panels = [seen(cloudy), sar[:1].expand(3, -1, -1), seen(clear), seen(truth)]
        row_CHW = torch.cat([nn.functional.pad(panel, (0, gap), value=1.0) for panel in panels], 2)[..., :-gap]
        image_HWC = (row_CHW * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        Image.fromarray(np.ascontiguousarray(image_HWC)).save(folder / f"{scenes.scenes[number].name}.png")


def seen(image_CHW: Tensor) -> Tensor:
    """As the eye would see it: [3, H, W], 0..1."""
    return (image_CHW[RED_GREEN_BLUE] / BRIGHT).clamp(0, 1)


def summarise(session: Session, scenes: Scenes, figures_NF: Tensor, weights: Weights) -> None:
    """predictions.csv, a line an image, and predictions.json, the means."""
    with open(session.output / "predictions.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["name", *FIGURES])
        for scene, figures in zip(scenes.scenes, figures_NF.tolist(), strict=True):
            table.writerow([scene.name, *(f"{value:.4f}" for value in figures)])
    means = dict(zip(FIGURES, figures_NF.double().mean(0).tolist(), strict=True))
    session.report(**{f"test_{name}": value for name, value in means.items()})
    found = {"images": len(scenes), **means, "left_out": scenes.left_out, "weights": weights.facts}
    (session.output / "predictions.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main)
