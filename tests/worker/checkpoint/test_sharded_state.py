"""DTensors in a checkpoint: each rank saves its pieces and loads what it needs, on any mesh, without communication.

The fast tests play one rank after another in this process: PyTorch's "fake" process group knows rank and world size and has no
peers, so whatever communicated would come back wrong. The slow ones train on real gloo ranks.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from saving import Place, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kgorch.checkpoint.export import export_safetensors
from kgorch.checkpoint.folder import read_checkpoint, read_json_file
from kgorch.checkpoint.sharding import Region
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker.checkpoint import restore_source, sharded_tensors, state_codec
from kgorch.worker.checkpoint.sharded_tensors import Layout
from kgorch.worker.checkpoint.snapshot_buffer import share
from kgorch.worker.health import loss_guard
from kgorch.worker.memory.microbatch import MicrobatchRunner
from kgorch.worker.ranks import data_ranks
from kgorch.worker.ranks.virtual_ranks import RankDivision, ranks_of

CPU = torch.device("cpu")
R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESHES = {
    "four": ((4,), [S0]), "two": ((2,), [S1]), "five": ((5,), [S0]), "columns": ((3,), [S1]), "replicas": ((2, 2), [R, S0]),
    "both": ((2, 2), [S0, S1]), "twice": ((2, 3), [S0, S0]), "copies": ((3,), [R]), "cube": ((2, 1, 2), [S1, R, S0]),
}  # fmt: skip
TENSORS = {
    "rows": torch.arange(30.0).view(10, 3), "odd": torch.arange(35.0, dtype=torch.float64).view(7, 5),
    "few": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3), "none": torch.zeros(0, 4), "mask": torch.arange(9).view(3, 3) > 4,
}  # fmt: skip


@contextmanager
def playing(rank: int, world_size: int):
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sharded_tensors._region.cache_clear()
        sharded_tensors._has_rank_0.cache_clear()


def spread(name: str) -> dict[str, torch.Tensor]:
    """All tensors as this rank has them on that mesh."""
    shape, placements = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    return {
        path: sharded_tensors.placed(
            Layout(mesh, tuple(placements), tuple(tensor.shape), CPU), lambda region, full=tensor: full[region.slices].clone()
        )
        for path, tensor in TENSORS.items()
    }  # fmt: skip


def saved(folder: Path, name: str) -> Path:
    """What all ranks of that mesh save."""
    world_size = math.prod(MESHES[name][0])
    contents: dict = {"state.json": {"model": {path: {"$tensor": path} for path in TENSORS}}}
    for rank in range(world_size):
        with playing(rank, world_size):
            tensors = spread(name)
            mine = share(tensors, set(), rank, world_size)
            entry = sharded_tensors.rank_entry(tensors)
            contents[f"rank{rank}.json"] = {"rng": {}, "own": {}, "tensors": sorted(mine), **entry}
            contents[f"rank{rank}.safetensors"] = sharded.shard_of_tensors(mine)
            if rank == 0:
                contents["sharding.json"] = sharded_tensors.document_of(tensors)
    return sharded.write(folder, contents)


@pytest.mark.parametrize("name", MESHES)
def test_the_ranks_of_any_mesh_save_each_element_once_and_any_other_mesh_loads_its_part(tmp_path, name):
    folder = saved(tmp_path / name, name)
    assert export_safetensors(folder, tmp_path / "whole.safetensors", None) == len(TENSORS)
    whole = load_file(tmp_path / "whole.safetensors")
    assert all(torch.equal(whole[path], tensor) for path, tensor in TENSORS.items())
    manifest = verify_checkpoint(folder)
    for other in ("two", "five", "both") if name != "five" else MESHES:
        world_size = math.prod(MESHES[other][0])
        for rank in range(world_size):
            with playing(rank, world_size):
                expected = spread(other)
                layouts = {path: sharded_tensors.layout_of(tensor) for path, tensor in expected.items()}
                fetch = sharded_tensors.fetch_for(layouts, restore_source.ShardReader(folder, manifest, rank))
                for path, tensor in expected.items():
                    found = fetch(path)
                    assert isinstance(found, DTensor) and found.placements == tensor.placements
                    assert found.shape == tensor.shape and found.stride() == tensor.stride()
                    assert found.dtype == tensor.dtype and torch.equal(found.to_local(), tensor.to_local()), path


def test_replicas_take_turns_and_no_rank_saves_an_empty_piece():
    sizes = []
    for rank in range(4):
        with playing(rank, 4):
            pieces = sharded_tensors.pieces_to_save(spread("replicas"))
            assert all(math.prod(region.shape) for region in pieces.values())
            sizes.append(len(pieces))
    assert all(sizes), "each rank saves something"


def test_a_mesh_that_is_a_part_of_another_one_is_saved_by_the_ranks_beside_rank_0_alone():
    """`mesh["tp"]`: the ranks of the other rows hold the same, which their DTensors do not know."""
    writers = []
    for rank in range(4):
        with playing(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
            layout = Layout(mesh, (S0,), (6, 2), CPU)
            tensor = sharded_tensors.placed(layout, lambda region: torch.zeros(region.shape))
            writers.append(sharded_tensors.pieces_to_save({"w": tensor}).get("w"))
    assert writers == [Region((0, 0), (3, 2)), Region((3, 0), (3, 2)), None, None]


def test_the_elements_read_for_a_piece_are_those_of_the_piece(tmp_path):
    """Four ranks saved rows; the third of five ranks needs columns of some."""
    folder = saved(tmp_path, "four")
    reader = restore_source.ShardReader(folder, read_checkpoint(folder), 0)
    read = []
    inner = reader._read
    reader._read = lambda file, path, region: read.append((file, region)) or inner(file, path, region)
    found = reader.fetch_region("rows", Region((4, 1), (4, 2)))
    assert torch.equal(found, TENSORS["rows"][4:8, 1:3])
    assert read == [("rank1.safetensors", Region((1, 1), (2, 2))), ("rank2.safetensors", Region((0, 1), (2, 2)))]


# One rank, for real


@pytest.fixture
def alone():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
    sharded_tensors._region.cache_clear()
    sharded_tensors._has_rank_0.cache_clear()


def tracked(mesh) -> dict:
    """Two weights of one shape, a tied one, a plain one, and an AdamW that has stepped."""
    torch.manual_seed(1)
    module = nn.Module()
    for name in ("one", "two", "plain"):
        weight = torch.randn(3, 3)
        setattr(
            module,
            name,
            nn.Parameter(weight if name == "plain" or mesh is None else distribute_tensor(weight, mesh, [S0])),
        )
    module.tied = module.two
    module.register_buffer("table", torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for weight in module.parameters():
        weight.grad = weight.detach().clone()
    optimizer.step()
    return {"model": module, "optimizer": optimizer}


def values(things: dict) -> dict[str, torch.Tensor]:
    captured = state_codec.capture(things)
    return {
        path: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for path, tensor in captured.tensors.items()
    }


def test_weights_of_one_shape_are_not_taken_for_tied_ones_and_tied_ones_are(alone):
    captured = state_codec.capture(tracked(alone))
    assert {path for path in captured.tensors if path.startswith("model.")} == {
        "model.one", "model.two", "model.plain", "model.table",
    }  # fmt: skip
    assert captured.tree["model"]["tied"] == {"$tensor": "model.two"}


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_state_goes_to_disk_and_to_memory_and_back_sharded_or_not(alone, tmp_path, before, after):
    place = Place(tmp_path)
    place.start_keeper()
    things, saver = tracked(alone if before else None), place.saver()
    expected = values(things)
    assert save(saver, things, 3) and saver.wait()
    folder = place.root / "step-00000003"
    from_memory = restore_source.SnapshotSource(*place.saver(attempt="2.1").fetch())
    place.kill_keeper()
    assert verify_checkpoint(folder).sharded is before
    for source in (restore_source.FolderSource(folder), from_memory):
        torch.manual_seed(9)
        others = tracked(alone if after else None)
        tree = source.tree | source.own(0)["own"]
        with torch.no_grad():
            for weight in others["model"].parameters():
                weight.zero_()
        state_codec.restore(others, tree, state_codec.fetch_for(others, tree, source.reader(0)))
        found = values(others)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], tensor) for path, tensor in expected.items())
        moments = others["optimizer"].state[others["model"].one]
        assert isinstance(moments["exp_avg"], DTensor) is after
        others["optimizer"].step()


def test_a_failed_step_is_undone_also_where_tensors_are_sharded(alone):
    things = tracked(alone)
    expected, before = values(things), state_codec.capture(things)
    copies = {path: tensor.to("cpu", copy=True) for path, tensor in before.tensors.items()}
    things["optimizer"].step()
    assert not torch.equal(values(things)["model.one"], expected["model.one"])
    state_codec.put_back(things, before, copies)
    assert all(torch.equal(values(things)[path], tensor) for path, tensor in expected.items())


def test_a_sum_that_is_still_to_be_made_is_refused_by_name(alone):
    tensor = DTensor.from_local(torch.ones(2), alone, [Partial()])
    with pytest.raises(CannotRestore, match=r"model\.w is a DTensor with a Partial placement"):
        sharded_tensors.pieces_to_save({"model.w": tensor})


def test_pieces_that_a_rank_has_not_saved_fail_the_save_and_leave_nothing(alone, tmp_path, monkeypatch):
    """As where the ranks track other tensors: a checkpoint of it could not be restored."""
    place = Place(tmp_path)
    place.start_keeper()
    monkeypatch.setattr(sharded_tensors, "rank_entry", lambda tensors: {"pieces": {}})
    saver = place.saver()
    assert save(saver, tracked(alone), 3) and not saver.wait()
    place.kill_keeper()
    assert "the ranks' pieces do not fit together: the tensor 'model.one': it has no piece" in saver.error
    assert not list(place.root.glob("step-*"))


def test_a_rank_looks_for_values_that_are_not_finite_in_its_own_pieces_alone():
    with playing(1, 4):
        tensors = spread("four")
        tensors["rows"].to_local().fill_(math.nan)
        assert list(loss_guard._not_finite(tensors)) == ["rows"]


# Which samples a rank reads


def linear_on(mesh, placements) -> nn.Module:
    module = nn.Linear(8, 8)
    layout = Layout(mesh, placements, (8, 8), CPU)
    module.weight = nn.Parameter(sharded_tensors.placed(layout, lambda region: torch.zeros(region.shape)))
    return module


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        (("dp", "tp"), [(2, 0), (2, 0), (2, 1), (2, 1)]),
        (("tp", "dp"), [(2, 0), (2, 1), (2, 0), (2, 1)]),
        (("dp", "model"), [(2, 0), (2, 0), (2, 1), (2, 1)]),
        (("replicas", "shards"), [None] * 4),
    ],
)
def test_ranks_that_hold_one_model_together_read_the_same_share_by_the_names_of_their_mesh(names, shares):
    for rank, share_of_rank in enumerate(shares):
        with playing(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            found = data_ranks.of_modules([linear_on(mesh, (S0, S1)), nn.Linear(2, 2)], 4)
            assert (found and (found.count, found.first)) == share_of_rank
            if "dp" in names:
                mine = data_ranks.of_mesh(mesh["dp"])
                assert (mine.count, mine.first, mine.world_size) == (*share_of_rank, 2)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_mesh_that_does_not_say_which_ranks_need_the_same_samples_is_refused_with_what_to_type(shape):
    with playing(1, 4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp") if len(shape) == 2 else None)
        part = mesh["tp"] if len(shape) == 2 else mesh
        with pytest.raises(KgorchError, match="cannot know which ranks") as refused:
            data_ranks.of_modules([linear_on(part, (S0,))], 4)
        assert 'session.loader(…, mesh=mesh["dp"])' in str(refused.value.next_step)
        assert data_ranks.of_modules([nn.Linear(2, 2)], 4) is None


# Ranks that play, and microbatches


def test_fewer_processes_cannot_play_the_ranks_of_a_sharded_model():
    division = RankDivision(0, 1)
    division.ranks = ranks_of(2, 0, 1)
    with pytest.raises(KgorchError, match="2 virtual ranks on 1"):
        division.refuse("ranks of a sharded model hold different pieces, and one process cannot play two")


@pytest.mark.parametrize(
    ("samples", "most", "weights"), [(8, 2, [0.5, 0.5]), (5, 3, [0.8, 0.2, 0.0]), (2, 2, [1.0, 0.0])]
)
def test_a_rank_with_fewer_samples_computes_as_many_microbatches_as_the_others(alone, samples, most, weights):
    ladder = SimpleNamespace(
        settings=SimpleNamespace(microbatch=4), has_rungs=False, report_use=lambda rank, is_used: None
    )
    health = SimpleNamespace(is_on=False, add_loss=lambda loss: None, skips=lambda step: False)
    guards = SimpleNamespace(
        ladder=ladder, health=health, board=SimpleNamespace(vote_everywhere=lambda flag: most), rank=0
    )
    runner = MicrobatchRunner(CPU, lambda: ranks_of(1, 0, 1), lambda **facts: None, guards)
    runner.set_modules([tracked(alone)["model"]])
    computed = []

    def work(part, weight):
        computed.append((len(part), weight))
        return torch.tensor(1.0)

    loss = runner.run(0, torch.zeros(samples, 2), work, scaled=False)
    assert [weight for _, weight in computed] == pytest.approx(weights) and float(loss) == pytest.approx(1.0)
    assert runner.is_sharded


# Real ranks


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_four_ranks_two_and_four_again_have_equal_values_on_meshes_of_three_kinds(tmp_path):
    patience = {"timeout_s": 400}
    four = ranks.run(tmp_path / "four", "shards.py", 4, {"mesh": "fsdp"}, stop_at=5, **patience)
    assert four.codes == [0] * 4, four.said()
    first = newest(four.folder)
    assert sum(tensor_bytes(path) for path in first.glob("*.safetensors")) < 1.3 * unsharded_bytes(first, tmp_path)
    # Dropout differs between its ranks, so those of the tensor-parallel mesh drift apart: only what it begins with is compared.
    tensor_parallel = ranks.run(
        tmp_path / "2d", "shards.py", 2, {"mesh": "2d"}, stop_at=6, resume=str(first), **patience
    )
    two = ranks.run(tmp_path / "two", "shards.py", 2, {"mesh": "fsdp"}, stop_at=6, resume=str(first), **patience)
    assert two.codes == [0] * 2, two.said()
    again = ranks.run(
        tmp_path / "again", "shards.py", 4, {"mesh": "hsdp"}, stop_at=7, resume=str(newest(two.folder)), **patience
    )
    assert again.codes == [0] * 4, again.said()
    for before, after in ((four, tensor_parallel), (four, two), (two, again)):
        [stopped], [begun] = before.lines(starting="stopped "), after.lines(starting="begin ")
        assert stopped.split()[1:3] == begun.split()[1:3]
    assert "because the model is sharded" in two.lines(starting="begin ")[0]
    plain = ranks.run(
        tmp_path / "plain", "shards.py", 1, {"mesh": "plain"}, stop_at=7, resume=str(newest(again.folder)), **patience
    )
    assert plain.lines(starting="begin ")[0].split()[1:3] == again.lines(starting="stopped ")[0].split()[1:3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ranks_of_a_tensor_parallel_group_get_the_same_batches_and_train_what_four_data_parallel_ranks_do(tmp_path):
    args = {"dropout": 0.0, "batch": 30}  # four shares of unequal size, two of equal size
    both = ranks.run(tmp_path / "2d", "shards.py", 4, args | {"mesh": "2d"}, timeout_s=400)
    fsdp = ranks.run(tmp_path / "fsdp", "shards.py", 4, args | {"mesh": "fsdp"}, timeout_s=400)
    assert both.codes == fsdp.codes == [0] * 4, both.said() + fsdp.said()
    batches = [both.lines(rank, starting="batch ") for rank in range(4)]
    assert len(batches[0]) == 8 and batches[0] == batches[1] and batches[2] == batches[3] and batches[0] != batches[2]
    exported = []
    for attempt in (both, fsdp):
        export_safetensors(newest(attempt.folder), attempt.folder / "whole.safetensors", None)
        exported.append(load_file(attempt.folder / "whole.safetensors"))
    for path, tensor in exported[0].items():
        assert torch.allclose(tensor.float(), exported[1][path].float(), atol=1e-5), path


def tensor_bytes(path: Path) -> int:
    """Bytes of a safetensors file without its header, which is the larger part of a small file."""
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints" / "train").iterdir())


def unsharded_bytes(folder: Path, tmp_path: Path) -> int:
    export_safetensors(folder, tmp_path / "out.safetensors", None)
    assert read_json_file(folder, read_checkpoint(folder), "sharding.json")["meshes"][0]["shape"] == [4]
    return (tmp_path / "out.safetensors").stat().st_size
