"""Questions about pictures, in Vietnamese: a student distilled from what a larger teacher said."""

import os

# Before any library reads them. The models lie in folders: a session must not wait for a network. fetch.py asks for one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the loading processes are parallel already
