"""A machine of one's own: nothing ends the session but the plan."""

from orchestrator.platforms.profile import Profile

PROFILE = Profile(name="generic", sources_of_figures="none: it promises nothing and limits nothing")
