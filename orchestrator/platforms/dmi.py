"""Fields of the firmware (DMI) that name the maker of the machine; on a cloud that is the cloud."""

from __future__ import annotations

from pathlib import Path


def field(root: Path, name: str) -> str:
    """A field such as `sys_vendor`; empty where there is none, as in most sandboxes of containers."""
    try:
        return (root / "sys/class/dmi/id" / name).read_text(errors="replace").strip()
    except OSError:
        return ""
