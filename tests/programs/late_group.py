"""A process group whose all-reduces are queued and come to their end later, as NCCL's: gloo on a thread of its own. A stand-in,
for there is no GPU.

Importing it registers the backend "late".
"""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

LATE_S = 0.02


class LateWork(Work):
    def __init__(self, queued) -> None:
        super().__init__()
        self._queued, self._future = queued, torch.futures.Future()
        queued.add_done_callback(lambda done: self._future.set_result(done.result()))

    def wait(self, timeout=None) -> bool:
        self._queued.result()
        return True

    def get_future(self):
        return self._future


class LateGroup(ProcessGroup):
    """One queue, as one stream: what is asked for first is done first."""

    def __init__(self, gloo, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo, self._queue, self._number = gloo, ThreadPoolExecutor(1), 0

    def _late(self, do, tensors) -> LateWork:
        self._number += 1

        def run():
            time.sleep(LATE_S)
            do().wait()
            return tensors

        return LateWork(self._queue.submit(run))

    def allreduce(self, tensors, options=None) -> LateWork:
        return self._late(lambda: self._gloo.allreduce(tensors, options), tensors)

    def broadcast(self, tensors, options=None) -> LateWork:
        return self._late(lambda: self._gloo.broadcast(tensors, options), tensors)

    def allgather(self, outputs, inputs, options=None) -> LateWork:
        return self._late(lambda: self._gloo.allgather(outputs, inputs, options), outputs)

    def getBackendName(self) -> str:
        return "late"

    def _get_backend(self, device) -> "LateGroup":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._number


def make(store, rank, size, timeout) -> LateGroup:
    return LateGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


dist.Backend.register_backend("late", make, devices=["cpu"])
