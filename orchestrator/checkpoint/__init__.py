"""Checkpoint folders: their manifest, how they are verified, found, deleted, recorded in the database and exported.

`manifest`, `schema`, `files`, `verify` and `safetensors_header` may import errors, untrusted_io, protocol.text and
system.durable_files, for ranks load them; `store` and `export` these, `registry` and `verifier` also db, plan and core.retention.
"""
