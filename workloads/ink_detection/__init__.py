"""Ink in volumes of carbonised papyrus (Vesuvius Challenge): train, predict, package."""
