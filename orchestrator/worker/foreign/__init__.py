"""The agent of a foreign program: it stands in for rank 0, so that the supervisor needs to know nothing of such programs.

A stage with `[stage.foreign]` runs any program that saves and resumes by itself. The shim starts the agent where it starts
torchrun for other stages; the program is the agent's child. The agent speaks the protocol of a rank: it says Hello, sends
Heartbeats with the step and the metrics that it reads from the program's output, copies each complete checkpoint of the program
into the run's own checkpoints, and leaves a record of how the program ended.

May import: ranks.supervisor_link and telemetry.metric_log of the worker; of the project errors, protocol, manifest and folder of
checkpoints, and the decisions in kgorch.core. PyTorch is not imported here: the program may need all of the memory.
"""
