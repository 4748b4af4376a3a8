"""A session over several nodes: which they are, the agent that runs on each other node, the channel to it, and saves in parts.

May import launch, snapshots, plan, hardware, protocol, core and system. Design: DECISIONS.md, "A session over several nodes".
"""
