"""The --gauge options: declared, read and checked in this one place."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

import pytest

Candidate = Literal["hyper_torch", "reference"]
Device = Literal["npu", "cuda", "cpu"]
Number = TypeVar("Number", float, "int | None")
_DEVICE_FILES: tuple[tuple[Device, str], ...] = (("npu", "davinci[0-9]*"), ("cuda", "nvidia[0-9]*"))


@dataclass(frozen=True, kw_only=True)
class GaugeOptions:
    """What the command line asks for, paths absolute and "auto" resolved.

    `world_size` None leaves it to the mesh; `hyper_source` None is the installed package; `replay` is a journal whose
    measurements stand in for new ones.
    """

    root: Path
    thresholds: Path
    results: Path
    run_dir: Path
    align_dir: Path
    replay: Path | None
    strict: bool
    candidate: Candidate
    device: Device
    hyper_source: str | None
    world_size: int | None
    budget_s: float

    def shown(self, path: Path) -> str:
        """A path as messages name it: relative to the root where it lies under it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)


def add_options(parser: pytest.Parser) -> None:
    """Declare the options; defaults under the root directory are filled in by `read_options`."""
    group = parser.getgroup("shardgauge", "published conclusions about sharded training")
    paths = {
        "--gauge-thresholds": "the claims and their limits (default: thresholds.yaml)",
        "--gauge-results": "the folder of recorded runs (default: results)",
        "--gauge-rundir": "where live runs keep journal, mailbox and logs (default: .gauge)",
        "--gauge-align-dir": "where initial weights and batches lie (default: align_data_8b)",
        "--gauge-replay": "decide live claims from this journal of an earlier run instead of measuring",
        "--gauge-hyper-src": "a hyper_parallel checkout to import the candidate from",
    }
    for name, text in paths.items():
        group.addoption(name, metavar="PATH", help=text)
    group.addoption("--gauge-strict", action="store_true", help="an inconclusive claim fails instead of being skipped")
    choices = {
        "--gauge-candidate": (("hyper_torch", "reference", "auto"), "the engine to hold against native"),
        "--gauge-device": (("npu", "cuda", "cpu", "auto"), "what live runs use"),
    }
    for name, (allowed, text) in choices.items():
        group.addoption(name, choices=allowed, default="auto", help=f"{text} (default: auto)")
    group.addoption("--gauge-world-size", type=int, metavar="N", help="ranks of a live run on a small machine")
    group.addoption(
        "--gauge-budget", type=float, default=60.0, metavar="SECONDS", help="most time to measure one comparison for"
    )


def read_options(config: pytest.Config) -> GaugeOptions:
    """The options of this run.

    Raises:
        pytest.UsageError: a number is out of range, or a path that was named is not there.
    """
    root = config.rootpath
    source = config.getoption("gauge_hyper_src")
    replay = _replay_journal(config)
    return GaugeOptions(
        root=root,
        thresholds=_named_path(config, "--gauge-thresholds") or root / "thresholds.yaml",
        results=_named_path(config, "--gauge-results") or root / "results",
        run_dir=_absolute(config, config.getoption("gauge_rundir") or str(root / ".gauge")),
        align_dir=_absolute(config, config.getoption("gauge_align_dir") or str(root / "align_data_8b")),
        replay=replay,
        strict=bool(config.getoption("gauge_strict")),
        candidate=_resolve_candidate(config.getoption("gauge_candidate"), source),
        device=_resolve_device(config.getoption("gauge_device")),
        hyper_source=None if source is None else str(_hyper_checkout(config)),
        world_size=_positive("--gauge-world-size", config.getoption("gauge_world_size")),
        budget_s=_positive("--gauge-budget", config.getoption("gauge_budget")),
    )


def is_asked_for(config: pytest.Config) -> bool:
    """Whether this run has claims to decide: a thresholds file at the root, or one named on the command line."""
    return config.getoption("gauge_thresholds") is not None or (config.rootpath / "thresholds.yaml").is_file()


def refuse_misplaced_root(config: pytest.Config) -> None:
    """Say so where pytest took the value of one of our options for its root, and so found no claims.

    pytest looks for its root before plugins declare options: in `--gauge-hyper-src PATH` it sees PATH alone.

    Raises:
        pytest.UsageError: a path option was given, and there is no thresholds file at the root.
    """
    for option in ("--gauge-hyper-src", "--gauge-replay", "--gauge-results", "--gauge-rundir", "--gauge-align-dir"):
        value = config.getoption(option.removeprefix("--").replace("-", "_"))
        if value is not None and config.inipath is None:
            raise pytest.UsageError(
                f"{option}: there is no thresholds.yaml in {config.rootpath}, which pytest took for its root; write "
                f"{option}={value} with an equals sign, or name a folder of tests (pytest tests/perf {option} {value})"
            )


def _named_path(config: pytest.Config, option: str) -> Path | None:
    named = config.getoption(option.removeprefix("--").replace("-", "_"))
    if named is None:
        return None
    path = _absolute(config, named)
    if not path.exists():
        raise pytest.UsageError(f"{option} {named}: no such file or folder (looked at {path})")
    return path


def _hyper_checkout(config: pytest.Config) -> Path:
    path = _named_path(config, "--gauge-hyper-src")
    if path is None or not (path / "hyper_parallel").is_dir():
        raise pytest.UsageError(
            f"--gauge-hyper-src {path}: not a hyper_parallel checkout, since it has no folder hyper_parallel/; give "
            "the folder that `git clone` made"
        )
    return path


def _replay_journal(config: pytest.Config) -> Path | None:
    """The journal itself, or the one in a run's folder."""
    path = _named_path(config, "--gauge-replay")
    return path / "journal.jsonl" if path is not None and path.is_dir() else path


def _absolute(config: pytest.Config, named: str) -> Path:
    return Path(config.invocation_params.dir, Path(named).expanduser()).resolve()


def _positive(option: str, number: Number) -> Number:
    if number is not None and not number > 0:
        raise pytest.UsageError(f"{option} {number}: give a number greater than 0")
    return number


def _resolve_candidate(asked: str, source: str | None) -> Candidate:
    if asked != "auto":
        return cast(Candidate, asked)
    installed = source is not None or importlib.util.find_spec("hyper_parallel") is not None
    return "hyper_torch" if installed else "reference"


def _resolve_device(asked: str) -> Device:
    if asked != "auto":
        return cast(Device, asked)
    present = (device for device, files in _DEVICE_FILES if any(Path("/dev").glob(files)))
    return next(present, "cpu")
