"""What the launcher starts: one rank. It reads the session's spec, joins the others and serves."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import platform
import signal
import sys
import traceback
from pathlib import Path

from shardgauge.errors import ShardgaugeError
from shardgauge.protocol import Raised, Refused, SessionSpec
from shardgauge.rundir import SessionDir
from shardgauge.worker.imports import require_torch
from shardgauge.worker.post_box import PostBox
from shardgauge.worker.watchdog import watch_parent

_RECORDED = ("OMP_", "MKL_", "HCCL_", "NCCL_", "GLOO_", "ASCEND_", "PYTORCH_", "TORCH_")


def main() -> None:
    """Serve one rank; returns the exit code, 0 after Close."""
    parser = argparse.ArgumentParser(prog="python -m shardgauge.worker")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arm", default="shardgauge.worker.arm:build_arm", help="MODULE:FUNCTION that builds an arm")
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    directory = SessionDir(options.directory)
    spec = SessionSpec.model_validate_json(directory.spec.read_bytes())
    watch_parent(spec)
    box = PostBox(directory, rank=int(os.environ["RANK"]))
    try:
        _serve(spec, box, build_arm=options.arm)
    except BaseException as error:
        box.reply(_last_words(error, box))
        traceback.print_exc()
        sys.stderr.flush()
        # Peers may sit in a collective with this rank: tearing the groups down here would wait for them.
        os._exit(1)
    # The groups are destroyed and the replies are files: an interpreter with torch in it takes seconds to tear down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(spec: SessionSpec, box: PostBox, *, build_arm: str) -> None:
    require_torch(spec.device)
    # Imported late: both import torch, and a rank without it has to be able to say so.
    from shardgauge.worker.device import open_device
    from shardgauge.worker.serve import Station, serve

    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    device = open_device(spec.device, local_rank=int(os.environ["LOCAL_RANK"]), local_world_size=local_world_size)
    module, _, function = build_arm.partition(":")
    builder = getattr(importlib.import_module(module), function)
    serve(Station(spec=spec, rank=box.rank, device=device, post_box=box, build_arm=builder), _environment())


def _last_words(error: BaseException, box: PostBox) -> Raised | Refused:
    """What the session lacks is refused before the hello; everything else was raised."""
    kind, message = type(error).__name__, str(error)
    if box.due == 0 and isinstance(error, ShardgaugeError):
        return Refused(rank=box.rank, error=kind, message=message)
    lines = traceback.format_exception(error)
    return Raised(rank=box.rank, message=f"{kind}: {message}", traceback="".join(lines))


def _environment() -> dict[str, str]:
    """What this rank runs on, without anything that tells one rank or host from another."""
    versions = {name: _version(name) for name in ("torch", "torch_npu")}
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": str(os.cpu_count()),
        **{name: version for name, version in versions.items() if version is not None},
    }
    return facts | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_RECORDED)}


def _version(package: str) -> str | None:
    module = sys.modules.get(package)
    return None if module is None else str(module.__version__)


if __name__ == "__main__":
    main()
