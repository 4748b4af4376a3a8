"""Text for people: units, tables, the progress of a session, plots. Verbs and `foreground` use it; it decides nothing.

`render` alone writes to the terminal, so that control characters from names and databases of others are removed at one place.
"""
