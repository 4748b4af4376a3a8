"""The names that runs, stages and quota pools may have. Runs and stages are folders of the same name."""

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""To be matched in full. A leading dot or dash is refused: it would hide the folder, or be read as an option by a shell command."""
