"""the memory ladder: which rung was taken when, and what worked"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "rungs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=True),
        sa.Column("plan_hash", sa.String(64), nullable=False),
        sa.Column("stage", sa.String(128), nullable=False),
        sa.Column("device", sa.String(128), nullable=False),
        sa.Column("world", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("rung", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("up", sa.Boolean(), nullable=False),
        sa.Column("changes_result", sa.Boolean(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rungs_run_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_rungs_session_id"), ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rungs")),
    )
    op.create_index("ix_rungs_run_id_id", "rungs", ["run_id", "id"])
    op.create_index("ix_rungs_plan", "rungs", ["plan_hash", "stage", "device", "world"])
