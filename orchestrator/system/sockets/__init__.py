"""Servers on Unix sockets: the listening file, lines from many peers without blocking, and the supervisor's control socket.

It may import what kgorch.system may.
"""
