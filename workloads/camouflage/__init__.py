"""Camouflaged animals in pictures (COD10K): an EdgeNeXt backbone, seven experts, two stages of training."""
