"""Which code is the user's: not that of a library, and not the SDK's."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

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
    module: Any = kind.__module__
    if not isinstance(module, str):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    is_built_in = path is None and module in sys.stdlib_module_names  # as _io, of which files are
    return not is_built_in and is_of_script(path or "", module)


def is_own_function(function: Any) -> bool:
    """Whether the script has defined it, and no library."""
    code, module = getattr(function, "__code__", None), getattr(function, "__module__", None)
    return code is not None and is_of_script(code.co_filename, str(module))
