"""The operating system as the other packages use it: clocks, signals, process identity, paths, locks, sockets, logs, systemd.

Imports the standard library, psutil, orchestrator.errors and orchestrator.wire.
"""
