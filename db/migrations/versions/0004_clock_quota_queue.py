"""walls with their reasons, the quota's pools, and leases of the queue"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("sessions") as sessions:
        sessions.add_column(sa.Column("wall_why", sa.String(64), nullable=False, server_default=""))
        sessions.add_column(sa.Column("fixed_wall_s", sa.Double(), nullable=True))
        sessions.add_column(sa.Column("fixed_wall_why", sa.String(64), nullable=False, server_default=""))
        sessions.add_column(sa.Column("pool", sa.String(64), nullable=False, server_default=""))
    # one that trains through the upgrade keeps its wall
    op.execute(
        "UPDATE sessions SET wall_why = 'the wall', fixed_wall_s = boot_wall_s, fixed_wall_why = 'the wall'"
        " WHERE boot_wall_s IS NOT NULL AND ended_at IS NULL"
    )
    with op.batch_alter_table("charges") as charges:
        charges.add_column(sa.Column("pool", sa.String(64), nullable=False, server_default=""))
        charges.add_column(sa.Column("why", sa.Text(), nullable=False, server_default=""))
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("pool", sa.String(64), nullable=False, server_default=""))
    op.create_table(
        "pools",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("total_s", sa.Double(), nullable=False),
        sa.Column("resets", sa.Text(), nullable=False),
        sa.Column("reserve_s", sa.Double(), nullable=False),
        sa.Column("told_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pools")),
    )
    op.create_index("ix_charges_pool_from_at", "charges", ["pool", "from_at"])
    op.create_index("ix_charges_session_id", "charges", ["session_id"])
    with op.batch_alter_table("resumes") as resumes:
        resumes.add_column(sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
        resumes.add_column(sa.Column("claimed_pid", sa.Integer(), nullable=True))
        resumes.add_column(sa.Column("claimed_ticks", sa.BigInteger(), nullable=True))
        resumes.add_column(sa.Column("claimed_boot", sa.String(64), nullable=False, server_default=""))
        resumes.add_column(sa.Column("lease_until_at", sa.DateTime(), nullable=True))
        resumes.add_column(sa.Column("last_error", sa.Text(), nullable=False, server_default=""))
        resumes.add_column(sa.Column("ranks", sa.Integer(), nullable=True))
        resumes.add_column(sa.Column("share", sa.Boolean(), nullable=False, server_default=sa.false()))
        resumes.add_column(sa.Column("turn_at", sa.DateTime(), nullable=True))
    op.create_index("ix_resumes_share_state_due_at", "resumes", ["share", "state", "due_at"])
    op.create_index("ix_resumes_state_due_at", "resumes", ["state", "due_at"])
    # one place in the queue a run: of older rows the newest stays
    op.execute(
        "UPDATE resumes SET state = 'done' WHERE state IN ('due', 'claimed') AND id NOT IN"
        " (SELECT max(id) FROM resumes WHERE state IN ('due', 'claimed') GROUP BY run_id)"
    )
    waiting = sa.text("state IN ('due', 'claimed')")
    op.create_index(
        "uq_resumes_waiting", "resumes", ["run_id"], unique=True, sqlite_where=waiting, postgresql_where=waiting
    )
    # what answers at once among any number of runs, sessions and events
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
    op.create_index("ix_runs_state_created_at", "runs", ["state", "created_at"])
    op.create_index("ix_attempts_reached", "attempts", ["session_id", "stage", "last_step"])
    op.create_index("ix_checkpoints_standing", "checkpoints", ["run_id", "state", "stage", "step"])
    op.create_index("ix_checkpoints_session_id", "checkpoints", ["session_id"])
    op.create_index("ix_resumes_run_id_state", "resumes", ["run_id", "state"])
    op.create_index("ix_events_run_id_kind", "events", ["run_id", "kind", "id"])
    op.create_index("ix_events_session_id_kind", "events", ["session_id", "kind", "id"])
