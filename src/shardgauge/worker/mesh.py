"""Device meshes and control groups, made once a shape: every rank of the session asks for them in the same order."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardgauge.spec import Mesh

SHARD, REPLICATE = "shard", "replicate"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A mesh over the session's first ranks, and a gloo group of its members for what is not training traffic."""

    device_mesh: DeviceMesh
    control: dist.ProcessGroup

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that one parameter is sharded over."""
        return self.device_mesh.get_group(SHARD)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard; None for FSDP."""
        return self.device_mesh.get_group(REPLICATE) if self.device_mesh.ndim == 2 else None


@functools.cache
def place(mesh: Mesh, device_type: str) -> Placement:
    """The placement of `mesh` on ranks 0 .. size - 1. A collective call over the whole session."""
    names = (REPLICATE, SHARD)[-len(mesh.shape) :]
    ranks = torch.arange(mesh.size).view(mesh.shape)
    return Placement(
        device_mesh=DeviceMesh(device_type, ranks, mesh_dim_names=names),
        control=dist.new_group(list(range(mesh.size)), backend="gloo"),
    )
