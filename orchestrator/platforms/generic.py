"""Any other machine: only the plan limits a session."""

from kgorch.platforms.profile import Profile

PROFILE = Profile(name="generic", sources_of_figures="none: it promises nothing and limits nothing")
