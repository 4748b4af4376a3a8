"""checkpoints that a user keeps whatever the plan keeps"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    # "0": both SQLite and PostgreSQL take that text for false
    op.add_column("checkpoints", sa.Column("pinned", sa.Boolean(), nullable=False, server_default="0"))
