from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from shardgauge.errors import SessionError
from shardgauge.launch import mailbox as mailbox_module
from shardgauge.launch.mailbox import Answers, Mailbox, Patience
from shardgauge.protocol import COMMAND, Close, Discard, Done, Hello, Raised, Refused, Run
from shardgauge.rundir import SessionDir
from shardgauge.worker import post_box as post_box_module
from shardgauge.worker.post_box import PostBox

LONG = Patience(replies_s=60)
NONE = Patience(replies_s=0)


@pytest.fixture
def directory(tmp_path: Path) -> SessionDir:
    """An empty session directory."""
    return SessionDir(tmp_path)


@pytest.fixture
def mailbox(directory: SessionDir) -> Iterator[Mailbox]:
    """The parent's end, for two ranks."""
    box = Mailbox(directory, world_size=2)
    yield box
    box.close()


def wait(mailbox: Mailbox, index: int, *, patience: Patience = NONE, lives: bool = True) -> Answers:
    """Wait with a launcher that lives, or does not."""
    return mailbox.wait(index, patience=patience, launcher_lives=lambda: lives)


def hello(rank: int) -> Hello:
    """A rank's first word."""
    return Hello(rank=rank, pid=1, environment={})


def test_commands_are_numbered_files_that_rank_0_reads(mailbox: Mailbox, directory: SessionDir) -> None:
    """What is sent lies in the mailbox and is what rank 0 fetches; nothing half-written stays beside it."""
    box = PostBox(directory, rank=0)
    box.reply(hello(0))
    for index, command in enumerate([Run(arm="a", steps=3), Discard(arm="a"), Close()], start=1):
        assert mailbox.send(command) == index
        assert COMMAND.validate_json(box.fetch()) == command
        box.reply(Done(rank=0))
        assert directory.command(index).exists()
    assert not list(directory.command(1).parent.glob("*.draft"))


class SleepSign:
    """Stands for a module's `select`: says when its user is about to sleep, and lets it sleep."""

    def __init__(self) -> None:
        self.asleep = threading.Event()

    def select(self, *arguments: Any) -> Any:
        """As `select.select`."""
        self.asleep.set()
        return select.select(*arguments)


def start(call: Callable[[], Any]) -> Queue[Any]:
    """Run `call` in a thread that a failing test leaves behind; its result comes in the queue."""
    results: Queue[Any] = Queue()
    threading.Thread(target=lambda: results.put(call()), daemon=True).start()
    return results


def test_the_doorbell_wakes_a_sleeping_rank(
    mailbox: Mailbox, directory: SessionDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sleeps on the pipe, not on a clock; here its clock is far too slow to help."""
    sign = SleepSign()
    monkeypatch.setattr(post_box_module, "_LOOK_S", 3600)
    monkeypatch.setattr(post_box_module, "select", sign)
    box = PostBox(directory, rank=0)
    box.reply(hello(0))
    fetched = start(box.fetch)
    assert sign.asleep.wait(timeout=60)
    mailbox.send(Close())
    assert COMMAND.validate_json(fetched.get(timeout=60)) == Close()


def test_an_answer_wakes_the_sleeping_parent(
    mailbox: Mailbox, directory: SessionDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent sleeps on the pipe, not on a clock; here its clock is far too slow to help."""
    sign = SleepSign()
    monkeypatch.setattr(mailbox_module, "LOOK_AROUND_S", 3600)
    monkeypatch.setattr(mailbox_module, "select", sign)
    waiting = start(lambda: wait(mailbox, 0, patience=Patience(replies_s=3600)))
    for rank in (1, 0):
        assert sign.asleep.wait(timeout=60)
        sign.asleep.clear()
        PostBox(directory, rank=rank).reply(hello(rank))
    answers = waiting.get(timeout=60)
    assert answers.end == "complete"
    assert answers.replies == {0: hello(0), 1: hello(1)}
    assert answers.silent == ()


def test_silent_ranks_are_named_at_the_deadline(mailbox: Mailbox, directory: SessionDir) -> None:
    """Who answered and who did not are both known."""
    PostBox(directory, rank=0).reply(hello(0))
    answers = wait(mailbox, 0)
    assert (answers.end, answers.silent, tuple(answers.replies)) == ("deadline", (1,), (0,))


def test_a_dead_launcher_ends_the_waiting_but_not_the_last_words(mailbox: Mailbox, directory: SessionDir) -> None:
    """What a rank said before the end is read."""
    raised = Raised(rank=1, message="m", traceback="t")
    PostBox(directory, rank=1).reply(raised)
    answers = wait(mailbox, 0, patience=LONG, lives=False)
    assert (answers.end, answers.replies) == ("launcher_gone", {1: raised})


@pytest.mark.parametrize(
    ("reply", "patience"),
    [
        (Raised(rank=1, message="m", traceback="t"), Patience(replies_s=3600, after_raised_s=0)),
        (Refused(rank=1, error="SpecError", message="m"), Patience(replies_s=3600, after_refused_s=0)),
    ],
)
def test_bad_news_shortens_the_wait(
    mailbox: Mailbox, directory: SessionDir, reply: Raised | Refused, patience: Patience
) -> None:
    """The other ranks may never answer once one has raised or refused."""
    PostBox(directory, rank=1).reply(reply)
    assert wait(mailbox, 0, patience=patience).end == "deadline"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "rank 1 sent a malformed reply: .*Invalid JSON"),
        ('{"kind":"done"', "rank 1 sent a malformed reply: .*Invalid JSON"),
        ('{"kind":"fine","rank":1}', "rank 1 sent a malformed reply: .*kind"),
        ('{"kind":"done","rank":1,"more":2}', "rank 1 sent a malformed reply: done.more: Extra"),
        ('{"kind":"done","rank":0}', "should be rank 1's and says that it is rank 0's"),
    ],
)
def test_a_malformed_reply_is_an_error(mailbox: Mailbox, directory: SessionDir, content: str, complaint: str) -> None:
    """It names the rank, the fault and the file."""
    directory.reply(0, 1).write_text(content, encoding="utf-8")
    with pytest.raises(SessionError, match=complaint) as caught:
        wait(mailbox, 0)
    assert str(directory.reply(0, 1)) in str(caught.value)


def test_many_unheard_rings_block_nobody(mailbox: Mailbox, directory: SessionDir) -> None:
    """A full pipe is ringing already: ranks never wait for a parent that is busy elsewhere, nor it for them."""
    box = PostBox(directory, rank=0)
    done = threading.Event()

    def ring_often() -> None:
        for _ in range(70_000):
            mailbox_module.ring(box._answer_bell)
        done.set()

    threading.Thread(target=ring_often, daemon=True).start()
    assert done.wait(timeout=60)
    assert wait(mailbox, 0).end == "deadline"
