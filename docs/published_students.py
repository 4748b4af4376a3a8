"""VQA's three students at their published sizes with random weights, for reports of memory and time (docs/reports.py).

`python docs/published_students.py OUT --listing TRAIN.jsonl`: the small ones of workloads/vqa/make_students.py, whose
tokenizers are kept, with networks of the published widths in their place. Sizes: the config.json of Salesforce/blip-vqa-base,
vinai/phobert-base and VietAI/vit5-base. 1.9 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import (
    AutoConfig,
    BlipVisionConfig,
    BlipVisionModel,
    PreTrainedModel,
    RobertaModel,
    T5ForConditionalGeneration,
)  # fmt: skip

BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SIZES: dict[str, tuple[type[PreTrainedModel], dict[str, object]]] = {
    "blip-vqa-base": (BlipVisionModel, BASE | {"image_size": 384, "patch_size": 16}),
    "phobert-base": (RobertaModel, BASE | {"vocab_size": 64001, "max_position_embeddings": 258}),
    "vit5-base": (
        T5ForConditionalGeneration,
        {"vocab_size": 36096, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12,
         "num_heads": 12},
    ),
}  # fmt: skip


def main() -> None:
    """Parse, then write the folders."""
    parser = argparse.ArgumentParser(
        description="Write BLIP's image encoder, PhoBERT and ViT5 at their published sizes."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--listing", type=Path, required=True, help="a file whose texts the tokenizers are learnt from")
    options = parser.parse_args()
    small = [
        sys.executable,
        "-m",
        "kgorch.workloads.vqa.make_students",
        str(options.out),
        "--listing",
        str(options.listing),
    ]
    subprocess.run([*small, "--image-size", "384"], check=True)
    for name, (kind, sizes) in SIZES.items():
        folder = options.out / name
        config = (
            BlipVisionConfig.from_pretrained(folder) if name.startswith("blip") else AutoConfig.from_pretrained(folder)
        )
        for key, value in sizes.items():
            setattr(config, key, value)
        network = kind(config)
        network.save_pretrained(folder)
        print(f"{folder}: {sum(weight.numel() for weight in network.parameters()):,} weights")


if __name__ == "__main__":
    main()
