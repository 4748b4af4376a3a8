"""Names of files in a run's folder that several processes use."""

from __future__ import annotations

KEEPER_SOCKET = "keeper.sock"
"""The snapshot server's socket, in the run's folder."""

FOREIGN_FOLDER = "foreign"
"""Which run the checkpoints of foreign programs belong to (worker/foreign/claim.py), in the state folder."""

CACHE_FOLDER = "cached"
"""Values that the run computes once (worker/data/value_cache.py), in the run's folder."""

COMPILED_FOLDER = "compiled"
"""What torch.compile and Triton have compiled (launch/shim.py), in the run's folder. It is code: it never comes from elsewhere."""

MAX_CACHED_BYTES = (64 << 20) + 1000
"""Of one such value, with the line before it."""

CACHE_COMPLETE_FILE = "whole.json"
"""In the folder of a data cache, as long as its copy is complete."""
