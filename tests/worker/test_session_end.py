"""A rank that is stopped before a wall does not unload PyTorch; all else that Python does at its end is done."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time
from kgorch.worker import entry

class Slow:
    def __del__(self):
        time.sleep(30)  # as PyTorch's unloading

kept = Slow()
left_open, closed = open(sys.argv[1], "w"), open(sys.argv[1] + ".closed", "w")
left_open.write("not flushed by the script")
closed.close()
atexit.register(lambda: print("registered with atexit"))
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread that was not waited for"))).start()
print("no newline", end=", ")
entry.leave()
"""


def test_files_left_open_threads_and_what_was_registered_come_to_their_end(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "not flushed by the script"
    assert done.stdout == "no newline, a thread that was not waited for\nregistered with atexit\n"


def test_a_handler_that_fails_keeps_it_from_nothing(tmp_path):
    program = PROGRAM.replace('print("registered with atexit")', "1 / 0")
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert done.returncode == 0 and "ZeroDivisionError" in done.stderr
    assert (tmp_path / "file").read_text() == "not flushed by the script"
