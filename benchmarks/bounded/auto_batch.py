"""Transformers' answer to memory that runs out: auto_find_batch_size; otherwise as transformers_trainer.py, with save_steps."""

from __future__ import annotations

from transformers import TrainingArguments, logging

from bounded import training
from bounded.training import ENDLESS
from bounded.transformers_trainer import OurTrainer, Told, batch_of, newest


def main() -> None:
    options = training.options().parse_args()
    logging.set_verbosity_error()
    arguments = TrainingArguments(
        str(options.folder), use_cpu=True, per_device_train_batch_size=training.BATCH, auto_find_batch_size=True,
        dataloader_drop_last=True, num_train_epochs=ENDLESS, learning_rate=1e-3, lr_scheduler_type="constant",
        weight_decay=0.01, max_grad_norm=0.0, save_strategy="steps", save_steps=options.every, save_total_limit=2,
        logging_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = OurTrainer(
        training.network(options.size), arguments, train_dataset=training.samples(), data_collator=batch_of, callbacks=[Told()]
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=newest(options.folder))


if __name__ == "__main__":
    main()
