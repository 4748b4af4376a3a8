"""where a checkpoint was copied from, and how exact a session is"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("source", sa.Text(), nullable=False, server_default=""))
    op.add_column("sessions", sa.Column("exactness", sa.JSON(), nullable=False, server_default="{}"))
