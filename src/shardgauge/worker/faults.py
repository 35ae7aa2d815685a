"""Faults that the reference engine can be told to have: the gate must see every one of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable

import torch

from shardgauge.spec import Fault, FaultKind


class InjectedFaultError(RuntimeError):
    """What a rank told to raise raises."""


class Faults:
    """The faults that apply to this rank, asked at the points where each bites."""

    def __init__(self, faults: tuple[Fault, ...], rank: int) -> None:
        self._faults = tuple(fault for fault in faults if fault.rank in (None, rank))
        self._rank = rank
        self._step = 0

    def _active(self, kind: FaultKind, unit: str | None = None) -> Iterable[Fault]:
        for fault in self._faults:
            if fault.kind == kind and self._step >= fault.step and fault.unit in (None, unit):
                yield fault

    def has(self, kind: FaultKind, unit: str | None = None) -> bool:
        """Whether a fault of that kind bites now, in that wrap unit."""
        return any(self._active(kind, unit))

    def begin_step(self, step: int) -> None:
        """Die, hang or raise where told to."""
        self._step = step
        for fault in self._faults:
            if fault.step != step:
                continue
            if fault.kind == "dead_rank":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "hung_rank":
                threading.Event().wait()
            if fault.kind == "raising_rank":
                raise InjectedFaultError(f"rank {self._rank} was told to raise at step {step}")

    def in_forward_hook(self, unit: str, first_unit: str) -> None:
        """Sleep in one unit's forward hook (the first unit's if none is named), once a step."""
        delay_ms = 0.0
        for fault in self._faults:
            if (fault.unit or first_unit) != unit or self._step < fault.step:
                continue
            if fault.kind == "delay":
                delay_ms += fault.amount
            if fault.kind == "hook_pile_up":
                delay_ms += fault.amount * (self._step - fault.step)
        if delay_ms:
            time.sleep(delay_ms / 1_000)

    def on_gradient(self, gradient: torch.Tensor, unit: str) -> None:
        """Scale or disturb a gradient before it is reduced."""
        for fault in self._active("scaled_gradient", unit):
            gradient.mul_(fault.amount)
        if self.has("nondeterminism", unit):
            noise = torch.empty_like(gradient).normal_(generator=torch.Generator().manual_seed(time.time_ns()))
            gradient.add_(noise, alpha=1e-4)

    def on_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Make the loss NaN at one step."""
        if any(fault.kind == "nan_loss" and fault.step == self._step for fault in self._faults):
            return loss * float("nan")
        return loss
