"""Detects the platform by environment variables and files. No network is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms import aws, azure, colab, gcp, generic, kaggle, lightning, paperspace, slurm, studiolab
from kgorch.platforms.profile import Profile

PLATFORMS = (kaggle, colab, studiolab, lightning, paperspace, slurm, aws, gcp, azure)
"""In the order of detection: notebooks and jobs before clouds, because they run on the clouds' machines."""

BY_NAME = {profile.name: profile for profile in (*(platform.PROFILE for platform in PLATFORMS), generic.PROFILE)}


def detect(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Profile:
    """The profile of this machine's platform; the generic one where none is recognized. `root`: of the file system."""
    return next((platform.PROFILE for platform in PLATFORMS if platform.is_here(environ, root)), generic.PROFILE)


def next_session(run: str, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """What a person does on this platform so that the next session finds the state of a run; empty where its disk stays."""
    platform = next((platform for platform in PLATFORMS if platform.is_here(environ, root)), None)
    return platform.next_session(run, environ, root) if platform in (kaggle, colab) else ""
