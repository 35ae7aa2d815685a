"""What the parent knows of an arm: which step comes next, how long steps take, and what a whole block must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardgauge.errors import SessionError
from shardgauge.protocol import Done
from shardgauge.records import RankBlock
from shardgauge.spec import Experiment


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long each thing may take before the session counts as hung; generous, since a miss ends it.

    A block may take `block_s`, and for each step `first_step_s` while no block of its arm has shown how long a step
    takes, afterwards `step_factor` times the slowest step that was seen.
    """

    start_s: float = 120.0
    prepare_s: float = 300.0
    block_s: float = 60.0
    first_step_s: float = 60.0
    step_factor: float = 20.0
    discard_s: float = 60.0
    close_s: float = 20.0
    refusal_s: float = 30.0
    device_lock_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class ArmProgress:
    """An arm as far as it has come."""

    arm: str
    experiment: Experiment
    next_step: int = 0
    slowest_step_ns: int = 0

    def allowance_s(self, steps: int, deadlines: Deadlines) -> float:
        """How long the next `steps` steps may take."""
        seen_s = self.slowest_step_ns * 1e-9
        return deadlines.block_s + steps * (deadlines.step_factor * seen_s if seen_s else deadlines.first_step_s)

    def check(self, done: Mapping[int, Done], *, steps: int) -> tuple[RankBlock, ...]:
        """The members' blocks, in rank order, if they are exactly what was asked.

        Raises:
            SessionError: a member sent no block, another rank sent one, or a block holds other steps.
        """
        members = range(self.experiment.mesh.size)
        expected = tuple(range(self.next_step, self.next_step + steps))
        blocks = []
        for rank, reply in sorted(done.items()):
            if (reply.block is not None) != (rank in members):
                has = "no block" if reply.block is None else "a block"
                raise SessionError(
                    f"arm {self.arm!r}: rank {rank} sent {has}; {self.experiment.mesh.name} has ranks "
                    f"0 to {members[-1]}"
                )
            if reply.block is None:
                continue
            found = tuple(record.step for record in reply.block.steps)
            if found != expected or reply.block.rank != rank:
                raise SessionError(
                    f"arm {self.arm!r}: rank {rank} was asked for steps {list(expected)} and sent {list(found)} "
                    f"in the name of rank {reply.block.rank}"
                )
            blocks.append(reply.block)
        return tuple(blocks)

    def after(self, blocks: tuple[RankBlock, ...]) -> ArmProgress:
        """The arm's progress once `blocks` are in."""
        durations_ns = [record.duration_ns for block in blocks for record in block.steps]
        return ArmProgress(
            arm=self.arm,
            experiment=self.experiment,
            next_step=self.next_step + len(blocks[0].steps),
            slowest_step_ns=max(self.slowest_step_ns, *durations_ns),
        )
