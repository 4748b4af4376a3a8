"""Which platform this is."""

from __future__ import annotations

import os
from collections.abc import Mapping

from orchestrator.platforms import colab, generic, kaggle
from orchestrator.platforms.profile import Profile


def detect(environ: Mapping[str, str] = os.environ) -> Profile:
    return next((platform.PROFILE for platform in (kaggle, colab) if platform.is_here(environ)), generic.PROFILE)
