"""Platforms by environment and firmware, and what a person says of them: plan over configuration over profile."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kgorch.db import location
from kgorch.errors import ConfigError, PlanError
from kgorch.limits.fixed_walls import began_s
from kgorch.plan import Plan, parse, user_config
from kgorch.platforms.azure import ASSET_TAG
from kgorch.platforms.detect import BY_NAME, PLATFORMS, detect
from kgorch.platforms.profile import Profile
from kgorch.system.clock import boottime_s

PLAN = 'name = "x"\n[[stage]]\nname = "train"\nentry = "train.py"\n'


def _machine(root: Path, **firmware: str) -> Path:
    folder = root / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in firmware.items():
        (folder / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("environ", "firmware", "name"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {"product_name": "Google Compute Engine"}, "kaggle"),
        ({"COLAB_RELEASE_TAG": "release"}, {"product_name": "Google Compute Engine"}, "colab"),
        ({"LIGHTNING_CLOUD_SPACE_ID": "1"}, {"sys_vendor": "Amazon EC2"}, "lightning"),
        ({"PAPERSPACE_NOTEBOOK_ID": "1"}, {}, "paperspace"),
        ({"SLURM_JOB_ID": "7"}, {"sys_vendor": "Amazon EC2"}, "slurm"),
        ({}, {"sys_vendor": "Amazon EC2"}, "aws"),
        ({}, {"board_vendor": "Amazon EC2"}, "aws"),
        ({}, {"product_name": "Google Compute Engine"}, "gcp"),
        ({}, {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": ASSET_TAG}, "azure"),
        ({}, {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, "generic"),
        ({}, {"sys_vendor": "QEMU"}, "generic"),
        ({}, {}, "generic"),
    ],
)
def test_a_platform_is_told_by_its_environment_first_and_by_the_machines_firmware_then(
    environ, firmware, name, tmp_path
):
    assert detect(environ, _machine(tmp_path, **firmware)).name == name


def test_studio_lab_is_told_by_its_home_folder_and_firmware_that_cannot_be_read_by_nothing(tmp_path):
    (tmp_path / "sys/class/dmi/id/sys_vendor").mkdir(parents=True)
    assert detect({}, tmp_path).name == "generic"
    (tmp_path / "home/studio-lab-user").mkdir(parents=True)
    assert detect({}, tmp_path).name == "studiolab"


def test_home_folders_that_may_not_be_looked_into_are_no_platform(tmp_path, monkeypatch):
    look = os.stat

    def refuse(path, *args, **options):
        if "studio-lab-user" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert detect({}, tmp_path).name == "generic"


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.PROFILE.name)
def test_every_platform_has_the_same_shape_and_tells_the_source_of_its_figures_with_a_date(platform):
    profile = platform.PROFILE
    assert isinstance(profile, Profile) and platform.__name__.endswith("." + profile.name)
    assert re.search(r"20\d\d-\d\d", profile.sources_of_figures)
    assert (profile.quota_hours is None) == (profile.quota_resets is None)
    assert (profile.metadata is not None) == (profile.notice in ("aws", "gcp", "azure"))


def test_kaggle_promises_nine_hours_from_its_containers_start_and_thirty_a_week():
    kaggle = BY_NAME["kaggle"]
    assert (kaggle.wall_s, kaggle.began, kaggle.disk_bytes) == (9 * 3600, "container", 20 * 10**9)
    assert (kaggle.quota_hours, kaggle.quota_resets, kaggle.factor) == (30, "Sat 00:00 UTC", 2.0)
    assert kaggle.sources == ("/kaggle/input/**",) and kaggle.home == Path("/kaggle/working/kgorch")


def test_a_session_began_with_the_container_the_boot_or_us():
    assert began_s("boot") == 0.0
    assert 0.0 <= began_s("container") <= began_s("start") <= boottime_s()


def test_a_jobs_start_is_what_slurm_told_it(monkeypatch):
    import time

    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(time.time()) - 100))
    assert boottime_s() - began_s("job") == pytest.approx(100, abs=5)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "soon")
    monkeypatch.setenv("PATH", "")
    assert began_s("job") == began_s("start"), "where nobody tells, it is our own start"


def test_an_unknown_platform_is_answered_with_its_line_and_the_nearest_known_one():
    with pytest.raises(PlanError) as caught:
        parse(PLAN + '[platform]\nname = "kagle"\n', "plan.toml")
    assert "plan.toml:6: platform.name: unknown platform (did you mean 'kaggle'?)" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('began = "dawn"', '"container", "job", "boot" or "start"'),
        ('metadata = "file:///etc"', "platform.metadata"),
        ('wall = "0s"', "above 0"),
        ('wal = "9h"', "did you mean 'wall'?"),
    ],
)
def test_what_a_platform_cannot_be_is_refused_by_key(line, said):
    with pytest.raises(PlanError) as caught:
        parse(PLAN + f"[platform]\n{line}\n", "plan.toml")
    assert "plan.toml:6: platform." in str(caught.value) and said in str(caught.value)


def _config(tmp_path: Path, text: str) -> user_config.UserConfig:
    path = tmp_path / "kgorch" / "config.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return user_config.load({"XDG_CONFIG_HOME": str(tmp_path)})


def _plan(text: str = "") -> Plan:
    return parse(PLAN + text, "plan.toml")


def test_key_by_key_the_plan_wins_over_the_configuration_and_that_over_the_profile(tmp_path):
    mine = _config(tmp_path, '[platform]\nwall = "11h"\nbegan = "boot"\n[quota]\nhours = 45\nresets = "never"\n')
    plan = user_config.apply_to_plan(_plan('[platform]\nname = "kaggle"\nwall = "12h"\n[quota]\nhours = 20\n'), mine)
    assert (plan.quota.hours, plan.quota.resets) == (20, "never")
    profile = user_config.resolve_platform(plan.platform, BY_NAME["generic"])
    assert (profile.name, profile.wall_s, profile.began) == ("kaggle", 12 * 3600, "boot")
    assert profile.sources == ("/kaggle/input/**",), "what nobody says otherwise is the profile's"


def test_a_value_that_the_plan_gives_wins_also_when_it_is_the_usual_one(tmp_path):
    mine = _config(tmp_path, '[notify]\non = ["saved"]\ncommand = ["tell"]\n')
    usual = Plan.model_fields["notify"].default.on
    said = '", "'.join(usual)
    assert user_config.apply_to_plan(_plan(), mine).notify.on == ["saved"]
    assert user_config.apply_to_plan(_plan(f'[notify]\non = ["{said}"]\n'), mine).notify.on == usual
    assert user_config.apply_to_plan(_plan(), mine).notify.command == ["tell"]


def test_a_configuration_changes_neither_the_plans_hash_nor_what_the_plan_says(tmp_path):
    plan = _plan()
    with_config = user_config.apply_to_plan(plan, _config(tmp_path, "[quota]\nhours = 1\n"))
    assert with_config.hash == plan.hash and plan.quota.hours is None


FLEET = "postgresql://db/kgorch"


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('lease = "1d"', ""),
        ('lease = "1m 30s"', ""),
        ("lease = 90", ""),
        ('lease = "90"', "expected a duration"),
        ('lease = "0.5s"', "expected a number of at least 1"),
        ('machine = "../a"', "expected 1 to 64 letters, digits"),
        ('database = "mysql://me:s3cr3t@x/y"', "expected postgresql+psycopg://USER@HOST/NAME"),
    ],
)
def test_both_readers_of_the_table_fleet_take_and_refuse_the_same(tmp_path, table, told):
    """The database is opened without pydantic, by a reader of its own (db/location.py): what it refuses, no verb gets beyond."""
    database = "" if "database" in table else f'database = "{FLEET}"\n'
    text = f"\ufeff[fleet]\n{database}{table}\n"
    if not told:
        assert _config(tmp_path, text).fleet.lease == location.fleet({"XDG_CONFIG_HOME": str(tmp_path)}).lease_s
        return
    with pytest.raises(ConfigError) as caught:
        _config(tmp_path, text)
    assert told in str(caught.value) and "s3cr3t" not in str(caught.value)
    with pytest.raises(ConfigError):
        location.fleet({"XDG_CONFIG_HOME": str(tmp_path)})


def test_without_a_file_nothing_is_said_and_a_named_one_must_be_there(tmp_path):
    assert (
        user_config.load({"XDG_CONFIG_HOME": str(tmp_path)})
        == user_config.load({"HOME": str(tmp_path)})
        == user_config.UserConfig()
    )
    with pytest.raises(ConfigError, match=r"there is no .*mine\.toml"):
        user_config.load({"KGORCH_CONFIG": str(tmp_path / "mine.toml")})
    (tmp_path / "mine.toml").write_text("[quota]\nhours = 3\n")
    assert user_config.load({"KGORCH_CONFIG": str(tmp_path / "mine.toml")}).quota.hours == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[quota]\nhors = 3\n", "config.toml:2: quota.hors: unknown key (did you mean 'hours'?)"),
        ("[quota]\n\nhours = 0\n", "config.toml:3: quota.hours: expected a number above 0; found 0"),
        ('[platfrm]\nname = "kaggle"\n', "config.toml:1: platfrm: unknown key (did you mean 'platform'?)"),
        ('[platform]\nname = "kagle"\n', "config.toml:2: platform.name: unknown platform"),
        ('name = "x"\n', "config.toml:1: name: unknown key"),
        ("[quota\n", "is not TOML"),
    ],
)
def test_a_bad_configuration_names_file_line_and_key(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        _config(tmp_path, text)
    assert said in str(caught.value)


def test_a_configuration_that_cannot_be_read_is_a_mistake_and_no_bug(tmp_path):
    (tmp_path / "kgorch" / "config.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is a folder|is UTF-16"):
        user_config.load({"XDG_CONFIG_HOME": str(tmp_path)})
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"is a folder|is UTF-16"):
        user_config.load({"KGORCH_CONFIG": str(tmp_path / "latin.toml")})


def test_a_metadata_server_where_there_are_no_notices_is_refused_and_each_field_is_overridden():
    part = _plan('[platform]\nname = "gcp"\nmetadata = "http://127.0.0.1:1"\n').platform
    assert user_config.resolve_platform(part, BY_NAME["generic"]).metadata == "http://127.0.0.1:1"
    with pytest.raises(PlanError, match="has no spot notices"):
        user_config.resolve_platform(_plan('[platform]\nmetadata = "http://127.0.0.1:1"\n').platform, BY_NAME["kaggle"])
    untouched = user_config.resolve_platform(_plan().platform, BY_NAME["kaggle"])
    assert all(getattr(untouched, item.name) == getattr(BY_NAME["kaggle"], item.name) for item in fields(Profile))
