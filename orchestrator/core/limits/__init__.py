"""The arithmetic of time: time limits of a session, the quota of accelerator hours and the windows in which it renews, and
points in time as a user types them. Where the figures come from is the business of kgorch.limits.

May import: of kgorch.core codes.
"""
