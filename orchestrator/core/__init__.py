"""Decisions: pure functions on plain values. Nothing in here reads a clock, opens a file or logs.

May import the standard library alone. The packages below it import one another in one direction: `session` is the highest.
"""
