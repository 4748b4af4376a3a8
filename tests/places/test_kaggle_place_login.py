"""Credentials: which ones the client is given, and that they appear nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places.conftest import script_of
from places.kaggle_server import Fault

from kgorch.core.remote.place_values import PlaceError, Trouble
from kgorch.remote.places.kaggle.client import environment
from kgorch.remote.places.kaggle.place import KagglePlace

ROOT = Path(__file__).parents[2]


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


@pytest.mark.parametrize("means", ["path", "value", "key"])
def test_a_credential_is_in_no_command_line_no_file_and_no_result(server, order, tmp_path, means):
    environ = server.environment(tmp_path / "home", login="key" if means == "key" else "token")
    if means == "value":
        environ["KAGGLE_API_TOKEN"] = server.token
    secret = server.key if means == "key" else server.token
    with KagglePlace(tmp_path / "place", environ) as place:
        results = [place.account(), place.quota(), place.find_push(order)]
        place.push(order, script_of(order, "import os; open('environment', 'w').write(repr(dict(os.environ)))"))
        assert secret not in command_lines()
        server.wait_for(order.name)
        results += place.collect(order.name, tmp_path / "place" / "out", ("*",))
        echo = {"code": 400, "message": f"the credential {secret} is not for this"}
        server.order("GetKernelSessionStatus", Fault("body", body=echo))
        with pytest.raises(PlaceError) as error:
            place.look(order.name)
        assert "is not for this" in error.value.message and secret not in error.value.message
    assert secret not in repr(results)
    for path in (tmp_path / "place").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_the_client_is_given_no_other_variable_of_kaggle_and_none_that_makes_it_print(server, tmp_path):
    environ = server.environment(tmp_path / "home") | {
        "KAGGLE_API_ENVIRONMENT": "LOCALHOST", "KAGGLE_PROXY": "http://127.0.0.1:1", "KAGGLE_KERNEL_RUN_TYPE": "Batch",
        "VERBOSE": "true", "AWS_SECRET_ACCESS_KEY": "none of Kaggle's", "KAGGLE_CONFIG_DIR": str(tmp_path / "config"),
    }  # fmt: skip
    chosen = environment(environ, tmp_path)
    assert {name for name in chosen if name.startswith("KAGGLE_")} == {"KAGGLE_API_TOKEN", "KAGGLE_CONFIG_DIR"}
    assert not {"VERBOSE", "AWS_SECRET_ACCESS_KEY"} & set(chosen)
    with KagglePlace(tmp_path / "place", environ) as place:
        assert place.account().means == "token"


def test_paths_of_credentials_hold_in_the_clients_own_folder(server, tmp_path, monkeypatch):
    environ = server.environment(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    environ["KAGGLE_API_TOKEN"] = "home/token"
    with KagglePlace(tmp_path / "place", environ) as place:
        assert place.account().name == server.username


def test_without_credentials_it_is_the_login(server, tmp_path):
    with KagglePlace(tmp_path / "place", server.environment(tmp_path / "home", login="")) as place:
        with pytest.raises(PlaceError, match="no valid credentials") as login:
            place.quota()
        assert login.value.trouble is Trouble.LOGIN
        (tmp_path / "home" / ".kaggle" / "access_token").write_text(server.token)
        assert place.account().means == "token", "a login is noticed at the next call"


def test_a_token_that_is_not_active_is_not_passed_over_for_another_account(server, tmp_path):
    environ = server.environment(tmp_path / "home", login="key")
    token = tmp_path / "token"
    token.write_text("KGAT_expired")
    environ |= {"KAGGLE_API_TOKEN": str(token)}
    before = len(server.asked("GetAcceleratorQuotaStatistics"))
    with KagglePlace(tmp_path / "place", environ) as place, pytest.raises(PlaceError, match="does not accept") as login:
        place.quota()
    assert login.value.trouble is Trouble.LOGIN and len(server.asked("GetAcceleratorQuotaStatistics")) == before


def test_a_folder_named_kaggle_where_one_works_is_not_imported(server, tmp_path, monkeypatch):
    (tmp_path / "kaggle").mkdir()
    (tmp_path / "kaggle" / "__init__.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    with KagglePlace(tmp_path / "place", server.environment(tmp_path / "home")) as place:
        assert place.account().name == server.username


def test_a_login_that_was_revoked_ends_the_process_so_that_a_new_one_counts(server, tmp_path):
    with KagglePlace(tmp_path / "place", server.environment(tmp_path / "home")) as place:
        place.account()
        server.order("GetAcceleratorQuotaStatistics", Fault("status", 401))
        with pytest.raises(PlaceError) as login:
            place.quota()
        assert login.value.trouble is Trouble.LOGIN
        checks = len(server.asked("IntrospectToken"))
        assert place.quota() is not None and len(server.asked("IntrospectToken")) == checks + 1


@pytest.mark.parametrize("name", ["kaggle", "six"])
def test_a_client_that_is_not_installed_is_named_with_what_to_install(tmp_path, name):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")")
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": ":".join([str(tmp_path / "hidden"), *sys.path]),
    }
    with KagglePlace(tmp_path / "place", environ) as place, pytest.raises(PlaceError) as missing:
        place.account()
    assert missing.value.trouble is Trouble.NO_CLIENT
    assert (
        f"No module named '{name}'" in missing.value.message and "pip install 'kgorch[kaggle]'" in missing.value.message
    )


def test_the_place_itself_never_loads_the_client():
    program = "import json, sys, kgorch.remote.places.kaggle.place; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"kaggle", "kagglesdk", "requests", "torch", "pydantic"} & {
        name.partition(".")[0] for name in json.loads(done.stdout)
    }
