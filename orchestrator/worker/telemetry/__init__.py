"""What a rank reports: metrics of the script, resource usage of the process, progress and liveness.

May import: of the project errors, protocol and the metric records of kgorch.core.
"""
