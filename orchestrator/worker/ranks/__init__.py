"""How the ranks of an attempt reach each other and the supervisor: process group, shared page, socket, virtual ranks.

May import: rng_state; of the project errors and protocol.
"""
