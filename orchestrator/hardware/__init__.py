"""GPUs and the host: NVML, the devices that CUDA sees, the locks by which runs share GPUs, an inventory, and telemetry.

It may import orchestrator.system, orchestrator.core, orchestrator.protocol, orchestrator.errors and db.samples.
"""
