"""Decisions about Slurm jobs that run sessions: what Slurm has answered about a job, and what follows a session.

May import core's codes and scheduling alone."""
