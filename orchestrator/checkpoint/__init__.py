"""Checkpoint folders: their manifest, how they are verified, found, deleted, recorded in the database and exported.

Ranks load `manifest`, `folder`, `verify` and `safetensors_header`: these, `store` and `export` may import errors, untrusted_io,
protocol.values, system.files and system.file_hash; `verifier` also protocol.messages, the clock and kgorch.db.rows; `registry`
also db,
plan and core.checkpoint.retention; `foreign_contents` also core.checkpoint.foreign_checkpoint.
"""
