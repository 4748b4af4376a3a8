"""Verbs that show a run, its output and its figures. They read the database, so they answer without a supervisor."""
