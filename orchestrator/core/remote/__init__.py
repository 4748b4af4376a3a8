"""Decisions about sessions that run elsewhere: what a place has answered, and the next step of a session there.

May import core alone."""
