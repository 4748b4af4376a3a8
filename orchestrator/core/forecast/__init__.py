"""When a run will be done and what it costs: sessions, hours and disk, also on a machine that is not here. All durations are
in seconds.

May import: nothing of the project.
"""
