"""What the processes of a run exchange: messages on Unix sockets, the launch specification, and files in shared folders.

It may import the standard library and `orchestrator.system.durable_files`, because every rank and the guard process load it.
"""
