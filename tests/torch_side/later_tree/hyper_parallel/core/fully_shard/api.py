"""`fully_shard`, the scheduler whose hooks drive a unit, and the class that a wrapped module gets."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from hyper_parallel.core.fully_shard.param_group import UnitState


@dataclass
class MixedPrecisionPolicy:
    """In what to compute, in what to reduce."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class Stage(Enum):
    """Where a unit is in its step."""

    PRE_FORWARD = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    BACKWARD = auto()


class PostBackward(torch.autograd.Function):
    """Identity on a unit's inputs; backward comes by when the unit is done."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass the inputs on."""
        ctx.done = done
        return tuple(given.view_as(given) for given in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Tell, and pass the gradients on."""
        ctx.done()
        return (None, *grads)


class Scheduler:
    """Hooks of one unit."""

    def __init__(self, modules: tuple[Any, ...], state: UnitState, dtype: torch.dtype, *, reshard: bool) -> None:
        self.modules = modules
        self.hsdp_state = state
        self.dtype = dtype
        self.reshard_after_forward = reshard
        self.scheduler_state: Stage | None = None
        self.forward_prefetch_cells: list[Any] = []
        self.backward_prefetch_cells: list[Any] = []
        self.root_units: list[Scheduler] | None = None
        modules[0].register_forward_pre_hook(self._forward_pre_hook, with_kwargs=True)
        modules[-1].register_forward_hook(self._forward_hook)

    def _forward_pre_hook(self, cell: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._hsdp_forward_pre_hook(cell, args, kwargs)
        if args[0].requires_grad:
            args = PostBackward.apply(self._backward_hook, *args)
        return args, kwargs

    def _hsdp_forward_pre_hook(self, cell: Any, args: Any, kwargs: Any) -> Any:
        if self.hsdp_state.compute_dtype is None:
            self._set_up_from_root(cell)
        self.scheduler_state = Stage.PRE_FORWARD
        with torch.profiler.record_function(f"pre_forward unshard:{self.hsdp_state.module_name}"):
            self.hsdp_state.unshard()
        for ahead in self.forward_prefetch_cells:
            with torch.profiler.record_function(f"pre_forward prefetch:{ahead.hsdp_scheduler.hsdp_state.module_name}"):
                ahead.hsdp_scheduler.hsdp_state.prefetch()
        return args, kwargs

    def _set_up_from_root(self, root: nn.Module) -> None:
        units = {id(m.hsdp_scheduler): m.hsdp_scheduler for m in root.modules() if isinstance(m, HSDPModule)}
        assert len(units) > 1, "the first unit to run is taken for the root, and is none"
        self.root_units = list(units.values())
        for unit in self.root_units:
            unit.hsdp_state.compute_dtype = unit.dtype

    def _forward_hook(self, cell: Any, inputs: Any, outputs: torch.Tensor) -> None:
        outputs.register_hook(self._backward_pre_hook)
        self._hsdp_forward_hook(cell, inputs, outputs)

    def _hsdp_forward_hook(self, cell: Any, inputs: Any, outputs: Any) -> None:  # noqa: ARG002 -- the tree's signature
        self.scheduler_state = Stage.FORWARD
        if self.reshard_after_forward:
            with torch.profiler.record_function(f"forward reshard:{self.hsdp_state.module_name}"):
                self.hsdp_state.shard()

    def _backward_pre_hook(self, grad: torch.Tensor) -> None:
        if self.root_units is not None:
            Variable._execution_engine.queue_callback(self._root_backward_hook)
        self._hsdp_backward_pre_hook(self.modules[0], grad)

    def _hsdp_backward_pre_hook(self, cell: Any, grads: Any) -> None:  # noqa: ARG002 -- the tree's signature
        self.scheduler_state = Stage.PRE_BACKWARD
        if self.reshard_after_forward:
            with torch.profiler.record_function(f"pre_backward unshard:{self.hsdp_state.module_name}"):
                self.hsdp_state.unshard()
        for behind in self.backward_prefetch_cells:
            name = behind.hsdp_scheduler.hsdp_state.module_name
            with torch.profiler.record_function(f"pre_backward prefetch:{name}"):
                behind.hsdp_scheduler.hsdp_state.prefetch()

    def _backward_hook(self) -> None:
        if self.scheduler_state is not Stage.BACKWARD:
            self._hsdp_backward_hook(self.modules[0], None, None)

    def _hsdp_backward_hook(self, cell: Any, inputs: Any, outputs: Any) -> None:  # noqa: ARG002 -- the tree's signature
        self.scheduler_state = Stage.BACKWARD
        with torch.profiler.record_function(f"post_backward:{self.hsdp_state.module_name}"):
            self.hsdp_state.post_backward()

    def _root_backward_hook(self) -> None:
        """Without a wrapped root nobody reduces the unit whose inputs need no gradient."""
        for unit in self.root_units or ():
            unit._backward_hook()


class HSDPModule:
    """What a wrapped module can do besides."""

    hsdp_scheduler: Scheduler

    def set_modules_to_forward_prefetch(self, modules: list["HSDPModule"]) -> None:
        """Units to gather ahead in forward."""
        self.hsdp_scheduler.forward_prefetch_cells = modules

    def set_modules_to_backward_prefetch(self, modules: list["HSDPModule"]) -> None:
        """Units to gather ahead in backward."""
        self.hsdp_scheduler.backward_prefetch_cells = modules


def _get_device_from_mesh(mesh: Any) -> torch.device:
    if mesh.device_type not in ("npu", "cuda"):
        raise AssertionError(f"npu and cuda are supported, not {mesh.device_type}")
    return torch.device(mesh.device_type)


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Any,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy,
    comm_fusion: bool = False,
) -> None:
    """Wrap a module, or several as one unit."""
    _get_device_from_mesh(mesh)
    modules: tuple[Any, ...] = tuple(module) if isinstance(module, list) else (module,)
    state = UnitState(modules, mesh, fused=comm_fusion)
    scheduler = Scheduler(modules, state, mp_policy.param_dtype or torch.float32, reshard=reshard_after_forward)
    for wrapped in modules:
        wrapped.__class__ = type(f"HSDP{type(wrapped).__name__}", (HSDPModule, type(wrapped)), {})
        wrapped.hsdp_scheduler = scheduler
