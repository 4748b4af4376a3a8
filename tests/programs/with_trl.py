"""An unmodified program in the manner of TRL's examples: supervised fine-tuning of a LoRA adapter, best metric, own checkpoints."""

import argparse
import os
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

WORDS = ["[PAD]", "[EOS]", *(f"w{number}" for number in range(60))]


def sentences(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 50, (count,), generator=generator).tolist()
    return Dataset.from_list(
        [{"text": " ".join(f"w{start + step}" for step in range(4 + start % 5))} for start in starts]
    )


class Slow(TrainerCallback):
    def on_step_end(self, *_, **__) -> None:
        time.sleep(float(os.environ.get("SPREAD_S", "0")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    torch.manual_seed(7)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=2, max_position_embeddings=64, **size)
    )
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            options.out, num_train_epochs=options.epochs, per_device_train_batch_size=4, gradient_accumulation_steps=2, seed=3,
            logging_steps=2, eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            learning_rate=5e-3, max_length=16, bf16=False, gradient_checkpointing=False,
        ),
        train_dataset=sentences(160, 1),
        eval_dataset=sentences(24, 2),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[Slow()],
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        Path(options.out).mkdir(parents=True, exist_ok=True)
        Path(options.out, "after.txt").write_text(f"{trainer.state.global_step} {metrics['eval_loss']:.9f}\n")


if __name__ == "__main__":
    main()
