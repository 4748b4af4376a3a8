"""The GPUs and the host: NVML, which devices CUDA sees, the locks by which runs share them, an inventory, and telemetry.

Imports orchestrator.system, orchestrator.core, orchestrator.errors, orchestrator.wire and db.samples.
"""
