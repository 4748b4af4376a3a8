"""The daemon that starts queued runs when it is their turn, its API, and the child process that resumes a claimed run.

May import core.scheduling, hardware, limits, system and db; admission only in the child process."""
