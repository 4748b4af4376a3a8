"""Verbs that write, explain and test a plan."""
