"""The database: SQLite by default, through SQLAlchemy. Functions take an engine and return immutable rows, never ORM objects."""

# a second copy of a module has classes of its own: an `except KgorchError` of one copy does not catch the other's
if __name__ != "kgorch.db":
    raise ImportError(f"the folder {__name__!r} is the package 'kgorch.db'", name=__name__)
