"""Sessions that run at another place and are driven from here: the contract of a place, the bundle that is sent, the bootstrap that
runs there, and the driver that carries a run from session to session.

May import core, plan, checkpoint, protocol, system, hardware, limits, admission and db. Only places/kaggle/client_process.py
imports Kaggle's client, in a process of its own."""
