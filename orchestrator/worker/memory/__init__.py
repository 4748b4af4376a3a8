"""How a step fits into memory: microbatches, activation checkpointing, the memory ladder and the retry after an out-of-memory.

May import: ranks, health, data.batches, checkpoint.state_codec, rng_state; of the project errors, protocol, manifest and the
memory ladder of kgorch.core.
"""
