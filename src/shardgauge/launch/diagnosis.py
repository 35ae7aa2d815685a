"""From what ranks and launcher left behind to one error: what went wrong, on which rank, and where it says more."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardgauge import errors
from shardgauge.errors import MissingDependency, RankDied, RankHung, RankRaised, SessionError, ShardgaugeError
from shardgauge.launch.mailbox import Answers
from shardgauge.launch.process_tree import rank_processes
from shardgauge.launch.torchrun import INSTALL_TORCH, Launch
from shardgauge.protocol import Raised, Refused, Reply
from shardgauge.rundir import SessionDir

_TAIL_LINES = 30
_DUMP_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known when a session fails: its name, what it was doing, what answered, and where its files lie."""

    session: str
    doing: str
    answers: Answers
    launch: Launch
    directory: SessionDir


def explain_failure(scene: Scene) -> ShardgaugeError:
    """The error for a command that not every rank carried out. Ranks that are silent dump their stacks first.

    A rank that was killed takes its peers' collectives with it, so a death without a word outranks the exceptions
    that followed from it; of several exceptions the earliest is shown.
    """
    answers = scene.answers
    raised = {rank: reply for rank, reply in answers.replies.items() if isinstance(reply, Raised)}
    exits = scene.launch.rank_exits()
    died = {rank: code for rank, code in exits.items() if rank not in raised and code != -signal.SIGTERM}
    if died:
        return _died(scene, died)
    if raised:
        return _raised(scene, raised)
    if answers.end == "launcher_gone":
        return _launcher_gone(scene)
    if answers.end == "complete":
        return _disagreed(scene)
    return _hung(scene)


def refusal(replies: Mapping[int, Refused]) -> ShardgaugeError:
    """The named error that the ranks refused with, in the words of the first."""
    reply = replies[min(replies)]
    kind = getattr(errors, reply.error, None)
    if isinstance(kind, type) and issubclass(kind, ShardgaugeError) and not issubclass(kind, SessionError):
        return kind(reply.message)
    return ShardgaugeError(f"{reply.error}: {reply.message}")


def _died(scene: Scene, died: Mapping[int, int]) -> ShardgaugeError:
    how = ", ".join(f"rank {rank} {describe_exit(code)}" for rank, code in sorted(died.items()))
    hint = ""
    if -signal.SIGKILL in died.values():
        hint = " SIGKILL is how the kernel ends a process when memory runs out: see `dmesg`, or use fewer ranks."
    return RankDied(_message(scene, f"died {scene.doing}: {how}.{hint}", _logs(scene, tuple(died))))


def _raised(scene: Scene, raised: Mapping[int, Raised]) -> ShardgaugeError:
    first = min(raised, key=lambda rank: (scene.answers.arrived_ns[rank], rank))
    also = _and_also(tuple(rank for rank in raised if rank != first))
    what = f"raised {scene.doing}: rank {first}: {raised[first].message}{also}"
    return RankRaised(_message(scene, what, raised[first].traceback.rstrip()))


def _launcher_gone(scene: Scene) -> ShardgaugeError:
    if fault := scene.launch.import_fault():
        return MissingDependency(f"no rank of session {scene.session!r} could be started: {fault}; {INSTALL_TORCH}")
    code = scene.launch.wait(0)
    how = describe_exit(code) if code is not None else "is gone"
    what = f"died {scene.doing}: the launcher {how}; no answer from {name_ranks(scene.answers.silent)}"
    return RankDied(_message(scene, what, tail(scene.directory.launcher_log)))


def _disagreed(scene: Scene) -> ShardgaugeError:
    said = "\n".join(_quote(rank, reply) for rank, reply in sorted(scene.answers.replies.items()))
    return SessionError(_message(scene, f"disagreed {scene.doing}:", said))


def _hung(scene: Scene) -> ShardgaugeError:
    answers, processes = scene.answers, rank_processes(scene.directory)
    answered = tuple(answers.replies)
    silent_logs = {rank: log for rank in answers.silent if (log := scene.launch.rank_log(rank))}
    dump_stacks({log: processes[rank] for rank, log in silent_logs.items() if rank in processes})
    what = (
        f"hung {scene.doing}: no answer from {name_ranks(answers.silent)} within {answers.waited_s:.0f} s; "
        f"{name_ranks(answered) if answered else 'no rank'} answered. The silent ranks were here:"
    )
    return RankHung(_message(scene, what, _logs(scene, answers.silent)))


def _quote(rank: int, reply: Reply) -> str:
    refused = f" ({reply.error}: {reply.message})" if isinstance(reply, Refused) else ""
    return f"rank {rank} said {reply.kind}{refused}"


def dump_stacks(processes: Mapping[Path, psutil.Process]) -> None:
    """Have each process write all its stacks to its log (faulthandler, on SIGUSR1), and wait until it has."""
    sizes = {log: log.stat().st_size for log in processes}
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile and has nothing to say
            process.send_signal(signal.SIGUSR1)
    deadline_s = time.monotonic() + _DUMP_S
    while time.monotonic() < deadline_s and any(log.stat().st_size == size for log, size in sizes.items()):
        time.sleep(0.05)
    time.sleep(0.1)  # a dump is several writes


def describe_exit(code: int) -> str:
    """`ended with exit code 3`, or `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def name_ranks(ranks: tuple[int, ...]) -> str:
    """`rank 3`, or `ranks 0, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in sorted(ranks))}"


def tail(log: Path | None) -> str:
    """The last lines of a log, or a word about why there are none."""
    if log is None or not log.exists():
        return "(no log: the process was never started)"
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:]) or "(the log is empty)"


def _logs(scene: Scene, ranks: tuple[int, ...]) -> str:
    return "\n".join(f"rank {rank}, end of its log:\n{tail(scene.launch.rank_log(rank))}" for rank in sorted(ranks))


def _and_also(ranks: tuple[int, ...]) -> str:
    return f" ({name_ranks(ranks)} raised after it)" if ranks else ""


def _message(scene: Scene, what: str, evidence: str) -> str:
    return f"session {scene.session!r} {what}\n{evidence}\nlogs: {scene.directory.logs}, {scene.directory.launcher_log}"
