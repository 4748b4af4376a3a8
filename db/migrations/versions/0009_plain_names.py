"""columns have names that need no explanation; their values stay as they are"""

from alembic import op

revision = "0009"
down_revision = "0008"

COLUMNS = {
    "sessions": {
        "place": "site",
        "lead_s": "save_lead_s",
        "beat_at": "heartbeat_at",
        "boot_wall_s": "wall_boottime_s",
        "fixed_wall_s": "fixed_wall_boottime_s",
    },
    "attempts": {"gained": "made_progress"},
    "checkpoints": {"took_s": "save_duration_s"},
    "pools": {"told_at": "updated_at"},
    "charges": {"from_at": "started_at"},
    "resumes": {
        "place": "site",
        "tries": "failed_starts",
        "turn_at": "last_session_at",
        "claimed_pid": "claimant_pid",
        "claimed_ticks": "claimant_started_ticks",
        "claimed_boot": "claimant_boot_id",
        "lease_until_at": "lease_expires_at",
    },
    "rungs": {"world": "world_size"},
}
"""Table → the columns that are renamed, former name → new name. docs/renamed.md tells users of them."""

INDEXES = {
    "ix_attempts_reached": ("ix_attempts_session_id_stage", "attempts", ("session_id", "stage", "last_step")),
    "ix_charges_from_at": ("ix_charges_started_at", "charges", ("started_at",)),
    "ix_charges_pool_from_at": ("ix_charges_pool_started_at", "charges", ("pool", "started_at")),
    "ix_checkpoints_standing": ("ix_checkpoints_run_id_state", "checkpoints", ("run_id", "state", "stage", "step")),
}
"""Former name → new name, table, columns."""


def upgrade() -> None:
    # RENAME COLUMN changes the schema alone. op.batch_alter_table would copy every row of a table.
    for table, names in COLUMNS.items():
        for before, now in names.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {before} TO {now}")
    # SQLite renames no index: it is built anew. These tables have some thousand rows.
    for before, (now, table, columns) in INDEXES.items():
        op.drop_index(before, table)
        op.create_index(now, table, list(columns))
