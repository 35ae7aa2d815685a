"""Starts a rank script N times over a file store and collects what each rank writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardgauge.worker import link

DEADLINE_S = 240


def join(directory: Path, rank: int, world: int, *, timeout_s: float = 60.0) -> None:
    """A rank's first act: the metered backend over a file store, so that no port is needed."""
    torch.set_num_threads(1)
    link.register()
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group(
        link.BACKEND, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )


def run_ranks(script: Path, directory: Path, *, world: int) -> list[dict[str, Any]]:
    """`script DIRECTORY RANK WORLD` on every rank; each writes rank<N>.json into the directory."""
    environment = {name: value for name, value in os.environ.items() if "WORLD_SIZE" not in name}
    environment["PYTHONPATH"] = str(script.parents[2])
    logs = [(directory / f"rank{rank}.log").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(directory), str(rank), str(world)],
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]
    try:
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        for log in logs:
            log.close()
    said = "\n".join((directory / f"rank{rank}.log").read_text() for rank in range(world) if codes[rank])
    assert not any(codes), f"exit codes {codes}\n{said}"
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(world)]
