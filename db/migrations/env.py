"""What Alembic runs for each command: on the connection that run.py hands over."""

from alembic import context

from kgorch.db.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
