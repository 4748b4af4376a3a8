"""A session in the test's process that ends at a step, and one that continues from what it had then: no files, no supervisor."""

from __future__ import annotations

from typing import Any

import torch

from kgorch.checkpoint.manifest import Manifest
from kgorch.worker import restore, rng_state, session_end
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.checkpoint.resumed_state import ResumedState
from kgorch.worker.session import Session


class Cut(BaseException):
    """Ends the training, as a stop does. `saved`: what the next session continues from."""

    def __init__(self, saved: Saved) -> None:
        super().__init__(saved.manifest.position.step)
        self.saved = saved


class Saved:
    """The state of a session in memory: a RestoreSource and its reader."""

    __module__ = Session.__module__  # no object of the script's

    def __init__(self, session: CutSession, *, is_final: bool) -> None:
        state = session._state
        captured, position = state_codec.capture(state.tracked.things), state.position
        self.manifest = Manifest(
            "r", "id", "train", position.as_manifest(), 1, "2026-11-20T00:00:00+00:00", final=is_final
        )
        self.tree = captured.tree
        self._tensors = {path: tensor.detach().clone() for path, tensor in captured.tensors.items()}
        self._own = {
            "own": captured.own_tree,
            "rng": rng_state.capture(torch.device("cpu")),
            "loaders": {name: place for name, item in state.followed.items() if (place := item.place)},
            "remembered": dict(state.remembered.values),
        }
        if gradients := state.tracked.thawed_or_frozen():
            self._own["requires_grad"] = gradients
        if state.foreign_loader is not None:
            self._own["rng"]["loader"] = state.foreign_loader.place
        if state.keyed_loader is not None and (place := state.keyed_loader.place(position.batch))["used"]:
            self._own["keyed"] = place

    def own(self, _: int) -> dict[str, Any]:
        return dict(self._own, rng=dict(self._own["rng"]))

    def reader(self, _: int) -> Saved:
        return self

    def is_readable(self) -> bool:
        return True

    def fetch(self, path: str) -> torch.Tensor:
        return self._tensors[path].clone()

    def fetch_region(self, path: str, region: Any) -> torch.Tensor:
        return self.fetch(path)[region.slices]

    def shape_of(self, path: str) -> tuple[int, ...]:
        return tuple(self._tensors[path].shape)

    def sharded(self, _: str) -> None:
        return None


class CutSession(Session):
    """Args: cut_at: optimizer steps after which the training is cut. saved: what it continues from."""

    __module__ = Session.__module__

    def __init__(self, cut_at: int | None = None, saved: Saved | None = None) -> None:
        super().__init__(None, None, is_guest=True)
        self._cut_at, self._saved = cut_at, saved
        self.__dict__["resumed"] = ResumedState(saved, 0)  # type: ignore[arg-type]
        self._ended, self._loop._boundary = self._loop._boundary, self._end_of_step  # type: ignore[method-assign]

    def track(self, **things: Any) -> None:
        super().track(**things)
        if self._saved:
            self._loop.resume(restore.restore(self._state, self._saved, "memory"))  # type: ignore[arg-type]

    def boundary(self, **options: Any) -> None:
        super().boundary(**options)
        self._cut()

    def _end_of_step(self) -> None:
        self._ended()
        if not self._loop._is_own:  # `steps` alone knows where its steps end
            self._cut()

    def _cut(self) -> None:
        if self.step == self._cut_at:
            cut = Cut(self.saved())
            session_end.end(cut)
            raise cut

    def saved(self, *, is_final: bool = False) -> Saved:
        """What a checkpoint of this moment would hold."""
        return Saved(self, is_final=is_final)
