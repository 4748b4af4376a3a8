"""What befalls a training from outside, for programs that know nothing of it: $TROUBLE, as JSON, for the model that is given.

`oom`: from step `at` on, `rank` (-1: all) finds no memory for more than `fits` samples, by an allocation that no machine can give.
`nan`: the loss of step `at` is no number on `rank`.
`spoil`: a weight is no number from step `at` on; once, where no file of that name is there yet.
`hang`: `rank` waits for ever in step `at`; once, likewise.

Steps are counted from this process's first one.
"""

import json
import os
import threading
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

IMPOSSIBLE = 1 << 46


def befall(model: torch.nn.Module) -> None:
    told = json.loads(os.environ.get("TROUBLE", "{}"))
    steps = 0

    def stepped(*_) -> None:
        nonlocal steps
        steps += 1

    def is_now(what: str, *, once: bool = False) -> bool:
        if what not in told or not model.training or told[what].get("rank", -1) not in (-1, int(os.environ["RANK"])):
            return False
        is_time = steps >= told[what]["at"] if what == "oom" else steps == told[what]["at"]
        if is_time and once:
            if Path(what).exists():
                return False
            Path(what).touch()
        return is_time

    def before(module, args, kwargs) -> None:
        batch = next(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
        if is_now("oom") and len(batch) > told["oom"]["fits"]:
            torch.empty(IMPOSSIBLE)
        if is_now("hang", once=True):
            threading.Event().wait()
        if is_now("spoil", once=True):
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = torch.nan

    def after(module, args, kwargs, out):
        if not is_now("nan"):
            return out
        if isinstance(out, torch.Tensor):
            return out * torch.nan
        out.loss = out.loss * torch.nan
        return out

    if told:
        register_optimizer_step_post_hook(stepped)
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)
