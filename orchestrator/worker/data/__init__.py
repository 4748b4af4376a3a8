"""What a training reads: the loaders of its batches and their exact resume, cached data sets, and values that are computed once.

May import: ranks, telemetry, and the random states of rng_state and tagged_json; of the project errors, protocol, manifest and
untrusted files.
"""
