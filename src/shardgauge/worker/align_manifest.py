"""What the alignment data must be: the manifest, committed beside it, and the stamps that remember a check.

Checksums are over each tensor's little-endian bytes, not over the file: torch's container differs between versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from pydantic import Field, ValidationError

from shardgauge.boundary import Boundary, explain_validation
from shardgauge.errors import AlignDataError
from shardgauge.plan import parameter_shapes
from shardgauge.presets import Preset

FORMAT_VERSION: Final = 1
FileName = Literal["init_weights.pt", "preset_batches.pt"]
FILE_NAMES: tuple[FileName, ...] = get_args(FileName)


@dataclass(frozen=True)
class AlignDir:
    """Every path of one preset's alignment data under `root`."""

    root: Path
    preset: Preset

    @property
    def manifest(self) -> Path:
        """Checksums of all presets; committed."""
        return self.root / "manifest.json"

    @property
    def folder(self) -> Path:
        """Holds the data, which is made here and never committed."""
        return self.root / self.preset.name

    @property
    def lock(self) -> Path:
        """Held by the one process that makes or checks the data."""
        return self.folder / ".lock"

    @property
    def make_command(self) -> str:
        """The command line that makes the data anew."""
        return f"python -m shardgauge.worker.align --preset {self.preset.name} --dir {self.root}"

    def file(self, name: FileName) -> Path:
        """A data file, whole whenever it exists."""
        return self.folder / name

    def partial(self, name: FileName) -> Path:
        """The data file while it is being made; only the holder of the lock touches it."""
        return self.folder / f"{name}.partial"

    def stamp(self, name: FileName) -> Path:
        """Remembers that the file was checked, and what it looked like then."""
        return self.folder / f"{name}.verified.json"


class TensorRecord(Boundary):
    """One tensor: what `torch.load` must give, and the SHA-256 of its little-endian bytes."""

    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Boundary):
    """All presets' tensors, by preset, file and name, made from one seed."""

    format_version: Literal[1] = FORMAT_VERSION
    seed: int
    presets: Mapping[str, Mapping[FileName, Mapping[str, TensorRecord]]]


class Stamp(Boundary):
    """A file that was checked and has not been written to since has these still."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    expected_digest: str


def expected_shapes(preset: Preset, name: FileName) -> Mapping[str, tuple[int, ...]]:
    """Shape of every tensor in a data file: the plan's parameters, or tokens [step, rank, batch, seq_len + 1]."""
    if name == "init_weights.pt":
        return parameter_shapes(preset)
    return {"tokens": (preset.data_steps, preset.data_ranks, preset.batch, preset.seq_len + 1)}


def load_manifest(paths: AlignDir) -> Manifest:
    """The manifest, whatever presets it describes.

    Raises:
        AlignDataError: it is missing, malformed or of another version.
    """
    if not paths.manifest.is_file():
        raise AlignDataError(
            f"no manifest {paths.manifest}: without checksums, data of {paths.preset.name} cannot be trusted. Use the "
            f"directory align_data_8b of a checkout, or write one with: {paths.make_command} --write-manifest"
        )
    try:
        return Manifest.model_validate_json(paths.manifest.read_bytes())
    except ValidationError as error:
        raise AlignDataError(
            f"{paths.manifest} is no manifest of version {FORMAT_VERSION}, the only one that this reader knows: "
            f"{explain_validation(error)}. Restore it from version control"
        ) from error


def read_manifest(paths: AlignDir) -> Manifest:
    """The manifest, complete for the preset and of its present sizes.

    Raises:
        AlignDataError: as `load_manifest`, or it does not describe the preset as it is.
    """
    manifest = load_manifest(paths)
    remake = f"Write its checksums with: {paths.make_command} --write-manifest"
    if paths.preset.name not in manifest.presets:
        known = ", ".join(sorted(manifest.presets)) or "none"
        raise AlignDataError(f"{paths.manifest} has no checksums of {paths.preset.name} (it has: {known}). {remake}")
    for name in FILE_NAMES:
        found = {tensor: record.shape for tensor, record in manifest.presets[paths.preset.name].get(name, {}).items()}
        expected = expected_shapes(paths.preset, name)
        if found != dict(expected):
            tensor = next(key for key in (*expected, *found) if found.get(key) != expected.get(key))
            raise AlignDataError(
                f"{paths.manifest} describes another {paths.preset.name}: {tensor} in {name} has the shape "
                f"{found.get(tensor)} there, {expected.get(tensor)} in the preset. {remake}"
            )
    return manifest


def write_manifest(paths: AlignDir, manifest: Manifest) -> None:
    """Write the manifest whole or not at all."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1)
    # One line a tensor, so that a diff shows which tensors changed.
    write_text_atomically(
        paths.manifest, re.sub(r"\{[^{}]*\}", lambda record: " ".join(record[0].split()), text) + "\n"
    )


def write_text_atomically(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def expected_digest(manifest: Manifest, preset: Preset, name: FileName) -> str:
    """SHA-256 of what the manifest says about one file, so that a stamp outlives changes elsewhere in it."""
    tensors = manifest.presets[preset.name][name]
    said = {tensor: record.model_dump(mode="json") for tensor, record in tensors.items()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def stamp_of(path: Path, digest: str) -> Stamp:
    """The stamp that `path`, checked against `digest`, gets as it is now."""
    status = path.stat()
    return Stamp(
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        expected_digest=digest,
    )


def is_stamped(paths: AlignDir, manifest: Manifest, name: FileName) -> bool:
    """Whether the file was checked against this manifest and is unchanged since. A malformed stamp counts as none."""
    stamp, path = paths.stamp(name), paths.file(name)
    if not stamp.is_file() or not path.is_file():
        return False
    try:
        remembered = Stamp.model_validate_json(stamp.read_bytes())
    except ValidationError:
        return False
    return remembered == stamp_of(path, expected_digest(manifest, paths.preset, name))


def write_stamp(paths: AlignDir, manifest: Manifest, name: FileName) -> None:
    """Remember that the file was checked; in a directory that cannot be written to, each process checks for itself."""
    if os.access(paths.folder, os.W_OK):
        stamp = stamp_of(paths.file(name), expected_digest(manifest, paths.preset, name))
        write_text_atomically(paths.stamp(name), stamp.model_dump_json() + "\n")
