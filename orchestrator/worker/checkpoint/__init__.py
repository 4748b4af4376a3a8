"""The state of a training as bytes: capture, snapshot buffers, restore, weights of other stages and from elsewhere.

May import: ranks, telemetry; the manifest and the safetensors header of the project.
"""
