"""Places that run sessions, a package each, behind remote/place.py. A place imports the contract and its own client alone."""
