"""One process without sharding: the truth that sharded losses are held against.

It runs every rank's sequences itself, one after the other, and averages their gradients in fp32, as the reduction
does. Mixed precision is the same too: bf16 parameters in computing, fp32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from shardgauge.errors import UnsupportedSwitch
from shardgauge.spec import Switches
from shardgauge.worker.engines import ShardRequest, precision_dtypes
from shardgauge.worker.mesh import place


class SingleEngine:
    """No `fully_shard` at all, on rank 0."""

    def shard(self, model: nn.Module, request: ShardRequest) -> SingleModel | None:
        """See `Engine.shard`."""
        experiment = request.experiment
        if experiment.switches != Switches() or experiment.mesh.size != 1:
            raise UnsupportedSwitch(
                f"the single engine shards nothing: it takes mesh fsdp1 and no switches, not "
                f"{experiment.mesh.name} ({experiment.switches.describe()})"
            )
        place(experiment.mesh, request.device.type)
        if not request.is_member:
            return None
        param_dtype, _ = precision_dtypes(experiment.precision)
        return SingleModel(model, request.device, param_dtype, experiment.data_parallel)


class SingleModel:
    """A whole model, its fp32 masters beside it."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype, micro_batches: int) -> None:
        self.module = module
        self._device = device
        self._dtype = dtype
        self._micro_batches = micro_batches
        self._masters: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.load`."""
        self._masters = {
            name: nn.Parameter(weights[name].to(self._device, torch.float32, copy=True))
            for name, _ in self.module.named_parameters()
        }
        self.module.to(self._dtype).to_empty(device=self._device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collect(self._masters[name]))
            for name, parameter in self.module.named_parameters()
        ]

    def _collect(self, master: nn.Parameter) -> object:
        def collect(parameter: nn.Parameter) -> None:
            share = parameter.grad.float() / self._micro_batches  # type: ignore[union-attr]
            master.grad = share if master.grad is None else master.grad.add_(share)
            parameter.grad = None

        return collect

    def parameters(self) -> Iterable[nn.Parameter]:
        """See `ShardedModel.parameters`."""
        return self._masters.values()

    def optimizer_scope(self) -> AbstractContextManager[object]:
        """Nothing is needed for plain tensors."""
        return nullcontext()

    def local_gradients(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_gradients`."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def local_parameters(self) -> Mapping[str, torch.Tensor]:
        """See `ShardedModel.local_parameters`."""
        return {name: master.detach() for name, master in self._masters.items()}

    def begin_step(self, step: int) -> None:  # noqa: ARG002 -- the protocol's argument
        """Compute with this step's masters."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self._masters[name])

    def close(self) -> None:
        """Unhook: autograd holds hooks where Python's collector does not see the cycle through them."""
        for hook in self._hooks:
            hook.remove()
