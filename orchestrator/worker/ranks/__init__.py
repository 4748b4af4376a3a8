"""How the ranks of an attempt reach each other and the supervisor: process group, shared page, socket, virtual ranks.

May import: the random states of `rng_state`, and the protocol with the supervisor.
"""
