"""Experiment trackers (TensorBoard, Weights & Biases, MLflow): a process for each, which sends them what `report` shows of a run.

May import report, plan, db, core, protocol, system and errors. Only these modules import the trackers' libraries, and only in those
processes: they import slowly, start threads, and may hang (docs/trackers.md)."""
