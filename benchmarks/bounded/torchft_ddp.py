"""torchft: each rank is a replica group with a torchrun of its own, below one lighthouse, as in its train_ddp.py.

Without $REPLICA_GROUP_ID: starts the lighthouse and the two torchruns. A rank that comes back gets the state from the other. The
gradients are averaged by Manager.allreduce: with torchft's DistributedDataParallel over gloo the rank that is left ends, too, by an
AssertionError in its hook (torchft 0.2.0, PyTorch 2.13). A rank is given up after HEARTBEAT_MS; the lighthouse's default is 5 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

HEARTBEAT_MS = 1000

REPLICA = os.environ.get("REPLICA_GROUP_ID")
if REPLICA:
    os.environ["RANK"] = REPLICA  # for marks and faults

from bounded import RANKS, training  # noqa: E402
from bounded.training import BATCH, ENDLESS, marks  # noqa: E402


def main() -> None:
    import torch
    from torchft import DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    options = training.options().parse_args()
    rank = int(REPLICA or 0)

    net = training.network(options.size)
    inner = training.optimizer_of(net)

    def load_state_dict(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load_state_dict,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"bounded_{rank}", rank=0, world_size=1, timeout=timedelta(seconds=15),
    )  # fmt: skip
    optimizer = Optimizer(manager, inner)
    data = training.samples()
    sampler = DistributedSampler(data, rank, num_replica_groups=RANKS, group_rank=0, num_replicas=1)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    began = False
    for epoch in range(ENDLESS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()  # asks for the quorum
            loss = training.loss_of(net, *batch)
            loss.backward()
            grads = [weight.grad for weight in net.parameters() if weight.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            manager.allreduce(flat).wait()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
            before = manager.current_step()
            optimizer.step()
            if not began:
                marks.begin(before)
                began = True
            if manager.current_step() > before:
                marks.done(manager.current_step(), loss.detach())


def start() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100, heartbeat_timeout_ms=HEARTBEAT_MS
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3", *sys.argv]
    groups = []
    for rank in range(RANKS):
        env = {**os.environ, "REPLICA_GROUP_ID": str(rank), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
        groups.append(subprocess.Popen([sys.executable, *words], env=env))
    sys.exit(max(group.wait() for group in groups))


if __name__ == "__main__":
    main() if REPLICA else start()
