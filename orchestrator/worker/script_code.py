"""Which code is the user's: not that of a library, and not the SDK's."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

WORKER = f"{Path(__file__).parent}{os.sep}"
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
WORKLOADS = "kgorch.workloads"


def is_of_script(path: str, module: str) -> bool:
    """Whether code of this file and module is the user's, not that of a library or of the SDK."""
    if module.startswith(WORKLOADS):
        return True
    return not path.startswith((WORKER, *LIBRARIES, "<frozen")) and module.partition(".")[0] != "kgorch"


def is_own_class(kind: type) -> bool:
    """Whether the script has defined it, and no library."""
    module = kind.__module__
    path = getattr(sys.modules.get(module), "__file__", None) if isinstance(module, str) else None
    return isinstance(module, str) and module != "builtins" and is_of_script(path or "", module)
