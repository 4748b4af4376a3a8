"""Comparison of another node's software with this one's: ranks of one training must run the same."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from kgorch import __version__
from kgorch.protocol.node_messages import NodeHello


def installed() -> tuple[str, str]:
    """Versions of PyTorch ("" without one) and Python on this node. PyTorch is not loaded."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return torch, platform.python_version()


def differences(hello: NodeHello, host: str) -> list[str]:
    """What differs, in one line each; Python's last number does not count."""
    return list(_differences(hello, host))


def _differences(hello: NodeHello, host: str) -> Iterator[str]:
    torch, python = installed()
    pairs = {
        "kgorch": (__version__, hello.kgorch),
        "PyTorch": (torch, hello.torch),
        "Python": (_minor(python), _minor(hello.python)),
    }
    for name, (here, there) in pairs.items():
        if here != there:
            yield f"{name}: {here or 'none'} here, {there or 'none'} on {host}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
