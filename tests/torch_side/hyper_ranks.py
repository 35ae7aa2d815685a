"""One rank of test_hyper_torch: `hyper_ranks.py SOURCE DIRECTORY RANK WORLD` trains all, then writes JSON."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardgauge.errors import UnsupportedSwitch
from shardgauge.plan import parameter_shapes
from shardgauge.presets import Preset, find_preset
from shardgauge.spec import Experiment, build_experiment
from shardgauge.worker import link
from shardgauge.worker.collectives import install_tally
from shardgauge.worker.engines import ShardRequest
from shardgauge.worker.engines.hyper_torch import HyperTorchEngine
from shardgauge.worker.engines.hyper_tree import loaded_modules
from shardgauge.worker.model import Qwen3, next_token_loss

STEPS = 5
LEARNING_RATE = 1e-3
PREFETCH = {"forward_prefetch": 1, "backward_prefetch": 1}
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "hsdp": {"precision": "fp32", "mesh": {"shape": (2, 2)}},
    "unshard_first": {"precision": "fp32", "switches": PREFETCH | {"hook_order": "unshard_first"}},
    "prefetch_first": {"precision": "fp32", "switches": PREFETCH | {"hook_order": "prefetch_first"}},
    "deep": {"precision": "fp32", "switches": {"forward_prefetch": 3, "backward_prefetch": 2}},
    "hsdp_prefetch": {"precision": "fp32", "mesh": {"shape": (2, 2)}, "switches": PREFETCH},
    "split": {"precision": "fp32", "switches": {"split_last_unit": True}},
    "submesh": {"precision": "fp32", "mesh": {"shape": (2,)}},
}


def experiment_of(name: str) -> Experiment:
    """The scenario's experiment."""
    return build_experiment(**({"engine": "hyper_torch", "mesh": {"shape": (4,)}} | SCENARIOS[name]))


def make_weights(preset: Preset) -> dict[str, torch.Tensor]:
    """The same full fp32 weights in every process: norms at 1, the rest normal."""
    generator = torch.Generator().manual_seed(42)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.05
        for name, shape in parameter_shapes(preset).items()
    }


def make_tokens(preset: Preset, step: int, rank: int) -> torch.Tensor:
    """[batch, seq + 1] tokens of one rank's step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(preset.vocab_size, (preset.batch, preset.seq_len + 1), generator=generator)


RANGES: list[str] = []


@contextmanager
def note_range(name: str) -> Iterator[None]:
    """Stands for record_function, for us and for the tree, and notes the range's name where it begins."""
    RANGES.append(name)
    yield


class Trainee:
    """A scenario in training on this rank; every step's loss, counts, gradient squares and ranges are kept."""

    def __init__(self, engine: HyperTorchEngine, name: str, rank: int) -> None:
        self.experiment = experiment_of(name)
        self.rank = rank
        self.seen: dict[str, list[Any]] = {"losses": [], "counts": [], "squares": [], "ranges": []}
        with torch.device("meta"):
            model = Qwen3(self.experiment.model_preset)
        request = ShardRequest(
            experiment=self.experiment,
            device=torch.device("cpu"),
            member_ranks=tuple(range(self.experiment.mesh.size)),
            rank=rank,
            open_range=note_range,
        )
        self.sharded = engine.shard(model, request)
        caches = [module.AllGatherMetadataCache._cache for module in loaded_modules("param_group")]
        self.seen["cached_units"] = [len(cache) for cache in caches]
        if self.sharded is not None:
            self.sharded.load(make_weights(self.experiment.model_preset))
            with self.sharded.optimizer_scope():
                self.optimizer = torch.optim.AdamW(self.sharded.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        """One training step; nothing on a rank outside the mesh."""
        if self.sharded is None:
            return
        tally = install_tally("cpu")
        tally.reset()
        RANGES.clear()
        tokens = make_tokens(self.experiment.model_preset, len(self.seen["losses"]), self.rank)
        with tally.counting():
            loss = next_token_loss(self.sharded.module(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = self.sharded.local_gradients()
        self.seen["losses"].append(loss.item())
        self.seen["counts"].append(dict(tally.counts))
        self.seen["squares"].append({n: g.double().square().sum().item() for n, g in gradients.items()})
        self.seen["ranges"].append(list(RANGES))
        with self.sharded.optimizer_scope():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> bool:
        """Whether nothing of the model is left after closing."""
        if self.sharded is None:
            return True
        layer = weakref.ref(self.sharded.module.get_submodule("layers.0"))
        self.sharded.close()
        del self.optimizer
        gc.collect()
        return layer() is None


def train_alone(engine: HyperTorchEngine, name: str, rank: int) -> dict[str, Any]:
    """All steps of one scenario."""
    trainee = Trainee(engine, name, rank)
    for _ in range(STEPS):
        trainee.step()
    return trainee.seen | {"freed": trainee.close()}


def train_in_turns(engine: HyperTorchEngine, names: tuple[str, ...], rank: int) -> dict[str, Any]:
    """The scenarios in one process, a step of each in turn."""
    trainees = {name: Trainee(engine, name, rank) for name in names}
    for _ in range(STEPS):
        for trainee in trainees.values():
            trainee.step()
    return {name: trainee.seen["losses"] for name, trainee in trainees.items()}


def try_fused(engine: HyperTorchEngine, rank: int) -> dict[str, Any]:
    """comm_fusion, which a tree either serves or refuses."""
    SCENARIOS["fused"] = {"precision": "fp32", "switches": {"comm_fusion": True}}
    try:
        return train_alone(engine, "fused", rank)
    except UnsupportedSwitch as error:
        return {"refused": str(error)}


def main(source: str, directory: Path, rank: int, world: int) -> None:
    """Join the group, train, write DIRECTORY/rank<RANK>.json."""
    torch.set_num_threads(1)
    link.register()
    dist.init_process_group(link.BACKEND, init_method=f"file://{directory / 'store'}", rank=rank, world_size=world)
    torch.profiler.record_function = note_range  # type: ignore[assignment,misc]
    engine = HyperTorchEngine(source)
    seen: dict[str, Any] = {name: train_alone(engine, name, rank) for name in SCENARIOS}
    seen["in_turns"] = train_in_turns(engine, ("prefetch_first", "hsdp", "bf16"), rank)
    seen["fused"] = try_fused(engine, rank)
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def train_plainly(name: str) -> dict[str, Any]:
    """The scenario in one process without sharding: per rank and step the loss, per step the averaged gradients."""
    experiment = experiment_of(name)
    preset = find_preset(experiment.preset)
    dtype = torch.bfloat16 if experiment.precision == "bf16" else torch.float32
    masters = {n: torch.nn.Parameter(weight) for n, weight in make_weights(preset).items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    ranks = range(experiment.mesh.size)
    losses: list[list[float]] = [[] for _ in ranks]
    squares = []
    for step in range(STEPS):
        for rank in ranks:
            model = Qwen3(preset).to(dtype)
            model.load_state_dict(masters)
            tokens = make_tokens(preset, step, rank)
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            losses[rank].append(loss.item())
            for n, parameter in model.named_parameters():
                assert parameter.grad is not None
                share = parameter.grad.float() / len(ranks)
                so_far = masters[n].grad
                masters[n].grad = share if so_far is None else so_far + share
        squares.append({n: m.grad.double().square().sum().item() for n, m in masters.items() if m.grad is not None})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "squares": squares}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
