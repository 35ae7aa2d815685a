"""The arm that session tests run: no model, and one fault a kind, chosen by the experiment."""

from __future__ import annotations

import os
import signal
import time

from shardgauge.errors import UnsupportedSwitch
from shardgauge.protocol import SessionSpec
from shardgauge.records import RankBlock, StepRecord
from shardgauge.spec import Experiment, Fault

TOGETHER = 7
"""An experiment with this seed has its ranks wait for each other in every block, as a real one's do."""


def build_arm(experiment: Experiment, session: SessionSpec, rank: int, device: object) -> FakeArm:  # noqa: ARG001 -- as the worker calls it
    """Refuses comm_fusion on every rank, and prefetch on rank 1 only."""
    if experiment.switches.comm_fusion:
        raise UnsupportedSwitch("the fake arm has no comm_fusion")
    if experiment.switches.forward_prefetch and rank == 1:
        raise UnsupportedSwitch("rank 1 has no prefetch")
    return FakeArm(experiment, rank)


class FakeArm:
    """Steps of one nanosecond a step and rank, so that a test can tell blocks apart."""

    def __init__(self, experiment: Experiment, rank: int) -> None:
        self._experiment = experiment
        self._rank = rank
        self._next = 0

    def run(self, steps: int, gradients: bool) -> RankBlock | None:  # noqa: FBT001 -- as the worker calls it
        """As `Arm.run`; norms stand for `gradients`."""
        first, self._next = self._next, self._next + steps
        if self._rank >= self._experiment.mesh.size:
            return None
        for fault in self._experiment.faults:
            if fault.rank == self._rank and first <= fault.step < self._next:
                steps -= strike(fault)
        if self._experiment.seed == TOGETHER:
            from torch import distributed

            distributed.barrier()
        records = tuple(
            StepRecord(
                step=step,
                duration_ns=1 + step + self._rank,
                loss=1.0,
                counts={},
                payload_bytes={},
                grad_norms=(1.0,) if gradients else None,
            )
            for step in range(first, first + steps)
        )
        return RankBlock(rank=self._rank, steps=records, peak_memory_bytes=1)

    def close(self) -> None:
        """Nothing to free."""


def strike(fault: Fault) -> int:
    """Raise, die, hang, or return how many steps are to be lost (which `lost_forward_prefetch` stands for here)."""
    if fault.kind == "raising_rank":
        raise ArithmeticError("the fake arm raises")
    if fault.kind == "dead_rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hung_rank":
        time.sleep(3600)
    return 1
