"""How a step fits into memory: microbatches, activation checkpointing, the memory ladder and the retry after an out-of-memory.

May import: ranks, health, data.batches, checkpoint.state_codec; of orchestrator.core: the memory ladder.
"""
