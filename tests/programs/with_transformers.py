"""An unmodified program in the manner of Transformers' examples: its own flags, Trainer, evaluation, code after training."""

import argparse
import os
import sys

import torch
import troubled
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SPREAD = float(os.environ.get("SPREAD_S", "0"))


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 60, (count, 12), generator=generator)
        self.labels = (self.ids.sum(1) > 390).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index].clone()
        ids[int(torch.randint(12, ()))] = 4  # one word is masked: another one each time
        return {"input_ids": ids, "labels": self.labels[index]}


class Slow(TrainerCallback):
    def on_step_end(self, *_, **__) -> None:
        import time

        time.sleep(SPREAD)


def saves(every: int) -> dict:
    """The Trainer's own checkpoints, none by default; the best one is loaded at the end."""
    if not every:
        return {"eval_strategy": "epoch", "save_strategy": "no"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    return {"eval_strategy": "steps", "eval_steps": every, "save_strategy": "steps", "save_steps": every, **best}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    troubled.befall(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            options.out, num_train_epochs=options.epochs, per_device_train_batch_size=8, learning_rate=1e-3, seed=11,
            gradient_accumulation_steps=options.accumulate, dataloader_num_workers=options.workers, logging_steps=3,
            **saves(options.save_steps), report_to=[], disable_tqdm=True, use_cpu=os.environ.get("DEVICE") != "cuda",
            lr_scheduler_type="cosine", warmup_steps=4,
        ),
        train_dataset=Sentences(220, 1),
        eval_dataset=Sentences(40, 2),
        callbacks=[Slow()],
    )  # fmt: skip
    result = trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        trainer.save_model(options.out)
        with open(os.path.join(options.out, "after.txt"), "w") as file:
            figures = f"{metrics['eval_loss']:.9f}", f"{result.training_loss:.6f}"
            print(trainer.state.global_step, *figures, trainer.args.device.type, file=file)
        print("evaluated", file=sys.stderr)


if __name__ == "__main__":
    main()
