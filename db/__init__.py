"""What kgorch remembers: SQLite by default, through SQLAlchemy. Verbs on rows return plain values, never ORM objects."""
