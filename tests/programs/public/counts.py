"""Counts, and writes down how far it has come, every fifth step: no PyTorch, no arguments with names."""

import hashlib
import json
import os
import sys
import time

count, folder = int(sys.argv[1]), sys.argv[2]
pause = float(os.environ.get("COUNTS_PAUSE", "0.1"))
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "state.json")
step, digest = 0, ""
if os.path.exists(path):
    with open(path) as file:
        state = json.load(file)
    step, digest = state["step"], state["digest"]
    print(f"goes on at {step}", flush=True)
while step < count:
    step += 1
    digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    time.sleep(pause)
    print(f"step {step} of {count}, loss {1 / step:.6f}", flush=True)
    if step % 5 == 0 or step == count:
        with open(path + ".tmp", "w") as file:
            json.dump({"step": step, "digest": digest, "loss": 1 / step}, file)
        os.replace(path + ".tmp", path)
