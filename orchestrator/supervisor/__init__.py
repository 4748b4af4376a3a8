"""The loop that supervises one session, its monitors and its recorder, and the recovery of a session that died without it.

May import launch, limits, services, snapshots, checkpoint and all below them."""
