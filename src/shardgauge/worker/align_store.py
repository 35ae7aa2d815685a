"""The data files: written without holding a model in memory, read through a memory map, described by their content."""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from shardgauge.errors import AlignDataError
from shardgauge.presets import Preset
from shardgauge.worker.align_manifest import AlignDir, FileName, TensorRecord, expected_shapes
from shardgauge.worker.align_values import fill_tokens, fill_weight

DTYPES: Mapping[FileName, torch.dtype] = {"init_weights.pt": torch.float32, "preset_batches.pt": torch.int64}

_IN_MEMORY_LIMIT_BYTES = 2 << 30
_CONTAINER_BYTES = 1 << 20  # more than the container's own records ever take
_HASH_CHUNK = 1 << 22


def load_weights(path: Path) -> Mapping[str, torch.Tensor]:
    """Full fp32 weights by name, memory-mapped: a rank that copies its shard reads no more than that from disk.

    Writing to them changes this process's copy only, never the file.

    Raises:
        AlignDataError: the file is missing or cannot be read as a dictionary of tensors.
    """
    if not path.is_file():
        raise AlignDataError(f"{path} is missing")
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    # A damaged pickle can raise anything; whatever it was is the cause of the error that the user reads.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AlignDataError(f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise AlignDataError(f"{path} holds a {type(tensors).__name__}, not a dictionary of tensors")
    return tensors


def load_tokens(path: Path) -> torch.Tensor:
    """int64 tokens [step, rank, batch, seq_len + 1]; position i is the input whose target is position i + 1.

    Raises:
        AlignDataError: the file is missing, damaged, or holds no tensor called tokens.
    """
    tensors = load_weights(path)
    if "tokens" not in tensors:
        raise AlignDataError(f"{path} holds {', '.join(tensors) or 'nothing'}, not tokens")
    return tensors["tokens"]


def describe_tensor(tensor: torch.Tensor) -> TensorRecord:
    """What the manifest says about a tensor. Memory beyond it stays under 50 MB."""
    flat = tensor.detach().contiguous().view(-1).numpy()
    little_endian = flat.dtype.newbyteorder("<")
    digest = hashlib.sha256()
    for start in range(0, flat.size, _HASH_CHUNK):
        digest.update(flat[start : start + _HASH_CHUNK].astype(little_endian, copy=False).view(np.uint8).data)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord.model_validate({"dtype": dtype, "shape": tuple(tensor.shape), "sha256": digest.hexdigest()})


def make_file(paths: AlignDir, name: FileName, *, seed: int) -> None:
    """Make a data file under its partial name. The caller holds the lock, and renames what it finds good.

    Raises:
        AlignDataError: the disk is full or cannot be written to, or this torch cannot make a file of that size. No
            partial file is left.
    """
    path = paths.partial(name)
    needed_bytes = _CONTAINER_BYTES + content_bytes(paths, name)
    try:
        path.unlink(missing_ok=True)  # left by a maker that was killed; its blocks count as free
        free_bytes = shutil.disk_usage(paths.folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _lay_out(path, paths, name, seed=seed)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        # torch words a failed write as RuntimeError.
        if isinstance(error, (OSError, RuntimeError)):
            raise AlignDataError(
                f"cannot make {paths.file(name)}: {error}. It needs {needed_bytes} bytes, "
                f"{shutil.disk_usage(paths.root).free} are free; free some, or choose another directory with --dir"
            ) from error
        raise


def content_bytes(paths: AlignDir, name: FileName) -> int:
    """Size of all tensors of a data file."""
    return sum(math.prod(shape) * DTYPES[name].itemsize for shape in expected_shapes(paths.preset, name).values())


def _lay_out(path: Path, paths: AlignDir, name: FileName, *, seed: int) -> None:
    """Write the file: the container first, then each tensor's values into it through a shared memory map."""
    # Never touched, so these take address space and no memory.
    tensors = {
        key: torch.empty(shape, dtype=DTYPES[name], device="cpu")
        for key, shape in expected_shapes(paths.preset, name).items()
    }
    if not hasattr(torch.serialization, "skip_data"):
        _save_from_memory(path, tensors, paths, seed=seed)
        return
    with torch.serialization.skip_data():
        torch.save(tensors, path)
    del tensors
    with path.open("rb+") as file:
        # torch leaves holes. A full disk must be an error here, not a SIGBUS when a hole is written to through the map.
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = load_weights(path)
    _fill(mapped, paths.preset, seed=seed)


def _save_from_memory(path: Path, tensors: Mapping[str, torch.Tensor], paths: AlignDir, *, seed: int) -> None:
    """The way of a torch without `skip_data`, for what fits in memory."""
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if total_bytes > _IN_MEMORY_LIMIT_BYTES:
        raise AlignDataError(
            f"torch {torch.__version__} has no torch.serialization.skip_data, without which {path.name} would take "
            f"{total_bytes} bytes of memory. Make it with torch 2.6 or newer (on any machine: {paths.make_command}) "
            f"and copy {paths.folder} here"
        )
    _fill(tensors, paths.preset, seed=seed)
    torch.save(tensors, path)


def _fill(tensors: Mapping[str, torch.Tensor], preset: Preset, *, seed: int) -> None:
    """Give every tensor its values, in place."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int64:
            fill_tokens(tensor.numpy(), vocab_size=preset.vocab_size, seed=seed)
        else:
            fill_weight(tensor.numpy(), name=name, seed=seed)
