"""on whose weights a checkpoint's metrics were measured, and which checkpoint is its stage's best"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("checkpoints") as checkpoints:
        checkpoints.add_column(sa.Column("measured", sa.JSON(), nullable=False, server_default="{}"))
        checkpoints.add_column(sa.Column("best", sa.String(200), nullable=False, server_default=""))
