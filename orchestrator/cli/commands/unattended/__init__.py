"""Verbs for runs that go on while nobody is logged in."""
