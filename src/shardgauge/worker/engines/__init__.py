"""Engines: implementations of `fully_shard` behind one small protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from shardgauge.plan import WrapUnit
from shardgauge.spec import Experiment, Precision

OpenRange = Callable[[str], AbstractContextManager[object]]
"""Opens a profiler range by its name, such as `pre_forward unshard:layers.0`."""


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """What an engine shards by. Every rank of the session makes the same request, in the same order.

    `member_ranks` are the session's global ranks that form the experiment's mesh (always 0 .. mesh.size - 1);
    the session's other ranks take part in making process groups and in nothing else.
    """

    experiment: Experiment
    device: torch.device
    member_ranks: tuple[int, ...]
    rank: int
    open_range: OpenRange

    @property
    def is_member(self) -> bool:
        """Whether this rank trains in the experiment."""
        return self.rank in self.member_ranks

    @property
    def units(self) -> tuple[WrapUnit, ...]:
        """The wrap plan, in forward order."""
        return self.experiment.units


class ShardedModel(Protocol):
    """A model after `fully_shard`, ready to train on this rank."""

    module: nn.Module

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's shard of each full fp32 weight (memory-mapped) into the sharded parameters."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The sharded fp32 master parameters, for the optimizer."""

    def optimizer_scope(self) -> AbstractContextManager[object]:
        """Entered around optimizer.step, zero_grad and any arithmetic on the parameters or gradients."""

    def local_gradients(self) -> Mapping[str, torch.Tensor]:
        """This rank's shard of each reduced gradient (plain fp32 tensors, averaged over the data), by name.

        A parameter that received no gradient is missing from the mapping.
        """

    def local_parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's shard of each master parameter (plain fp32 tensors), by name."""

    def begin_step(self, step: int) -> None:
        """Told before each training step; `step` counts from 0."""

    def close(self) -> None:
        """Release hooks, buffers and process groups."""


class Engine(Protocol):
    """One implementation of `fully_shard`."""

    def shard(self, model: nn.Module, request: ShardRequest) -> ShardedModel | None:
        """Wrap `model` (on the meta device, parameters fp32) by the wrap plan.

        Returns None on a rank that is not a member. Raises UnsupportedSwitch, before any collective, for a switch
        that the engine lacks, and MissingDependency when its package is not there.
        """


def precision_dtypes(precision: Precision) -> tuple[torch.dtype, torch.dtype]:
    """(parameter dtype in computing, gradient dtype in reducing): bf16 computes in bf16 and reduces in fp32."""
    return (torch.bfloat16 if precision == "bf16" else torch.float32), torch.float32
