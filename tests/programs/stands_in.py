"""Plays the daemon for systemd: a training of its own session, a watchdog until told to hang, a stop that takes a while."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kgorch.system import log_handlers, sd_notify

disk = Path(sys.argv[1])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
log_handlers.configure(disk)
log = log_handlers.logging.getLogger("kgorch.daemon")

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
sd_notify.ready()
sd_notify.status("looks after\n one training")
every_s = sd_notify.watchdog_interval_s() or 1.0
while not asked:
    if not (disk / "hang").exists():
        sd_notify.watchdog()
    time.sleep(min(every_s, 0.1))
sd_notify.stopping()
time.sleep(2)
(disk / "saved").write_text("by the last save")
