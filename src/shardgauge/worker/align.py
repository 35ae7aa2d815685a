"""Alignment data: the initial weights and batches that every run of a preset shares, made once, checked before use.

`python -m shardgauge.worker.align --preset NAME --dir DIR` makes what is missing or wrong, and checks it against the
manifest. Training only reads: it makes the data of a small preset on first use, and of a large one it says how.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from shardgauge.errors import AlignDataError, ShardgaugeError
from shardgauge.presets import PRESETS, Preset, find_preset
from shardgauge.worker.align_manifest import (
    FILE_NAMES,
    AlignDir,
    FileName,
    Manifest,
    TensorRecord,
    is_stamped,
    load_manifest,
    read_manifest,
    write_manifest,
    write_stamp,
)
from shardgauge.worker.align_memory import measure_shard_load, watch_memory
from shardgauge.worker.align_store import content_bytes, describe_tensor, load_tokens, load_weights, make_file

__all__ = [
    "AlignFiles",
    "ensure_align_data",
    "load_tokens",
    "load_weights",
    "main",
    "make_align_data",
    "rewrite_manifest",
    "verify_align_data",
]

SEED = 42
_SMALL_BYTES = 256 << 20
_LOCK_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class AlignFiles:
    """One preset's data files, checked."""

    weights: Path
    batches: Path


def ensure_align_data(align_dir: Path, preset: Preset, *, make_small: bool) -> AlignFiles:
    """Check the preset's data, once for each version of a file; first make it if it is missing and small.

    Safe to call from many processes at once: one makes and checks, the others wait and then find its stamp.

    Args:
        align_dir: holds manifest.json; the data is in a folder of it named after the preset.
        preset: whose data.
        make_small: make missing data of up to 256 MiB. Wrong data is never replaced here.

    Raises:
        AlignDataError: there is no manifest for the preset, or data is missing, truncated or differs from the
            manifest; the message names the file, the tensor, and the command that makes it anew.
    """
    paths = AlignDir(align_dir, preset)
    manifest = read_manifest(paths)
    if not all(is_stamped(paths, manifest, name) for name in FILE_NAMES):
        missing = [name for name in FILE_NAMES if not paths.file(name).is_file()]
        small = sum(content_bytes(paths, name) for name in FILE_NAMES) <= _SMALL_BYTES
        if missing and not (make_small and small):
            raise AlignDataError(
                f"{paths.file(missing[0])} is missing. Make it ({content_bytes(paths, missing[0])} bytes) with: "
                f"{paths.make_command}"
            )
        with _hold_lock(paths):
            for name in FILE_NAMES:
                if not paths.file(name).is_file():
                    _make_anew(paths, manifest, name)
                else:
                    _verify_or_advise(paths, manifest, name)
    return AlignFiles(weights=paths.file("init_weights.pt"), batches=paths.file("preset_batches.pt"))


def verify_align_data(align_dir: Path, preset: Preset) -> AlignFiles:
    """Check the preset's data and make nothing; raises as `ensure_align_data` does."""
    return ensure_align_data(align_dir, preset, make_small=False)


def make_align_data(align_dir: Path, preset: Preset) -> tuple[str, ...]:
    """Make what is missing or differs from the manifest, check everything, and say in a line a file what was done.

    Raises:
        AlignDataError: there is no manifest for the preset, the disk is full, or what was made here differs from the
            manifest; a file that was there is then left as it was.
    """
    paths = AlignDir(align_dir, preset)
    manifest = read_manifest(paths)
    done = []
    with _hold_lock(paths):
        for name in FILE_NAMES:
            try:
                _verify_file(paths, manifest, name)
                done.append(f"{paths.file(name)}: already as the manifest says")
            except AlignDataError as fault:
                _make_anew(paths, manifest, name)
                done.append(
                    f"{paths.file(name)}: made and checked, {content_bytes(paths, name)} bytes. Before: {fault}"
                )
    return tuple(done)


def rewrite_manifest(align_dir: Path, preset: Preset) -> tuple[str, ...]:
    """Make the preset's data and write its checksums into the manifest: for a preset that is new or has changed.

    Raises:
        AlignDataError: the disk is full, or the manifest that is there cannot be read.
    """
    paths = AlignDir(align_dir, preset)
    with _hold_lock(paths):
        manifest = load_manifest(paths) if paths.manifest.is_file() else Manifest(seed=SEED, presets={})
        records = {}
        for name in FILE_NAMES:
            make_file(paths, name, seed=manifest.seed)
            tensors = load_weights(paths.partial(name))
            records[name] = {key: describe_tensor(tensor) for key, tensor in tensors.items()}
        manifest = manifest.model_copy(update={"presets": {**manifest.presets, preset.name: records}})
        write_manifest(paths, manifest)
        for name in FILE_NAMES:
            paths.partial(name).replace(paths.file(name))
            write_stamp(paths, manifest, name)
    return (
        f"{paths.manifest}: checksums of {preset.name} written",
        *(f"{paths.file(name)}: made" for name in FILE_NAMES),
    )


@contextmanager
def _hold_lock(paths: AlignDir) -> Iterator[None]:
    """Be the only process that makes or checks this data. A directory that nobody can write to needs no lock."""
    try:
        paths.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(paths.folder, os.W_OK):
            yield
            return
        with filelock.FileLock(paths.lock, timeout=_LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise AlignDataError(
            f"another process has held {paths.lock} for {_LOCK_TIMEOUT_S:.0f} s, longer than making or checking "
            f"{paths.preset.name} takes; see what holds it with: fuser -v {paths.lock}"
        ) from error
    except OSError as error:
        raise AlignDataError(f"cannot work in {paths.folder}: {error}; choose another directory with --dir") from error


def _make_anew(paths: AlignDir, manifest: Manifest, name: FileName) -> None:
    """Make a file, check it, and only then put it in the place of the one that may be there."""
    partial = paths.partial(name)
    make_file(paths, name, seed=manifest.seed)
    try:
        _check_content(partial, manifest.presets[paths.preset.name][name])
        partial.replace(paths.file(name))
    except AlignDataError as fault:
        raise AlignDataError(
            f"what is made here differs from {paths.manifest}, so {paths.file(name)} was not written: {fault}. "
            f"If the preset or the recipe was changed on purpose: {paths.make_command} --write-manifest"
        ) from fault
    finally:
        partial.unlink(missing_ok=True)
    write_stamp(paths, manifest, name)


def _verify_or_advise(paths: AlignDir, manifest: Manifest, name: FileName) -> None:
    """Check a file; the error ends with the command that makes it anew."""
    try:
        _verify_file(paths, manifest, name)
    except AlignDataError as fault:
        raise AlignDataError(f"{fault} (by {paths.manifest}). Make it anew with: {paths.make_command}") from fault


def _verify_file(paths: AlignDir, manifest: Manifest, name: FileName) -> None:
    """Check a file against the manifest, unless its stamp says that this was done."""
    if not is_stamped(paths, manifest, name):
        _check_content(paths.file(name), manifest.presets[paths.preset.name][name])
        write_stamp(paths, manifest, name)


def _check_content(path: Path, expected: Mapping[str, TensorRecord]) -> None:
    """Compare names, dtypes, shapes and checksums of a file's tensors, and name the first that differs."""
    tensors = load_weights(path)
    for name in dict.fromkeys((*expected, *tensors)):
        if name not in tensors:
            raise AlignDataError(f"{path} lacks the tensor {name}")
        if name not in expected:
            raise AlignDataError(f"{path} has a tensor {name}, which does not belong there")
        shape, dtype = tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch.")
        if (dtype, shape) != (expected[name].dtype, expected[name].shape):
            raise AlignDataError(
                f"{path}: {name} is {dtype} {shape}, expected {expected[name].dtype} {expected[name].shape}"
            )
        if (found := describe_tensor(tensors[name]).sha256) != expected[name].sha256:
            raise AlignDataError(f"{path}: {name} has the SHA-256 {found}, expected {expected[name].sha256}")


def main(arguments: Sequence[str]) -> int:
    """The command line. Returns 0, or 2 after an error that the user can mend, printed without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m shardgauge.worker.align", description=__doc__)
    parser.add_argument("--preset", required=True, help=f"one of {', '.join(sorted(PRESETS))}")
    parser.add_argument("--dir", type=Path, default=Path("align_data_8b"), help="holds manifest.json (%(default)s)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write-manifest", action="store_true", help="make the data, write its checksums down")
    action.add_argument("--measure-shard-load", action="store_true", help="load one rank's shard, say what it costs")
    parser.add_argument("--shards", type=int, default=8, help="ranks to shard over when measuring (%(default)s)")
    options = parser.parse_args(arguments)
    if options.shards < 1:
        parser.error(f"--shards must be 1 or more, not {options.shards}")
    try:
        preset = find_preset(options.preset)
        if options.measure_shard_load:
            weights = verify_align_data(options.dir, preset).weights
            lines: tuple[str, ...] = (measure_shard_load(weights, shards=options.shards),)
        else:
            act = rewrite_manifest if options.write_manifest else make_align_data
            start = time.perf_counter()
            with watch_memory() as peaks:
                lines = act(options.dir, preset)
            lines = (*lines, f"{time.perf_counter() - start:.1f} s, {peaks.describe()}")
    except ShardgaugeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
