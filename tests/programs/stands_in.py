"""Plays the daemon for systemd: a training of its own session, a watchdog until told to hang, a stop that takes a while."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orchestrator.runtime import logs, notify

disk = Path(sys.argv[1])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
logs.configure(disk)
log = logs.logging.getLogger("kgorch.daemon")

training = disk / "training.pid"
if not training.exists():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    training.write_text(str(child.pid))
    for name, folder in (("in_tmpdir", tempfile.gettempdir()), ("in_tmp", "/tmp")):
        handle, path = tempfile.mkstemp(dir=folder)
        (disk / name).write_text(path)
log.info("begun\nin two lines", extra={"run": "surface-demo", "session": 3})
log.warning("asked https://mira:hidden@example.org/x?sig=hidden2")
log.info("long " * 100_000)
notify.ready()
notify.status("looks after\n one training")
every_s = notify.watchdog_interval_s() or 1.0
while not asked:
    if not (disk / "hang").exists():
        notify.watchdog()
    time.sleep(min(every_s, 0.1))
notify.stopping()
time.sleep(2)
(disk / "saved").write_text("by the last save")
