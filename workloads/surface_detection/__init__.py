"""Papyrus surfaces in CT volumes of scrolls (Vesuvius Challenge, surface detection): train, predict, package, submit."""
