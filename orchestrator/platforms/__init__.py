"""What each platform promises: how long a session lasts, when it began, which folder outlives it. One module a platform.

May import the standard library alone."""
