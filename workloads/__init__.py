"""Reference trainings that live through many sessions; each also runs alone."""
