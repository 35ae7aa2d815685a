"""What is changed on hyper_parallel's scheduler instances from outside: the order of hooks, and profiler ranges.

A scheduler's pre-hooks gather its own unit (unshard) and start the gathers of units to come (prefetch). Its state
does the work. Both are replaced on the instance, never on the class: other arms stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from shardgauge.spec import HookOrder
from shardgauge.worker.engines import OpenRange

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def native_order(scheduler: Any) -> HookOrder | None:
    """The order that the tree itself has, read off the names its forward pre-hook uses; None if it shows neither."""
    names = _forward_pre_hook_code(scheduler).co_names
    if "unshard" not in names or "prefetch" not in names:
        return None
    return "unshard_first" if names.index("unshard") < names.index("prefetch") else "prefetch_first"


def has_ranges(scheduler: Any) -> bool:
    """Whether the tree opens the profiler ranges itself."""
    constants = _forward_pre_hook_code(scheduler).co_consts
    return any(isinstance(constant, str) and "pre_forward unshard" in constant for constant in constants)


def _forward_pre_hook_code(scheduler: Any) -> Any:
    # The class's, as the instance's may have been replaced here.
    return inspect.unwrap(type(scheduler)._hsdp_forward_pre_hook).__code__


def force_order(scheduler: Any, order: HookOrder, open_range: OpenRange) -> None:
    """Make both pre-hooks prefetch before or after they unshard, whatever the tree does.

    The original hook is run with nothing to prefetch. Prefetching moves out of it, and so does its range where the
    tree opens ranges; where `open_ranges` does, it opens this one as well.
    """
    ranged = has_ranges(scheduler)
    for direction in _DIRECTIONS:
        name = f"_hsdp_{direction}_pre_hook"
        setattr(scheduler, name, _ordered(scheduler, direction, order, open_range if ranged else None))


def _ordered(scheduler: Any, direction: Direction, order: HookOrder, open_range: OpenRange | None) -> Any:
    original = getattr(scheduler, f"_hsdp_{direction}_pre_hook")
    cells_name = f"{direction}_prefetch_cells"

    def prefetch(cells: Any) -> None:
        for cell in cells:
            state = cell.hsdp_scheduler.hsdp_state
            if open_range is None:
                state.prefetch()
            else:
                with open_range(f"pre_{direction} prefetch:{state.module_name}"):
                    state.prefetch()

    def pre_hook(*args: Any, **kwargs: Any) -> Any:
        cells = getattr(scheduler, cells_name)
        # A forward that runs inside backward is a recomputation, for which no tree gathers ahead.
        recomputing = direction == "forward" and getattr(scheduler.scheduler_state, "name", "") == "PRE_BACKWARD"
        if not cells or recomputing:
            return original(*args, **kwargs)
        setattr(scheduler, cells_name, [])
        try:
            if order == "prefetch_first":
                prefetch(cells)
            result = original(*args, **kwargs)
            if order == "unshard_first":
                prefetch(cells)
        finally:
            setattr(scheduler, cells_name, cells)
        return result

    return pre_hook


class Ranges:
    """Opens the later trees' ranges, under their names, around the hooks of a tree that has none.

    One object an arm: `_phase` is what the arm's hooks are doing now, and tells one `unshard` from another.
    """

    def __init__(self, open_range: OpenRange) -> None:
        self._open_range = open_range
        self._phase: str | None = None

    def open_on(self, scheduler: Any, unit: str) -> None:
        """Replace the hooks of `scheduler`, whose ranges are to carry the name `unit`."""
        state = scheduler.hsdp_state
        for hook, phase in (
            ("_hsdp_forward_pre_hook", "pre_forward"),
            ("_hsdp_forward_hook", "forward"),
            ("_hsdp_backward_pre_hook", "pre_backward"),
        ):
            setattr(scheduler, hook, self._in_phase(getattr(scheduler, hook), phase))
        post_backward = self._ranged(scheduler._hsdp_backward_hook, lambda: f"post_backward:{unit}")
        scheduler._hsdp_backward_hook = self._in_phase(post_backward, "post_backward")
        # Inside prefetch the tree calls its own unshard, which is no range of its own there.
        state.prefetch = self._ranged(
            self._in_phase(state.prefetch, "prefetch"),
            lambda: self._named("prefetch", unit, "pre_forward", "pre_backward"),
        )
        state.unshard = self._ranged(state.unshard, lambda: self._named("unshard", unit, "pre_forward", "pre_backward"))
        state.shard = self._ranged(state.shard, lambda: self._named("reshard", unit, "forward"))
        state.reduce_params = self._ranged(
            state.reduce_params, lambda: None if self._phase else f"root_backward reduce:{unit}"
        )

    def _named(self, action: str, unit: str, *phases: str) -> str | None:
        return f"{self._phase} {action}:{unit}" if self._phase in phases else None

    def _in_phase(self, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            before, self._phase = self._phase, phase
            try:
                return original(*args, **kwargs)
            finally:
                self._phase = before

        return hook

    def _ranged(self, original: Callable[..., Any], label: Callable[[], str | None]) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            name = label()
            if name is None:
                return original(*args, **kwargs)
            opened: AbstractContextManager[object] = self._open_range(name)
            with opened:
                return original(*args, **kwargs)

        return work
