"""Slurm jobs that run sessions: its commands, the batch script, and the rows of the jobs.

May import core, errors and db. What submits a run is admission/slurm_submission.py, what runs in the job scheduler/slurm_job.py."""
