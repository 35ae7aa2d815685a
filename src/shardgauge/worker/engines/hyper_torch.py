"""The candidate: hyper_parallel's `fully_shard` on torch, from the tree that the user names.

The tree is taken as it is. What an experiment needs and a tree lacks is added on instances from outside (the order of
hooks, profiler ranges, a CPU), or refused.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardgauge.errors import SpecError
from shardgauge.plan import WrapUnit, parameter_shapes
from shardgauge.worker.engines import ShardRequest, precision_dtypes
from shardgauge.worker.engines.hyper_cpu import accept_cpu_mesh, gather_past_autograd
from shardgauge.worker.engines.hyper_hooks import Ranges, force_order, has_ranges, native_order
from shardgauge.worker.engines.hyper_tree import HyperTree, load_tree
from shardgauge.worker.mesh import Placement, place


@dataclass(frozen=True, kw_only=True)
class _Wrapped:
    """A wrap unit after `fully_shard`; one head for each call that it took, in forward order."""

    unit: WrapUnit
    heads: tuple[Any, ...]


class HyperTorchEngine:
    """One `fully_shard` call a wrap unit and one, without parameters, on the root.

    Trees that know a root set up every unit's precision and names in the root's first forward, and share the queue
    of pending reductions below it; to the others it makes no difference.
    """

    def __init__(self, source: str | None) -> None:
        """Import the tree of checkout `source`, or (None) the installed package.

        Raises:
            SpecError: `source` is no checkout, or another tree is imported in this process.
            MissingDependency: the tree cannot be imported.
        """
        self.tree = load_tree(source)

    def shard(self, model: nn.Module, request: ShardRequest) -> HyperTorchModel | None:
        """See `Engine.shard`."""
        self._refuse(request)
        placement = place(request.experiment.mesh, request.device.type)
        if not request.is_member:
            return None
        if request.device.type == "cpu":
            accept_cpu_mesh(self.tree)
        self.tree.forget_metadata()
        options = self._options(request, _hyper_mesh(self.tree, request, placement))
        wrapped = tuple(self._wrap(model, unit, request, options) for unit in request.units)
        if request.device.type == "cpu":
            gather_past_autograd()
        self.tree.api.fully_shard(model, **options | {"reshard_after_forward": False})
        _prefetch(wrapped, request)
        _equip(model, wrapped, request)
        return HyperTorchModel(self.tree, model, shard_rank=placement.shard_group.rank())

    def _refuse(self, request: ShardRequest) -> None:
        """Raise for what the tree cannot do, alike on every rank and before any collective."""
        mesh, switches = request.experiment.mesh, request.experiment.switches
        if switches.comm_fusion and "comm_fusion" not in self.tree.keywords:
            raise self.tree.lacks("comm_fusion", "its fully_shard has no such keyword")
        if switches.comm_fusion and not self.tree.takes_module_list and not switches.split_last_unit:
            raise self.tree.lacks("comm_fusion", "it takes no list of modules to fuse norm and lm_head over")
        if mesh.shard == 1:
            raise SpecError(
                f"hyper_torch cannot train on mesh {mesh.name}: hyper_parallel reduces no gradient over a shard axis "
                "of 1; choose a mesh that shards over at least 2 ranks"
            )
        for name, shape in parameter_shapes(request.experiment.model_preset).items():
            if shape[0] % mesh.shard:
                raise SpecError(
                    f"hyper_torch cannot shard {name} of shape {shape} over {mesh.shard} ranks: hyper_parallel splits "
                    "dimension 0 evenly or not at all; choose a shard size that divides it"
                )

    def _options(self, request: ShardRequest, mesh: Any) -> dict[str, Any]:
        param_dtype, reduce_dtype = precision_dtypes(request.experiment.precision)
        policy = self.tree.api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if "device" in self.tree.keywords:
            options["device"] = request.device
        return options

    def _wrap(self, model: nn.Module, unit: WrapUnit, request: ShardRequest, options: dict[str, Any]) -> _Wrapped:
        modules = [model.get_submodule(path) for path in unit.modules]
        for module in modules:
            # hyper cuts its shard out of a real tensor; one unit at a time is ever whole.
            module.to_empty(device=request.device)
        options = options | {"reshard_after_forward": unit != request.units[-1]}
        if request.experiment.switches.comm_fusion:
            options["comm_fusion"] = True
        calls: list[Any] = modules
        if len(modules) > 1 and self.tree.takes_module_list:
            # The list is one unit; its hooks are reached through the first module.
            calls, modules = [modules], modules[:1]
        for call in calls:
            self.tree.api.fully_shard(call, **options)
        return _Wrapped(unit=unit, heads=tuple(modules))


def _hyper_mesh(tree: HyperTree, request: ShardRequest, placement: Placement) -> Any:
    """A mesh of hyper's own over the member ranks, on the session's process groups.

    hyper's `init_device_mesh` would make groups of its own, and not as often on one rank as on another once a rank
    finds some cached: with several meshes in a session, or one over part of it, that deadlocks.
    """
    mesh = request.experiment.mesh
    ranks = torch.tensor(request.member_ranks).view(mesh.shape)
    names = placement.device_mesh.mesh_dim_names
    hyper_mesh = tree.package.DeviceMesh(request.device.type, ranks, mesh_dim_names=names, _init_backend=False)
    hyper_mesh.get_group = placement.device_mesh.get_group
    return hyper_mesh


def _prefetch(wrapped: tuple[_Wrapped, ...], request: ShardRequest) -> None:
    """Unit i gathers units i + 1 ... in forward and i - 1 ... in backward, nearest first.

    Forward enters a unit by its first head, backward by its last.
    """
    switches = request.experiment.switches
    for index, here in enumerate(wrapped):
        ahead = wrapped[index + 1 : index + 1 + switches.forward_prefetch]
        behind = wrapped[max(0, index - switches.backward_prefetch) : index][::-1]
        if ahead:
            here.heads[0].set_modules_to_forward_prefetch([head for there in ahead for head in there.heads])
        if behind:
            here.heads[-1].set_modules_to_backward_prefetch([head for there in behind for head in there.heads[::-1]])


def _equip(model: Any, wrapped: tuple[_Wrapped, ...], request: ShardRequest) -> None:
    """Add to the schedulers what the experiment needs and the tree does not do."""
    named = [(head.hsdp_scheduler, there.unit.name) for there in wrapped for head in there.heads]
    order = request.experiment.switches.hook_order
    for scheduler, name in named:
        if hasattr(scheduler.hsdp_state, "module_name"):
            # Trees that open ranges find the names during the first step; a range opened before has none.
            scheduler.hsdp_state.module_name = name
        if native_order(scheduler) != order:
            force_order(scheduler, order, request.open_range)
    ranges = Ranges(request.open_range)
    for scheduler, name in (*named, (model.hsdp_scheduler, "")):
        if not has_ranges(scheduler):
            ranges.open_on(scheduler, name)


class HyperTorchModel:
    """A model under hyper_parallel; its parameters are hyper's own DTensors, sharded on dimension 0."""

    def __init__(self, tree: HyperTree, module: nn.Module, *, shard_rank: int) -> None:
        self.module = module
        self._tree = tree
        self._shard_rank = shard_rank
        self._parameters = dict(module.named_parameters())

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.load`."""
        with torch.no_grad():
            for name, local in self.local_parameters().items():
                begin = self._shard_rank * local.shape[0]
                local.copy_(weights[name][begin : begin + local.shape[0]])

    def parameters(self) -> Iterable[nn.Parameter]:
        """See `ShardedModel.parameters`."""
        return self._parameters.values()

    def optimizer_scope(self) -> AbstractContextManager[object]:
        """Operators on hyper's DTensors reach their local shards: hyper has no layout rule for most of them."""
        scope: AbstractContextManager[object] = self._tree.package.SkipDTensorDispatch()
        return scope

    def local_gradients(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_gradients`."""
        return {name: _local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def local_parameters(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_parameters`."""
        return {name: _local(parameter) for name, parameter in self._parameters.items()}

    def begin_step(self, step: int) -> None:
        """Nothing depends on the step."""

    def close(self) -> None:
        """Free the model; process groups stay with the session.

        Modules, hooks and schedulers refer to each other in circles, which only the collector opens.
        """
        self._parameters.clear()
        self.module = nn.Module()
        gc.collect()


def _local(tensor: Any) -> torch.Tensor:
    """The plain local shard, which may have been moved since last asked for (fused trees rebase it)."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
