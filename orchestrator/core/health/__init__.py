"""What makes a training bad or slow: a loss or weight that is not finite and its remedies, and bottlenecks of the hardware. Ranks
load `training_health`.

May import: nothing of the project.
"""
