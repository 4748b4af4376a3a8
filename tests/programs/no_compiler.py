"""Spares a rank PyTorch's compiler, which nothing here uses: a DDP or an optimizer imports it, for 1.5 s of CPU a rank.

To be imported before a session attaches. What stands in its place answers what a process group, a DDP and an optimizer ask
of it; whoever asks for more gets the real one, but for imports of its modules (by the profiler: KGORCH_TESTS_COMPILER=1; by
what looks for operations that are not deterministic).
"""

import importlib
import os
import sys
import types


class _StandIn(types.ModuleType):
    def __init__(self, name, **known):
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(sys.modules.get("torch._dynamo"), _StandIn):
            del sys.modules["torch._dynamo"]
        return getattr(importlib.import_module(self.__name__), name)


def _as_it_is(function=None, *_, **__):
    return function or _as_it_is


if "torch._dynamo" not in sys.modules and "KGORCH_TESTS_COMPILER" not in os.environ:
    sys.modules["torch._dynamo"] = _StandIn(
        "torch._dynamo",
        disable=_as_it_is,
        graph_break=lambda: None,
        trace_rules=_StandIn("torch._dynamo.trace_rules", clear_lru_cache=lambda: None),
        utils=_StandIn("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    )
