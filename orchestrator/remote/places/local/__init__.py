"""This machine as a place: sessions are processes over folders that look like a place's. It needs no account.

It tests the contract with real processes, and lets people try remote runs."""
