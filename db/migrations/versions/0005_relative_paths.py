"""paths below the state folder are kept relative to it

Which folder that was is read from the rows: a run's own folder is ROOT/runs/NAME/NUMBER. So a database that was moved before it
was migrated comes right, too. What lies elsewhere (checkpoint.dir) stays absolute.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

OF_RUN = {
    "runs": ("id = :run", ("folder", "checkpoints")),
    "attempts": ("session_id IN (SELECT id FROM sessions WHERE run_id = :run)", ("folder",)),
    "checkpoints": ("run_id = :run", ("path",)),
}


def upgrade() -> None:
    connection = op.get_bind()
    for run, folder, name, number in connection.execute(sa.text("SELECT id, folder, name, number FROM runs")).all():
        root, is_a_runs, rest = folder.rpartition("/runs/")
        if not is_a_runs or not root or rest != f"{name}/{number}":
            continue  # nothing that kgorch has written
        for table, (rows, columns) in OF_RUN.items():
            for column in columns:
                told = {"run": run, "prefix": f"{root}/", "length": len(root) + 1}
                relative = f"substr({column}, :length + 1)"
                free = f" AND NOT EXISTS (SELECT 1 FROM {table} o WHERE o.{column} = substr({table}.{column}, :length + 1))"
                connection.execute(
                    sa.text(
                        f"UPDATE {table} SET {column} = {relative}"
                        f" WHERE {rows} AND substr({column}, 1, :length) = :prefix{free if column == 'path' else ''}"
                    ),
                    told,
                )
