"""What a rank reports: metrics of the script, resource usage of the process, progress and liveness.

May import: host_copy, and the protocol with the supervisor; of orchestrator.core: the records of metrics.
"""
