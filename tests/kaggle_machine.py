"""A machine as a session at Kaggle sees it: /kaggle/input that cannot be written, /kaggle/working, a process tree of its own.

Made of mount and process namespaces over this machine's own files, so it needs root and `unshare`; nothing of it stays behind.
What is not alike: the image's packages, the GPUs, the network.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

VARIABLES = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "KAGGLE_URL_BASE": "https://www.kaggle.com", "MPLBACKEND": "agg"}

ENTER = r"""
set -e
root=$1 folder=$2; shift 2
mount -t tmpfs none "$root"
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"; fi
done
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --rbind "$1" "$root$2"
    if [ "$3" = ro ]; then mount -o remount,ro,bind "$root$2"; fi
    shift 3
done
shift
chroot "$root" sh -c 'cd "$0" && "$@"' "$folder" "$@"
"""
"""The shell stays process 1, as Kaggle's own is: it reaps what nobody waits for."""


@functools.cache
def is_available() -> bool:
    words = ["unshare", "--mount", "--pid", "--fork", "true"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0


def command(root: Path, input_folder: Path, working: Path, words: list[str]) -> list[str]:
    """The command that runs `words` in such a machine. Args: root: an empty folder, mounted over in there alone."""
    mounts = [(input_folder, "/kaggle/input", "ro"), (working, "/kaggle/working", "rw")]
    return command_with_mounts(root, mounts, "/kaggle/working", words)


def command_with_mounts(root: Path, mounts: list[tuple[Path, str, str]], folder: str, words: list[str]) -> list[str]:
    """Args: mounts: of folders here, to where, `ro` or `rw`; folder: where the command begins."""
    for path in (root, *(path for path, _, _ in mounts)):
        path.mkdir(parents=True, exist_ok=True)
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", ENTER, "sh"]
    return [*enter, str(root), folder, *(str(word) for mount in mounts for word in mount), "--", *words]


def environ() -> dict[str, str]:
    """Variables there: those of this machine's shell, without kgorch's and the test's own."""
    ours = ("KGORCH_", "PYTEST_", "COLUMNS", "LINES", "JPY_", "PYTHONPATH", "XDG_")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | VARIABLES
