"""Trainers of other libraries, carried through sessions without a change of the script: Lightning, Transformers, Accelerate.

May import the public API of the worker (session.py) and, once a script has imported it, the library of the module's name.
"""
