"""The log: where it goes without systemd, what a line looks like, and that no secret is in it."""

from __future__ import annotations

import logging
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kgorch.system import log_handlers, redaction

SECRETS = {"HF_TOKEN": "hf_abcdefgh", "WANDB_API_KEY": "0123456789", "SHORT_KEY": "ab", "HOME": "/home/mira"}


@pytest.fixture
def log(tmp_path):
    log_handlers.configure(tmp_path, environ=SECRETS)
    logger = logging.getLogger("kgorch.daemon")
    yield logger
    for handler in list(logging.getLogger("kgorch").handlers):
        logging.getLogger("kgorch").removeHandler(handler)
        handler.close()


def _text(folder):
    return (folder / "logs" / "daemon.log").read_text()


def test_without_systemd_a_line_names_time_level_run_and_session(log, tmp_path):
    log.warning("resumed at step %d", 4000, extra={"run": "surface-demo", "session": 3})
    assert _text(tmp_path).endswith("Z WARNING kgorch.daemon [surface-demo 3] resumed at step 4000\n")


@pytest.mark.parametrize("word", ["a", "token", "a-", "a.b+", "a://b@", "key=", "key ="])
def test_a_line_that_is_one_long_word_is_masked_at_once(word):
    began_s = time.process_time()
    redaction.redact(word * (30_000 // len(word)))
    assert time.process_time() - began_s < 2.0


def test_the_files_are_rotated_and_do_not_grow_without_end(log, tmp_path, monkeypatch):
    handler = logging.getLogger("kgorch").handlers[0]
    handler.maxBytes = 1000
    for number in range(200):
        log.info("line %d", number)
    files = sorted((tmp_path / "logs").iterdir())
    assert len(files) == log_handlers.FILES and all(path.stat().st_size <= 1000 for path in files)
    assert "line 199\n" in _text(tmp_path)


def test_no_secret_is_written_in_a_message_an_argument_an_address_or_a_traceback(log, tmp_path):
    log.info("with hf_abcdefgh and %s", "0123456789")
    log.info("POST https://mira:pw@example.org/hook?sig=deadbeef#x")
    log.info('{"api_key": "tellnobody", "step": 4}')
    try:
        raise ValueError("token=tellnobody")
    except ValueError:
        log.exception("refused")
    text = _text(tmp_path)
    assert not [word for word in ("hf_abc", "0123456789", "mira", "deadbeef", "tellnobody") if word in text]
    assert "https://example.org/hook?***#x" in text and '"step": 4' in text and "ValueError: token=***" in text


def test_a_password_that_holds_the_sign_before_the_host_is_masked_whole():
    assert redaction.redact("at https://mira:p@ss@host/x?to=me@home") == "at https://host/x?***"
    assert redaction.redact("at https://host?to=me@home") == "at https://host?***"


def test_a_password_that_holds_the_sign_is_not_half_shown_in_the_address_of_a_mirror():
    url = "sftp://me:p@ssw0rd@host/a@b"
    assert redaction.without_credentials(url) == "sftp://host/a@b"
    assert {"me", "p@ssw0rd", "me:p@ssw0rd"} == {*redaction.url_credentials(url)}
    assert redaction.without_credentials("s3://bucket/me@home") == "s3://bucket/me@home"
    assert redaction.without_credentials("sqlite:///me@home.db") == "sqlite:///me@home.db"
    chained = "simplecache::sftp://me:p@ss@one/a::sftp://you:w0rd@two/b"
    assert redaction.without_credentials(chained) == "simplecache::sftp://one/a::sftp://two/b"
    assert {"p@ss", "w0rd"} <= {*redaction.url_credentials(chained)}


def test_a_folder_whose_name_is_no_utf_8_can_be_named(log, tmp_path):
    record = log.makeRecord(log.name, logging.INFO, __file__, 1, "starts the due runs of /home/\udcff", (), None)
    logging.getLogger("kgorch").handlers[0].handle(record)  # past pytest's own, whose report could not be sent
    assert "/home/\\udcff\n" in _text(tmp_path)


def test_what_is_no_secret_stays_as_it_is():
    for text in ("ab is short", "file:///data/x.toml", "step 4000: loss=0.25", "https://example.org/a/b"):
        assert redaction.redact(text, redaction.secret_values(SECRETS)) == text


@given(some.text(max_size=200))
def test_a_secret_is_masked_wherever_it_stands(around):
    half = len(around) // 2
    assert "hf_abcdefgh" not in redaction.redact(
        around[:half] + "hf_abcdefgh" + around[half:], redaction.secret_values(SECRETS)
    )


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path, capsys):
    (tmp_path / "logs").write_text("in the way")
    log_handlers.configure(tmp_path, environ={})
    logging.getLogger("kgorch.daemon").info("goes on")
    told = capsys.readouterr().err
    assert "no log file" in told and "goes on" in told


def test_only_the_stream_that_systemd_named_counts_as_the_journal(tmp_path):
    with open(tmp_path / "stream", "w") as file:
        found = os.fstat(file.fileno())
        mine = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert log_handlers.is_journal(mine, file.fileno())
        assert not log_handlers.is_journal(mine, 0) and not log_handlers.is_journal({}, file.fileno())
