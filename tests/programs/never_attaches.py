"""A script that knows nothing of kgorch, and takes its time."""

import sys
import time

print("hello from a plain script", sys.argv[1:], flush=True)
time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
