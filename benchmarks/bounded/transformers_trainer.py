"""Hugging Face's Trainer: save_steps, and what it calls just-in-time checkpointing on SIGTERM (--jit)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, logging
from transformers.trainer_utils import get_last_checkpoint

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
    parser.add_argument("--jit", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    arguments = TrainingArguments(
        str(options.folder), use_cpu=True, per_device_train_batch_size=training.BATCH, dataloader_drop_last=True,
        num_train_epochs=ENDLESS, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=0.0,
        save_strategy="steps", save_steps=options.every, save_total_limit=2, enable_jit_checkpoint=options.jit,
        logging_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = OurTrainer(
        training.network(options.size), arguments, train_dataset=training.samples(), data_collator=batch_of, callbacks=[Told()]
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.folder)))


if __name__ == "__main__":
    main()
