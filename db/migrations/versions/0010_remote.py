"""sessions and bundles at other places"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_IS_OPEN = sa.text("state IN ('planned', 'bundling', 'pushing', 'asking', 'queued', 'running', 'ended')")


def upgrade() -> None:
    op.create_table(
        "remote_bundles",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("place", sa.String(length=32), nullable=False),
        sa.Column("account", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_at", sa.DateTime(), nullable=False),
        sa.Column("ready_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_remote_bundles")),
        sa.UniqueConstraint("place", "account", "name", name=op.f("uq_remote_bundles_place")),
    )
    op.create_table(
        "remote_sessions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("place", sa.String(length=32), nullable=False),
        sa.Column("account", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=50), nullable=False),
        sa.Column("nonce", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("wait", sa.String(length=16), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("due_at", sa.DateTime(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("source", sa.Integer(), nullable=False),
        sa.Column("expected_position", sa.Integer(), nullable=False),
        sa.Column("expected_step", sa.Integer(), nullable=False),
        sa.Column("session_s", sa.Integer(), nullable=False),
        sa.Column("timeout_s", sa.Integer(), nullable=False),
        sa.Column("bundle", sa.Text(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("refusals", sa.Integer(), nullable=False),
        sa.Column("absences", sa.Integer(), nullable=False),
        sa.Column("absent_since", sa.DateTime(), nullable=True),
        sa.Column("pushed_at", sa.DateTime(), nullable=True),
        sa.Column("running_at", sa.DateTime(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("status_at", sa.DateTime(), nullable=True),
        sa.Column("is_last", sa.Boolean(), nullable=False),
        sa.Column("queue_told", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=128), nullable=False),
        sa.Column("reached_position", sa.Integer(), nullable=False),
        sa.Column("reached_step", sa.Integer(), nullable=False),
        sa.Column("fruitless", sa.Integer(), nullable=False),
        sa.Column("unprepared", sa.Integer(), nullable=False),
        sa.Column("first_cause", sa.Text(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("quota_used_s", sa.Double(), nullable=True),
        sa.Column("factor", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_remote_sessions_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_remote_sessions")),
        sa.UniqueConstraint("name", name=op.f("uq_remote_sessions_name")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_remote_sessions_run_id")),
    )
    op.create_index("ix_remote_sessions_state_due_at", "remote_sessions", ["state", "due_at"], unique=False)
    op.create_index(
        "uq_remote_sessions_open",
        "remote_sessions",
        ["run_id"],
        unique=True,
        sqlite_where=_IS_OPEN,
        postgresql_where=_IS_OPEN,
    )
