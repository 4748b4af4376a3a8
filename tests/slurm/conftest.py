"""A cluster for all tests of a module: it takes seconds to come up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Kgorch
from slurm_cluster import Cluster, running_cluster


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with running_cluster() as made:
        yield made


@pytest.fixture
def cluster(running: Cluster, kgorch: Kgorch) -> Iterator[Cluster]:
    """Without jobs, at the beginning and at the end; `kgorch` is typed on its login node."""
    kgorch.extra_env["SLURM_CONF"] = running.env["SLURM_CONF"]
    yield running
    running.clear()
