"""A stand-in for Kaggle's server, because no account can be had in a test. It is ours: what it does is what users and Kaggle's own
client say of the real one, not what the real one has shown us (docs/kaggle.md lists what a real account has to show).

It answers the real, unmodified client (PyPI `kaggle`) over the way that the client takes in production: `https_proxy`, CONNECT, TLS
with a certificate of its own authority. It is strict: where reports differ it does what is worse for us, unless a rule says
otherwise (rules.py). What is pushed is executed: as root in namespaces of its own, where /kaggle/input is read-only and neither the
checkout nor the person's home can be seen; otherwise as a plain process with the folders in its environment.

`python -m places.kaggle_server FOLDER` runs it by hand and prints the variables to export.
"""

from places.kaggle_server.faults import Fault
from places.kaggle_server.rules import Rules
from places.kaggle_server.server import KaggleServer

__all__ = ["Fault", "KaggleServer", "Rules"]
