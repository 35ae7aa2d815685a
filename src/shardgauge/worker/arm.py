"""An arm: an experiment prepared on this rank, ready to run blocks of training steps."""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from shardgauge.plan import parameter_shapes
from shardgauge.protocol import SessionSpec
from shardgauge.records import RankBlock, StepRecord
from shardgauge.spec import Experiment
from shardgauge.worker.align import ensure_align_data, load_tokens, load_weights
from shardgauge.worker.collectives import CollectiveTally, install_tally
from shardgauge.worker.device import Device
from shardgauge.worker.engines import ShardedModel, ShardRequest
from shardgauge.worker.engines.registry import find_engine
from shardgauge.worker.faults import Faults
from shardgauge.worker.link import LINK
from shardgauge.worker.mesh import place
from shardgauge.worker.model import Qwen3, next_token_loss

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.0


def build_arm(experiment: Experiment, session: SessionSpec, rank: int, device: Device) -> Arm:
    """Wrap, load and equip the model: ready at step 0. A collective call over the whole session.

    Raises:
        ShardgaugeError: a switch, dependency or the alignment data is missing; raised alike on every rank.
    """
    engine = find_engine(experiment, session.hyper_source)
    data = ensure_align_data(Path(session.align_dir), experiment.model_preset, make_small=True)
    with torch.device("meta"):
        model = Qwen3(experiment.model_preset)
    request = ShardRequest(
        experiment=experiment,
        device=device.torch_device,
        member_ranks=tuple(range(experiment.mesh.size)),
        rank=rank,
        open_range=torch.profiler.record_function,
    )
    sharded = engine.shard(model, request)
    if sharded is None:
        return Arm(experiment, None, rank, device)
    sharded.load(load_weights(data.weights))
    tokens = load_tokens(data.batches).to(device.torch_device)
    return Arm(experiment, Training(experiment, sharded, tokens, rank), rank, device)


class Training:
    """Model, optimizer and this rank's batches; knows how to take one step, not how to measure it."""

    def __init__(self, experiment: Experiment, sharded: ShardedModel, tokens: torch.Tensor, rank: int) -> None:
        self.sharded = sharded
        self.faults = Faults(experiment.faults, rank)
        self._control = place(experiment.mesh, tokens.device.type).control
        self._replicas = experiment.mesh.replicate
        self._names = tuple(parameter_shapes(experiment.model_preset))
        self._tokens = tokens
        self._columns = range(experiment.data_parallel) if experiment.engine == "single" else (rank,)
        with sharded.optimizer_scope():
            self.optimizer = torch.optim.AdamW(
                sharded.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=False
            )

    def _batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        row = self._tokens[step % self._tokens.shape[0]]
        for column in self._columns:
            yield row[column, :, :-1], row[column, :, 1:]

    def forward_backward(self, step: int) -> torch.Tensor:
        """The mean loss over this rank's sequences; gradients are reduced when it returns."""
        self.sharded.begin_step(step)
        self.faults.begin_step(step)
        losses = []
        for inputs, targets in self._batches(step):
            loss = self.faults.on_loss(next_token_loss(self.sharded.module(inputs), targets))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update(self) -> None:
        """One optimizer step; gradients are forgotten."""
        with self.sharded.optimizer_scope():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def gradient_norms(self) -> tuple[float | None, ...]:
        """The L2 norm of every full gradient, in the model's parameter order; None where it is not finite.

        Squares are summed over all members on the control group, in float64; replicas that agree count once.
        """
        with self.sharded.optimizer_scope(), torch.no_grad():
            local = self.sharded.local_gradients()
            squares = torch.tensor(
                [float(local[n].double().square().sum()) if n in local else 0.0 for n in self._names],
                dtype=torch.float64,
            )
        dist.all_reduce(squares, group=self._control)
        norms = (squares / self._replicas).sqrt().tolist()
        return tuple(norm if math.isfinite(norm) else None for norm in norms)

    def parameters_sha256(self) -> str:
        """A digest of this rank's master shards, bit by bit."""
        digest = hashlib.sha256()
        with self.sharded.optimizer_scope():
            shards: Mapping[str, torch.Tensor] = self.sharded.local_parameters()
            for name in sorted(shards):
                digest.update(name.encode())
                digest.update(shards[name].detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class Arm:
    """What the session commands: run steps, close. A rank outside the mesh holds an arm that does nothing."""

    def __init__(self, experiment: Experiment, training: Training | None, rank: int, device: Device) -> None:
        self._experiment = experiment
        self._training = training
        self._rank = rank
        self._device = device
        self._tally: CollectiveTally = install_tally(device.torch_device.type)
        self._step = 0

    def run(self, steps: int, gradients: bool) -> RankBlock | None:  # noqa: FBT001 -- the protocol's field, passed on
        """Train `steps` steps and report each; None on a rank that is not a member."""
        training = self._training
        if training is None:
            return None
        LINK.spec = self._experiment.link if self._device.torch_device.type == "cpu" else None
        records = tuple(self._measure(training, gradients=gradients) for _ in range(steps))
        return RankBlock(
            rank=self._rank,
            steps=records,
            peak_memory_bytes=self._device.peak_memory_bytes(),
            parameters_sha256=training.parameters_sha256() if gradients else None,
        )

    def _measure(self, training: Training, *, gradients: bool) -> StepRecord:
        self._tally.reset()
        LINK.reset()
        begin_ns = time.perf_counter_ns()
        with self._tally.counting():
            loss = training.forward_backward(self._step)
        norms = training.gradient_norms() if gradients else None
        training.update()
        self._device.synchronize()
        duration_ns = time.perf_counter_ns() - begin_ns
        value = float(loss)
        record = StepRecord(
            step=self._step,
            duration_ns=duration_ns,
            loss=value if math.isfinite(value) else None,
            counts=dict(self._tally.counts),
            payload_bytes=dict(self._tally.payload_bytes),
            link=LINK.use() if LINK.spec else None,
            grad_norms=norms,
        )
        self._step += 1
        return record

    def close(self) -> None:
        """Free the model; process groups stay with the session."""
        if self._training is not None:
            self._training.sharded.close()
        self._training = None
        gc.collect()  # modules and hooks know each other; without this their memory goes whenever Python likes
