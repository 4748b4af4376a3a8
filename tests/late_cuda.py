"""A stand-in for `torch.cuda`, for nothing real can be had: copies arrive late, registration fails when told to, and any thread but
the one that trains is refused. It has no kernels: what a tensor holds is computed at once, on the CPU.

cuda = LateCuda(); monkeypatch.setattr(image, "torch", cuda.torch); tensor = cuda.tensor([1.0])
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU; what is copied from it without waiting arrives when its queue is worked off."""

    owner: LateCuda
    at: torch.device

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return self.at

    def clone(self) -> torch.Tensor:
        return self.owner.clone(self)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = args[1] if len(args) > 1 else None
        if function is torch.Tensor.copy_ and isinstance(source, OnDevice) and not isinstance(args[0], OnDevice):
            return source.owner.copy(args[0], source, waits=not kwargs.get("non_blocking", False))
        if function is torch.Tensor.to and args[1:] == ("cpu",):
            args[0].owner.gpu_memory.append("to the CPU")
            return _plain(args[0]).clone()
        made = super().__torch_function__(function, types, args, kwargs)
        if type(made) is OnDevice:
            first = next(item for item in args if isinstance(item, OnDevice))
            made.owner, made.at = first.owner, first.at
        return made


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class LateCuda:
    """Attributes:
    torch: takes the place of the module in the code under test.
    never: the device does not come to an end: no copy arrives, and waiting for one fails the test.
    registration: what cudaHostRegister returns. pending: the error that CUDA keeps of a failed call.
    gpu_memory: what a copy of something that is not contiguous has been made with.
    """

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self.queues: dict[Any, deque[Callable[[], None]]] = defaultdict(deque)
        self.never, self.registration, self.pending, self.full = False, 0, 0, False
        self.gpu_memory: list[str] = []
        self.waits = 0
        self.stream: Any = "main"
        self.torch = _Torch(self)

    def tensor(self, values: Any, index: int = 0) -> Any:
        return self.on(torch.as_tensor(values), index)

    def on(self, tensor: torch.Tensor, index: int = 0) -> Any:
        made = tensor.as_subclass(OnDevice)
        made.owner, made.at = self, torch.device("cuda", index)
        return made

    def clone(self, tensor: OnDevice) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.on(_plain(tensor).clone(), tensor.at.index)

    def copy(self, into: torch.Tensor, source: OnDevice, *, waits: bool) -> torch.Tensor:
        self.on_main_thread()
        if not source.is_contiguous():
            self.gpu_memory.append("made contiguous on the GPU")
        values = _plain(source).clone()
        queue = self.stream if source.at.index == 0 else source.at  # another GPU's own stream
        self.queues[queue].append(lambda: into.copy_(values))
        if waits:
            self.work_off(queue)
        return into

    def work_off(self, queue: Any) -> None:
        self.on_main_thread()
        assert not self.never, "waited for a device that does not come to an end"
        self.waits += 1
        while self.queues[queue]:
            self.queues[queue].popleft()()

    def on_main_thread(self) -> None:
        assert threading.get_ident() == self.main, "CUDA was used from another thread than the one that trains"

    # torch.cuda

    def Event(self) -> Any:
        return _Event(self)

    def Stream(self) -> Any:
        return _Stream(self)

    def current_stream(self, device: Any = None) -> Any:
        return _Stream(self, "main")

    @contextmanager
    def on_stream(self, stream: Any):
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    def synchronize(self, device: Any = None) -> None:
        self.work_off(device)

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pending = self.registration
        return self.registration

    def cudaHostUnregister(self, address: int) -> int:
        return 0


class _Stream:
    def __init__(self, cuda: LateCuda, name: Any = None) -> None:
        self.cuda, self.name, self.device = cuda, name or id(self), torch.device("cuda", 0)

    def wait_stream(self, other: Any) -> None:
        self.cuda.on_main_thread()

    def synchronize(self) -> None:
        self.cuda.work_off(self.name)


class _Event:
    def __init__(self, cuda: LateCuda) -> None:
        self.cuda, self.queue = cuda, cuda.stream

    def record(self) -> None:
        self.queue = self.cuda.stream

    def query(self) -> bool:
        self.cuda.on_main_thread()
        return not self.cuda.queues[self.queue]

    def synchronize(self) -> None:
        if self.cuda.queues[self.queue]:
            self.cuda.work_off(self.queue)


class _Torch:
    """`torch`, but for CUDA."""

    def __init__(self, cuda: LateCuda) -> None:
        self._cuda, self.cuda = cuda, _Cuda(cuda)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def zeros(self, *size: Any, device: str = "cpu", **options: Any) -> torch.Tensor:
        if device == "cuda" and self._cuda.pending:
            error, self._cuda.pending = self._cuda.pending, 0
            raise RuntimeError(f"CUDA error: {error}")
        return torch.zeros(*size, **options)


class _Cuda:
    def __init__(self, cuda: LateCuda) -> None:
        self._cuda, self.stream = cuda, cuda.on_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)
