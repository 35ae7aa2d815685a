"""One rank of test_reference: `reference_ranks.py DIRECTORY RANK WORLD` trains every scenario, then writes JSON."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardgauge.protocol import SessionSpec
from shardgauge.spec import Experiment, build_experiment
from shardgauge.worker import arm as arms
from shardgauge.worker.device import open_device
from shardgauge.worker.faults import InjectedFaultError
from tests.torch_side.spawn import join

STEPS = 4
PREFETCH = {"forward_prefetch": 1, "backward_prefetch": 1}
SCENARIOS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single", "mesh": {"shape": (1,)}, "data_ranks": 4},
    "native": {"engine": "native"},
    "native prefetch": {"engine": "native", "switches": PREFETCH},
    "default": {},
    "again": {},
    "prefetch": {"switches": PREFETCH},
    "pr707": {"switches": PREFETCH | {"hook_order": "unshard_first"}},
    "deep": {"switches": {"forward_prefetch": 2, "backward_prefetch": 3}},
    "fused": {"switches": {"comm_fusion": True}},
    "fused prefetch": {"switches": PREFETCH | {"comm_fusion": True}},
    "split": {"switches": {"split_last_unit": True}},
    "native hsdp": {"engine": "native", "mesh": {"shape": (2, 2)}},
    "hsdp": {"mesh": {"shape": (2, 2)}},
    "hsdp fused": {"mesh": {"shape": (2, 2)}, "switches": PREFETCH | {"comm_fusion": True}},
    "half": {"mesh": {"shape": (2,)}},
    "bf16": {"precision": "bf16"},
    "bf16 single": {"engine": "single", "mesh": {"shape": (1,)}, "data_ranks": 4, "precision": "bf16"},
    "delay": {"faults": ({"kind": "delay", "amount": 150.0, "unit": "layers.3"},)},
    "lost forward prefetch": {"switches": PREFETCH, "faults": ({"kind": "lost_forward_prefetch"},)},
    "lost backward prefetch": {"switches": PREFETCH, "faults": ({"kind": "lost_backward_prefetch"},)},
    "doubled all-gather": {"faults": ({"kind": "doubled_all_gather", "unit": "layers.2"},)},
    "dropped reduce-scatter": {"faults": ({"kind": "dropped_reduce_scatter", "unit": "layers.2"},)},
    "serialised": {"switches": PREFETCH, "faults": ({"kind": "serialised_communication"},)},
    "scaled gradient": {"faults": ({"kind": "scaled_gradient", "amount": 1.001, "unit": "layers.5"},)},
    "hook pile-up": {"faults": ({"kind": "hook_pile_up", "amount": 60.0},)},
    "nan": {"faults": ({"kind": "nan_loss", "step": 2, "rank": 1},)},
    "nondeterminism": {"faults": ({"kind": "nondeterminism"},)},
    "raising": {"faults": ({"kind": "raising_rank", "step": 0},)},
}

RANGES: list[str] = []


@contextmanager
def note_range(name: str) -> Iterator[None]:
    """Stands for record_function and notes the range's name where it begins."""
    RANGES.append(name)
    yield


def scenario(name: str, world: int) -> Experiment:
    """The scenario's experiment: reference, fp32, all ranks, unless it says otherwise."""
    base: dict[str, Any] = {"engine": "reference", "mesh": {"shape": (world,)}, "precision": "fp32"}
    return build_experiment(**(base | SCENARIOS[name]))


def train(name: str, session: SessionSpec, rank: int) -> dict[str, Any]:
    """The scenario's records on this rank, and the ranges of its last step."""
    experiment = scenario(name, session.world_size)
    device = open_device("cpu", local_rank=rank, local_world_size=session.world_size)
    trainee = arms.build_arm(experiment, session, rank, device)
    try:
        first = trainee.run(STEPS - 1, gradients=True)
        RANGES.clear()
        last = trainee.run(1, gradients=True)
    except InjectedFaultError as error:
        return {"raised": str(error)}
    finally:
        trainee.close()
    if first is None or last is None:
        return {"member": False}
    steps = [step.model_dump(mode="json") for step in (*first.steps, *last.steps)]
    return {"member": True, "steps": steps, "sha256": last.parameters_sha256, "ranges": list(RANGES)}


def main(directory: Path, rank: int, world: int) -> None:
    """Every scenario, in the same order on every rank."""
    join(directory, rank, world)
    torch.profiler.record_function = note_range  # type: ignore[assignment,misc]
    session = SessionSpec(
        session="test",
        engine="reference",
        device="cpu",
        world_size=world,
        align_dir=str(Path(__file__).parents[2] / "align_data_8b"),
        parent_pid=1,
    )
    report = {name: train(name, session, rank) for name in SCENARIOS}
    left = sum(isinstance(thing, torch.nn.Parameter) for thing in gc.get_objects())
    report["parameters left"] = {"count": left}
    (directory / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
