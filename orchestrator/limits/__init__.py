"""What ends a session: fixed walls, a Slurm job's end, notices of spot machines, and the quota with its pools.

May import core, plan, platforms, hardware, system and db."""
