"""The file or link by which a foreign program finds its newest checkpoint: DeepSpeed's `latest`, Megatron's number in a file.

Before each start it is made to name the checkpoint that the program is handed. Otherwise it would name one that was moved aside
because nothing proves it whole, one that only another machine has, or nothing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.errors import KgorchError
from kgorch.system import files
from kgorch.worker.foreign import checkpoint_copy
from kgorch.worker.foreign.candidates import scan

MAX_CHARACTERS = 200
"""Of a file that names a checkpoint. One that holds more, or several lines, is another file, which is not overwritten: what is
overwritten stands in the journal."""


class LatestPointer:
    """Of one program.

    Args:
        root: the plan's folder.
        pattern: the plan's place of checkpoints.
        section: `latest` of LaunchSpec.foreign: `file` and `text`, or `link`.
    """

    def __init__(self, root: Path, pattern: str, section: Mapping[str, str | None]) -> None:
        self._root, self._pattern, self._text = root, pattern, section["text"] or ""
        self._name = section["link"] or section["file"] or ""
        self._path, self._is_link = root / self._name, bool(section["link"])

    def set(self, handed: str) -> str:
        """Make it name the checkpoint that the program is handed. Without one it is moved aside, unless it names another.

        Args:
            handed: path of the checkpoint below the plan's folder; empty for none.
        Returns: what was done, in words; empty for nothing.
        Raises: KgorchError where it cannot name that checkpoint, or is something else; OSError.
        """
        try:
            return self._point_to(handed) if handed else self._put_away()
        except (NotADirectoryError, PermissionError) as error:
            raise KgorchError(f"stage.foreign.latest: {self._name} cannot be used: {error.strerror}") from None

    def problem(self) -> str:
        """What is wrong with what the program has written there, in words; empty where it names a checkpoint."""
        try:
            found = self._content()
        except (KgorchError, OSError) as error:
            return str(error)
        names = [self._named(item.path) for item in scan(self._root, self._pattern)]
        if not names or (found is not None and found in names):
            return ""
        expected = next(
            (repr(name)[:200] for name in names if name is not None), "the number of a checkpoint, and none has one"
        )
        return f"{self._name} holds {'nothing' if found is None else repr(found)[:200]}, expected {expected}"

    def _point_to(self, handed: str) -> str:
        """Raises: OSError, KgorchError."""
        found, wanted = self._content(), self._named(handed)
        if wanted is None:
            raise KgorchError(
                f"stage.foreign.latest: {self._name} cannot name {handed}",
                "expected a number in the part of its path that * stands for",
                next_step="give stage.foreign.latest a text with {name}",
            )
        if found == wanted:
            return ""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_link:
            temporary = self._path.with_name(f"{self._path.name}.part")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(wanted)
            temporary.replace(self._path)
        else:
            ending = self._text[len(self._text.rstrip()) :]
            files.write(self._path, f"{wanted}{ending}".encode())
        return f"{self._name} holds {wanted!r:.200} now" + (f", and held {found!r:.200}" if found is not None else "")

    def _put_away(self) -> str:
        """Raises: OSError, KgorchError."""
        found = self._content()
        if found is None:
            return ""
        if found in {self._named(item.path) for item in scan(self._root, self._pattern)}:
            return f"{self._name} holds {found!r:.200}: the program goes on from there if it looks, for this run hands it nothing"
        aside = checkpoint_copy.move_aside(self._path)
        return f"{self._name} holds {found!r:.200}, which is no checkpoint that is there; it is now {aside}"

    def _named(self, path: str) -> str | None:
        """What it holds for a checkpoint; None where its path has no number for it."""
        if self._is_link:
            return os.path.relpath(self._root / path, self._path.parent)
        words = {"{checkpoint}": path, "{name}": path.rpartition("/")[2]}
        if numbers := foreign_checkpoint.numbers_in(path, self._pattern):
            words["{number}"] = str(numbers[-1])
        elif "{number}" in self._text:
            return None
        return re.sub(r"\{\w+\}", lambda match: words[match[0]], self._text.rstrip())

    def _content(self) -> str | None:
        """What it holds, without blanks at its end; None where it is not there. Raises: OSError; KgorchError for something else."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return None
        if self._is_link and stat.S_ISLNK(mode):
            return str(self._path.readlink())
        if not self._is_link and self._path.is_file():
            with open(self._path, encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_CHARACTERS + 1).rstrip()
            if len(text) <= MAX_CHARACTERS and "\n" not in text:
                return text
        raise KgorchError(
            f"stage.foreign.latest: {self._name} is no {'link' if self._is_link else 'file with the name of a checkpoint'}",
            next_step="correct it, or move what lies there away",
        )
