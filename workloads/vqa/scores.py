"""How near an answer comes to the right one: exact match and token F1, as in SQuAD but for Vietnamese.

SQuAD's own normalisation (and torchmetrics') drops English articles, and `a` is a word here. Tones stay: `vàng` is not `vang`.
"""

from __future__ import annotations

import unicodedata
from collections import Counter


def normalised(text: str) -> str:
    """Composed letters, lower case, no punctuation, single spaces."""
    composed = unicodedata.normalize("NFC", text).casefold()
    kept = "".join(" " if unicodedata.category(letter).startswith("P") else letter for letter in composed)
    return " ".join(kept.split())


def exact(said: str, right: str) -> float:
    """1.0 where both are the same after normalisation, else 0.0."""
    return float(normalised(said) == normalised(right))


def token_f1(said: str, right: str) -> float:
    """Harmonic mean of precision and recall of the words, each counted as often as it stands there."""
    said_words, right_words = normalised(said).split(), normalised(right).split()
    if not said_words or not right_words:
        return float(said_words == right_words)
    shared = (Counter(said_words) & Counter(right_words)).total()
    return 2 * shared / (len(said_words) + len(right_words))


def rouge_l(said: str, right: str) -> float:
    """F1 of the longest common subsequence of words: how near the reasons come (Lin 2004)."""
    said_words, right_words = normalised(said).split(), normalised(right).split()
    if not said_words or not right_words:
        return float(said_words == right_words)
    row = [0] * (len(right_words) + 1)
    for word in said_words:
        before = row[:]
        for at, other in enumerate(right_words, 1):
            row[at] = before[at - 1] + 1 if word == other else max(before[at], row[at - 1])
    return 2 * row[-1] / (len(said_words) + len(right_words))
