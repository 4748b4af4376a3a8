"""Detection of losses and weights that are not finite or spike, and the remedies that all ranks apply together.

May import: telemetry; of the project the protocol and the remedies of kgorch.core.
"""
