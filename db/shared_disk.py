"""Whether a file lies on a file system that several machines write to.

SQLite's write-ahead log needs memory that all its processes share, so "all processes using a database must be on the same host"
(sqlite.org/wal.html). On a cluster the login node reads what a compute node writes: there the database keeps a rollback journal,
which needs nothing but POSIX locks. Those of NFS 4, Lustre (mounted with flock), GPFS and CephFS hold across machines.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "glusterfs", "pvfs2", "orangefs", "wekafs",
     "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs", "fuse.s3fs"}
)  # fmt: skip
"""Types of file systems, as /proc/self/mountinfo names them."""

MOUNTS = Path("/proc/self/mountinfo")


def is_on_network(path: Path, mounts: Path = MOUNTS) -> bool:
    """By the mount that the path is below; False where the kernel does not tell."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return False
    target, kind, length = os.path.realpath(path), "", -1
    for line in lines:
        # 36 35 98:0 / /shared rw,noatime master:1 - nfs4 server:/export rw (man 5 proc); a blank is \040
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        is_above = target == point or target.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= length:  # of two mounts at one place the later one is on top
            kind, length = after.split(" ")[0], len(point)
    return kind in NETWORK
