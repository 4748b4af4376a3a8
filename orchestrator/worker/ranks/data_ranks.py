"""Which ranks read different samples: all of them, unless some compute one model together (tensor parallelism)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from kgorch.errors import KgorchError
from kgorch.worker.local_tensors import is_any_sharded, is_sharded
from kgorch.worker.ranks.virtual_ranks import VirtualRanks, ranks_of

SAME_BATCH = frozenset(
    {"tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel", "cp", "context", "context_parallel", "sp"}
)
"""Names of mesh dimensions whose ranks need the same samples. Any other name counts as data-parallel, as all of FSDP's are."""


def of_mesh(mesh: Any) -> VirtualRanks:
    """The division of the samples over the ranks of a data-parallel mesh. Raises: KgorchError: this rank has no part in it."""
    return _divided(mesh, range(mesh.ndim))


def of_modules(modules: Iterable[nn.Module], world_size: int) -> VirtualRanks | None:
    """The division of the samples that the meshes of sharded weights imply; None where each rank reads samples of its own.

    Raises:
        KgorchError: the meshes do not say it.
    """
    modules = list(modules)
    meshes: list[Any] = [
        mesh for module in modules if is_any_sharded(module.parameters()) for mesh in dict.fromkeys(_meshes_of(module))
    ]
    whole = [mesh for mesh in meshes if mesh.size() == world_size]
    joint = [mesh for mesh in whole if SAME_BATCH.intersection(mesh.mesh_dim_names or ())]
    if joint:
        return _divided(joint[0], [at for at, name in enumerate(joint[0].mesh_dim_names) if name not in SAME_BATCH])
    # A mesh without names is FSDP's default one, or the one of a model that is tensor-parallel over all ranks.
    is_known = all(mesh.mesh_dim_names for mesh in whole) or any(
        base.__name__ == "FSDPModule" for module in modules for part in module.modules() for base in type(part).__mro__
    )
    if world_size == 1 or not meshes or (whole and is_known):
        return None
    found = ", ".join(f"{list(mesh.shape)} {mesh.mesh_dim_names or 'without names'}" for mesh in meshes)
    raise KgorchError(
        "session.loader() cannot know which ranks of this sharded model need the same samples",
        f"{world_size} ranks, meshes of the model's weights: {found}",
        next_step='name the dimensions of one mesh of all ranks, init_device_mesh(…, mesh_dim_names=("dp", "tp")), and'
        ' type session.loader(…, mesh=mesh["dp"])',
    )


def _meshes_of(module: nn.Module) -> Iterator[Any]:
    weights: Iterable[Any] = module.parameters()
    return (weight.device_mesh for weight in weights if is_sharded(weight))


def _divided(mesh: Any, dimensions: Sequence[int]) -> VirtualRanks:
    coordinates = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    if not coordinates:
        raise KgorchError(
            f"session.loader(): this rank has no part in the mesh {tuple(mesh.shape)} {mesh.mesh_dim_names or ''}",
            next_step="make a mesh of all ranks with init_device_mesh, and give its data-parallel dimensions",
        )
    place = 0
    for at in dimensions:
        place = place * mesh.shape[at] + coordinates[0][at]
    count = math.prod(mesh.shape[at] for at in dimensions)
    return ranks_of(count, place, count)
