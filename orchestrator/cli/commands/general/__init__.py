"""Help and version."""
