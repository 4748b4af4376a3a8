"""Exceptions that are no bug of kgorch: a disk, a path, a word that is no UTF-8, the database or one of its rows."""

from __future__ import annotations

import errno

from kgorch.errors import NO_ROOM, DatabaseUnusable, KgorchError

ENVIRONMENT = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR,
    errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENOTCONN,
}  # fmt: skip
"""Errors of a path or its disk. ENOENT is not among them: a file that kgorch expects and that does not exist is its own bug."""


def environment_error(error: Exception) -> KgorchError | None:
    """The error to print for an exception that the environment caused; None for a bug, which must show its traceback."""
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        return KgorchError(
            f"{error.object[:200]!r} is not valid UTF-8",
            next_step="rename it, or set LC_ALL=C.UTF-8",
            error_code="KG903",
        )
    if isinstance(error, OSError):
        if error.errno not in ENVIRONMENT or not error.filename:
            return None
        place = str(error.filename)[:200]
        return KgorchError(
            f"{error.strerror}: {place!r}",
            next_step="check that the path is right and writable, and its disk not full",
            error_code="KG501" if error.errno in NO_ROOM else "KG503",
        )
    if type(error).__module__ == "sqlalchemy.exc" and (cause := getattr(error, "orig", None)):
        from kgorch.db.engine import MAY_PASS

        return (DatabaseUnusable if isinstance(error, MAY_PASS) else KgorchError)(
            f"the database cannot be used: {cause}",
            next_step="try again; check that no other program locks it",
            error_code="KG602",
        )
    from kgorch.cli.odd_row import odd_row

    if odd := odd_row(error):
        return KgorchError(
            f"the database holds a value that kgorch did not write: {odd} ({type(error).__name__}: {str(error)[:200]})",
            next_step="restore a copy of kgorch.db, or correct that row",
            error_code="KG602",
        )
    return None
