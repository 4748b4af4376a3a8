"""Slurm jobs that run sessions"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0011"

_IS_OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "slurm_jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("job", sa.String(length=20), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("follows", sa.String(length=20), nullable=False),
        sa.Column("requeue", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=24), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("starts_at", sa.DateTime(), nullable=True),
        sa.Column("submitted_at", sa.DateTime(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.Column("stop_at", sa.DateTime(), nullable=True),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("why", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_slurm_jobs_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slurm_jobs")),
    )
    op.create_index("ix_slurm_jobs_run_id_id", "slurm_jobs", ["run_id", "id"], unique=False)
    op.create_index(
        "uq_slurm_jobs_open",
        "slurm_jobs",
        ["run_id"],
        unique=True,
        sqlite_where=_IS_OPEN,
        postgresql_where=_IS_OPEN,
    )
