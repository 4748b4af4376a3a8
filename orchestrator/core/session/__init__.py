"""The lifecycle of a session, and what leads to its events: how an attempt ended, a rank that hangs. Also which of the
events notify the user.

May import: of kgorch.core checkpoint, health, limits, memory and codes.
"""
