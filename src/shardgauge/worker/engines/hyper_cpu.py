"""What hyper_parallel, which is written for NPU and CUDA, needs repaired from outside to train on a CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from shardgauge.worker.engines.hyper_tree import HyperTree, loaded_modules


class _Distributed(ModuleType):
    """Looks like torch.distributed; its all-gather leaves the output's version alone.

    gloo fills the output by an ATen copy. hyper's parameters are views of that buffer and saved for backward, so the
    gather before backward would make autograd refuse them as modified. NCCL and HCCL write past autograd's eyes; so
    does a copy into `output.data`, whose version counter is its own.
    """

    def __getattr__(self, name: str) -> Any:
        # Looked up at each use, so that whatever else wraps torch.distributed is honoured.
        return getattr(dist, name)

    def all_gather_into_tensor(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`torch.distributed.all_gather_into_tensor` into `output_tensor.data`."""
        return dist.all_gather_into_tensor(output_tensor.data, *args, **kwargs)


_distributed = _Distributed("torch.distributed")


def accept_cpu_mesh(tree: HyperTree) -> None:
    """Make later trees, which assert that a mesh is of npu or cuda, take a CPU mesh. Done once a tree."""
    original = getattr(tree.api, "_get_device_from_mesh", None)
    if original is None or hasattr(original, "accepts_cpu"):
        return

    def device_of(mesh: Any) -> Any:
        return torch.device("cpu") if _device_type(mesh) == "cpu" else original(mesh)

    device_of.accepts_cpu = True  # type: ignore[attr-defined]
    tree.api._get_device_from_mesh = device_of


def _device_type(mesh: Any) -> str:
    device_type = mesh.device_type
    return str(device_type() if callable(device_type) else device_type)


def gather_past_autograd() -> None:
    """Give every fully_shard module that is loaded the look-alike of torch.distributed. Safe to repeat.

    The modules that gather are imported by the first `fully_shard` call: to be done after it.
    """
    for module in loaded_modules("fully_shard"):
        for name, value in list(vars(module).items()):
            if value is dist:
                setattr(module, name, _distributed)
