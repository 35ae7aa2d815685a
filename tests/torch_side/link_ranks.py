"""One rank of test_link: `link_ranks.py DIRECTORY RANK WORLD` tries the metered group, then writes what it saw."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardgauge.presets import LinkSpec
from shardgauge.worker import arena
from shardgauge.worker.collectives import install_tally
from shardgauge.worker.link import LINK
from tests.torch_side.spawn import join

SLOW = LinkSpec(latency_us=20_000, bandwidth_gbit_s=1.0)


def contribution(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order."""
    return (torch.arange(elements) % 97 + 100 * rank).to(dtype)


def check_results(rank: int, world: int) -> Iterator[tuple[str, bool]]:
    """Each collective against what it must give, in shared memory and, where too large for it, through gloo."""
    for elements in (8, 1000 * world, arena.LARGEST_REGION_BYTES // 4 + world):
        everyone = torch.stack([contribution(peer, elements) for peer in range(world)])
        gathered = torch.empty(world * elements)
        dist.all_gather_single(gathered, contribution(rank, elements))
        yield f"all_gather of {elements}", bool(torch.equal(gathered.view(world, -1), everyone))
        share = elements // world
        for op, total in ((dist.ReduceOp.SUM, everyone.sum(0)), (dist.ReduceOp.AVG, everyone.mean(0))):
            mine = torch.empty(share)
            dist.reduce_scatter_single(mine, contribution(rank, share * world), op=op)
            expected = total[: share * world].view(world, -1)[rank]
            yield f"reduce_scatter {op} of {elements}", bool(torch.equal(mine, expected))
        whole = contribution(rank, elements)
        dist.all_reduce(whole)
        yield f"all_reduce of {elements}", bool(torch.equal(whole, everyone.sum(0)))
    highest = contribution(rank, 8)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    yield "all_reduce MAX", bool(torch.equal(highest, contribution(world - 1, 8)))


def check_many_in_flight(rank: int, world: int) -> Iterator[tuple[str, bool]]:
    """More traffic than the arena holds, several collectives in flight, waited for out of order."""
    elements = arena.LARGEST_REGION_BYTES // (4 * 8 * world)
    right = True
    for turn in range(16):
        outputs = [torch.empty(world * elements) for _ in range(4)]
        works = [
            dist.all_gather_single(output, contribution(rank + turn + i, elements), async_op=True)
            for i, output in enumerate(outputs)
        ]
        for i in (2, 0, 3, 1):
            works[i].wait()
            expected = torch.stack([contribution(peer + turn + i, elements) for peer in range(world)])
            right &= bool(torch.equal(outputs[i].view(world, -1), expected))
    yield "many in flight", right


def measure_clock() -> dict[str, Any]:
    """Two transfers queue on one link; computing hides them, waiting exposes them."""
    source, outputs = torch.ones(8), [torch.empty(8 * dist.get_world_size()) for _ in range(2)]
    seen: dict[str, Any] = {}
    LINK.spec = SLOW
    for name, computing_s in (("waited", 0.0), ("hidden", 0.1)):
        dist.barrier()
        LINK.reset()
        begin_s = time.perf_counter()
        works = [dist.all_gather_single(output, source, async_op=True) for output in outputs]
        time.sleep(computing_s)
        for work in works:
            work.wait()
        seen[name] = LINK.use().model_dump() | {"elapsed_s": time.perf_counter() - begin_s}
    LINK.spec = None
    return seen


def miss_a_peer(rank: int) -> str:
    """Rank 1 stays away from a collective of a group with a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    said = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except arena.PeerMissingError as error:
            said = str(error)
    dist.barrier()
    return said


def main(directory: Path, rank: int, world: int) -> None:
    """Everything, in the same order on every rank."""
    join(directory, rank, world)
    tally = install_tally("cpu")
    with tally.counting():
        wrong = [name for name, right in check_results(rank, world) if not right]
    counts, payload_bytes = dict(tally.counts), dict(tally.payload_bytes)
    wrong += [name for name, right in check_many_in_flight(rank, world) if not right]
    report = {
        "wrong": wrong,
        "counts": counts,
        "payload_bytes": payload_bytes,
        "clock": measure_clock(),
        "missing": miss_a_peer(rank),
    }
    (directory / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
