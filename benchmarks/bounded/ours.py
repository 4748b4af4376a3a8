"""The training under kgorch."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from bounded import training
from bounded.training import BATCH, ENDLESS, Marks, marks
from kgorch import attach


class Count:
    """How far the training is, remembered with it."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def state_dict(self) -> dict[str, int]:
        return {"step": self.marks.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.marks.step = state["step"]


def main(size: str) -> None:
    with attach(seed=0) as session:
        model = DistributedDataParallel(training.network(size))
        optimizer = training.optimizer_of(model)
        session.track(model=model, optimizer=optimizer, count=Count(marks))
        loader = session.loader(training.samples(), global_batch=BATCH * session.world_size)
        marks.begin(marks.step)
        for _ in session.epochs(ENDLESS):
            for batch in session.steps(loader):
                loss = session.backward(batch, lambda part: training.loss_of(model, *part))
                training.step_of(optimizer)
                marks.done(loss=loss)
