"""One launch of torchrun: what it is started with, the shim that guards it, what its processes leave, and how that is judged.

May import core, plan, protocol, checkpoint, snapshots, services, hardware, system and db."""
