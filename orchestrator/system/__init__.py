"""The operating system for all other packages: clocks, signals, processes, paths, files, locks, sockets, logs, systemd.

It may import the standard library, psutil, xxhash, kgorch.errors, kgorch.protocol and kgorch.core.names.
"""
