"""The state of a training as bytes: capture, snapshot buffers, restore, weights of other stages and from elsewhere.

May import: ranks, telemetry, tagged_json; of the project errors, protocol, manifest, shard and untrusted files, and the retention
rule of kgorch.core.
"""
