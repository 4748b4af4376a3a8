"""Kaggle as a place, through its official client (PyPI `kaggle`).

The client runs in a process of its own (client_process.py, the only importer of `kaggle`): it has no time limit on API calls,
prints to its standard output, turns each `KAGGLE_*` variable into configuration, authenticates when it is imported, and exits
the interpreter when it cannot. This side imports the contract of a place alone.
"""
