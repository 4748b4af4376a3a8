"""Snapshots of the training's state in host memory: the keeper, which holds them, its client, and the writer of checkpoints.

May import protocol, checkpoint, core, system, untrusted_io and the standard library."""
