"""The state of one unit: its shards, the buffers they are gathered into, and the reduction of its gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class AllGatherMetadataCache:
    """Sizes by identity, as the tree keeps them."""

    _cache: dict[int, Any] = {}  # noqa: RUF012 -- shared by all, which is the point


class UnitState:
    """Gathers as soon as told (prefetch) or on need (unshard); without comm_fusion one collective a parameter."""

    def __init__(self, modules: tuple[nn.Module, ...], mesh: Any, *, fused: bool) -> None:
        self.module_name: str | None = None
        self.compute_dtype: torch.dtype | None = None
        self._fused = fused
        self._shard_group = mesh.get_group(len(mesh.mesh_shape) - 1)
        self._replicas = mesh.get_group(0) if len(mesh.mesh_shape) == 2 else None
        self._world = mesh.mesh_shape[-1]
        self._slots = [
            (owner, name)
            for module in modules
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if not hasattr(parameter, "is_shard")
        ]
        self._shapes = [owner.get_parameter(name).shape for owner, name in self._slots]
        self._shards = [self._cut(owner.get_parameter(name)) for owner, name in self._slots]
        self._buffers: list[torch.Tensor] = []
        self._full: list[nn.Parameter] = []
        self._pending: list[Any] = []
        self._gathered = False
        self._place(self._shards)
        sizes = [shard.numel() for shard in self._shards]
        cached = AllGatherMetadataCache._cache.setdefault(id(self), sizes)
        assert cached == sizes, "a freed unit's sizes were found at this one's address"

    def _cut(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = nn.Parameter(parameter.detach()[: parameter.shape[0] // self._world].clone())
        shard.is_shard = True  # type: ignore[attr-defined]
        return shard

    def _place(self, parameters: list[nn.Parameter]) -> None:
        for (owner, name), parameter in zip(self._slots, parameters, strict=True):
            owner._parameters[name] = parameter

    def prefetch(self) -> None:
        """Start gathering."""
        if self._gathered or self._pending or not self._shards:
            return
        assert self.compute_dtype is not None, "the root's first forward sets the precision"
        if not self._buffers:
            self._buffers = [torch.empty(shape, dtype=self.compute_dtype) for shape in self._shapes]
            self._full = [nn.Parameter(buffer) for buffer in self._buffers]
        shards = [shard.detach().to(self.compute_dtype) for shard in self._shards]
        if self._fused:
            packed = torch.cat([shard.flatten() for shard in shards])
            output = packed.new_empty(self._world * packed.numel())
            self._pending = [(dist.all_gather_into_tensor(output, packed, self._shard_group, True), output)]  # noqa: FBT003
            return
        for buffer, shard in zip(self._buffers, shards, strict=True):
            work = dist.all_gather_into_tensor(buffer, shard, group=self._shard_group, async_op=True)
            self._pending.append((work, shard))

    def unshard(self) -> None:
        """Have the full parameters in the modules."""
        if self._gathered:
            return
        self.prefetch()
        for work, output in self._pending:
            work.wait()
            if self._fused:
                sizes = [shard.numel() for shard in self._shards]
                for buffer, part in zip(self._buffers, output.view(self._world, -1).split(sizes, 1), strict=True):
                    buffer.data.copy_(part.reshape(buffer.shape))
        self._pending = []
        self._gathered = True
        self._place(self._full)

    def shard(self) -> None:
        """Have the shards in the modules."""
        self._gathered = False
        self._place(self._shards)

    def post_backward(self) -> None:
        """Average the gradients over all ranks, each its shard, and go back to the shards."""
        self.shard()
        gradients = [full.grad.float() for full in self._full if full.grad is not None]
        for full in self._full:
            full.grad = None
        if self._fused and gradients:
            rows = [gradient.reshape(self._world, -1) for gradient in gradients]
            reduced = self._reduce(torch.cat(rows, 1).flatten()).split([shard.numel() for shard in self._shards])
        else:
            reduced = [self._reduce(gradient.flatten()) for gradient in gradients]
        for shard, gradient in zip(self._shards, reduced, strict=True):
            shard.grad = gradient.view(shard.shape)

    def _reduce(self, full: torch.Tensor) -> torch.Tensor:
        part = full.new_empty(full.numel() // self._world)
        dist.reduce_scatter_tensor(part, full, op=dist.ReduceOp.AVG, group=self._shard_group)
        if self._replicas is not None:
            dist.all_reduce(part, op=dist.ReduceOp.AVG, group=self._replicas)
        return part
