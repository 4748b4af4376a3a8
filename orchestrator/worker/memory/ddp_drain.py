"""Completion of DistributedDataParallel's reduction on a rank whose backward has failed in the middle of it.

The other ranks wait in all-reduces that this rank would have joined. It joins the remaining ones with zeros, as DDP's own Join
does, so no rank hangs; then all ranks vote, and discard the sums.

The number of remaining all-reduces follows from the sequence number of the group's backend, so a step pays for no
communication hook. The group itself does not always return it: PyTorch before 2.7 gives a group of several backends
("cpu:gloo,cuda:nccl") no default one, and asks that. All other collectives of a forward (broadcasting buffers, rebuilding the
buckets) are done before the part that may fail, so that only the reduction has to be counted.

There are three modes, chosen by how DDP was built:

- `DRAIN`: one plain DDP, or none.
- `APART`: forward and backward of the bare module, and a reduction of our own afterwards, without overlap. For what cannot be
  drained (static graphs, several DDPs, the script's own hooks, a PyTorch without the private names), if it is microbatched anyway.
- `NONE`: nothing can be retried. An out-of-memory error ends the attempt, and the next rung starts a new one.
"""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

DRAIN, APART, NONE = "drain", "apart", "none"
BUCKET_BYTES = 25 << 20
_NAMES = ("_get_zeros_like_grad_buckets", "_reset_state", "_rebuild_buckets", "_get_local_used_map")


def numbered(modules: Iterable[nn.Module]) -> dict[int, int]:
    """The number of each tracked parameter, by its id. Averages of weights are left out, because they are never trained."""
    found = dict[int, int]()
    trained = (module for module in modules if not isinstance(module, AveragedModel))
    for number, weight in enumerate(weight for module in trained for weight in module.parameters()):
        found.setdefault(id(weight), number)
    return found


def find(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """The DDPs of the parameters of the tracked modules, whatever of both is inside of the other.

    In the order of the parameters, for the collectives of the ranks must meet.
    """
    number_of, found = numbered(modules), list[tuple[int, DistributedDataParallel]]()
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):
            numbers = (number_of.get(id(weight)) for weight in thing.module.parameters())
            first = min((number for number in numbers if number is not None), default=None)
            found += [(first, thing)] if first is not None else []
    return [ddp for _, ddp in sorted(found, key=operator.itemgetter(0))]


@contextlib.contextmanager
def without_reduction(ddps: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """A context without gradient reduction: gradients stay those of this rank."""
    with contextlib.ExitStack() as stack:
        for ddp in ddps:
            stack.enter_context(ddp.no_sync())
        yield


class GradientReduction:
    """The gradient reduction of one training.

    Args:
        ddps: all DDPs of the training.
        hidden: something else makes ranks wait for each other in a forward or backward (SyncBatchNorm).
        on_reset: called when the DDPs have been put back, and lay their gradients into buckets anew.

    Attributes:
        communicates: the script runs collectives of its own in a step's forward or backward; known after some steps.
    """

    def __init__(
        self, ddps: list[DistributedDataParallel], *, hidden: bool = False, on_reset: Callable[[], None] = lambda: None
    ) -> None:
        self._ddps, self._hidden, self._on_reset = ddps, hidden, on_reset
        self._plain = not hidden and (not ddps or (len(ddps) == 1 and _can_be_drained(ddps[0])))
        self._backend = _backend(ddps[0]) if ddps and self._plain else None
        self._sequence_before: int | None = None  # when this step's reduction began; None until it has
        self._of_a_step = 0
        self._is_steady = self._syncs = False
        self.communicates = False

    def mode(self, *, microbatched: bool) -> str:
        """DRAIN, APART or NONE, for the next step. The same on all ranks."""
        if self._plain:
            return DRAIN
        return APART if microbatched and not self._hidden else NONE

    def begin(self) -> None:
        """Run the collectives of a forward that are not part of the reduction, before the part of the step that may fail."""
        if not self._ddps:
            return
        self._sequence_before = None  # if memory runs out in here, this rank's progress is unknown
        for ddp in self._ddps:
            self._syncs = ddp.require_backward_grad_sync
            ddp.reducer._rebuild_buckets()  # DDP would do it in its forward, with a collective
            if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                ddp._sync_buffers()  # type: ignore[no-untyped-call]
            # The buffers are synchronised. Not by nn.Module's own way to set an attribute, which takes 6 µs.
            vars(ddp)["require_forward_param_sync"] = False
        self._sequence_before = self._sequence()

    def finish(self) -> None:
        """A step has succeeded on all ranks: learn how many collectives it takes."""
        if not self._syncs or self._sequence_before is None:
            return
        launched = self._sequence() - self._sequence_before
        was_steady = self._is_steady
        self._is_steady, self._of_a_step = launched == self._of_a_step, launched
        if self._is_steady and not was_steady:  # rarely, because `_owed` allocates as much memory as the gradients
            with contextlib.suppress(RuntimeError):
                self.communicates = any(launched > len(_owed(ddp)) for ddp in self._ddps)

    def drain(self) -> None:
        """After a failure, when the failed step's tensors are freed: join the collectives that the others wait for.

        Allocates as much memory as the gradients, which have just been freed.

        Raises:
            RuntimeError: memory ran out before the reduction began, or other collectives than DDP's reduction use the group in a
                step, so this rank's progress is unknown.
        """
        for ddp in self._ddps if self._syncs else ():  # in the script's own no_sync() no rank waits
            if self._sequence_before is None:
                raise RuntimeError("memory ran out while DDP prepared its buckets: the step cannot be tried again")
            launched, left = self._sequence() - self._sequence_before, _owed(ddp)
            if launched > len(left) or (self._is_steady and self._of_a_step != len(left)):
                raise RuntimeError(f"other collectives than DDP's {len(left)} in a step: it cannot be tried again")
            for tensor in left[launched:]:
                dist.all_reduce(tensor, group=ddp.process_group)

    def reset(self) -> None:
        """After a failed step, on all ranks: put DDP's reducer back to the state before a step."""
        for ddp in self._ddps:
            ddp.reducer._reset_state()
            ddp.require_forward_param_sync = True
        self._on_reset()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which the DDPs call their bare modules."""
        with without_reduction(self._ddps):
            for ddp in self._ddps:
                if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                    ddp._sync_buffers()  # type: ignore[no-untyped-call]
                ddp.forward = ddp.module.__call__  # type: ignore[method-assign]
            try:
                yield
            finally:
                for ddp in self._ddps:
                    del ddp.forward
                    ddp.require_forward_param_sync = True

    def reduce(self) -> None:
        """Replace the gradients by the mean of all ranks'. A parameter that no rank has used keeps none."""
        for ddp in self._ddps:
            weights = [weight for weight in ddp.module.parameters() if weight.requires_grad]
            if ddp.find_unused_parameters:
                used = torch.tensor([float(weight.grad is not None) for weight in weights], device=weights[0].device)
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=ddp.process_group)
                weights = [weight for weight, is_used in zip(weights, used.tolist(), strict=True) if is_used]
            for weight in weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            for chunk in _in_chunks([weight.grad for weight in weights if weight.grad is not None]):
                flat = torch.cat([grad.reshape(-1) for grad in chunk]).div_(ddp.process_group.size())
                dist.all_reduce(flat, group=ddp.process_group)
                for grad, reduced in zip(chunk, torch.split(flat, [grad.numel() for grad in chunk]), strict=True):
                    grad.copy_(reduced.view_as(grad))

    def _sequence(self) -> int:
        return int(self._backend._get_sequence_number_for_group()) if self._backend is not None else 0


def _backend(ddp: DistributedDataParallel) -> Any:
    """The backend that reduces this DDP's gradients: NCCL or gloo, whatever other backends the group has."""
    device = next(weight.device for weight in ddp.module.parameters() if weight.requires_grad)
    return ddp.process_group._get_backend(device)


def _owed(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """A tensor of zeros for each all-reduce of a step, in its order: the buckets, then the map of used parameters."""
    zeros = [bucket.buffer() for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
    return [*zeros, ddp.reducer._get_local_used_map()] if ddp.find_unused_parameters else zeros


def _can_be_drained(ddp: DistributedDataParallel) -> bool:
    return (
        not ddp.static_graph
        and not getattr(ddp, "_comm_hooks", [None])
        and getattr(ddp, "mixed_precision", None) is None
        and not getattr(ddp, "_delay_all_reduce_params", None)
        and all(hasattr(ddp.reducer, name) for name in _NAMES)
        and not hasattr(ddp, "buffer_hook")
        and hasattr(ddp, "will_sync_module_buffers")
        and _counts(ddp)
    )


def _counts(ddp: DistributedDataParallel) -> bool:
    """Whether the backend numbers its collectives; a third-party backend may have the method and raise."""
    try:
        _backend(ddp)._get_sequence_number_for_group()
    except (RuntimeError, AttributeError):
        return False
    return True


def _in_chunks(grads: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Lists of gradients of one type, of some 25 MB."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        chunk, chunk_bytes = list[torch.Tensor](), 0
        for grad in (grad for grad in grads if grad.dtype == dtype):
            chunk.append(grad)
            chunk_bytes += grad.nbytes
            if chunk_bytes >= BUCKET_BYTES:
                yield chunk
                chunk, chunk_bytes = [], 0
        if chunk:
            yield chunk
