"""What a session does on a GPU, as far as it can be seen without one: which group it joins, what it calls out of memory, what it
says of the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kgorch.errors import KgorchError
from kgorch.launch import shim
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker import attach, restore, rng_state, save_coordinator
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.determinism import Determinism
from kgorch.worker.memory import oom
from kgorch.worker.memory.activation_checkpointing import has_dropout_state
from kgorch.worker.ranks import process_group

CPU = torch.device("cpu")


@pytest.fixture
def alone():
    """A session without kgorch around it; the process group that it made ends with it."""
    opened = []

    def attached(**options):
        opened.append(attach(**options))
        return opened[-1]

    yield attached
    if opened and dist.is_initialized():
        dist.destroy_process_group()


# Joining


@pytest.fixture
def gpus(monkeypatch):
    """So many GPUs, as torch.cuda would tell; the group that would be made is returned instead."""
    made = []

    def there_are(count: int) -> list[tuple[str, timedelta | None]]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(
            dist, "init_process_group", lambda backend, timeout=None, **_: made.append((backend, timeout))
        )
        return made

    return there_are


@pytest.mark.parametrize(
    ("count", "ranks_here", "backend", "shares"),
    [(2, 2, "cpu:gloo,cuda:nccl", False), (1, 2, "gloo", True), (3, 4, "gloo", True), (0, 2, "gloo", False)],
)
def test_ranks_that_share_a_gpu_meet_over_gloo_for_nccl_refuses_them(
    monkeypatch, gpus, count, ranks_here, backend, shares
):
    made = gpus(count)
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": ranks_here, "LOCAL_WORLD_SIZE": ranks_here}.items():
        monkeypatch.setenv(name, str(value))
    member = process_group.join(supervised=True)
    assert [name for name, _ in made] == [backend] and member.shares_gpu is shares
    if count:
        assert member.device == torch.device("cuda", 1 % count)


def test_ranks_on_several_machines_with_a_gpu_each_do_not_share(monkeypatch, gpus):
    made = gpus(1)
    for name, value in {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert not process_group.join(supervised=True).shares_gpu and made[0][0] == "cpu:gloo,cuda:nccl"


def test_a_collective_waits_as_long_as_a_session_may_last_under_kgorch_and_as_pytorch_has_it_alone():
    program = (
        "import os, torch, torch.distributed as dist; from kgorch.worker.ranks import process_group as group\n"
        "group.join(supervised={})\n"
        "backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu'))\n"
        "dist.all_reduce(torch.ones(2)); print(backend.options._timeout.total_seconds(), flush=True)\n"
        "os._exit(0)"  # PyTorch's own end of a group that stands aborts now and then (entry.leave)
    )
    waits = [
        float(
            subprocess.run([sys.executable, "-c", program.format(way)], capture_output=True, check=True).stdout.split()[
                -1
            ]
        )
        for way in (True, False)
    ]
    assert waits == [process_group.UNLIMITED.total_seconds(), 1800.0]


def test_a_gpu_that_pytorch_cannot_use_is_an_error_and_no_training_on_the_cpu(monkeypatch, gpus):
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", "12.4")

    def fails(text):
        def init():
            raise RuntimeError(text)

        monkeypatch.setattr(torch.cuda, "init", init)

    fails("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver")
    with pytest.raises(
        KgorchError, match=r"cannot use the GPU \(Tesla T4\): The NVIDIA driver on your system is too old"
    ) as old:
        process_group.join(gpus="Tesla T4")
    assert "CUDA 12.4" in old.value.facts[0] and "update the driver" in str(old.value.next_step)
    fails("CUDA unknown error - this may be due to an incorrectly set up environment")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        process_group.CudaUnusable, match=r"CUDA unknown error.*CUDA_VISIBLE_DEVICES is '0'.*nvidia-smi"
    ):
        process_group.join(gpus="Tesla T4")


@pytest.mark.parametrize(("cuda", "told"), [(None, "Tesla T4"), ("12.4", "")])
def test_a_pytorch_without_cuda_and_hidden_gpus_train_on_the_cpu(monkeypatch, gpus, cuda, told):
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert process_group.join(gpus=told).device == CPU


def test_cuda_counts_gpus_as_the_driver_does_whatever_the_person_has_set(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    launch = LaunchSpec(
        run="r", run_id="id", stage="train", attempt="1.1", folder=str(tmp_path), entry="x.py", workdir="/", ranks=1,
        socket="", checkpoints="", output="", plan_hash="",
    )  # fmt: skip
    assert shim.environment(launch, tmp_path, 7)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


# Memory that ran out


SAID = {
    "2.4 to 2.13, allocator": "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.74 GiB",
    "2.6, expandable segments": "CUDA driver error: out of memory",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN 8": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuSPARSE": "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "Triton": "Triton Error [CUDA]: out of memory",
    "NCCL": "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\nCuda failure 2 'out of memory'",
    "a launch": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CPU": "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
}
DEAD = ("NCCL", "a launch")


@pytest.mark.parametrize("library", SAID)
def test_what_each_library_says_of_a_refused_allocation_is_known(library):
    error = RuntimeError(SAID[library])
    assert oom.is_out_of_memory(error) and oom.can_retry(error) is (library not in DEAD)


AMBIGUOUS = [
    "GET was unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
]


@pytest.fixture
def allocator(monkeypatch):
    """`num_ooms` and free bytes of a GPU with 1600 of them, as torch.cuda would tell."""
    told = {"num_ooms": 0, "free": 1000}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: told)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (told["free"], 1600))
    monkeypatch.setattr(oom, "refusals", oom.Refusals())
    return told


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_an_ambiguous_error_is_memory_where_an_allocation_was_refused_or_the_device_is_full(allocator, text):
    error = RuntimeError(text)
    assert not oom.is_out_of_memory(error)
    allocator["num_ooms"] = 1  # refused; and the cache was given back before the error was raised, so there is room
    assert oom.is_out_of_memory(error)
    assert oom.refusals.look() == 1 and not oom.is_out_of_memory(error)
    allocator["free"] = 10
    assert oom.is_out_of_memory(error)


def test_a_dead_context_leaves_a_record_of_why(allocator, monkeypatch):
    def dead():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", dead)
    assert (
        oom.ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")) == ""
    )


# The same bits


def test_status_says_what_cuda_does_not_promise_unless_it_is_asked_for(monkeypatch):
    assert Determinism("off").verdict == "not asked for"
    on_gpu = Determinism("off", on_cuda=True)
    assert on_gpu.verdict == "not asked for: on CUDA some operations give other bits each time"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    on_gpu.probe()
    assert on_gpu.verdict.endswith(", and cudnn.benchmark chooses algorithms by their time")


def test_status_says_which_device_and_libraries_the_checkpoint_was_written_with(alone, monkeypatch):
    session = alone()
    restore.report_other_versions(session._state.exactness, CPU, process_group.versions("0.1.0", CPU))
    assert "versions" not in session.exactness
    before = {"kgorch": "0.0.9", "torch": torch.__version__, "device": "Tesla T4", "cudnn": "90100"}
    restore.report_other_versions(session._state.exactness, CPU, before)
    said = "the device was Tesla T4 and is cpu; cuDNN was 90100 and is none: other bits from here on"
    assert session.exactness["versions"] == said


def test_status_says_how_many_allocations_were_refused_in_steps_that_came_through(alone, request):
    session = alone()
    allocator = request.getfixturevalue("allocator")
    session._loop._report_refusals()
    assert "memory" not in session.exactness
    for refused in (2, 3):
        allocator["num_ooms"] = refused
        session._loop._report_refusals()
    assert session.exactness["memory"].startswith(
        "3 allocations were refused in steps that came through: near the memory limit"
    )


def test_a_model_with_sync_batchnorm_is_not_played_by_fewer_processes(alone):
    session = alone()
    session.track(model=nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    assert not session._state.division.is_divisible


@pytest.mark.parametrize(
    ("rnn", "keeps"),
    [
        (nn.LSTM(4, 4, num_layers=2, dropout=0.2), True),
        (nn.GRU(4, 4, num_layers=3, dropout=0.1), True),
        (nn.LSTM(4, 4, num_layers=2), False),
        (nn.Sequential(nn.LSTM(4, 4), nn.Dropout(0.5)), False),
    ],
    ids=["lstm", "gru", "no dropout", "one layer"],
)
def test_the_dropout_state_of_an_rnn_is_renewed_before_every_backward(alone, monkeypatch, rnn, keeps):
    """cuDNN draws it once a process otherwise, so that a resumed process has other masks."""
    assert has_dropout_state([rnn]) is keeps
    session, renewed = alone(), []
    monkeypatch.setattr(rng_state, "renew_dropout_state", renewed.append)
    session._runner._device = torch.device("cuda", 0)
    session._runner.set_modules([rnn])
    session._runner._device = CPU
    session.backward(torch.ones(2, 2), lambda part: part.sum().requires_grad_())
    session.backward(torch.ones(2, 2), lambda part: part.sum().requires_grad_())
    assert len(renewed) == (2 if keeps else 0)


def test_renewing_sets_the_generator_to_what_it_is(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: ("state", device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: calls.append(args))
    rng_state.renew_dropout_state(torch.device("cuda", 1))
    assert calls == [(("state", torch.device("cuda", 1)), torch.device("cuda", 1))]


# Costs


def test_what_is_queued_on_the_device_is_no_part_of_what_a_snapshot_costs(alone, monkeypatch):
    session, waited = alone(), []

    class Stream:
        def synchronize(self):
            waited.append(time.monotonic())

    session.track(model=nn.Linear(2, 2))
    session._state.member = session._state.member._replace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    boundary = save_coordinator.capture_boundary(session._state)
    assert waited and boundary.began_s >= waited[0]


def _training():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def _step(tracked):
    tracked["model"](torch.ones(1, 3)).sum().backward()
    for name in ("optimizer", "schedule"):
        tracked[name].step()
    tracked["optimizer"].zero_grad()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_rehearsal_is_undone_in_the_tensors_that_are_there(steps_before):
    """An optimizer that loads its state has it twice on the GPU for a moment."""
    tracked = _training()
    for _ in range(steps_before):
        _step(tracked)
    before = state_codec.capture(tracked)
    copies = {name: tensor.clone() for name, tensor in before.tensors.items()}
    _step(tracked)
    places = {name: tensor.data_ptr() for name, tensor in state_codec.capture(tracked).tensors.items()}
    state_codec.put_back(tracked, before, copies)
    after = state_codec.capture(tracked)
    assert (after.tree, after.own_tree) == (before.tree, before.own_tree)
    assert all(torch.equal(after.tensors[name], copy) for name, copy in copies.items())
    if steps_before:
        assert {name: tensor.data_ptr() for name, tensor in after.tensors.items()} == places
    _step(tracked)


def test_the_tests_see_no_gpu_unless_they_are_asked_to():
    assert os.environ.get("KGORCH_TEST_GPU") == "1" or not torch.cuda.is_available()
