"""Verbs that start, continue, save and stop a training."""
