"""Rows in, figures out: what `status`, `history` and their --json show. Reads the database; needs no living supervisor."""
