"""Sessions behind a journal, and the journal in their place: a replay says what the run said, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from shardgauge.bench import BenchSettings, EndOfEvidence, LiveBench, ReplayBench
from shardgauge.claims import Docket
from shardgauge.errors import (
    LaunchFailed,
    MissingDependency,
    NotMeasurable,
    RankDied,
    RecordError,
    ShardgaugeError,
    UnsupportedSwitch,
)
from shardgauge.gauge import ClaimNotMeasurable, ClaimRefuted, Gauge
from shardgauge.journal import BlockEntry, Entry, FaultEntry, SessionEntry, VerdictEntry, read_journal
from shardgauge.launch.process_tree import session_processes
from shardgauge.live import LiveEvidence, LiveSettings, open_live_evidence
from shardgauge.marked_yaml import parse_marked_yaml
from shardgauge.options import GaugeOptions
from shardgauge.rundir import RunDir, SessionDir
from shardgauge.spec import Mesh, build_experiment
from shardgauge.thresholds import load_thresholds
from tests.unit.fake_bench import FakeSessions, pace
from tests.unit.fake_evidence import CANDIDATE, NATIVE, THRESHOLDS

ROOT = Path(__file__).parents[2]
SHOWN = ".gauge/run/journal.jsonl"
SETTINGS = LiveSettings(device="cpu", candidate="reference", world_size=4, timing_ranks=4, budget_s=15.0)
REFERENCE = build_experiment(engine="reference", mesh=Mesh(shape=(4,)))
FASTER = {"holds": 80.0, "refuted": 120.0, "inconclusive": 95.0}


@contextmanager
def bench_in(root: Path, sessions: FakeSessions) -> Iterator[LiveBench]:
    """A bench over made-up sessions, whose journal lies in `root`."""
    settings = BenchSettings(device="cpu", world_size=4, candidate="reference", hyper_source=None, align_dir=root)
    bench = LiveBench(settings, RunDir(root), shown_as=SHOWN, make_session=cast(Any, sessions))
    try:
        yield bench
    finally:
        bench.close()


def decide(evidence: LiveEvidence, thresholds: str = THRESHOLDS) -> str:
    """The verdict on the claim, as a terminal shows it; it is kept as the plugin keeps it."""
    claims = load_thresholds(parse_marked_yaml(thresholds, name="thresholds.yaml"), name="thresholds.yaml")
    docket = Docket(claim=claims.find("candidate-faster"), file=claims.name, evidence=evidence)
    gauge = Gauge(docket, meshes=frozenset())
    try:
        gauge.assert_faster(CANDIDATE, than=NATIVE)
    except (ClaimRefuted, ClaimNotMeasurable):
        pass
    finally:
        gauge.keep_verdict()
    return gauge.verdict.render()


def measure(
    root: Path, sessions: FakeSessions, *, claims: tuple[str, ...] = (THRESHOLDS,), budget_s: float = SETTINGS.budget_s
) -> list[str]:
    """The verdicts of a live run."""
    with bench_in(root, sessions) as bench:
        evidence = LiveEvidence(replace(SETTINGS, budget_s=budget_s), bench, clock=lambda: sessions.now_s)
        return [decide(evidence, text) for text in claims]


def replay(root: Path, *, claims: tuple[str, ...] = (THRESHOLDS,)) -> list[str]:
    """The verdicts that the journal in `root` gives."""
    bench = ReplayBench(RunDir(root).journal, shown_as=SHOWN)
    evidence = LiveEvidence(SETTINGS, bench, clock=lambda: 0.0)
    return [decide(evidence, text) for text in claims]


def entries(root: Path, kind: type[Entry] | None = None) -> list[Any]:
    """The journal's entries, or those of one kind."""
    return [e for e in read_journal(RunDir(root).journal).entries if kind is None or isinstance(e, kind)]


def strike(doing: str, part: str, error: Exception, *, times: int = 0) -> Callable[[str, str, int], None]:
    """What a session does, raising `error` where it does this with that arm or session, for the n-th time."""

    def struck(now: str, name: str, count: int) -> None:
        if now == doing and name.endswith(part) and count == times:
            raise error

    return struck


@pytest.mark.parametrize(("outcome", "prefetch_ms"), FASTER.items(), ids=FASTER)
def test_a_replay_gives_the_verdict_of_the_run_byte_for_byte(tmp_path: Path, outcome: str, prefetch_ms: float) -> None:
    """Whatever it was: figures, interval, pairs and noise are those of the run, and no rank is started."""
    verdicts = measure(tmp_path, FakeSessions(step_ms=pace(prefetch=prefetch_ms, noise=0.03)))
    assert f": {outcome.upper()} on live evidence" in verdicts[0]
    assert SHOWN in verdicts[0]
    before = RunDir(tmp_path).journal.read_bytes()
    assert replay(tmp_path) == verdicts
    assert RunDir(tmp_path).journal.read_bytes() == before


FAULTS: dict[str, tuple[str, str, ShardgaugeError, int, str]] = {
    "dies-while-running": ("run", " of", RankDied("rank 1 was killed by SIGKILL\nits log"), 4, "NOT MEASURABLE"),
    "dies-after-the-first-look": ("run", " to", RankDied("rank 1 was killed"), 8, "NOT MEASURABLE"),
    "dies-while-preparing": ("prepare", " to", RankDied("rank 0 was killed"), 0, "NOT MEASURABLE"),
    "dies-while-discarding": ("discard", " of", RankDied("rank 3 was killed"), 0, "NOT MEASURABLE"),
    "lacks-a-switch": ("prepare", " of", UnsupportedSwitch("this tree has no prefetch"), 0, "UNDECIDABLE"),
    "does-not-come-up": ("open", "reference", LaunchFailed("no rank came up"), 0, "NOT MEASURABLE"),
    "lacks-torch": ("open", "native", MissingDependency("torch is not installed"), 0, "NOT MEASURABLE"),
}


@pytest.mark.parametrize(("doing", "part", "error", "times", "outcome"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_journalled_and_replayed_in_the_same_words(
    tmp_path: Path, doing: str, part: str, error: ShardgaugeError, times: int, outcome: str
) -> None:
    """What could not be measured then cannot be now, at the same place and for the same reason; it never holds."""
    slow_to_decide = FakeSessions(step_ms=pace(prefetch=95, noise=0.03), strike=strike(doing, part, error, times=times))
    verdicts = measure(tmp_path, slow_to_decide)
    assert f": {outcome} on live evidence" in verdicts[0]
    assert str(error).splitlines()[0] in verdicts[0]
    faults = entries(tmp_path, FaultEntry)
    assert (faults[0].error, faults[0].message) == (type(error).__name__, str(error))
    assert faults[0].session in ("reference", "native")
    assert faults[0].arm
    assert replay(tmp_path) == verdicts
    if not isinstance(error, UnsupportedSwitch):
        assert slow_to_decide.closed == [name for name in reversed(slow_to_decide.launched) if name not in part]


@pytest.mark.parametrize("kind", [LaunchFailed, MissingDependency])
def test_a_session_that_failed_is_not_launched_again_and_says_so(tmp_path: Path, kind: type[ShardgaugeError]) -> None:
    """The next claim that needs it gets the first cause, once, under the same class; a replay says the same."""
    sessions = FakeSessions(strike=strike("open", "reference", kind("no rank came up")))
    claims = (THRESHOLDS, THRESHOLDS.replace("at_most: 0.95", "at_most: 0.90"), THRESHOLDS)
    verdicts = measure(tmp_path, sessions, claims=claims)
    assert sessions.launched == ["reference"]
    assert "note    no rank came up" in verdicts[0]
    for later in verdicts[1:]:
        assert "note    session 'reference' failed earlier: no rank came up" in later
    assert [fault.error for fault in entries(tmp_path, FaultEntry)] == [kind.__name__] * 3
    assert replay(tmp_path, claims=claims) == verdicts


def test_a_session_that_died_while_measuring_is_not_used_again(tmp_path: Path) -> None:
    """Nor are its arms discarded, which went with it; the other session's are."""
    sessions = FakeSessions(strike=strike("run", " of", RankDied("rank 1 was killed"), times=2))
    first, second = measure(tmp_path, sessions, claims=(THRESHOLDS, THRESHOLDS))
    assert "rank 1 was killed" in first
    assert "session 'reference' failed earlier: rank 1 was killed" in second
    assert sessions.launched == ["reference", "native"]
    assert [arm.rpartition(" ")[2] for arm in sessions.open_arms] == ["of"]


def test_a_refused_arm_leaves_the_session_in_use(tmp_path: Path) -> None:
    """A switch that is lacking is no failure of the session."""
    sessions = FakeSessions(strike=strike("prepare", "refused", UnsupportedSwitch("no such switch")))
    with bench_in(tmp_path, sessions) as bench:
        with pytest.raises(UnsupportedSwitch, match="no such switch"):
            bench.open_arm(REFERENCE, "refused")
        arm = bench.open_arm(REFERENCE, "accepted")
        assert len(bench.run(arm, steps=2).ranks) == 4
    assert sessions.launched == ["reference"]


def test_every_block_is_journalled_before_the_next_is_run(tmp_path: Path) -> None:
    """A crash loses no measurement that was made."""
    runs = 0

    def look(doing: str, arm: str, times: int) -> None:  # noqa: ARG001 -- as a session is struck
        nonlocal runs
        if doing == "run":
            assert len(entries(tmp_path, BlockEntry)) == runs
            runs += 1

    measure(tmp_path, FakeSessions(step_ms=pace(prefetch=80), strike=look))
    assert len(entries(tmp_path, BlockEntry)) == runs == 14


def test_a_journal_tells_the_run_in_order(tmp_path: Path) -> None:
    """Header, a session when it is up, its arm, all blocks in turn, and the verdict behind them."""
    (verdict,) = measure(tmp_path, FakeSessions(step_ms=pace(prefetch=80)))
    kinds = [entry.kind for entry in entries(tmp_path)]
    assert kinds == ["header", "session", "prepared", "session", "prepared", *["block"] * 14, "verdict"]
    (entry,) = entries(tmp_path, VerdictEntry)
    assert (entry.claim, entry.outcome, entry.message) == ("candidate-faster", "holds", verdict)
    assert entry.details["parts"][0]["effect"]["pairs"] == 6
    indices: dict[str, list[int]] = {}
    for found in entries(tmp_path, BlockEntry):
        indices.setdefault(found.block.arm, []).append(found.block.index)
    assert list(indices.values()) == [list(range(7))] * 2


def test_a_verdict_that_concludes_nothing_is_journalled_too(tmp_path: Path) -> None:
    """Undecidable and not measurable are outcomes a reader of the journal needs to know."""
    for name, error in (("undecidable", UnsupportedSwitch("no")), ("not_measurable", RankDied("no"))):
        measure(tmp_path / name, FakeSessions(strike=strike("prepare", " of", error)))
        (entry,) = entries(tmp_path / name, VerdictEntry)
        assert entry.outcome == name


def test_the_truth_runs_in_the_candidates_session(tmp_path: Path) -> None:
    """`single` needs no launch of its own, and the journal says whose session it is in."""
    sessions = FakeSessions()
    with bench_in(tmp_path, sessions) as bench:
        single = build_experiment(engine="single", mesh=Mesh(shape=(1,)), data_ranks=4)
        bench.open_arm(single, "truth")
        bench.open_arm(REFERENCE, "candidate")
    assert sessions.launched == ["reference"]
    (entry,) = entries(tmp_path, SessionEntry)
    assert (entry.session, entry.engine, entry.world_size) == ("reference", "reference", 4)


def test_closing_ends_every_session(tmp_path: Path) -> None:
    """In the reverse order of their launches."""
    sessions = FakeSessions(step_ms=pace(prefetch=80))
    measure(tmp_path, sessions)
    assert sessions.launched == ["reference", "native"]
    assert sessions.closed == ["native", "reference"]


def edit_blocks(root: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | None], *, index: int = 3) -> None:
    """Change or drop one block's line of the candidate's arm."""
    journal = RunDir(root).journal
    lines = []
    for line in journal.read_text().splitlines():
        content = json.loads(line)
        block = content.get("block")
        if block and block["purpose"].endswith(" of") and block["index"] == index:
            content["block"] = edit(block)
        if not block or content["block"] is not None:
            lines.append(json.dumps(content))
    journal.write_text("\n".join(lines) + "\n")


def without_rank(block: dict[str, Any]) -> dict[str, Any]:
    """Rank 2 is not there."""
    return block | {"ranks": [rank for rank in block["ranks"] if rank["rank"] != 2]}


def without_step(block: dict[str, Any]) -> dict[str, Any]:
    """Every rank lacks the second step."""
    return block | {"ranks": [rank | {"steps": rank["steps"][:1] + rank["steps"][2:]} for rank in block["ranks"]]}


def without_last_step(block: dict[str, Any]) -> dict[str, Any]:
    """Every rank lacks the last step."""
    return block | {"ranks": [rank | {"steps": rank["steps"][:-1]} for rank in block["ranks"]]}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without_rank, "block 3 has no record of rank 2"),
        (without_step, "block 3 of rank 0 holds steps ["),
        (without_last_step, "block 3 of rank 0 holds steps ["),
        (lambda _block: None, "block 4 of rank 0 holds steps ["),
    ],
    ids=["rank", "step", "last-step", "block"],
)
def test_a_journal_with_a_gap_gives_no_verdict(
    tmp_path: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | None], said: str
) -> None:
    """What held live is not measurable any more, and the message says what is missing, and where."""
    (held,) = measure(tmp_path, FakeSessions(step_ms=pace(prefetch=80)))
    assert ": HOLDS" in held
    edit_blocks(tmp_path, edit)
    (verdict,) = replay(tmp_path)
    assert verdict.startswith("candidate-faster: NOT MEASURABLE on live evidence")
    assert said in verdict
    assert SHOWN in verdict


def cut(root: Path, *, after_blocks: int, rest: bytes = b"") -> None:
    """The journal as a crash leaves it: so many blocks, and the beginning of a line."""
    journal = RunDir(root).journal
    lines, blocks = [], 0
    for line in journal.read_bytes().splitlines(keepends=True):
        blocks += b'"kind":"block"' in line
        if blocks > after_blocks:
            break
        lines.append(line)
    journal.write_bytes(b"".join(lines) + rest)


@pytest.mark.parametrize("blocks", [0, 1, 2, 5, 13])
def test_a_journal_cut_before_the_first_look_gives_no_verdict(tmp_path: Path, blocks: int) -> None:
    """It says how many pairs there are, which arm ends, and that the last line was cut."""
    measure(tmp_path, FakeSessions(step_ms=pace(prefetch=80)))
    cut(tmp_path, after_blocks=blocks, rest=b'{"kind":"blo')
    (verdict,) = replay(tmp_path)
    assert verdict.startswith("candidate-faster: NOT MEASURABLE on live evidence")
    assert f"only {max(0, (blocks - 2) // 2)} pairs of blocks, too few for an interval" in verdict
    assert f"{SHOWN} holds no further block of arm 'measure step_ms " in verdict
    assert f"its line {6 + blocks} was cut short and is dropped" in verdict


def test_a_journal_cut_after_a_look_is_as_undecided_as_that_look(tmp_path: Path) -> None:
    """A run that held at a later look had not held at the first: less evidence decides no more."""
    (live,) = measure(tmp_path, FakeSessions(step_ms=pace(prefetch=93, noise=0.02)), budget_s=120)
    assert ": HOLDS" in live
    assert "pairs   6," not in live
    cut(tmp_path, after_blocks=2 + 2 * 6 + 1)
    (verdict,) = replay(tmp_path)
    assert ": INCONCLUSIVE" in verdict
    assert "pairs   6," in verdict


def test_a_journal_without_the_arm_says_what_it_lacks_and_which_faults_it_notes(tmp_path: Path) -> None:
    """Replaying with other options than the run's is the likely cause; a fault in the journal is the other."""
    sessions = FakeSessions(strike=strike("prepare", "other", RankDied("rank 1 was killed")))
    with bench_in(tmp_path, sessions) as bench, pytest.raises(RankDied):
        bench.open_arm(REFERENCE, "other")
    (verdict,) = replay(tmp_path)
    assert verdict.startswith("candidate-faster: NOT MEASURABLE on live evidence")
    assert f"{SHOWN} holds no arm 'measure step_ms " in verdict
    assert "replay with the options of the run that wrote it" in verdict
    assert "it notes a fault: RankDied: rank 1 was killed" in verdict


def test_a_journal_of_before_arms_were_noted_with_faults_is_read(tmp_path: Path) -> None:
    """Such a fault is told where an arm is missing."""
    with bench_in(tmp_path, FakeSessions()):
        pass
    with RunDir(tmp_path).journal.open("a") as journal:
        journal.write('{"kind":"fault","session":"reference","error":"RankDied","message":"rank 1 was killed"}\n')
    assert "it notes a fault: RankDied: rank 1 was killed" in replay(tmp_path)[0]


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    """A malformed line is an error with its number, never less evidence."""
    measure(tmp_path, FakeSessions(step_ms=pace(prefetch=80)))
    journal = RunDir(tmp_path).journal
    journal.write_text(journal.read_text().replace('"kind":"block"', '"kind":"blok"', 1))
    with pytest.raises(RecordError, match=r"journal\.jsonl, line 6: .*'blok'"):
        ReplayBench(journal)


def test_two_claims_on_the_same_runs_replay_each_with_its_own_blocks(tmp_path: Path) -> None:
    """Another limit is another question; the journal keeps their arms apart, and the third is the first's answer."""
    claims = (THRESHOLDS, THRESHOLDS.replace("at_most: 0.95", "at_most: 0.90"), THRESHOLDS)
    sessions = FakeSessions(step_ms=pace(prefetch=86, noise=0.03))
    verdicts = measure(tmp_path, sessions, claims=claims)
    assert verdicts[0] == verdicts[2]
    arms = {entry.block.arm for entry in entries(tmp_path, BlockEntry)}
    assert len(arms) == 4
    assert replay(tmp_path, claims=claims) == verdicts
    assert replay(tmp_path, claims=claims[:1]) == verdicts[:1]


def test_a_replay_ends_where_the_journal_does(tmp_path: Path) -> None:
    """The bench itself says so, arm by arm."""
    with bench_in(tmp_path, FakeSessions()) as bench:
        blocks = [bench.run(bench.open_arm(REFERENCE, purpose), steps=2) for purpose in ("one", "two")]
    again = ReplayBench(RunDir(tmp_path).journal, shown_as=SHOWN)
    arms = [again.open_arm(REFERENCE, purpose) for purpose in ("one", "two")]
    assert [arm.environment for arm in arms] == [{"torch": "2"}] * 2
    assert [again.run(arm, steps=2) for arm in reversed(arms)] == blocks[::-1]
    with pytest.raises(EndOfEvidence, match=r"\.gauge/run/journal\.jsonl holds no further block of arm 'one'$"):
        again.run(arms[0], steps=2)
    again.close_arm(arms[0])


def test_a_replay_knows_on_how_many_ranks_time_was_measured(tmp_path: Path) -> None:
    """A journal of a machine with other cores is replayed as it was measured; counts say nothing about it."""
    link = REFERENCE.model_preset.link
    with bench_in(tmp_path, FakeSessions()) as bench:
        bench.open_arm(REFERENCE.model_copy(update={"mesh": Mesh(shape=(8,))}), "counts")
        assert ReplayBench(RunDir(tmp_path).journal).timed_ranks is None
        bench.open_arm(REFERENCE.model_copy(update={"link": link}), "measure")
        bench.open_arm(build_experiment(engine="single", mesh=Mesh(shape=(1,)), data_ranks=8, link=link), "measure")
    assert ReplayBench(RunDir(tmp_path).journal).timed_ranks == 4


def test_a_replay_is_opened_with_the_runs_ranks_and_without_a_clock(tmp_path: Path) -> None:
    """Neither this machine's cores nor its speed have a say; without timed arms its cores choose as ever."""
    link = REFERENCE.model_preset.link
    with bench_in(tmp_path, FakeSessions()) as bench:
        bench.open_arm(REFERENCE.model_copy(update={"link": link, "mesh": Mesh(shape=(3,))}), "measure")
    options = GaugeOptions(
        root=tmp_path,
        thresholds=tmp_path,
        results=tmp_path,
        run_dir=tmp_path / "none",
        align_dir=tmp_path,
        replay=RunDir(tmp_path).journal,
        strict=False,
        candidate="reference",
        device="cpu",
        hyper_source=None,
        world_size=None,
        budget_s=60.0,
    )
    with open_live_evidence(options) as evidence:
        assert (evidence.settings.timing_ranks, evidence.settings.world_size) == (3, 8)
        assert evidence.bench.where == "journal.jsonl"
        assert evidence.clock() == evidence.clock()
    assert not options.run_dir.exists()


def test_an_unknown_fault_is_not_measurable(tmp_path: Path) -> None:
    """A later version's error class is told by its name."""
    sessions = FakeSessions(strike=strike("prepare", "arm", RankDied("what it says")))
    with bench_in(tmp_path, sessions) as bench, pytest.raises(RankDied):
        bench.open_arm(REFERENCE, "arm")
    journal = RunDir(tmp_path).journal
    journal.write_text(journal.read_text().replace('"RankDied"', '"RankMelted"'))
    with pytest.raises(NotMeasurable, match="RankMelted: what it says"):
        ReplayBench(journal).open_arm(REFERENCE, "arm")


PYTEST = """\
import json, sys
import pytest
code = pytest.main(sys.argv[1:])
heavy = sorted({"torch", "torch_npu", "hyper_parallel"} & set(sys.modules))
print("\\n" + json.dumps([int(code), heavy]))
"""


def run_pytest(temporary: Path, *arguments: str) -> tuple[str, str]:
    """What one run of the counts' claim prints, and its verdict; its device lock is its own."""
    junit = temporary / "junit.xml"
    result = subprocess.run(
        [
            *(sys.executable, "-c", PYTEST, "tests/perf", "-m", "fsdp8 and live", "-k", "collective_counts"),
            *("-p", "no:cacheprovider", "--color=no", f"--junitxml={junit}"),
            *("--gauge-device=cpu", "--gauge-candidate=reference", "--gauge-world-size=2", *arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    code, heavy = json.loads(result.stdout.splitlines()[-1])
    assert code == 0, result.stdout
    assert heavy == []
    (verdict,) = [p.get("value") for p in ET.parse(junit).iter("property") if p.get("name") == "shardgauge"]  # noqa: S314 -- our own file
    return result.stdout, str(verdict)


def test_a_real_run_and_its_replay_say_the_same(tmp_path: Path) -> None:
    """Two ranks of torch count, the pytest process never loads it, nothing is left, and the replay starts nothing."""
    told, verdict = run_pytest(tmp_path, f"--gauge-rundir={tmp_path / 'runs'}")
    (run,) = (tmp_path / "runs").iterdir()
    journal = RunDir(run).journal
    for session in ("native", "reference"):
        assert RunDir(run).session(session).logs.is_dir()
        assert session_processes(SessionDir(RunDir(run).session(session).root.absolute())) == ()
    assert "live: launches: native, reference" in told
    again, replayed = run_pytest(tmp_path, f"--gauge-rundir={tmp_path / 'none'}", f"--gauge-replay={journal}")
    assert replayed == verdict
    assert f"live: replayed from {journal}; nothing was measured" in again
    assert claims_told(again) == claims_told(told)
    assert not (tmp_path / "none").exists()
    (entry,) = entries(run, VerdictEntry)
    assert json.loads(verdict) == entry.details


def claims_told(output: str) -> list[str]:
    """The summary's lines on the claim."""
    return [line for line in output.splitlines() if line.startswith("collective-counts")]
