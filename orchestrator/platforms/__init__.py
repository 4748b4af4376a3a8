"""What each place to run promises: how long a session lasts, when it began, where state outlives it."""
