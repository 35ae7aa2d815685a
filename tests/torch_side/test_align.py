"""Alignment data: the same bits everywhere, made once, and refused before any training if it is not what it must be."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from shardgauge.errors import AlignDataError
from shardgauge.presets import PRESETS, find_preset
from shardgauge.worker import align, align_store, align_values
from shardgauge.worker.align_manifest import FILE_NAMES, AlignDir, read_manifest
from shardgauge.worker.align_memory import MemoryPeaks, watch_memory

COMMITTED = Path(__file__).parents[2] / "align_data_8b"
NANO = find_preset("qwen3-nano")
WQ = "layers.0.attention.wq.weight"


@pytest.fixture
def align_dir(tmp_path: Path) -> Path:
    """A directory with the committed manifest and no data."""
    shutil.copy(COMMITTED / "manifest.json", tmp_path)
    return tmp_path


@pytest.fixture
def weights(align_dir: Path) -> Path:
    """The weights file of freshly made nano data."""
    return align.ensure_align_data(align_dir, NANO, make_small=True).weights


def resave(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write a data file anew after a change to its tensors."""
    tensors = {name: tensor.clone() for name, tensor in align.load_weights(path).items()}
    change(tensors)
    torch.save(tensors, path)


def flip_one_bit(path: Path, tensor: str) -> None:
    """Change the lowest bit of the middle value of `tensor`, in place, as a bad disk would."""
    content = bytearray(path.read_bytes())
    values = align.load_weights(path)[tensor].numpy().tobytes()
    content[content.index(values) + len(values) // 2] ^= 1
    path.write_bytes(content)


def fail_with(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises `error` whatever it is given."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor that is hashed from now on."""
    hashed: list[torch.Tensor] = []

    def describe(tensor: torch.Tensor) -> Any:
        hashed.append(tensor)
        return align_store.describe_tensor(tensor)

    monkeypatch.setattr(align, "describe_tensor", describe)
    return hashed


def test_weights_have_the_published_bits() -> None:
    """The recipe, pinned: PCG64's raw stream, centred sums of 16-bit halves, one fp32 multiplication."""
    weight = np.zeros((2, 4), np.float32)
    align_values.fill_weight(weight, name=WQ, seed=42)
    assert [float(value).hex() for value in weight.ravel()] == [
        "-0x1.79e8440000000p-7",
        "-0x1.547aa40000000p-9",
        "0x1.b9e3500000000p-10",
        "0x1.5abff00000000p-9",
        "-0x1.23e1960000000p-8",
        "-0x1.0cec620000000p-5",
        "0x1.7035120000000p-10",
        "-0x1.9dc16c0000000p-6",
    ]


def test_tokens_have_the_published_values() -> None:
    """The recipe, pinned: products of four 16-bit quarters of PCG64's raw words."""
    tokens = np.zeros(8, np.int64)
    align_values.fill_tokens(tokens, vocab_size=151936, seed=42)
    assert tokens.tolist() == [416, 11985, 8418, 8122, 3014, 27812, 500, 7279]


@pytest.mark.parametrize("shape", [(37, 41), (64, 64)], ids=["odd", "even"])
def test_values_do_not_depend_on_the_chunk(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that takes many draws has the values that one draw gives."""
    whole, parts = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    align_values.fill_weight(whole, name=WQ, seed=42)
    monkeypatch.setattr(align_values, "_CHUNK", 64)
    align_values.fill_weight(parts, name=WQ, seed=42)
    assert np.array_equal(whole, parts)


def test_weights_are_a_centred_triangle_of_std_002() -> None:
    """Mean 0 and std 0.02 within sampling error, bounds of sqrt(6) std, no two streams alike, norms one."""
    values = {}
    for name, seed in ((WQ, 42), (WQ, 43), ("lm_head.weight", 42)):
        values[name, seed] = np.zeros((1024, 1024), np.float32)
        align_values.fill_weight(values[name, seed], name=name, seed=seed)
        assert abs(values[name, seed].mean()) < 4 * 0.02 / 1024
        assert values[name, seed].std() == pytest.approx(0.02, rel=4e-3)
        assert 0.048 < np.abs(values[name, seed]).max() <= 0.02 * math.sqrt(6) * (1 + 1e-6)
    flat = [value.ravel() for value in values.values()]
    assert np.abs(np.corrcoef(flat) - np.eye(3)).max() < 0.005
    norm = np.zeros(128, np.float32)
    align_values.fill_weight(norm, name="norm.weight", seed=42)
    assert (norm == 1).all()


@pytest.mark.parametrize("vocab_size", [2, 512, 151936])
def test_tokens_are_skewed_and_below_the_vocabulary(vocab_size: int) -> None:
    """No token reaches the vocabulary's size, and the lower half of it takes 99 % of the tokens."""
    tokens = np.zeros(200_000, np.int64)
    align_values.fill_tokens(tokens, vocab_size=vocab_size, seed=42)
    assert tokens.min() == 0
    assert tokens.max() < vocab_size
    assert (tokens < vocab_size // 2).mean() == pytest.approx(0.994, abs=0.003)


def test_fresh_nano_data_is_what_the_manifest_says(align_dir: Path) -> None:
    """First use makes the data of a small preset, shaped for training, and leaves no partial file."""
    files = align.ensure_align_data(align_dir, NANO, make_small=True)
    assert len(align.load_weights(files.weights)) == 91
    tokens = align.load_tokens(files.batches)
    assert tokens.dtype == torch.int64
    assert tuple(tokens.shape) == (32, 8, 1, 65)
    assert list(align_dir.rglob("*.partial")) == []
    assert align.verify_align_data(align_dir, NANO) == files


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_committed_manifest_describes_every_preset(name: str) -> None:
    """The manifest has the shapes that the presets have now."""
    assert read_manifest(AlignDir(COMMITTED, find_preset(name))).seed == 42


def test_writing_the_manifest_reproduces_the_committed_one(align_dir: Path) -> None:
    """`--write-manifest` gives the committed file, byte for byte, other presets' entries included."""
    committed = (align_dir / "manifest.json").read_text()
    manifest = json.loads(committed)
    manifest["presets"]["qwen3-nano"] = {}
    (align_dir / "manifest.json").write_text(json.dumps(manifest))
    assert align.main(["--preset", "qwen3-nano", "--dir", str(align_dir), "--write-manifest"]) == 0
    assert (align_dir / "manifest.json").read_text() == committed
    assert align.main(["--preset", "qwen3-nano", "--dir", str(align_dir)]) == 0


def test_loading_copies_nothing_and_writing_changes_no_file(weights: Path) -> None:
    """Weights are mapped privately: what a process does to them stays in it."""
    align.load_weights(weights)[WQ].fill_(7)
    align.verify_align_data(weights.parents[1], NANO)
    assert not (align.load_weights(weights)[WQ] == 7).any()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, 4_000_000), "is truncated or damaged"),
    "empty": (lambda path: os.truncate(path, 0), "is truncated or damaged"),
    "not-torch": (lambda path: path.write_text("weights"), "is truncated or damaged"),
    "one-bit": (lambda path: flip_one_bit(path, WQ), f"{WQ} has the SHA-256 "),
    "one-value": (lambda path: resave(path, lambda t: t[WQ].view(-1)[5].mul_(2)), f"{WQ} has the SHA-256 "),
    "lacks-tensor": (lambda path: resave(path, lambda t: t.pop(WQ)), f"lacks the tensor {WQ}"),
    "extra-tensor": (
        lambda path: resave(path, lambda t: t.update(bias=torch.zeros(1))),
        "has a tensor bias, which does not belong there",
    ),
    "other-shape": (
        lambda path: resave(path, lambda t: t.update({WQ: t[WQ].view(64, 256)})),
        rf"{WQ} is float32 \(64, 256\), expected float32 \(128, 128\)",
    ),
    "other-dtype": (
        lambda path: resave(path, lambda t: t.update({WQ: t[WQ].bfloat16()})),
        rf"{WQ} is bfloat16 \(128, 128\), expected float32 \(128, 128\)",
    ),
    "not-tensors": (lambda path: torch.save({"a": 1}, path), "not a dictionary of tensors"),
    "not-a-dictionary": (lambda path: torch.save(torch.zeros(3), path), "holds a Tensor, not a dictionary of tensors"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_data_is_refused_and_remade_by_the_command(
    weights: Path, damage: Callable[[Path], object], says: str
) -> None:
    """Use refuses the file, naming file, fault and command, and leaves it alone; the command makes it good again."""
    damage(weights)
    damaged = weights.read_bytes()
    command = f"python -m shardgauge.worker.align --preset qwen3-nano --dir {weights.parents[1]}"
    with pytest.raises(AlignDataError, match=f"init_weights.pt.*{says}.*Make it anew with: {command}"):
        align.ensure_align_data(weights.parents[1], NANO, make_small=True)
    assert weights.read_bytes() == damaged
    assert align.main(["--preset", "qwen3-nano", "--dir", str(weights.parents[1])]) == 0
    align.verify_align_data(weights.parents[1], NANO)


def test_damaged_batches_are_refused(weights: Path) -> None:
    """The batches are checked as the weights are."""
    flip_one_bit(weights.with_name("preset_batches.pt"), "tokens")
    with pytest.raises(AlignDataError, match=r"preset_batches.pt: tokens has the SHA-256 .*, expected "):
        align.verify_align_data(weights.parents[1], NANO)


def test_data_of_another_preset_is_refused(weights: Path) -> None:
    """Nano's files in the large preset's folder do not pass for its data."""
    shutil.copytree(weights.parent, weights.parents[1] / "qwen3-8b-lite")
    with pytest.raises(AlignDataError, match=r"tok_embeddings.weight is float32 \(512, 128\), expected float32 \(1519"):
        align.verify_align_data(weights.parents[1], find_preset("qwen3-8b-lite"))


def test_missing_large_data_is_not_made_on_use(align_dir: Path) -> None:
    """A preset of gigabytes is made by the command only, which the error names with the size."""
    says = r"init_weights.pt is missing. Make it \(11152941056 bytes\) with: python -m shardgauge.worker.align --preset"
    with pytest.raises(AlignDataError, match=says):
        align.ensure_align_data(align_dir, find_preset("qwen3-8b-lite"), make_small=True)
    assert not (align_dir / "qwen3-8b-lite").exists()


def test_missing_small_data_is_an_error_where_nothing_may_be_made(align_dir: Path) -> None:
    """Verifying makes nothing."""
    with pytest.raises(AlignDataError, match=r"init_weights.pt is missing"):
        align.verify_align_data(align_dir, NANO)


def test_one_missing_file_is_made_and_the_other_kept(weights: Path) -> None:
    """Only what is missing is made."""
    inode = weights.stat().st_ino
    weights.with_name("preset_batches.pt").unlink()
    align.ensure_align_data(weights.parents[1], NANO, make_small=True)
    assert weights.stat().st_ino == inode


MANIFEST_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no-preset": (lambda m: m["presets"].pop("qwen3-nano"), r"no checksums of qwen3-nano \(it has: qwen3-8b-lite\)"),
    "later-version": (lambda m: m.update(format_version=2), r"no manifest of version 1.*format_version"),
    "unknown-key": (lambda m: m.update(comment="x"), r"no manifest of version 1.*comment"),
    "bad-checksum": (
        lambda m: m["presets"]["qwen3-nano"]["init_weights.pt"][WQ].update(sha256="x"),
        r"no manifest of version 1.*sha256",
    ),
    "no-file": (
        lambda m: m["presets"]["qwen3-nano"].pop("preset_batches.pt"),
        r"tokens in preset_batches.pt has the shape None there, \(32, 8, 1, 65\) in the preset",
    ),
}


@pytest.mark.parametrize(("change", "says"), MANIFEST_FAULTS.values(), ids=MANIFEST_FAULTS)
def test_faulty_manifest_is_refused(align_dir: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    """Data is never made or used by a manifest that is malformed or incomplete."""
    manifest = json.loads((align_dir / "manifest.json").read_text())
    change(manifest)
    (align_dir / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(AlignDataError, match=says):
        align.ensure_align_data(align_dir, NANO, make_small=True)


def test_missing_manifest_is_refused(tmp_path: Path) -> None:
    """Without a manifest nothing is made, because nothing could be checked."""
    with pytest.raises(AlignDataError, match=r"no manifest .*manifest.json"):
        align.ensure_align_data(tmp_path, NANO, make_small=True)
    assert list(tmp_path.iterdir()) == []


def test_manifest_of_other_sizes_is_refused(align_dir: Path) -> None:
    """A preset whose sizes were changed does not train on data of the old ones."""
    wider = NANO.model_copy(update={"dim": 256})
    with pytest.raises(
        AlignDataError, match=r"tok_embeddings.weight .* has the shape \(512, 128\) there, \(512, 256\)"
    ):
        align.ensure_align_data(align_dir, wider, make_small=True)


def test_checked_data_is_not_hashed_again(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamp of an unchanged file stands for its check."""
    hashed = count_hashes(monkeypatch)
    align.verify_align_data(weights.parents[1], NANO)
    assert hashed == []


def replace_by_copy(path: Path) -> None:
    """Put another file in the place of `path`, with the same size and time of change."""
    status = path.stat()
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


def write_and_turn_back_the_clock(path: Path) -> None:
    """Change the content in place and restore size and time of modification, as a careless copy tool may."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_expectation(path: Path) -> None:
    """Let the stamp be of a check against another manifest."""
    stamp = path.with_name("init_weights.pt.verified.json")
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"expected_digest": "0" * 64}))


INVALIDATIONS: dict[str, Callable[[Path], object]] = {
    "touched": lambda path: os.utime(path, ns=(1, 1)),
    "replaced": replace_by_copy,
    "other-manifest": change_expectation,
    "damaged-stamp": lambda path: path.with_name("init_weights.pt.verified.json").write_text("{"),
    "no-stamp": lambda path: path.with_name("init_weights.pt.verified.json").unlink(),
}


@pytest.mark.parametrize("invalidate", INVALIDATIONS.values(), ids=INVALIDATIONS)
def test_stamp_of_something_else_is_no_check(
    weights: Path, invalidate: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any change to the file or to what is expected of it makes it be hashed anew, and only that file."""
    hashed = count_hashes(monkeypatch)
    invalidate(weights)
    align.verify_align_data(weights.parents[1], NANO)
    assert len(hashed) == 91


def test_a_clock_turned_back_hides_no_change(weights: Path) -> None:
    """A byte changed in place is found although size, modification time and inode are those of the check."""
    write_and_turn_back_the_clock(weights)
    with pytest.raises(AlignDataError, match=r"init_weights\.pt.*Make it anew"):
        align.verify_align_data(weights.parents[1], NANO)


def test_stamp_outlives_changes_to_other_presets(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new checksum elsewhere in the manifest does not cost a check here."""
    manifest = weights.parents[1] / "manifest.json"
    content = json.loads(manifest.read_text())
    content["presets"].pop("qwen3-8b-lite")
    manifest.write_text(json.dumps(content))
    hashed = count_hashes(monkeypatch)
    align.verify_align_data(weights.parents[1], NANO)
    assert hashed == []


def test_data_in_an_unwritable_directory_is_checked_without_a_trace(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared read-only data needs no lock and gets no stamp, and is checked by each process."""
    for trace in (".lock", *(f"{name}.verified.json" for name in FILE_NAMES)):
        weights.with_name(trace).unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    hashed = count_hashes(monkeypatch)
    align.verify_align_data(weights.parents[1], NANO)
    assert len(hashed) == 92
    assert sorted(path.name for path in weights.parent.iterdir()) == sorted(FILE_NAMES)


NO_SPACE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "known-before": lambda patch: patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1)),
    "while-reserving": lambda patch: patch.setattr(
        os, "posix_fallocate", fail_with(OSError(errno.ENOSPC, "No space left on device"))
    ),
    "while-laying-out": lambda patch: patch.setattr(torch, "save", fail_with(RuntimeError("No space left on device"))),
    "while-flushing": lambda patch: patch.setattr(
        os, "fsync", fail_with(OSError(errno.EDQUOT, "No space left on device"))
    ),
}


@pytest.mark.parametrize("fill_disk", NO_SPACE.values(), ids=NO_SPACE)
def test_full_disk_is_told_with_needed_and_free_bytes(
    align_dir: Path, fill_disk: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up is an error of ours that says how much is needed, and leaves nothing behind."""
    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(AlignDataError, match=r"No space left on device. It needs \d{7} bytes, \d+ are free"):
            align.ensure_align_data(align_dir, NANO, make_small=True)
    assert [path.name for path in (align_dir / "qwen3-nano").iterdir()] in ([], [".lock"])
    align.ensure_align_data(align_dir, NANO, make_small=True)


def test_interrupted_making_leaves_no_partial_file(align_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a file is filled removes what there is of it and is not mistaken for a full disk."""
    monkeypatch.setattr(align_store, "fill_weight", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        align.ensure_align_data(align_dir, NANO, make_small=True)
    assert list(align_dir.rglob("*.pt*")) == []


def test_data_that_comes_out_differently_never_replaces_what_is_there(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this machine makes other bits than the manifest's, that is said, and the old file stays."""
    flip_one_bit(weights, WQ)
    before = weights.read_bytes()
    monkeypatch.setattr(align_values, "_STEP", np.float32(1e-7))
    assert align.main(["--preset", "qwen3-nano", "--dir", str(weights.parents[1])]) == 2
    assert "what is made here differs from" in capsys.readouterr().err
    assert weights.read_bytes() == before
    assert list(weights.parent.glob("*.partial")) == []


def test_making_holds_no_model_in_memory(tmp_path: Path) -> None:
    """A file of 200 MB is made within 64 MB of anonymous memory: a model of any size can be made on any machine."""
    preset = NANO.model_copy(update={"name": "wide", "vocab_size": 200_000})
    paths = AlignDir(tmp_path, preset)
    paths.folder.mkdir()
    before = MemoryPeaks()
    before.sample()
    with watch_memory() as peaks:
        align_store.make_file(paths, "init_weights.pt", seed=42)
        for weight in align_store.load_weights(paths.partial("init_weights.pt")).values():
            align_store.describe_tensor(weight)
    assert paths.partial("init_weights.pt").stat().st_size > 200_000_000
    assert peaks.anonymous_bytes - before.anonymous_bytes < 64 << 20


def test_torch_without_skip_data_makes_small_data_too(align_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older torch takes the way through memory, to the same content."""
    monkeypatch.delattr(torch.serialization, "skip_data")
    align.ensure_align_data(align_dir, NANO, make_small=True)


def test_torch_without_skip_data_refuses_a_large_model(align_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which torch can make it, rather than take 11 GB of memory."""
    monkeypatch.delattr(torch.serialization, "skip_data")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    with pytest.raises(AlignDataError, match=r"has no torch.serialization.skip_data, .* 11152941056 bytes of memory"):
        align.make_align_data(align_dir, find_preset("qwen3-8b-lite"))


COUNTING_MAKER = """
import sys
from pathlib import Path
from shardgauge.presets import find_preset
from shardgauge.worker import align

make_file = align.make_file

def make_and_tell(paths, name, *, seed):
    print("made", name)
    make_file(paths, name, seed=seed)

align.make_file = make_and_tell
print("ready", flush=True)
sys.stdin.readline()
align.ensure_align_data(Path(sys.argv[1]), find_preset("qwen3-nano"), make_small=True)
"""


def test_many_processes_make_the_data_once(align_dir: Path) -> None:
    """Processes that find no data at the same moment all get it, and one of them makes each file."""
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", COUNTING_MAKER, str(align_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for maker in makers:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "ready\n"
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write("go\n")
        maker.stdin.flush()
    outputs = [maker.communicate(timeout=120)[0] for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0, 0]
    assert sorted("".join(outputs).splitlines()) == ["made init_weights.pt", "made preset_batches.pt"]


def test_mistakes_on_the_command_line_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a message without a traceback."""
    assert align.main(["--preset", "qwen3-9b", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "unknown preset 'qwen3-9b'; known presets: qwen3-8b-lite, qwen3-nano\n"
    assert align.main(["--preset", "qwen3-nano", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"no manifest {tmp_path}/manifest.json")
    with pytest.raises(SystemExit, match="2"):
        align.main(["--preset", "qwen3-nano", "--dir", str(tmp_path), "--shards", "0"])


def test_shard_load_is_measured(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The public figure: what one of n ranks loads, how long it takes, and in how much memory."""
    assert align.main(["--preset", "qwen3-nano", "--dir", str(weights.parents[1]), "--measure-shard-load"]) == 0
    assert "shard 1 of 8: 1 MiB of 91 tensors loaded in " in capsys.readouterr().out
