"""Verbs on what a run keeps on disk."""
