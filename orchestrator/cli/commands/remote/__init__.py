"""Verbs on runs at another place."""
