"""GPUs and the host: NVML, the devices that CUDA sees, the locks by which runs share GPUs, an inventory, and telemetry.

It may import kgorch.system, kgorch.core, kgorch.protocol, kgorch.errors and kgorch.db.samples.
"""
