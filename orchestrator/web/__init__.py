"""The page of `kgorch web`: what `report` says of all runs in a browser, and the actions of the verbs behind buttons.

It computes no figure of its own and writes only through the functions that the verbs call. May import `report` and what is below
it, `admission` and `scheduler` for the actions; `cli` starts it. Needs the extra `kgorch[web]`.
"""
