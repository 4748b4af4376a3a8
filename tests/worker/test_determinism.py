"""The plan's `deterministic`: what each level asks of PyTorch, and that the report tells what held."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from kgorch.checkpoint.folder import read_checkpoint
from kgorch.errors import KgorchError
from kgorch.launch import shim
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.determinism import Determinism


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    places = [(torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")]
    places += [(torch.backends.cuda.matmul, "allow_tf32"), (torch.utils.deterministic, "fill_uninitialized_memory")]
    kept = [(place, name, getattr(place, name)) for place, name in places]
    yield
    torch.use_deterministic_algorithms(False)
    for place, name, value in kept:
        setattr(place, name, value)


def put() -> None:
    """An operation that has no deterministic way, on the CPU too."""
    torch.zeros(3).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def test_off_leaves_pytorch_as_it_is():
    found = Determinism("off")
    put()
    assert not torch.are_deterministic_algorithms_enabled() and found.verdict == "not asked for"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("level", ["warn", "strict"])
def test_a_level_takes_the_deterministic_way(level):
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True
    Determinism(level)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() == (level == "warn")
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_strict_raises_at_what_has_no_deterministic_way():
    found = Determinism("strict")
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        put()
    assert found.verdict == "held"


def test_warn_names_the_operations_that_did_not_hold():
    found = Determinism("warn")
    found.probe()
    torch.ones(3).sum()
    assert found.verdict == "held"
    put(), put()
    pooled, where = torch.nn.functional.max_pool2d(torch.rand(1, 1, 4, 4), 2, return_indices=True)
    torch.nn.functional.max_unpool2d(pooled, where, 2)
    assert found.verdict == "did not hold: max_unpooling2d_forward_out, put_"


@pytest.mark.parametrize(
    ("said", "op"),
    [
        ("Flash Attention defaults to a non-deterministic algorithm. To explicitly enable …", "Flash Attention"),
        (
            "Deterministic behavior was enabled …, but this operation is not deterministic because it uses CuBLAS …",
            "CuBLAS",
        ),
        ("index_add_cuda_ does not have a deterministic implementation, but you set …", "index_add_cuda_"),
    ],
)
def test_the_warnings_that_only_a_gpu_gives_are_known(said, op):
    found = Determinism("warn")
    warnings.warn(said, UserWarning)
    assert found.verdict == f"did not hold: {op}"


def test_warnings_that_were_silenced_before_are_heard():
    warnings.simplefilter("ignore")
    found = Determinism("warn")
    put()
    assert found.verdict == "did not hold: put_"


def test_silenced_warnings_are_no_proof():
    found = Determinism("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.probe()
        put()
    assert found.verdict.startswith("not known")
    found.probe()
    assert found.verdict == "held", "heard again, and nothing has been heard of"


def test_a_level_that_is_none_is_refused():
    with pytest.raises(KgorchError, match=r"expected one of off, warn, strict.*strict"):
        Determinism("strct")


def test_the_ranks_have_cublas_set_before_cuda_starts_and_a_persons_own_value_stays(tmp_path, monkeypatch):
    def environment(level):
        launch = LaunchSpec(
            "r", "id", "s", "1.1", str(tmp_path), "e:f", ".", 1, "s", "c", "o", "h", deterministic=level
        )
        return shim.environment(launch, tmp_path, 3).get("CUBLAS_WORKSPACE_CONFIG")

    assert environment("off") is None and environment("warn") == environment("strict") == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert environment("warn") == ":16:8"


@pytest.mark.slow
def test_status_and_checkpoints_tell_what_held(kgorch):
    plan = str(kgorch.plan("puts.py", ranks=1, every="600s"))
    kgorch("start", plan, "--set", "deterministic=warn")
    assert kgorch.status()["exactness"] == {"data": "keyed", "deterministic": "did not hold: put_"}
    assert "exactness   data: keyed. deterministic: did not hold: put_" in kgorch("status").stdout
    assert read_checkpoint(kgorch.checkpoints()[-1]).versions["deterministic"] == "warn"
    failed = kgorch("start", plan, "--fresh", "--set", "deterministic=strict", code=20)
    assert "put_ does not have a deterministic implementation" in failed.stderr
