"""Hugging Face's Trainer: save_steps (--every N), and what it calls just-in-time checkpointing on SIGTERM (--jit SECONDS waited).

Resumed is from the newest folder that is whole: get_last_checkpoint takes one that a kill has left half written, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, logging
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from bounded import training
from bounded.training import ENDLESS, marks


class OurTrainer(Trainer):
    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        return training.loss_of(model, inputs["words"], inputs["classes"])


class Told(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        marks.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        marks.done(state.global_step)


def batch_of(items: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    words, classes = zip(*items, strict=True)
    return {"words": torch.stack(words), "classes": torch.stack(classes)}


def main() -> None:
    parser = training.options()
    parser.add_argument("--jit", type=float, help="kill_wait of its CheckpointManager, which has no argument")
    options = parser.parse_args()
    logging.set_verbosity_error()
    arguments = TrainingArguments(
        str(options.folder), use_cpu=True, per_device_train_batch_size=training.BATCH, dataloader_drop_last=True,
        num_train_epochs=ENDLESS, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=0.0,
        save_strategy="steps" if options.every else "no", save_steps=options.every or 500, save_total_limit=2,
        enable_jit_checkpoint=options.jit is not None,
        logging_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = OurTrainer(
        training.network(options.size), arguments, train_dataset=training.samples(), data_collator=batch_of, callbacks=[Told()]
    )  # fmt: skip
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, JITCheckpointCallback) and callback.jit_manager:
            callback.jit_manager.kill_wait = options.jit
    trainer.train(resume_from_checkpoint=newest(options.folder))


def newest(folder: Path) -> str | None:
    """trainer_state.json is written last; the text file is there as long as a just-in-time checkpoint is being written."""
    found = [
        path for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").exists() and not (path / "checkpoint-is-incomplete.txt").exists()
    ]  # fmt: skip
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


if __name__ == "__main__":
    main()
