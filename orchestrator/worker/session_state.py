"""What the parts of a session share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.checkpoint.resumed_state import RememberedValues
from kgorch.worker.checkpoint.tracked_objects import TrackedObjects
from kgorch.worker.checkpoint.training_position import TrainingPosition
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.determinism import Determinism
from kgorch.worker.memory.bucket_order import BucketOrder
from kgorch.worker.probe.hooks import ProbeHooks
from kgorch.worker.ranks.process_group import RankInfo
from kgorch.worker.ranks.virtual_ranks import RankDivision
from kgorch.worker.telemetry.event_sender import EventSender, Exactness
from kgorch.worker.telemetry.progress_marker import ProgressMarker
from kgorch.worker.telemetry.rank_metrics import ResourceMeter
from kgorch.worker.telemetry.reported_metrics import ReportedMetrics
from kgorch.worker.telemetry.step_timer import StepTimer

QUICK_BATCHES = 2
"""Batches in a quick test of a loader that is not trained on: the first one of a kind takes longer than the others."""


@dataclass(slots=True)
class SessionState:
    """The state of a session, with one owner per field.

    Attributes:
        launch: the launch file; None when the script runs alone.
        member: this process among the ranks, and its device.
        quick: a quick test or a probe: loaders give a few batches only.
        determinism: level and verdict.
        division: the virtual ranks that this process plays. Set by restore.py.
        bucket_order: in which DDP sums the gradients. Written by restore.py and the step loop.
        resources: allocator, CPU and data wait of this process.
        marker: what the training's thread is doing, for the detection of hangs.
        timer: durations of steps. Written by the step loop.
        events: journal entries for the supervisor.
        exactness: what is known of identical results.
        metrics: what the script has reported.
        tracked: what is saved.
        position: counters. Written by restore.py and the step loop.
        keyed_loader: the loader of the running epoch, where `session.loader` made it; None between two. Written by the step loop.
        foreign_loader: the loader of the running epoch, unless `session.loader` made it. Written by the step loop.
        followed: loaders that the script iterates itself (session.follow), by name.
        remembered: plain values that a checkpoint holds.
        probe: hooks of a probe; the null object in a training.
    """

    launch: LaunchSpec | None
    member: RankInfo
    quick: bool
    determinism: Determinism
    division: RankDivision
    bucket_order: BucketOrder
    resources: ResourceMeter
    marker: ProgressMarker
    timer: StepTimer
    events: EventSender
    exactness: Exactness
    metrics: ReportedMetrics
    tracked: TrackedObjects = field(default_factory=TrackedObjects)
    position: TrainingPosition = field(default_factory=TrainingPosition)
    keyed_loader: Loader | None = None
    foreign_loader: LoaderFastForward | None = None
    followed: dict[str, FollowedLoader] = field(default_factory=dict)
    remembered: RememberedValues = field(default_factory=RememberedValues)
    probe: ProbeHooks = field(default_factory=ProbeHooks)

    @classmethod
    def create(cls, launch: LaunchSpec | None, member: RankInfo, determinism: Determinism) -> SessionState:
        """The state of a session that has not begun."""
        marker, events = ProgressMarker(), EventSender()
        events_of_first = events if member.rank == 0 else None
        return cls(
            launch,
            member,
            launch is not None and (launch.quick or launch.probe is not None),
            determinism,
            division=RankDivision(member.rank, member.world_size),
            bucket_order=BucketOrder(member.world_size),
            resources=ResourceMeter(member.device),
            marker=marker,
            timer=StepTimer(marker),
            events=events,
            exactness=Exactness(events_of_first),
            metrics=ReportedMetrics(events_of_first),
        )

    @property
    def most_batches(self) -> int | None:
        """Limit of the batches that a loader of `session.loader` gives (data/keyed_loader.py); None for no limit."""
        if not self.quick:
            return None
        return 0 if self.probe.as_on_cuda else QUICK_BATCHES

    def update_exactness(self) -> None:
        """Determinism and loader as they are known now; how exact a foreign loader is shows as it is read."""
        self.exactness.update(deterministic=self.determinism.verdict)
        self.report_loader()

    def report_loader(self) -> None:
        """Report how exact the foreign loaders are."""
        running = [loader.running for loader in self.followed.values()]
        loaders = [loader for loader in (self.foreign_loader, *running) if loader is not None]
        if loaders:
            lost = "; ".join(dict.fromkeys(loader.lost for loader in loaders if loader.lost))
            data = "; ".join(dict.fromkeys(loader.exactness for loader in loaders))
            self.exactness.update(data=data, **({"resume": lost} if lost else {}))
