"""The reference engine: a small `fully_shard` of our own, with the report's switches and with faults to switch on.

It is the gate's calibration weight and stands in where hyper_parallel is not installed. Every parameter is sharded on
dimension 0. A unit is gathered before its forward and again before its backward, and its gradients are
reduce-scattered when the last of them has accumulated. Reductions are asynchronous: they are drained by the next
unit's post-backward and, for the last ones, at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.autograd import Variable

from shardgauge.errors import SpecError
from shardgauge.plan import WrapUnit
from shardgauge.worker.engines import ShardRequest, precision_dtypes
from shardgauge.worker.engines.reference_unit import Reduction, ShardedUnit, UnitContext
from shardgauge.worker.faults import Faults
from shardgauge.worker.mesh import place


class ReferenceEngine:
    """Per parameter by default; `comm_fusion` carries a unit in one collective."""

    def shard(self, model: nn.Module, request: ShardRequest) -> ReferenceModel | None:
        """See `Engine.shard`."""
        shard_size = request.experiment.mesh.shard
        for name, parameter in model.named_parameters():
            if parameter.shape[0] % shard_size:
                raise SpecError(
                    f"the reference engine shards dimension 0 evenly: {name} has {parameter.shape[0]} rows, "
                    f"mesh {request.experiment.mesh.name} has {shard_size} shards; choose another mesh or preset"
                )
        placement = place(request.experiment.mesh, request.device.type)
        if not request.is_member:
            return None
        param_dtype, reduce_dtype = precision_dtypes(request.experiment.precision)
        context = UnitContext(
            shard_group=placement.shard_group,
            replicate_group=placement.replicate_group,
            device=request.device,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            fused=request.experiment.switches.comm_fusion,
            faults=Faults(request.experiment.faults, request.rank),
        )
        return ReferenceModel(model, request, context)


class ReferenceModel:
    """The model with its hooks: what happens when, unit by unit."""

    def __init__(self, module: nn.Module, request: ShardRequest, context: UnitContext) -> None:
        self.module = module
        self._switches = request.experiment.switches
        self._open_range = request.open_range
        self._faults = context.faults
        self._units = [self._wrap(unit, context) for unit in request.units]
        self._pending: list[Reduction] = []
        self._in_backward = False

    def _wrap(self, unit: WrapUnit, context: UnitContext) -> ShardedUnit:
        modules = [self.module.get_submodule(path) for path in unit.modules]
        sharded = ShardedUnit(self.module, unit, context)
        modules[0].register_forward_pre_hook(lambda *_: self._pre_forward(sharded))
        modules[-1].register_forward_hook(lambda _module, _args, output: self._post_forward(sharded, output))
        sharded.on_last_gradient(lambda: self._post_backward(sharded))
        return sharded

    def _pre_forward(self, unit: ShardedUnit) -> None:
        self._faults.in_forward_hook(unit.name, self._units[0].name)
        index = self._units.index(unit)
        depth = 0 if self._faults.has("lost_forward_prefetch", unit.name) else self._switches.forward_prefetch
        self._unshard(unit, self._units[index + 1 : index + 1 + depth], "pre_forward")

    def _pre_backward(self, unit: ShardedUnit) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish_backward)
        index = self._units.index(unit)
        depth = 0 if self._faults.has("lost_backward_prefetch", unit.name) else self._switches.backward_prefetch
        self._unshard(unit, self._units[max(0, index - depth) : index][::-1], "pre_backward")

    def _unshard(self, unit: ShardedUnit, ahead: list[ShardedUnit], phase: str) -> None:
        """PR 707's order waits for the unit itself first; the older one queues the units ahead before it waits."""
        if self._switches.hook_order == "prefetch_first":
            self._prefetch(ahead, phase)
        with self._open_range(f"{phase} unshard:{unit.name}"):
            unit.gather()
            unit.wait_gathered()
        if self._switches.hook_order == "unshard_first":
            self._prefetch(ahead, phase)

    def _prefetch(self, ahead: list[ShardedUnit], phase: str) -> None:
        for unit in ahead:
            with self._open_range(f"{phase} prefetch:{unit.name}"):
                unit.gather()

    def _post_forward(self, unit: ShardedUnit, output: torch.Tensor) -> None:
        if unit is not self._units[-1]:
            with self._open_range(f"forward reshard:{unit.name}"):
                unit.reshard()
        if output.requires_grad:
            output.register_hook(lambda _gradient: self._pre_backward(unit))

    def _post_backward(self, unit: ShardedUnit) -> None:
        with self._open_range(f"post_backward:{unit.name}"):
            self._advance()
            self._pending += unit.reduce_gradients()
            unit.reshard()

    def _advance(self) -> None:
        """Wait for the reductions in flight; on an HSDP mesh each is followed by its all-reduce across replicas."""
        self._pending = [follower for reduction in self._pending for follower in reduction.finish()]

    def _finish_backward(self) -> None:
        with self._open_range(f"root_backward reduce:{self._units[0].name}"):
            while self._pending:
                self._advance()
        self._in_backward = False

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.load`."""
        for unit in self._units:
            unit.load(weights)

    def parameters(self) -> Iterable[nn.Parameter]:
        """See `ShardedModel.parameters`."""
        return [parameter.sharded for unit in self._units for parameter in unit.parameters]

    def optimizer_scope(self) -> AbstractContextManager[object]:
        """Nothing is needed: the masters are plain tensors."""
        return nullcontext()

    def local_gradients(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_gradients`."""
        return {
            parameter.name: parameter.sharded.grad
            for unit in self._units
            for parameter in unit.parameters
            if parameter.sharded.grad is not None
        }

    def local_parameters(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_parameters`."""
        return {parameter.name: parameter.sharded.detach() for unit in self._units for parameter in unit.parameters}

    def begin_step(self, step: int) -> None:
        """Tell the faults which step it is."""
        self._faults.begin_step(step)

    def close(self) -> None:
        """Break the cycles between hooks and units, so that memory goes at once."""
        for unit in self._units:
            unit.close()
        self._units.clear()
        self.module = nn.Module()
