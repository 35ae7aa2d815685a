"""Starts the ranks on this node through torchrun, and reads what torchrun says about how they ended."""

from __future__ import annotations

import importlib.util
import os
import re
import site
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import shardgauge
from shardgauge.errors import MissingDependency
from shardgauge.rundir import SessionDir

SESSION_MARK = "SHARDGAUGE_SESSION"
"""Environment variable that every process of a session inherits: the session's directory."""

_OUTER_LAUNCH = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_.*|SHARDGAUGE_.*"
)
_RANK_EXIT = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+) ")
_IMPORT_FAULT = re.compile(r"\b(\w*(?:Error|Exception)): (.+?)\)?$", re.MULTILINE)
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

INSTALL_TORCH = (
    "install it with `pip install -c constraints-cpu.txt torch`, or run in an image that brings torch (and torch_npu)"
)


class Launch(Protocol):
    """Ranks that were started, seen from outside."""

    @property
    def pid(self) -> int:
        """The launcher's process."""

    def lives(self) -> bool:
        """Whether the launcher still runs."""

    def wait(self, timeout_s: float) -> int | None:
        """The launcher's exit code; None if it still runs after `timeout_s`."""

    def rank_exits(self) -> Mapping[int, int]:
        """Exit codes (negative: a signal) of the ranks that the launcher saw fail."""

    def rank_log(self, rank: int) -> Path | None:
        """The rank's stderr; None if it was never started."""

    def import_fault(self) -> str | None:
        """Why the launcher could not import what it needs to start a rank at all, if that is what happened."""


class Launcher(Protocol):
    """A way to start ranks: torchrun on one node; srun and msrun are to come."""

    def start(self, directory: SessionDir, *, world_size: int) -> Launch:
        """Start `world_size` ranks of `shardgauge.worker` on the session that lies in `directory`."""


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """`torchrun --standalone`: one node, a free port.

    `environment` is added to the ranks' environment, `worker_arguments` to the worker's command line.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    worker_arguments: tuple[str, ...] = ()

    def start(self, directory: SessionDir, *, world_size: int) -> TorchrunLaunch:
        """See `Launcher.start`.

        Raises:
            MissingDependency: torch is not installed for this interpreter.
        """
        if importlib.util.find_spec("torch") is None:
            raise MissingDependency(f"torch is not installed for {sys.executable}; {INSTALL_TORCH}")
        options = f"--standalone --local-addr localhost --nproc-per-node {world_size} --redirects 3".split()
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--log-dir", str(directory.logs)]
        command += ["-m", "shardgauge.worker", str(directory.root), *self.worker_arguments]
        directory.logs.mkdir()
        with directory.launcher_log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory.root,  # `-m` puts the working directory first on sys.path: nothing there shadows a module
                env=rank_environment(os.environ, directory=directory, extra=self.environment),
                start_new_session=True,
            )
        return TorchrunLaunch(process, directory)


class TorchrunLaunch:
    """A running torchrun; see `Launch`."""

    def __init__(self, process: subprocess.Popen[bytes], directory: SessionDir) -> None:
        self._process = process
        self._directory = directory

    @property
    def pid(self) -> int:
        """See `Launch.pid`."""
        return self._process.pid

    def lives(self) -> bool:
        """See `Launch.lives`."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """See `Launch.wait`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def rank_exits(self) -> Mapping[int, int]:
        """See `Launch.rank_exits`."""
        text = self._directory.launcher_log.read_text(encoding="utf-8", errors="replace")
        return {int(rank): int(code) for rank, code in _RANK_EXIT.findall(text)}

    def rank_log(self, rank: int) -> Path | None:
        """See `Launch.rank_log`."""
        return next(self._directory.logs.glob(f"*/attempt_0/{rank}/stderr.log"), None)

    def import_fault(self) -> str | None:
        """See `Launch.import_fault`."""
        if any(self._directory.logs.glob("*/attempt_0/*")):
            return None
        text = self._directory.launcher_log.read_text(encoding="utf-8", errors="replace")
        faults = _IMPORT_FAULT.findall(text)
        if not faults or "torch" not in text:
            return None
        kind, message = faults[-1]
        return f"importing torch raised {kind}: {message}"


def rank_environment(outer: Mapping[str, str], *, directory: SessionDir, extra: Mapping[str, str]) -> dict[str, str]:
    """The ranks' environment: ours without what an outer launch left in it, one thread a rank, `extra` on top."""
    kept = {name: value for name, value in outer.items() if not _OUTER_LAUNCH.fullmatch(name)}
    forced = {
        **dict.fromkeys(_ONE_THREAD, "1"),
        "PYTHONPATH": _python_path(outer.get("PYTHONPATH", ""), extra.get("PYTHONPATH", "")),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # A rank imports its device's package itself and says what failed, and a broken one does not stop the launcher.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        SESSION_MARK: str(directory.root),
    }
    return {**_loopback(), **kept, **extra, **forced}


def _python_path(outer: str, extra: str) -> str:
    """Absolute entries, since the ranks run elsewhere; the package's own root if only a path led us to it."""
    entries = [str(Path(entry).resolve()) for entry in (extra + os.pathsep + outer).split(os.pathsep) if entry]
    root = str(Path(shardgauge.__file__).parents[1])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        entries.append(root)
    return os.pathsep.join(entries)


def _loopback() -> dict[str, str]:
    """One node's ranks meet on the loopback interface, whatever the host name resolves to."""
    names = {name for _, name in socket.if_nameindex()}
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in names), {})
