"""Files that are replaced as a whole, and folders whose entries survive a power cut."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader finds the old content or the new, never a part. Not flushed to disk.

    Raises: OSError.
    """
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(content))
    aside.rename(path)


def fsync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk: without it a power cut may undo a rename whose file was flushed.

    Raises: OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
