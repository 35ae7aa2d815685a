"""One wrap unit of the reference engine: its shards, its gathered parameters, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgauge.plan import WrapUnit
from shardgauge.worker.faults import Faults

# torch 2.13 renamed the two collectives and warns of the old names; older torch has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class UnitContext:
    """What all units of a model share."""

    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None
    device: torch.device
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    fused: bool
    faults: Faults

    @property
    def shard_size(self) -> int:
        """Ranks that one parameter is sharded over."""
        return self.shard_group.size()

    @property
    def data_size(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.shard_size * (self.replicate_group.size() if self.replicate_group else 1)


class ShardedParameter:
    """An fp32 master shard, and the full parameter that modules and autograd see.

    The full parameter keeps its identity; only its storage comes and goes. Collectives write through `flat`, an alias
    with a version counter of its own, so autograd does not take a gather for an in-place change.
    """

    def __init__(self, name: str, owner: nn.Module, attribute: str, context: UnitContext) -> None:
        self.name = name
        meta = owner.get_parameter(attribute)
        shape = (meta.shape[0] // context.shard_size, *meta.shape[1:])
        self.sharded = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=context.device))
        self.full = nn.Parameter(torch.empty(meta.shape, dtype=context.param_dtype, device=context.device))
        self.flat = self.full.data.view(-1)
        self.release()
        setattr(owner, attribute, self.full)

    def allocate(self) -> None:
        """Give the full parameter its storage back, contents undefined."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())

    def release(self) -> None:
        """Free the full parameter's storage."""
        self.full.untyped_storage().resize_(0)

    def load(self, weight: torch.Tensor, shard_rank: int) -> None:
        """Copy this rank's rows of the full weight."""
        rows = self.sharded.shape[0]
        with torch.no_grad():
            self.sharded.copy_(weight[shard_rank * rows : (shard_rank + 1) * rows])

    def accept(self, reduced: torch.Tensor, data_size: int) -> None:
        """Take a summed gradient shard as the master's mean gradient, added to what is there."""
        gradient = (reduced.view(self.sharded.shape) / data_size).to(self.sharded.dtype)
        self.sharded.grad = gradient if self.sharded.grad is None else self.sharded.grad + gradient


@dataclass(kw_only=True)
class Reduction:
    """A reduction in flight: its work, its output, and whose gradients lie in it, one behind the other."""

    work: Any
    output: torch.Tensor
    parameters: tuple[ShardedParameter, ...]
    context: UnitContext
    replicas: dist.ProcessGroup | None

    def finish(self) -> list[Reduction]:
        """Wait; then either pass the sum on to the replicas or hand it to the parameters."""
        if self.work is not None:
            self.work.wait()
        if self.replicas is not None:
            work = dist.all_reduce(self.output, group=self.replicas, async_op=True)
            return [
                Reduction(
                    work=work, output=self.output, parameters=self.parameters, context=self.context, replicas=None
                )
            ]
        sizes = [parameter.sharded.numel() for parameter in self.parameters]
        for parameter, reduced in zip(self.parameters, self.output.split(sizes), strict=True):
            parameter.accept(reduced, self.context.data_size)
        return []


@dataclass
class _Gather:
    works: list[Any] = field(default_factory=list)
    fused_output: torch.Tensor | None = None


class ShardedUnit:
    """The parameters of one `fully_shard` call."""

    def __init__(self, model: nn.Module, unit: WrapUnit, context: UnitContext) -> None:
        self.name = unit.name
        self.context = context
        self.parameters = tuple(self._shard(model, name) for name in unit.parameters)
        self._in_flight: _Gather | None = None
        self._gathered = False
        self._gradients_due = len(self.parameters)
        self._hooks: list[Any] = []

    def _shard(self, model: nn.Module, name: str) -> ShardedParameter:
        path, _, attribute = name.rpartition(".")
        return ShardedParameter(name, model.get_submodule(path), attribute, self.context)

    def on_last_gradient(self, act: Callable[[], None]) -> None:
        """Call `act` in backward when every parameter of the unit has its gradient."""

        def count(_parameter: nn.Parameter) -> None:
            self._gradients_due -= 1
            if self._gradients_due == 0:
                self._gradients_due = len(self.parameters)
                act()

        self._hooks = [parameter.full.register_post_accumulate_grad_hook(count) for parameter in self.parameters]

    def close(self) -> None:
        """Unhook: autograd holds hooks where Python's collector does not see the cycle through them."""
        for hook in self._hooks:
            hook.remove()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's shards."""
        shard_rank = self.context.shard_group.rank()
        for parameter in self.parameters:
            parameter.load(weights[parameter.name], shard_rank)

    def gather(self) -> None:
        """Issue the unit's all-gathers, unless they are done or in flight."""
        if self._gathered or self._in_flight is not None:
            return
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.allocate()
            self._in_flight = self._issue_gathers()
            if self.context.faults.has("doubled_all_gather", self.name):
                self._in_flight.works += self._issue_gathers().works
        if self.context.faults.has("serialised_communication", self.name):
            self.wait_gathered()

    def _issue_gathers(self) -> _Gather:
        group, dtype = self.context.shard_group, self.context.param_dtype
        shards = [parameter.sharded.detach().to(dtype).view(-1) for parameter in self.parameters]
        if not self.context.fused:
            works = [
                _all_gather(parameter.flat, shard, group=group, async_op=True)
                for parameter, shard in zip(self.parameters, shards, strict=True)
            ]
            return _Gather(works=works)
        packed = torch.cat(shards)
        output = packed.new_empty(self.context.shard_size, packed.numel())
        return _Gather(works=[_all_gather(output.view(-1), packed, group=group, async_op=True)], fused_output=output)

    def wait_gathered(self) -> None:
        """Wait for the gathers in flight; afterwards the full parameters hold the weights."""
        if self._in_flight is None:
            return
        for work in self._in_flight.works:
            work.wait()
        output, self._in_flight, self._gathered = self._in_flight.fused_output, None, True
        if output is not None:
            sizes = [parameter.sharded.numel() for parameter in self.parameters]
            for parameter, columns in zip(self.parameters, output.split(sizes, dim=1), strict=True):
                parameter.flat.view(self.context.shard_size, -1).copy_(columns)

    def reshard(self) -> None:
        """Free the full parameters."""
        self._gathered = False
        for parameter in self.parameters:
            parameter.release()

    def reduce_gradients(self) -> list[Reduction]:
        """Issue the unit's reduce-scatters over the gradients that have accumulated, and forget those."""
        with torch.no_grad():
            gradients = [self._take_gradient(parameter) for parameter in self.parameters]
            if not self.context.fused:
                return [
                    self._reduce(gradient.view(-1), (parameter,))
                    for parameter, gradient in zip(self.parameters, gradients, strict=True)
                ]
            by_rank = [gradient.view(self.context.shard_size, -1) for gradient in gradients]
            return [self._reduce(torch.cat(by_rank, dim=1).view(-1), self.parameters)]

    def _take_gradient(self, parameter: ShardedParameter) -> torch.Tensor:
        gradient = parameter.full.grad
        if gradient is None:
            raise RuntimeError(f"{parameter.name} has no gradient when its unit's are reduced")
        parameter.full.grad = None
        gradient = gradient.to(self.context.reduce_dtype)
        self.context.faults.on_gradient(gradient, self.name)
        return gradient

    def _reduce(self, source: torch.Tensor, parameters: tuple[ShardedParameter, ...]) -> Reduction:
        context = self.context
        output = source.new_empty(source.numel() // context.shard_size)
        work = None
        if context.faults.has("dropped_reduce_scatter", self.name):
            output.copy_(source.view(context.shard_size, -1)[context.shard_group.rank()])
        else:
            work = _reduce_scatter(output, source, group=context.shard_group, async_op=True)
        if context.faults.has("serialised_communication", self.name) and work is not None:
            work.wait()
        return Reduction(
            work=work, output=output, parameters=parameters, context=context, replicas=context.replicate_group
        )
