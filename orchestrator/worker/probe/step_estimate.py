"""Estimate of a step's memory and time on a GPU that this machine does not have (`kgorch check --on`).

The script's own forward and backward run on tensors with shapes and types, but without data (PyTorch's FakeTensorMode), so a
network for a GPU takes a few seconds on a laptop. Each operation is observed below autograd and autocast: the bytes that it
leaves alive, and the seconds that it would take, by its floating-point operations or by the bytes that it reads and writes,
whichever take longer (the roofline model, Williams et al. 2009). The optimizer's step is observed in the same way, on a copy
of the optimizer.

Not visible are cuDNN's workspaces, the allocator's fragmentation, and kernels that are faster or slower than the assumed share
of the GPU's data sheet. core/forecast/machines.py holds the assumptions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kgorch.errors import KgorchError
from kgorch.worker.probe.cuda_autocast import HALF, rules_of_cuda

BLOCK = 512
"""Bytes to whose multiple CUDA's allocator rounds up (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""

Work = Callable[[Any, float], torch.Tensor]


@dataclass(frozen=True)
class Rates:
    """The speed that a training is assumed to reach on one GPU.

    Attributes:
        half: floating-point operations per second in half precision.
        full: the same in full precision.
        bytes: bytes per second of memory traffic.
        launch_s: seconds that the host takes to launch an operation.
    """

    half: float
    full: float
    bytes: float
    launch_s: float


@dataclass
class Cost:
    """The cost of some operations.

    Attributes:
        gpu_s: seconds on the device, one after another.
        launches: operations that the host has to launch.
        flops: floating-point operations in "half" and "full" precision.
    """

    gpu_s: float = 0.0
    launches: int = 0
    flops: dict[str, float] = field(default_factory=lambda: {"half": 0.0, "full": 0.0})

    def since(self, before: Cost) -> Cost:
        """The cost since an earlier copy."""
        flops = {kind: count - before.flops[kind] for kind, count in self.flops.items()}
        return Cost(self.gpu_s - before.gpu_s, self.launches - before.launches, flops)

    def copy(self) -> Cost:
        return Cost(self.gpu_s, self.launches, dict(self.flops))

    def seconds(self, launch_s: float) -> float:
        """Seconds in all: the host launches while the device computes, so the slower of the two counts."""
        return max(self.gpu_s, self.launches * launch_s)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run while it is entered.

    Attributes:
        live_bytes: bytes of the live tensors that were made since, and of those given to `hold`.
        peak: the highest value of `living`.
        cost: of the operations.
        read_values: number of `.item()` and similar reads.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates, self._counted = rates, weakref.WeakSet[Any]()
        self.live_bytes = self.peak = 0
        self.cost, self.read_values = Cost(), 0

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these: weights and buffers, which are counted separately. A view of one would count as new."""
        for tensor in tensors:
            self._counted.add(tensor.untyped_storage())

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors as alive until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._counted:
                continue
            self._counted.add(storage)
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.live_bytes += size
            self.peak = max(self.peak, self.live_bytes)
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.equal.default:  # whether a block has changed its buffers; irrelevant for memory
            return True
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read_values += 1
            return _one(args[0].dtype)
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._count(func, args, kwargs, result, inputs, outputs)
        self.hold(outputs)
        return result

    def _count(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        if func.is_view or "empty" in func.__name__ or not (outputs or func._schema.is_mutable):
            return
        size = sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs))
        flops = 0.0
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            flops = float(count(*args, **kwargs, out_val=result))
        kind = "half" if inputs and inputs[0].dtype in HALF else "full"
        self.cost.flops[kind] += flops
        self.cost.gpu_s += max(
            flops / (self._rates.half if kind == "half" else self._rates.full), size / self._rates.bytes
        )
        self.cost.launches += 1


def _one(dtype: torch.dtype) -> Any:
    """A value for a tensor that has none: one that survives a division, a comparison, a loop."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


@dataclass(frozen=True)
class EstimatedTrial:
    """One setting.

    Attributes:
        peak: bytes of a whole step.
        forward: bytes that the first forward leaves alive.
        step: cost of the step.
        parts: number of microbatches.
    """

    peak: int
    forward: int
    step: Cost
    parts: int


class StepEstimate:
    """Estimates a training step of the tracked objects.

    Args:
        tracked: as given to session.track().
        ddps: the DDPs that reduce the gradients.
        rates: of the GPU.
        buckets: bytes of the DDPs' gradient buckets.

    Attributes:
        forward_cost: of the forward of the newest microbatch.
        read_values: reads of values in the newest trial.
        optimizer_bytes: state of the optimizers.
        optimizer_peak: additional bytes during an optimizer's step.
        optimizer_cost: of the optimizers' steps.
    """

    def __init__(
        self, tracked: Mapping[str, Any], ddps: Iterable[DistributedDataParallel], rates: Rates, buckets: int
    ) -> None:
        self._modules = [thing for thing in tracked.values() if isinstance(thing, nn.Module)]
        self._optimizers = [thing for thing in tracked.values() if isinstance(thing, torch.optim.Optimizer)]
        self._ddps, self._rates, self._buckets = list(ddps), rates, buckets
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, torch.Tensor] = {}
        self._tape = Tape(rates)
        self._forward = 0
        self.forward_cost = Cost()
        self.read_values = 0
        self.optimizer_bytes, self.optimizer_peak, self.optimizer_cost = self._of_optimizers()

    # One step

    def trial(self, parts: Sequence[Any], work: Work) -> EstimatedTrial:
        """Estimate a step of a batch in these parts, of which the first one is computed.

        Raises:
            KgorchError: the step's shapes depend on values, which are unknown without computing them.
        """
        count = len(parts)
        for weight in self._fakes.values():
            weight.grad = None
        self._tape, self._forward = Tape(self._rates), 0
        with self._mode:
            inputs = pytree.tree_map(self._as_fake, parts[0])
        self._tape.hold(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        try:
            with self._in_place_of_the_real(), self._mode, rules_of_cuda(), self._tape:
                self._tape.ignore(self._fakes.values())
                for _ in range(min(2, count)):  # during the second one the gradients of the first exist
                    before = self._tape.cost.copy()
                    work(inputs, 1.0)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise KgorchError(
                "this step cannot be estimated: its shapes depend on values",
                f"PyTorch stopped at {getattr(error, 'func', error)}",
                next_step="kgorch check PLAN on the machine that is to train, without --on",
            ) from None
        self.read_values = self._tape.read_values
        one = self._tape.cost.since(before)
        cost = Cost(one.gpu_s * count, one.launches * count, {kind: n * count for kind, n in one.flops.items()})
        del inputs
        return EstimatedTrial(self.standing + self._tape.peak, self._forward, cost, count)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A context for the forward of a microbatch; `forward_cost` is that of the last one."""
        live_bytes, cost = self._tape.live_bytes, self._tape.cost.copy()
        yield
        self._forward = self._forward or self._tape.live_bytes - live_bytes
        self.forward_cost = self._tape.cost.since(cost)

    @property
    def standing(self) -> int:
        """Bytes that live between two steps: weights, buffers, optimizer state, DDP's buckets."""
        return self.weight_bytes + self.optimizer_bytes + self._buckets

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(tensor.nbytes for tensor in self._real().values())

    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained parameters."""
        return sum(tensor.nbytes for tensor in self.trained())

    # Tensors without data

    def _real(self) -> dict[int, torch.Tensor]:
        return {id(item): item for module in self._modules for item in (*module.parameters(), *module.buffers())}

    def trained(self) -> list[torch.Tensor]:
        """The parameters that an optimizer updates."""
        inputs = {id(item): item for one in self._optimizers for group in one.param_groups for item in group["params"]}
        return [item for item in inputs.values() if item.requires_grad]

    def _fake_of(self, real: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor, always the same one."""
        if id(real) not in self._fakes:
            with self._mode:
                outputs = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
                is_weight = isinstance(real, nn.Parameter)
                self._fakes[id(real)] = (
                    nn.Parameter(outputs, requires_grad=real.requires_grad) if is_weight else outputs
                )
        return self._fakes[id(real)]

    def _as_fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)

    @contextlib.contextmanager
    def _in_place_of_the_real(self) -> Iterator[None]:
        """A context in which parameters and buffers of all tracked modules have no data, and DDPs call their bare modules."""
        tables: list[dict[str, Any]] = [
            table
            for module in dict.fromkeys(part for root in self._modules for part in root.modules())
            for table in cast(tuple[dict[str, Any], ...], (module._parameters, module._buffers))
        ]
        before = [dict(table) for table in tables]
        for ddp in self._ddps:
            ddp.__dict__["forward"] = ddp.module.forward
        for real in self._real().values():
            self._fake_of(real).requires_grad_(real.requires_grad)  # a script may freeze parameters between two epochs
        try:
            for table in tables:
                table.update({name: self._fake_of(item) for name, item in table.items() if item is not None})
            yield
        finally:
            for table, saved in zip(tables, before, strict=True):
                table.update(saved)
            for ddp in self._ddps:
                ddp.__dict__.pop("forward", None)

    def _of_optimizers(self) -> tuple[int, int, Cost]:
        """Bytes of the optimizers' state, additional bytes during a step, and the cost of a step."""
        tape = Tape(self._rates)
        saved = more = 0
        with self._mode:
            for one in self._optimizers:
                twin = self._twin(one)
                with tape:
                    twin.step()  # creates its state
                    before, cost = tape.live_bytes, tape.cost.copy()
                    tape.peak = before
                    twin.step()
                values = [value for state in twin.state.values() for value in state.values()]
                saved += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
                more = max(more, tape.peak - before)
                step_cost = tape.cost.since(cost)
        return saved, more, step_cost if self._optimizers else Cost()

    def _twin(self, real: torch.optim.Optimizer) -> Any:
        """An optimizer of the same class and settings, with weights and gradients without data."""
        twin: Any = object.__new__(type(real))
        twin.__dict__.update(real.__dict__)
        twin.state = defaultdict(dict)
        twin.step = type(real).step.__get__(twin)  # a scheduler may have wrapped the real one's, to count its calls
        twin.param_groups = []
        for group in real.param_groups:
            weights = [self._fake_of(weight) for weight in group["params"]]
            for weight in weights:
                if weight.requires_grad:
                    weight.grad = torch.empty_like(weight)
            # On CUDA the default updates many weights at once, with temporaries of their size.
            at_once = {"foreach": True} if "foreach" in group and not group.get("fused") else {}
            twin.param_groups.append({**group, "params": weights, **at_once})
        return twin
