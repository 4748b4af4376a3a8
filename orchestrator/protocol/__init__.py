"""What the processes of a run exchange: messages on Unix sockets, the launch specification, and names of shared files.

It may import the standard library alone, because every rank and the guard process load it.
"""
