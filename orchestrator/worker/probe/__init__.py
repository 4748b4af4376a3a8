"""Measured or estimated trial steps of a training, for `kgorch check`.

May import: data, memory and telemetry of the worker; of the project errors and protocol.
"""
