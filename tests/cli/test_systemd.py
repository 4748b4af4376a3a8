"""kgorch systemd: what is printed, written, left alone and taken away. Real systemd: tests/system/test_systemd_units.py."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from click.testing import CliRunner

from kgorch.cli import cli
from kgorch.system import systemd_units


def test_what_is_printed_is_what_is_installed_whatever_the_unit(kgorch, tmp_path):
    kgorch("systemd", "install", "--user", "--into", str(tmp_path / "units"))
    for unit in systemd_units.UNITS:
        printed = kgorch("systemd", "print", unit, "--user").stdout
        assert printed == (tmp_path / "units" / unit).read_text()
        assert f'"KGORCH_HOME={kgorch.home}"' in printed and printed.startswith(systemd_units.MARK)
        assert "$" not in printed.replace("$(systemd-escape", ""), "all is filled in"


def test_a_system_unit_runs_as_the_person_named_and_a_user_unit_closes_nothing_that_needs_root(kgorch):
    system = kgorch("systemd", "print", "--system", "--as", "nobody").stdout
    assert "\nUser=nobody\n" in system and "\nPrivateTmp=yes\n" in system
    user = kgorch("systemd", "print", "--user").stdout
    assert "User=" not in user and "PrivateTmp=" not in user and "\nNoNewPrivileges=yes\n" in user
    assert "no account" in kgorch("systemd", "print", "--system", "--as", "no-such-person", code=2).stderr
    assert "leave out --as" in kgorch("systemd", "print", "--user", "--as", "nobody", code=2).stderr


@pytest.mark.parametrize(("uid", "manager"), [(0, "system"), (1000, "user")])
def test_the_manager_is_that_of_who_asks(monkeypatch, uid, manager):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    told = CliRunner().invoke(cli, ["systemd", "print", "kgorch.service"])
    other = CliRunner().invoke(cli, ["systemd", "print", "kgorch.service", f"--{manager}"])
    assert told.exit_code == 0 and told.output == other.output


def test_installing_again_changes_nothing_and_another_home_replaces(kgorch, tmp_path):
    words = ("systemd", "install", "--user", "--into", str(tmp_path / "units"))
    assert kgorch(*words).stdout.count(": written") == 2
    assert kgorch(*words).stdout.count(": unchanged") == 2
    assert kgorch(*words, "--home", "/srv/kgorch").stdout.count(": replaced") == 2
    assert "KGORCH_HOME=/srv/kgorch" in (tmp_path / "units" / "kgorch.service").read_text()


def test_a_dry_run_says_what_would_be_written_and_run_and_writes_nothing(kgorch, tmp_path):
    kgorch.extra_env["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    told = kgorch("systemd", "install", "--user", "--now", "--dry-run").stdout
    assert told.count(": would be written") == 2 and "systemctl --user restart kgorch.service" in told
    assert "nothing was changed" in told and not (tmp_path / "config").exists()
    kgorch("systemd", "install", "--user", "--into", str(tmp_path / "units"))
    told = kgorch("systemd", "install", "--user", "--into", str(tmp_path / "units"), "--dry-run").stdout
    assert told.count(": unchanged") == 2 and "systemctl" not in told


def test_uninstalling_takes_away_what_was_written_and_nothing_else(kgorch, tmp_path):
    folder = tmp_path / "units"
    kgorch("systemd", "install", "--user", "--into", str(folder))
    (folder / "other.service").write_text("[Service]\n")
    assert kgorch("systemd", "uninstall", "--into", str(folder)).stdout.count(": removed") == 2
    assert [path.name for path in folder.iterdir()] == ["other.service"]
    assert kgorch("systemd", "uninstall", "--into", str(folder)).stdout.count(": absent") == 2


@pytest.mark.parametrize("verb", ["install", "uninstall"])
@pytest.mark.parametrize("link", [False, True])
def test_a_unit_that_somebody_else_wrote_is_refused_and_nothing_is_changed(kgorch, tmp_path, verb, link):
    folder = tmp_path / "units"
    folder.mkdir()
    theirs = folder / "kgorch@.service"
    if link:  # systemctl mask
        theirs.symlink_to("/dev/null")
    else:
        theirs.write_text("[Service]\nExecStart=/bin/true\n")
    refused = kgorch("systemd", verb, "--into", str(folder), code=2)
    assert "was not written by kgorch" in refused.stderr and "next:" in refused.stderr
    assert list(folder.iterdir()) == [theirs]


def test_a_folder_that_cannot_be_written_and_a_home_that_no_unit_can_name_are_told_as_such(kgorch, tmp_path):
    (tmp_path / "file").write_text("")
    told = kgorch("systemd", "install", "--user", "--into", str(tmp_path / "file" / "units"), code=2).stderr
    assert "cannot be written" in told
    told = kgorch("systemd", "print", "--user", "--home", "/srv/two\nlines", code=2).stderr
    assert "line break" in told and "next:" in told
    told = kgorch("systemd", "install", "--user", "--into", str(tmp_path), "--home", "/srv/\udcff", code=2).stderr
    assert "not UTF-8" in told and "Traceback" not in told


def test_a_system_unit_that_another_installs_works_in_the_folder_of_whom_it_runs_as(kgorch):
    kgorch.extra_env |= {"KGORCH_HOME": "", "SUDO_USER": "daemon"}
    printed = kgorch("systemd", "print", "--system").stdout
    folder = Path(pwd.getpwnam("daemon").pw_dir, ".local", "state", "kgorch")
    assert "\nUser=daemon\n" in printed and f'"KGORCH_HOME={folder}"' in printed


def test_a_unit_is_utf_8_whatever_the_locale(kgorch, tmp_path):
    kgorch.extra_env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    kgorch("systemd", "install", "--user", "--into", str(tmp_path), "--home", "/srv/müller")
    assert "KGORCH_HOME=/srv/müller" in (tmp_path / "kgorch.service").read_bytes().decode("utf-8")
