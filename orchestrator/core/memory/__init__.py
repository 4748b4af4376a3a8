"""How a training fits into memory: the ladder of settings that need less, when to change them, the fit of a plan before it runs,
and how many snapshots of the state the host can hold. Ranks load `memory_ladder`.

May import: of kgorch.core codes.
"""
