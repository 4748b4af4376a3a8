"""Detection of losses and weights that are not finite or spike, and the remedies that all ranks apply together.

May import: host_copy, and the protocol with the supervisor; of orchestrator.core: the policy of remedies.
"""
