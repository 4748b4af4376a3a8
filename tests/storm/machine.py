"""The machine that a world stands on: small disks of its own, and what can be done to its processes from outside by weather.c."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import shutil
import struct
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

SWITCHES = ("slow_ms", "read_only", "source_fails", "clock_s")
"""As weather.c has them, 64 bits each."""

DISK_BYTES = 128 << 20


class Refused(Exception):
    """This machine does not allow it: the fault is passed over, and named."""


@functools.cache
def compiler() -> str | None:
    return shutil.which("cc")


@dataclass
class Weather:
    """The page shared with weather.c in every process of a world. Without a compiler its faults are passed over."""

    folder: Path
    library: Path | None

    @classmethod
    def over(cls, folder: Path) -> Weather:
        folder.mkdir(parents=True)
        library = folder / "weather.so"
        if cc := compiler():
            source = Path(__file__).with_name("weather.c")
            subprocess.run([cc, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        made = cls(folder, library if compiler() else None)
        (folder / "page").write_bytes(b"\0" * mmap.PAGESIZE)
        made.new_boot()
        return made

    def env(self, disk: Path, source: Path) -> dict[str, str]:
        if self.library is None:
            return {}
        return {
            "LD_PRELOAD": str(self.library),
            "KGORCH_TEST_WEATHER": str(self.folder / "page"),
            "KGORCH_TEST_DISK": str(disk),
            "KGORCH_TEST_SOURCE": str(source) + "/",
            "KGORCH_TEST_BOOT": str(self.boot),
        }

    @property
    def boot(self) -> Path:
        return self.folder / "boot_id"

    def new_boot(self) -> None:
        self.boot.write_text(f"{uuid.uuid4()}\n")

    def set(self, **switches: int) -> None:
        """Raises: Refused."""
        if self.library is None:
            raise Refused("no C compiler")
        with open(self.folder / "page", "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
            for name, value in switches.items():
                struct.pack_into("q", page, 8 * SWITCHES.index(name), value)

    def calm(self) -> None:
        """All but the clock, which stays where it was put."""
        if self.library:
            self.set(slow_ms=0, read_only=0, source_fails=0)


class Disk:
    """A small file system of its own, where this machine lets us mount one; a plain folder else."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)
        self.mounted = _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(place))

    def fill(self, leaving: int) -> None:
        """Raises: Refused."""
        self._must_be_ours()
        self.free_again()
        with open(self.place / ".filler", "wb") as file:
            room = os.statvfs(self.place)
            size = room.f_bavail * room.f_frsize - leaving
            while size > 0:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                    break
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size -= 4096  # the run has written meanwhile

    def free_again(self) -> None:
        (self.place / ".filler").unlink(missing_ok=True)

    def remount(self, how: str) -> None:
        """`ro` or `rw`; the kernel allows `ro` while nobody has a file open for writing. Raises: Refused."""
        self._must_be_ours()
        until = time.monotonic() + 10.0  # files of the dead are closed a moment later
        while not _mount("-o", f"remount,{how}", str(self.place)):
            if time.monotonic() > until:
                raise Refused(f"the kernel does not remount it {how}")
            time.sleep(0.2)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.place)], check=False, capture_output=True)

    def _must_be_ours(self) -> None:
        if not self.mounted:
            raise Refused("no right to mount a small file system")


def _mount(*options: str) -> bool:
    try:
        return subprocess.run(["mount", *options], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
