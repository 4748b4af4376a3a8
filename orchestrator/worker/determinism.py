"""Deterministic operations: the level that the plan asks for, and whether it held.

"off" leaves PyTorch as it is. "warn" uses deterministic algorithms where they exist, and collects the operations that have
none from PyTorch's own warnings. "strict" has PyTorch raise at the first of them.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import torch

from kgorch.errors import KgorchError, nearest

LEVELS = ("off", "warn", "strict")
CUBLAS_VARIABLE, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_WARNING = re.compile(
    r"(?P<op>.+?) (does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
    r"|.*not deterministic because it uses (?P<library>\w+)",
    re.DOTALL,
)
_PROBE = "kgorch_probe"


class Determinism:
    """Sets the level of this process. Create it before the model.

    Args:
        level: one of LEVELS.
        on_cuda: the training computes on a GPU, where PyTorch promises identical bits only on request.

    Raises:
        KgorchError: there is no such level.
    """

    def __init__(self, level: str, *, on_cuda: bool = False) -> None:
        if level not in LEVELS:
            raise KgorchError(
                f"deterministic={level!r}: expected one of {', '.join(LEVELS)}{nearest(str(level), LEVELS)}"
            )
        self.level, self._ops, self._is_heard = level, set[str](), True
        self._on_cuda, self._benchmark = on_cuda, False
        if level != "off":
            self._demand()
        if level == "warn":
            self._listen()

    @property
    def verdict(self) -> str:
        """What has held until now, for `status`."""
        if self.level == "off":
            if not self._on_cuda:
                return "not asked for"
            benchmark = ", and cudnn.benchmark chooses algorithms by their time" if self._benchmark else ""
            return f"not asked for: on CUDA some operations give other bits each time{benchmark}"
        if self._ops:
            return f"did not hold: {', '.join(sorted(self._ops))}"
        return "held" if self._is_heard else "not known: the script keeps PyTorch's warnings from being shown"

    def probe(self) -> None:
        """Check whether warnings still arrive here, and whether cuDNN chooses its algorithms by measuring.

        Scripts often switch warnings off, and silence would pass for success. Measured choices differ on a busy GPU.
        """
        self._benchmark = torch.backends.cudnn.benchmark
        if self.level == "warn":
            self._is_heard = False
            text = f"{_PROBE} does not have a deterministic implementation"
            # With an empty registry, because a warning is shown once for each registry.
            warnings.warn_explicit(text, UserWarning, __file__, 0, registry={})

    def _demand(self) -> None:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)  # under kgorch the launcher has set it
        torch.use_deterministic_algorithms(True, warn_only=self.level == "warn")
        fills: Any = torch.utils.deterministic
        fills.fill_uninitialized_memory = False  # a debugging aid that fills every new tensor
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        # The older names: setting the newer ones (`fp32_precision`, 2.9) makes every later read of these raise, in scripts, too.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def _listen(self) -> None:
        show = warnings.showwarning

        def heard(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            matched = _WARNING.match(str(message))
            op = matched and (matched["op"] or matched["library"])
            if op == _PROBE:
                self._is_heard = True
                return
            if op:
                self._ops.add(op)
            show(message, category, *rest, **more)

        warnings.filterwarnings("default", message=_WARNING.pattern)
        warnings.showwarning = heard
