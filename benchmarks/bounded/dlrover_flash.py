"""DLRover's flash checkpoint to disk every N steps, its saver in a process that it starts itself outside of dlrover-run.

What it keeps in memory alone is gone with the session's machine.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

logging.disable(logging.WARNING)
from dlrover.python.common.storage import KeepLatestStepStrategy  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from bounded import training  # noqa: E402
from bounded.training import ENDLESS, EPOCH, marks  # noqa: E402


def main() -> None:
    options = training.options().parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(training.network(options.size))
    optimizer = training.optimizer_of(model)
    folder = str(options.folder)
    strategy = KeepLatestStepStrategy(max_to_keep=2, checkpoint_dir=folder)
    checkpointer = DdpCheckpointer(folder, comm_backend="gloo", deletion_strategy=strategy)
    first = 0
    if state := checkpointer.load_checkpoint():
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    marks.begin(first)
    loader = training.loader_of(training.samples(), dist.get_rank(), dist.get_world_size())
    for epoch in range(first // EPOCH, ENDLESS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            loss = training.loss_of(model, *batch)
            loss.backward()
            training.step_of(optimizer)
            marks.done()
            if marks.step % options.every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": marks.step}
                checkpointer.save_checkpoint(marks.step, state, storage_type=StorageType.DISK)


if __name__ == "__main__":
    main()
