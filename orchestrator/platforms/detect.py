"""Which platform this is: by its environment and by files below the root, never by asking a network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from orchestrator.platforms import aws, azure, colab, gcp, generic, kaggle, lightning, paperspace, slurm, studiolab
from orchestrator.platforms.profile import Profile

PLATFORMS = (kaggle, colab, studiolab, lightning, paperspace, slurm, aws, gcp, azure)
"""Notebooks first, then jobs: they run on the clouds' machines."""

BY_NAME = {profile.name: profile for profile in (*(platform.PROFILE for platform in PLATFORMS), generic.PROFILE)}


def detect(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Profile:
    return next((platform.PROFILE for platform in PLATFORMS if platform.is_here(environ, root)), generic.PROFILE)
