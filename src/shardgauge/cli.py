"""The command line: what a user runs outside pytest. It never imports torch; commands that need it are processes."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from shardgauge import __version__
from shardgauge.errors import MissingDependency, ShardgaugeError
from shardgauge.launch.torchrun import INSTALL_TORCH

_PACKAGES = ("torch", "torch_npu", "hyper_parallel", "mindspore")
_DEVICE_FILES = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}
_USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 2 for an error that the user can mend."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "align":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _align(rest) if options.command == "align" else _doctor()
    except ShardgaugeError as error:
        sys.stderr.write(f"shardgauge: {error}\n")
        return _USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardgauge", description="Conclusions about sharded training, as a merge gate."
    )
    parser.add_argument("--version", action="version", version=f"shardgauge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Its options, --help too, are read by the command itself, which may import torch.
    commands.add_parser("align", add_help=False, help="make or check the initial weights and batches of a preset")
    commands.add_parser("doctor", help="show what is installed and which devices there are")
    return parser


def _align(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            f"align makes its data with torch, which {sys.executable} does not have; {INSTALL_TORCH}"
        )
    command = [sys.executable, "-m", "shardgauge.worker.align", *arguments]
    return subprocess.run(command, check=False).returncode


def _doctor() -> int:
    lines = [f"shardgauge {__version__}, Python {platform.python_version()}"]
    lines += [f"{package:<15} {_installed(package)}" for package in _PACKAGES]
    for device, pattern in _DEVICE_FILES.items():
        lines.append(f"{device + ' devices':<15} {len(list(Path('/dev').glob(pattern)))}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _installed(package: str) -> str:
    """Its version, without importing it."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "present, not installed by pip"


if __name__ == "__main__":
    sys.exit(main())
