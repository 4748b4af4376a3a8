"""The program of a remote session: `bootstrap.py` joins these modules into the one script that a place runs.

Standard library alone, Python 3.8 or newer: nothing of kgorch is installed where it begins. May import each other, one name a line.
"""
