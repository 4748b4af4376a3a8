"""Accelerate's answer to memory that runs out: find_executable_batch_size around model, optimizer and loop, as documented.

In its best form: half the batch each time instead of nine tenths, and from the last save_state instead of from the beginning.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

from bounded import training
from bounded.training import BATCH, ENDLESS, marks


class Count:
    def state_dict(self) -> dict[str, int]:
        return {"step": marks.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        marks.step = state["step"]


def main() -> None:
    options = training.options().parse_args()
    accelerator = Accelerator(cpu=True)
    saved, batch = options.folder / "state", BATCH
    accelerator.register_for_checkpointing(Count())

    def half() -> int:
        nonlocal batch
        batch //= 2
        return batch

    @find_executable_batch_size(starting_batch_size=BATCH, reduce_batch_size_fn=half)
    def inner(batch_size: int) -> None:
        accelerator.free_memory()
        model = training.network(options.size)
        loader = torch.utils.data.DataLoader(training.samples(), batch_size, shuffle=True, drop_last=True)
        model, optimizer, loader = accelerator.prepare(model, training.optimizer_of(model), loader)
        if saved.exists():
            accelerator.load_state(str(saved))
        marks.begin(marks.step)
        for _ in range(ENDLESS):
            for words, classes in loader:
                loss = training.loss_of(model, words, classes)
                accelerator.backward(loss)
                training.step_of(optimizer)
                marks.done(loss=loss.detach())
                if marks.step % options.every == 0:
                    accelerator.save_state(str(saved))

    inner()


if __name__ == "__main__":
    main()
