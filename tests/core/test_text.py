"""Text for a terminal: nothing in it moves the cursor, and it is as wide as it is said to be."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kgorch.cli.display.render import LogText
from kgorch.core import text

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"


@pytest.mark.parametrize(
    "hostile",
    ["\x1b[2J", CLIPBOARD, "\x07", "\x9b31m", "\u202e", "\u2066", "\x7f", "\r", "\x00", "\u200f", "\udc9b", "\u2028"],
)
def test_nothing_that_a_terminal_obeys_is_left(hostile):
    shown = text.printable(f"a{hostile}b\tc\nd")
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert shown[0] == "a" and shown.endswith("b\tc\nd")


def test_letters_of_all_languages_stay_and_odd_spaces_are_spaces():
    assert text.printable("größe 損失 ошибка ✓ →") == "größe 損失 ошибка ✓ →"
    assert text.printable("a\u00a0b\u3000c") == "a b c"


@given(st.text())
def test_printable_text_is_printable_whatever_it_was(any_text):
    assert all(letter.isprintable() or letter in "\n\t" for letter in text.printable(any_text))
    assert text.in_one_line(any_text).isprintable()


@given(st.text(st.sampled_from("\x1b[]0123;mJH\x07\x9b\x9d\\P\n ax")))
def test_of_a_logs_escape_sequences_colours_alone_stay(any_text):
    shown = text.coloured(any_text)
    assert text.COLOUR.sub("", shown).replace("\n", "").isprintable()


def test_a_log_keeps_its_colours_and_loses_titles_clipboard_and_cursor():
    assert (
        text.coloured(f"\x1b[1;31mred\x1b[0m {CLIPBOARD}\x1b[2J\x1b[1Aup\x1b]0;title\x1b\\")
        == "\x1b[1;31mred\x1b[0m up"
    )
    assert text.coloured("10%\r20%\r") == "10%\r20%\r", "a bar of progress is drawn over itself"


@example("000→\x1b 0", [1, 1, 1, 5])  # an escape with a space in it, cut off behind the space
@given(st.text(st.sampled_from("\x1b[]031;mJ\x07\n aü→")), st.lists(st.integers(1, 7)))
def test_a_log_that_is_read_in_pieces_is_shown_as_one_that_is_read_at_once(any_text, sizes):
    content, log, shown = any_text.encode(), LogText(), ""
    for size in [*sizes, len(content)]:
        piece, content = content[:size], content[size:]
        shown += log.feed(piece)
    shown += log.feed(content, is_last=True)
    assert text.COLOUR.sub("", shown).replace("\n", "").isprintable()
    if "]" not in any_text:  # a title that never ends hides less when its pieces were shown before
        assert shown == text.coloured(any_text)


@given(st.text(), st.integers(0, 40))
def test_what_is_cut_fits_and_what_fits_is_not_cut(any_text, columns):
    line = text.in_one_line(any_text)
    shown = text.cut(line, columns)
    assert text.width(shown) <= columns
    assert shown == line or text.width(line) > columns


@given(st.text(), st.integers(2, 40))
def test_a_folded_text_fits_and_loses_nothing_but_spaces(any_text, columns):
    line = text.in_one_line(any_text)
    lines = text.folded(line, columns)
    assert all(text.width(part) <= columns for part in lines)
    assert "".join(lines).replace(" ", "") == line.replace(" ", "")
    assert text.width(line) > columns or lines == [line]
