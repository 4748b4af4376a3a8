"""Questions about pictures, in Vietnamese: a student distilled from what a larger teacher said."""

import os

# Before any library reads them. What the student is made of lies in folders: nothing is to be fetched in the midst of a session.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the loading processes are parallel already
