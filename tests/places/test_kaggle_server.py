"""The stand-in for Kaggle's server: as strict as Kaggle is reported to be, and executing what is pushed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from places.conftest import script_of
from places.kaggle_server import sandbox

from kgorch.core.remote.place_values import PlaceError, Trouble

ROOT = Path(__file__).parents[2]

needs_namespaces = pytest.mark.skipif(not sandbox.has_namespaces(), reason="needs root and namespaces")

LOOKS_AROUND = """
import errno, json, os, socket
from pathlib import Path
facts = {"cwd": os.getcwd(), "inputs": sorted(str(path) for path in Path("/kaggle/input").glob("*/*/*")), "parent": os.getppid()}
try:
    Path("/kaggle/input/new").touch()
except OSError as error:
    facts["write"] = errno.errorcode[error.errno]
facts["checkout"] = os.path.exists(CHECKOUT)
facts["tmp"] = os.listdir("/tmp")
facts["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
    facts["loopback"] = True
facts["interfaces"] = [name for _, name in socket.if_nameindex() if name != "lo"]
facts["variables"] = {name: value for name, value in os.environ.items() if name.startswith(("KAGGLE", "KGORCH"))}
Path("facts.json").write_text(json.dumps(facts))
"""


@needs_namespaces
def test_a_session_sees_what_a_session_at_kaggle_sees(place, server, pushed, bundle, tmp_path):
    order = pushed(LOOKS_AROUND.replace("CHECKOUT", repr(str(ROOT / "pyproject.toml"))))
    [file] = place.collect(order.name, tmp_path, ("facts.json",))
    facts = json.loads(file.read_text())
    assert facts["cwd"] == "/kaggle/working" and facts["inputs"] == [f"/kaggle/input/datasets/{bundle}"]
    assert facts["write"] == "EROFS" and facts["loopback"] and not facts["interfaces"]
    assert not facts["checkout"] and facts["tmp"] == [] and facts["parent"] == 1 and facts["processes"] == 2
    assert facts["variables"] == {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "KAGGLE_URL_BASE": "https://www.kaggle.com"}


def test_a_session_without_namespaces_is_told_of_its_folders(place, server, pushed, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "has_namespaces", lambda: False)
    body = """
import os
from pathlib import Path
inputs = Path(os.environ["KGORCH_REMOTE_INPUT"])
print([str(path.relative_to(inputs)) for path in inputs.glob("*/*/*")])
Path(os.environ["KGORCH_REMOTE_OUTPUT"], "kgorch.db").write_text("rows")
"""
    order = pushed(body)
    assert list(place.log(order.name)) == [f"['datasets/{bundle}']"]
    assert [file.name for file in place.collect(order.name, tmp_path)] == ["kgorch.db"]


@needs_namespaces
@pytest.mark.parametrize("older", [False, True])
def test_the_next_session_reads_what_the_one_before_has_kept(place, server, pushed, monkeypatch, older):
    monkeypatch.setattr(server.rules, "older_mounts", older)
    first = pushed(
        "import os; open('state', 'w').write('step 7'); os.symlink('/etc/passwd', 'link'); os.mkfifo('pipe')"
    )
    second = pushed(
        "import glob; [print(path, open(path).read()) for path in glob.glob('/kaggle/input/**/state', recursive=True)]"
        "\nimport os; print(os.path.lexists('link'))",
        name=first.name[:-3] + "002",
        source=first.name,
    )
    mount = first.name if older else f"notebooks/{server.username}/{first.name}"
    assert list(place.log(second.name)) == [f"/kaggle/input/{mount}/state step 7", "False"]
    assert sorted(path.name for path in server.session(first.name).output.iterdir()) == ["state"]


@pytest.mark.parametrize("end", ["raise SystemExit(1)", "cancelled", "running"])
def test_only_the_output_of_a_complete_session_can_be_attached(place, server, order, end):
    first = replace(order, name=order.name[:-3] + "100")
    place.push(first, script_of(first, end if "(" in end else "import time; time.sleep(60)"))
    if end == "cancelled":
        server.cancel(first.name)
    if end != "running":
        server.wait_for(first.name)
    second = replace(order, source=first.name)
    with pytest.raises(PlaceError) as error:
        place.push(second, script_of(second))
    assert error.value.trouble is Trouble.UNATTACHED
    server.cancel(first.name)


def test_a_kernel_is_no_source_of_itself(server, order):
    body = {
        "slug": f"ada/{order.name}",
        "newTitle": order.name,
        "text": "print()",
        "kernelDataSources": [f"ada/{order.name}"],
    }
    server.kernels.save(body)
    server.wait_for(order.name)
    assert server.kernels.save(body)["invalidKernelSources"] == [f"ada/{order.name}"]


def test_the_output_of_an_error_can_be_fetched_or_not(place, server, pushed, tmp_path, monkeypatch):
    body = "open('kgorch.db', 'w').write('x'); raise SystemExit(1)"
    assert place.collect(pushed(body).name, tmp_path)
    monkeypatch.setattr(server.rules, "keeps_error_output", False)
    with pytest.raises(PlaceError) as absent:
        place.collect(pushed(body).name, tmp_path)
    assert absent.value.trouble is Trouble.ABSENT


def test_a_title_of_another_slug_makes_another_kernel(server):
    answer = server.kernels.save({"slug": "ada/kgorch-title-001", "newTitle": "Another title", "text": "print()"})
    assert answer["url"].endswith("/another-title") and "kgorch-title-001" not in server.kernels.kernels


def test_hours_of_a_session_are_charged_with_its_factor(place, server, order):
    gpu = replace(order, accelerator="NvidiaTeslaT4")
    place.push(gpu, script_of(gpu))
    elapsed_s = server.wait_for(gpu.name).elapsed_s
    assert elapsed_s > 0 and place.quota().used_s >= 2 * elapsed_s - 0.001


def test_archives_of_a_data_set_are_unpacked_and_wheels_by_a_rule(place, server, tmp_path, monkeypatch):
    for name in ("code.zip", "kgorch.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("inner/train.py", "pass")
    assert place.is_bundle_ready(place.store_bundle(tmp_path, "kgorch-zips-0001"))
    assert set(server.datasets.datasets["kgorch-zips-0001"].files) == {"code/inner/train.py", "kgorch.whl"}
    monkeypatch.setattr(server.rules, "unpacks_wheels", True)
    assert place.is_bundle_ready(place.store_bundle(tmp_path, "kgorch-zips-0002"))
    assert "kgorch/inner/train.py" in server.datasets.datasets["kgorch-zips-0002"].files


def test_by_hand_it_prints_what_leads_the_clients_own_command_to_it(tmp_path):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "places.kaggle_server", str(tmp_path / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as server:
        exports = dict(server.stdout.readline().removeprefix("export ").strip().split("=", 1) for _ in range(3))
        quota = [
            sys.executable,
            "-c",
            "import sys; from kaggle.cli import main; sys.argv = ['kaggle', 'quota']; main()",
        ]
        done = subprocess.run(quota, capture_output=True, text=True, env=environ | exports)
        server.terminate()
    assert done.returncode == 0 and "GPU" in done.stdout, done.stderr
