"""The native engine: torch_npu's `fully_shard` on an NPU, torch's elsewhere.

torch's hooks are opened under the report's range names too, by wrapping the parameter groups' phases on the instances
(private names, stable from torch 2.6 to 2.13; a phase that a version lacks simply has no range).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from shardgauge.errors import MissingDependency, UnsupportedSwitch
from shardgauge.worker.engines import OpenRange, ShardRequest, precision_dtypes
from shardgauge.worker.mesh import SHARD, place

_PHASES = {
    "pre_forward": "pre_forward unshard",
    "post_forward": "forward reshard",
    "pre_backward": "pre_backward unshard",
    "post_backward": "post_backward",
}
_group_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _import_fully_shard(device_type: str) -> Any:
    if device_type != "npu":
        from torch.distributed import fsdp

        return fsdp
    try:
        from torch_npu.distributed import fsdp as npu_fsdp
    except ImportError as error:
        raise MissingDependency(
            f"torch_npu.distributed.fsdp cannot be imported: {error}. The native engine on an NPU needs a torch_npu "
            "that has fully_shard (2.7 or newer) and its CANN environment sourced"
        ) from error
    return npu_fsdp


class NativeEngine:
    """FSDP2 by one `fully_shard` call a wrap unit and one on the root."""

    def shard(self, model: nn.Module, request: ShardRequest) -> NativeModel | None:
        """See `Engine.shard`."""
        switches = request.experiment.switches
        if switches.comm_fusion:
            raise UnsupportedSwitch("native always fuses a unit's collectives: comm_fusion is not a switch of it")
        if switches.hook_order != "prefetch_first":
            raise UnsupportedSwitch(f"native has no hook_order switch (asked for {switches.hook_order})")
        fsdp = _import_fully_shard(request.device.type)
        device_mesh = place(request.experiment.mesh, request.device.type).device_mesh
        if not request.is_member:
            return None
        param_dtype, reduce_dtype = precision_dtypes(request.experiment.precision)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        wrapped = []
        units = request.units
        for unit in units:
            modules = [model.get_submodule(path) for path in unit.modules]
            fsdp.fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=device_mesh,
                mp_policy=policy,
                reshard_after_forward=unit is not units[-1],
            )
            wrapped.append(modules[0])
            _open_ranges(modules[0], unit.name, request.open_range)
        fsdp.fully_shard(model, mesh=device_mesh, mp_policy=policy)
        _prefetch(wrapped, forward=switches.forward_prefetch, backward=switches.backward_prefetch)
        return NativeModel(model, request.device, device_mesh.get_local_rank(SHARD))


def _prefetch(wrapped: list[Any], *, forward: int, backward: int) -> None:
    for index, module in enumerate(wrapped):
        if forward:
            module.set_modules_to_forward_prefetch(wrapped[index + 1 : index + 1 + forward])
        if backward:
            module.set_modules_to_backward_prefetch(wrapped[max(0, index - backward) : index][::-1])


def _open_ranges(module: Any, unit: str, open_range: OpenRange) -> None:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        _group_names[group] = unit
        for phase, label in _PHASES.items():
            if original := getattr(group, phase, None):
                setattr(group, phase, _in_range(original, f"{label}:{unit}", open_range))
        _open_prefetch_range(type(group), open_range)


def _in_range(original: Callable[..., Any], label: str, open_range: OpenRange) -> Callable[..., Any]:
    def phase(*args: Any, **kwargs: Any) -> Any:
        with open_range(label):
            return original(*args, **kwargs)

    return phase


def _open_prefetch_range(group_type: Any, open_range: OpenRange) -> None:
    """`_prefetch_unshard(target, pass_type)` is static: it is wrapped once on the class, the name found by target."""
    original = getattr(group_type, "_prefetch_unshard", None)
    if original is None or getattr(original, "shardgauge_range", False):
        return

    def prefetch(target: Any, pass_type: str) -> Any:
        with open_range(f"pre_{pass_type} prefetch:{_group_names.get(target, 'unknown')}"):
            return original(target, pass_type)

    prefetch.shardgauge_range = True  # type: ignore[attr-defined]
    group_type._prefetch_unshard = staticmethod(prefetch)


class NativeModel:
    """A model under FSDP2; parameters are DTensors, sharded on dimension 0."""

    def __init__(self, module: nn.Module, device: torch.device, shard_rank: int) -> None:
        self.module = module
        self._device = device
        self._shard_rank = shard_rank

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.load`."""
        self.module.to_empty(device=self._device)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                local = _local(parameter)
                rows = -(-parameter.shape[0] // parameter.device_mesh.size(-1))  # type: ignore[attr-defined]
                begin = min(self._shard_rank * rows, parameter.shape[0])
                local.copy_(weights[name][begin : begin + local.shape[0]])

    def parameters(self) -> Iterable[nn.Parameter]:
        """See `ShardedModel.parameters`."""
        return self.module.parameters()

    def optimizer_scope(self) -> AbstractContextManager[object]:
        """Nothing is needed: DTensor parameters take optimizers as they are."""
        return nullcontext()

    def local_gradients(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_gradients`."""
        return {name: _local(p.grad) for name, p in self.module.named_parameters() if p.grad is not None}

    def local_parameters(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_parameters`."""
        return {name: _local(parameter).detach() for name, parameter in self.module.named_parameters()}

    def begin_step(self, step: int) -> None:
        """Nothing depends on the step."""

    def close(self) -> None:
        """Process groups belong to the session's meshes."""


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local()
    return local
