"""machines that share a PostgreSQL"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

JSON_COLUMNS = {
    "runs": ("overrides",),
    "sessions": ("metrics", "exactness"),
    "checkpoints": ("metrics", "measured"),
    "samples": ("values",),
    "rungs": ("settings",),
    "events": ("facts",),
    "remote_sessions": ("record",),
}


def upgrade() -> None:
    for table, names in {"runs": ("machine",), "sessions": ("machine",), "resumes": ("claimant_machine",)}.items():
        for name in names:
            op.add_column(table, sa.Column(name, sa.String(64), nullable=False, server_default=""))
    op.add_column("sessions", sa.Column("lease_expires_at", sa.DateTime(), nullable=True))
    op.add_column("resumes", sa.Column("mirrored", sa.Boolean(), nullable=False, server_default=sa.false()))
    document = sa.JSON().with_variant(sa.Text(), "postgresql")
    op.create_table(
        "machines",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("boot_id", sa.String(length=64), nullable=False),
        sa.Column("home", sa.Text(), nullable=False),
        sa.Column("state_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("gpus", document, nullable=False),
        sa.Column("daemon_pid", sa.Integer(), nullable=True),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_machines")),
    )
    if op.get_bind().dialect.name == "postgresql":
        _postgresql()


def _postgresql() -> None:
    # json refuses NaN, which a metric may be; db/postgres.py stores the same text as SQLite
    for table, names in JSON_COLUMNS.items():
        for name in names:
            op.execute(f'ALTER TABLE {table} ALTER COLUMN "{name}" DROP DEFAULT')
            op.execute(f'ALTER TABLE {table} ALTER COLUMN "{name}" TYPE text USING "{name}"::text')
    # Two machines that both believe a run to be theirs: the second one's session is refused.
    op.execute(
        "CREATE UNIQUE INDEX uq_sessions_live ON sessions (run_id)"
        " WHERE phase NOT IN ('finished', 'suspended', 'cut_off', 'failed')"
    )
    # the order in which rows are started, so that a claim among ten thousand reads a few
    op.execute(
        "CREATE INDEX ix_resumes_order ON resumes (state, priority DESC, last_session_at NULLS FIRST, due_at, id)"
    )
