"""What runs beside a session and never delays it: the mirror of checkpoints, notifications, and the local copy of data sets.

May import core, plan, checkpoint, protocol, system, hardware and db."""
