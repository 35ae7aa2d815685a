from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardgauge.errors import JournalWriteFailed, RecordError
from shardgauge.journal import (
    BlockEntry,
    Entry,
    FaultEntry,
    HeaderEntry,
    Journal,
    PreparedEntry,
    SessionEntry,
    VerdictEntry,
    read_journal,
)
from shardgauge.records import Block, RankBlock, StepRecord
from shardgauge.spec import Experiment

EXPERIMENT = Experiment(engine="reference")
STEP = StepRecord(step=0, duration_ns=7, loss=None, counts={"all_gather": 3}, payload_bytes={"all_gather": 9})
BLOCK = Block(
    session="s",
    arm="a",
    experiment=EXPERIMENT.digest,
    purpose="timing",
    index=0,
    ranks=(RankBlock(rank=0, steps=(STEP,), peak_memory_bytes=1),),
)
ENTRIES: tuple[Entry, ...] = (
    SessionEntry(session="s", engine="reference", device="cpu", world_size=8, environment={"torch": "2"}),
    PreparedEntry(session="s", arm="a", experiment=EXPERIMENT, digest=EXPERIMENT.digest),
    BlockEntry(block=BLOCK),
    VerdictEntry(claim="c", outcome="holds", message="m", details={"ratio": 0.5, "pairs": [1, 2]}),
    FaultEntry(session=None, error="RankDied", message="rank 3 was killed"),
)


def write(path: Path, *entries: Entry) -> Path:
    """A closed journal that holds `entries`."""
    with Journal(path) as journal:
        for entry in entries:
            journal.append(entry)
    return path


def test_every_entry_comes_back_in_order(tmp_path: Path) -> None:
    """What was appended is what is read, after a header that carries the format."""
    content = read_journal(write(tmp_path / "run" / "journal.jsonl", *ENTRIES))
    assert content.entries == (HeaderEntry(), *ENTRIES)
    assert content.cut_line is None


def test_a_line_is_readable_before_the_next_is_made(tmp_path: Path) -> None:
    """A crash right after `append` loses nothing."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for count, entry in enumerate(ENTRIES, start=1):
            journal.append(entry)
            assert read_journal(path).entries[1:] == ENTRIES[:count]


def test_equal_entries_are_equal_bytes(tmp_path: Path) -> None:
    """Two journals of the same events do not differ."""
    first, second = write(tmp_path / "1", *ENTRIES), write(tmp_path / "2", *ENTRIES)
    assert first.read_bytes() == second.read_bytes()


def test_a_journal_is_never_overwritten(tmp_path: Path) -> None:
    """A second run in the same place is told so, and the first run's journal stays."""
    path = write(tmp_path / "journal.jsonl", *ENTRIES)
    before = path.read_bytes()
    with pytest.raises(JournalWriteFailed, match="no journal could be begun there: File exists"):
        Journal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("value", [float("nan"), [float("inf")]])
def test_a_verdict_holds_finite_numbers_only(value: object) -> None:
    """NaN has no JSON, and a verdict that rests on it is none."""
    with pytest.raises(ValidationError, match="finite"):
        VerdictEntry.model_validate({"claim": "c", "outcome": "o", "message": "m", "details": {"x": value}})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.getuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)],  # noqa: S607 -- the system's own mount
            check=False,
            capture_output=True,
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a small file system takes root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)  # noqa: S607 -- as above


def fill(journal: Journal, entry: Entry) -> None:
    """Append until the disk is full."""
    for _ in range(20):
        journal.append(entry)


def test_a_full_disk_cuts_back_to_the_last_whole_line(small_disk: Path) -> None:
    """The error counts the intact lines, exactly those can be read, and with room again the journal goes on."""
    path, ballast = small_disk / "journal.jsonl", small_disk / "ballast"
    ballast.write_bytes(bytes(32 << 10))
    long = FaultEntry(session="s", error="RankDied", message="x" * 5000)
    with Journal(path) as journal:
        with pytest.raises(JournalWriteFailed, match="No space left on device") as caught:
            fill(journal, long)
        content = read_journal(path)
        lines = len(content.entries)
        assert content.entries == (HeaderEntry(), *[long] * (lines - 1))
        assert content.cut_line is None
        assert f"line {lines + 1} (fault) could not be written" in str(caught.value)
        assert f"The {lines} lines before it are intact" in str(caught.value)
        ballast.unlink()
        journal.append(ENTRIES[0])
    assert read_journal(path).entries == (*content.entries, ENTRIES[0])


def failing_after(whole_writes: int, *, code: int) -> Callable[[int, bytes], int]:
    """os.write, until one write comes out half and everything after it fails."""
    calls = iter(range(1000))

    def write(file: int, data: bytes) -> int:
        call = next(calls)
        if call < whole_writes:
            return os.write(file, data)
        if call == whole_writes:
            return os.write(file, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write_leaves_whole_lines(tmp_path: Path, code: int) -> None:
    """Half a line that reached the disk before the error is taken back."""
    path = tmp_path / "journal.jsonl"
    with Journal(path, write=failing_after(2, code=code)) as journal:
        journal.append(ENTRIES[0])
        with pytest.raises(JournalWriteFailed, match=os.strerror(code)):
            journal.append(ENTRIES[1])
    assert read_journal(path).entries == (HeaderEntry(), ENTRIES[0])
    assert read_journal(path).cut_line is None


def test_a_header_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A run whose journal can't even begin does not start."""
    with pytest.raises(JournalWriteFailed, match=r"line 1 \(header\) could not be written"):
        Journal(tmp_path / "journal.jsonl", write=failing_after(0, code=errno.ENOSPC))


def test_a_short_write_is_carried_on(tmp_path: Path) -> None:
    """The system may take fewer bytes than it was given; that is no error."""
    path = tmp_path / "journal.jsonl"
    with Journal(path, write=lambda file, data: os.write(file, data[:10])) as journal:
        journal.append(ENTRIES[3])
    assert read_journal(path).entries[1:] == (ENTRIES[3],)


def test_a_cut_last_line_is_dropped_and_reported(tmp_path: Path) -> None:
    """Wherever a crash cut the last line, the lines before it count and the reader says which one is gone."""
    path = write(tmp_path / "journal.jsonl", *ENTRIES[:2])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last + 1, len(whole)):
        path.write_bytes(whole[:end])
        content = read_journal(path)
        assert content.entries == (HeaderEntry(), ENTRIES[0])
        assert content.cut_line == 3


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["HEADER", "{", "FAULT"], "line 2: .*Invalid JSON"),
        (["HEADER", "FAULT", '{"kind":"guess"}'], "line 3: .*kind"),
        (["HEADER", ""], "line 2: .*Invalid JSON"),
        (["HEADER", '{"kind":"fault","session":null,"error":"E"}'], "line 2: fault.message: Field required"),
        (["HEADER", '{"kind":"fault","session":null,"error":"E","message":"m","x":1}'], "line 2: fault.x: Extra"),
        (
            ["HEADER", '{"kind":"verdict","claim":"c","outcome":"o","message":"m","details":{"x":NaN}}'],
            "line 2: .*details.x.*not JSON compliant",
        ),
        (["HEADER", "FAULT", "HEADER"], "line 3: a header stands where it can't"),
        (["FAULT"], "line 1: not a journal's header"),
        (["[]"], "line 1: not a journal's header"),
        (['{"kind":"header","format":2,"later":true}', '{"kind":"later"}'], "line 1: format 2, .* knows format 1 only"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, lines: list[str], complaint: str) -> None:
    """A damaged or future journal is refused whole, with the line that shows it."""
    path = write(tmp_path / "journal.jsonl", ENTRIES[4])
    header, fault = path.read_text(encoding="utf-8").splitlines()
    text = "".join({"HEADER": header, "FAULT": fault}.get(line, line) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=complaint) as caught:
        read_journal(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"kind":"hea'])
def test_a_journal_without_a_whole_line_is_none(tmp_path: Path, content: bytes) -> None:
    """An empty file, or one that was cut in its header, is no evidence."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="holds no whole line"):
        read_journal(path)


def test_a_missing_journal_is_named(tmp_path: Path) -> None:
    """The message has the path and the system's reason."""
    with pytest.raises(RecordError, match=r"nowhere.jsonl: cannot be read: No such file"):
        read_journal(tmp_path / "nowhere.jsonl")


def test_a_line_is_plain_json(tmp_path: Path) -> None:
    """Any tool reads it, a line at a time."""
    path = write(tmp_path / "journal.jsonl", *ENTRIES)
    kinds = [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert kinds == ["header", "session", "prepared", "block", "verdict", "fault"]
