"""What names of runs and stages look like: they are folders, too."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
