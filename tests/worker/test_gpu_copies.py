"""What leaves a GPU: metrics, losses and snapshots, on a stand-in whose copies arrive late."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from late_cuda import LateCuda

from kgorch.core.metrics.metric_curve import Mark, MetricRecorder, Value
from kgorch.protocol.messages import JournalEntry
from kgorch.protocol.snapshot_messages import STAMP_BYTES, BufferGrant
from kgorch.worker.checkpoint import snapshot_buffer, snapshot_writer
from kgorch.worker.checkpoint.snapshot_buffer import SnapshotBuffer
from kgorch.worker.health import loss_guard
from kgorch.worker.memory import oom, oom_retry
from kgorch.worker.telemetry import host_copy, reported_metrics
from kgorch.worker.telemetry.reported_metrics import ReportedMetrics


@pytest.fixture
def cuda(monkeypatch):
    made = LateCuda()
    for module in (host_copy, snapshot_buffer):
        monkeypatch.setattr(module, "torch", made.torch)
    return made


def _image(cuda, capacity=1 << 16):
    descriptor = os.memfd_create("image")
    os.ftruncate(descriptor, capacity + STAMP_BYTES)
    return SnapshotBuffer(descriptor, capacity, pinned=True)


# Metrics


def test_a_reported_tensor_is_not_waited_for_and_counts_once_it_has_arrived(cuda):
    reported = ReportedMetrics()
    reported.report("loss", cuda.tensor(1.5))
    reported.report("rate", 0.25)
    reported.collect()
    assert reported.values == {"rate": 0.25} and not cuda.waits
    cuda.synchronize("main")
    reported.collect()
    assert reported.values == {"rate": 0.25, "loss": 1.5} and not reported.pending


def test_a_reported_tensor_counts_as_it_was_when_it_was_reported(cuda):
    reported, loss = ReportedMetrics(), cuda.tensor([2.0])
    reported.report("loss", loss)
    loss.fill_(7.0)  # as the next replay of a CUDA graph does
    reported.collect(wait=True)
    assert reported.values == {"loss": 2.0}


def test_of_a_device_far_behind_the_oldest_and_the_newest_figure_are_on_their_way(cuda):
    reported = ReportedMetrics()
    for step in range(1000):
        reported.report("loss", cuda.tensor(float(step)))
    assert len(reported.pending["loss"]) == reported_metrics.ON_THE_WAY
    cuda.synchronize("main")
    reported.collect()
    assert reported.values == {"loss": 999.0}


def test_a_figure_that_arrives_late_is_recorded_where_it_was_reported(cuda):
    reported, records = ReportedMetrics(), []
    recorder = MetricRecorder(records.append)
    reported.on_arrival = lambda name, value, mark: recorder.add(name, value, mark, 0.0)
    reported.report("rate", 0.5, Mark(6, 1, False))
    reported.report("loss", cuda.tensor(1.0), Mark(6, 1, False))  # the last step of an epoch
    reported.report("loss", cuda.tensor(3.0), Mark(7, 2, False))
    assert not records
    cuda.synchronize("main")
    reported.collect()
    recorder.flush(0.0)
    assert [(item.first, item.step, item.epoch, dict(item.values)) for item in records] == [
        (5, 6, 1, {"rate": Value(0.5, 1), "loss": Value(1.0, 1)}),
        (6, 7, 2, {"loss": Value(3.0, 1)}),
    ]


def test_a_figure_that_arrives_late_bears_the_step_at_which_it_was_reported(cuda):
    reported = ReportedMetrics()
    reported.report("dice", cuda.tensor(0.5), Mark(7, 1, True))
    reported.report("loss", 2.0, Mark(9, 1, True))
    assert reported.measured == {"loss": 9}
    reported.collect(wait=True)
    assert reported.measured == {"loss": 9, "dice": 7}


def test_another_thread_reads_plain_numbers_while_the_device_hangs(cuda):
    reported, seen = ReportedMetrics(), []
    reported.report("loss", cuda.tensor(1.0))
    reported.collect(wait=True)
    cuda.never = True
    reported.report("loss", cuda.tensor(2.0))
    thread = threading.Thread(target=lambda: seen.append(reported.values))
    thread.start()
    thread.join(5.0)
    assert seen == [{"loss": 1.0}]


# Losses and weights


def test_sums_of_weights_on_several_devices_are_one_wait_each():
    class Counted(torch.Tensor):
        waits = 0

        @property
        def device(self):
            return torch.device("cuda", self.at)

        def tolist(self):
            Counted.waits += 1
            return super().tolist()

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            made = super().__torch_function__(function, types, args, kwargs or {})
            if type(made) is Counted:
                made.at = 0
            return made

    weights = {}
    for number in range(20):
        weights[str(number)] = torch.full((3,), float("nan") if number == 17 else 1.0).as_subclass(Counted)
        weights[str(number)].at = number % 2
    assert list(loss_guard._not_finite(weights)) == ["17"]
    assert Counted.waits == 2


# Snapshots


def test_an_image_is_whole_when_it_has_been_filled_also_from_a_second_gpu(cuda):
    made = _image(cuda)
    tensors = {"a.one": cuda.tensor(torch.arange(6.0)), "a.two": cuda.tensor(torch.arange(8.0), index=1)}
    tensors["a.step"] = torch.tensor(3.0)
    made.fill(tensors, {}, 1)
    assert {name: view.tolist() for name, view in made._views.items()} == {
        "a.one": list(range(6)),
        "a.two": list(range(8)),
        "a.step": 3.0,
    }


def test_what_is_not_contiguous_takes_no_memory_of_the_gpu_to_be_copied(cuda):
    made, weight = _image(cuda), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    made.fill({"a.weight": cuda.on(weight), "a.turned": cuda.on(torch.arange(6.0).view(2, 3).t())}, {}, 1)
    assert torch.equal(made._views["a.weight"], weight) and made._views["a.turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert cuda.gpu_memory == ["to the CPU"] * 2


def test_a_registration_that_fails_leaves_no_error_to_the_next_kernel(cuda):
    cuda.registration = 2
    made = _image(cuda)
    assert not made.is_pinned and cuda.pending == 0
    made.fill({"a.one": torch.arange(6.0)}, {}, 1)
    assert made._views["a.one"].tolist() == list(range(6))


def test_pages_are_not_unregistered_at_the_end_of_a_process_whose_device_may_hang(cuda, monkeypatch):
    ended = []
    monkeypatch.setattr(
        snapshot_buffer.weakref,
        "finalize",
        lambda *_: ended.append(type("Finalizer", (), {"atexit": True})()) or ended[-1],
    )
    _image(cuda)
    assert [finalizer.atexit for finalizer in ended] == [False]


@pytest.mark.parametrize(("count", "pinned"), [(0, False), (1, True), (2, True)])
def test_images_that_are_files_are_not_pinned_and_somebody_says_so(tmp_path, monkeypatch, count, pinned):
    from saving import Place

    made = []

    class Recorded:
        is_pinned = property(lambda self: self.pinned)

        def __init__(self, descriptor, capacity, *, pinned):
            self.pinned = pinned
            made.append(pinned)

    place = Place(tmp_path)
    saver = place.saver()
    monkeypatch.setattr(snapshot_writer, "SnapshotBuffer", Recorded)
    monkeypatch.setattr(saver, "_connect", lambda patience_s: setattr(saver, "_keeper", object()))
    monkeypatch.setattr(snapshot_writer.transport, "send", lambda *_: None)
    answer = BufferGrant(count=count, bytes=100, number=1, slot=0), [0] * max(count, 1)
    monkeypatch.setattr(saver, "_answer", lambda kind, patience_s: answer)
    saver.prepare(100, torch.device("cuda"))
    assert made == [pinned] * max(count, 1)
    notes = [
        note.facts["why"]
        for note in place.told
        if isinstance(note, JournalEntry) and note.kind == "snapshots_not_pinned"
    ]
    assert notes == ([] if pinned else ["there is no room for them in memory, so they are files"])


# A step's beginning


def test_a_gradient_that_finds_no_room_for_its_copy_is_kept_on_the_host(cuda, monkeypatch):
    monkeypatch.setattr(oom.refusals, "look", lambda: 1)
    gradient = cuda.tensor([1.0, 2.0])
    assert type(oom_retry._copy_of(gradient)).__name__ == "OnDevice"
    cuda.full = True
    kept = oom_retry._copy_of(gradient)
    assert type(kept) is torch.Tensor and kept.tolist() == [1.0, 2.0]


def test_buffers_of_several_types_are_copied_in_a_kernel_a_type(monkeypatch):
    norms = torch.nn.Sequential(*(torch.nn.BatchNorm1d(4) for _ in range(8)))
    buffers, copied, copy = oom_retry.BufferCopies([norms]), [], torch._foreach_copy_
    buffers.keep()

    def counted(values, held):
        copied.append({item.dtype for item in held})
        copy(values, held)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    norms(torch.randn(5, 4))
    kept = [buffer.clone() for buffer in norms.buffers()]
    buffers.keep()
    assert sorted(map(str, copied)) == ["{torch.float32}", "{torch.int64}"]
    norms(torch.randn(5, 4))
    buffers.restore()
    assert all(torch.equal(buffer, before) for buffer, before in zip(norms.buffers(), kept, strict=True))
