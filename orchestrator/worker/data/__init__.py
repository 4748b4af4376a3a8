"""What a training reads: the loaders of its batches, their exact resume, cached data sets and values.

May import: ranks, the random states of `rng_state` and `tagged_json`; of the project outside of worker: errors, untrusted files.
"""
