"""A process that works beside the training gives way to it, also where the kernel groups processes by session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kgorch.system import priority

PROGRAM = """
import os
from kgorch.system import priority
priority.lower(5)
print(os.nice(0))
print(priority.AUTOGROUP.read_text())
"""


def lowered(*, own_session: bool) -> tuple[str, str]:
    """Nice value of a process that has lowered its priority, and the line about its session's group."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], start_new_session=own_session, capture_output=True, text=True, check=True
    )
    nice, group = done.stdout.split("\n", 1)
    return nice, group.strip()


@pytest.mark.skipif(not priority.AUTOGROUP.exists(), reason="this kernel does not group processes by session")
def test_the_group_of_a_session_of_its_own_is_lowered_with_it():
    nice, group = lowered(own_session=True)
    assert group.endswith(f"nice {nice}") and int(nice) == min(os.nice(0) + 5, 19)


@pytest.mark.skipif(not priority.AUTOGROUP.exists(), reason="this kernel does not group processes by session")
def test_the_group_of_somebody_elses_session_stays_as_it_is():
    before = priority.AUTOGROUP.read_text().strip()
    assert lowered(own_session=False)[1] == before


def test_a_kernel_without_groups_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(priority, "AUTOGROUP", Path(tmp_path, "missing", "autogroup"))
    monkeypatch.setattr(os, "nice", lambda by: by)
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    priority.lower(5)
