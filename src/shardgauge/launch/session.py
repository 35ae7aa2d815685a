"""One launched group of ranks that stays alive and serves many experiments: the parent's handle on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import psutil

from shardgauge.errors import LaunchFailed, RankDied, RankHung, SessionError, SpecError
from shardgauge.launch.arms import ArmProgress, Deadlines
from shardgauge.launch.device_lock import default_lock_dir, device_ids, locked_devices
from shardgauge.launch.diagnosis import Scene, describe_exit, explain_failure, refusal, tail
from shardgauge.launch.mailbox import Answers, Mailbox, Patience
from shardgauge.launch.process_tree import end_processes
from shardgauge.launch.torchrun import Launch, Launcher, Torchrun
from shardgauge.protocol import Close, Command, Discard, Done, Hello, Prepare, Refused, Run, SessionSpec, post
from shardgauge.records import RankBlock
from shardgauge.rundir import SessionDir
from shardgauge.spec import Experiment


class Session:
    """Ranks that wait for commands; a context manager. Waiting ranks use no core.

    Any `SessionError` ends every process of the session before it is raised, and the session can't be used again.
    A refusal (UnsupportedSwitch and so on, out of `prepare`) leaves it usable. `spec.parent_pid` is filled in here.
    """

    def __init__(
        self,
        spec: SessionSpec,
        directory: SessionDir,
        *,
        launcher: Launcher | None = None,
        deadlines: Deadlines | None = None,
        lock_dir: Path | None = None,
    ) -> None:
        parent = psutil.Process()
        self._spec = spec.model_copy(update={"parent_pid": parent.pid, "parent_started_s": parent.create_time()})
        self._directory = SessionDir(directory.root.absolute())
        self._launcher = launcher or Torchrun()
        self._deadlines = deadlines or Deadlines()
        self._lock_dir = lock_dir or default_lock_dir()
        self._arms: dict[str, ArmProgress] = {}
        self._hellos: tuple[Hello, ...] = ()
        self._over: str | None = "it is not open yet"
        self._held = ExitStack()
        self._mailbox: Mailbox
        self._launch: Launch | None = None

    @property
    def spec(self) -> SessionSpec:
        """What the ranks were started with."""
        return self._spec

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """Every rank's first word, in rank order."""
        return self._hellos

    @property
    def environment(self) -> Mapping[str, str]:
        """What the ranks run on; the same on all of them."""
        return self._hellos[0].environment

    def __enter__(self) -> Session:
        """Lock the devices, start the ranks and hear from all of them.

        Raises:
            DeviceBusy, MissingDependency, MissingDevice: what the session needs is not there.
            LaunchFailed: the ranks did not come up.
        """
        with self._ending_on_error():
            self._start()
            self._hellos = self._greet(self._wait(0, replies_s=self._deadlines.start_s))
        self._over = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close; without further ado when an exception is on its way, so that nothing covers it."""
        if error is None:
            self.close()
        else:
            self._end(f"it was left by {type(error).__name__}")

    def prepare(self, arm: str, experiment: Experiment) -> None:
        """Build an arm on all ranks, ready at step 0.

        Raises:
            SpecError: the arm's name is taken, or its mesh needs more ranks than there are.
            ShardgaugeError: what the ranks refused with; the session stays usable.
            SessionError: a rank died, raised, hung or disagreed.
        """
        if arm in self._arms:
            raise SpecError(f"{self._named} has an arm {arm!r} already; discard it or choose a name")
        if experiment.mesh.size > self._spec.world_size:
            raise SpecError(
                f"{experiment.mesh.name} needs {experiment.mesh.size} ranks, {self._named} has {self._spec.world_size}"
            )
        command = Prepare(arm=arm, experiment=experiment)
        self._ask(command, doing=f"preparing arm {arm!r}", replies_s=self._deadlines.prepare_s)
        self._arms[arm] = ArmProgress(arm=arm, experiment=experiment)

    def run(self, arm: str, *, steps: int, gradients: bool = False) -> tuple[RankBlock, ...]:
        """Run the arm's next `steps` steps: one block a member rank, in rank order.

        Raises:
            SpecError: there is no such arm, or nothing to run.
            SessionError: a rank died, raised, hung, or sent anything but these steps.
        """
        progress = self._progress(arm)
        if steps < 1:
            raise SpecError(f"a block has at least one step, not {steps}")
        command = Run(arm=arm, steps=steps, gradients=gradients)
        first, last = progress.next_step, progress.next_step + steps - 1
        doing = f"running steps {first} to {last} of arm {arm!r}"
        done = self._ask(command, doing=doing, replies_s=progress.allowance_s(steps, self._deadlines))
        with self._ending_on_error():
            try:
                blocks = progress.check(done, steps=steps)
            except SessionError as error:
                raise SessionError(f"{self._named} sent an incomplete block {doing}: {error}\n{self._where}") from error
        self._arms[arm] = progress.after(blocks)
        return blocks

    def discard(self, arm: str) -> None:
        """Forget an arm and free its memory.

        Raises:
            SpecError: there is no such arm.
            SessionError: a rank died, raised or hung.
        """
        self._progress(arm)
        self._ask(Discard(arm=arm), doing=f"discarding arm {arm!r}", replies_s=self._deadlines.discard_s)
        del self._arms[arm]

    def close(self) -> None:
        """Have every rank leave by itself. Closing twice is harmless.

        Raises:
            SessionError: a rank did not end, or not cleanly; it is gone all the same.
        """
        if self._over is not None:
            return
        self._ask(Close(), doing="closing", replies_s=self._deadlines.close_s)
        code = self._launched.wait(self._deadlines.close_s)
        exits = self._launched.rank_exits()
        self._end("it was closed")
        if code is None:
            raise RankHung(f"{self._named} said good-bye and did not end; it was killed. {self._where}")
        if code != 0:
            ranks = ", ".join(f"rank {rank} {describe_exit(exits[rank])}" for rank in sorted(exits))
            end = tail(self._launched.rank_log(min(exits)) if exits else self._directory.launcher_log)
            raise RankDied(f"{self._named} did not end cleanly: {ranks}\n{end}\n{self._where}")

    @property
    def _named(self) -> str:
        return f"session {self._spec.session!r}"

    @property
    def _where(self) -> str:
        return f"logs: {self._directory.logs}, {self._directory.launcher_log}"

    @property
    def _launched(self) -> Launch:
        assert self._launch is not None  # noqa: S101 -- our own invariant: only an open session asks
        return self._launch

    def _start(self) -> None:
        ids = device_ids(self._spec.device, world_size=self._spec.world_size, environment=os.environ)
        timeout_s = self._deadlines.device_lock_s
        try:
            self._held.enter_context(locked_devices(ids, lock_dir=self._lock_dir, timeout_s=timeout_s))
            self._directory.root.mkdir(parents=True)
            post(self._directory.spec, self._spec)
            self._mailbox = Mailbox(self._directory, world_size=self._spec.world_size)
            self._held.callback(self._mailbox.close)
            self._held.callback(self._end_processes)
            self._launch = self._launcher.start(self._directory, world_size=self._spec.world_size)
        except OSError as error:
            raise LaunchFailed(f"{self._named} could not be set up in {self._directory.root}: {error}") from error

    def _greet(self, answers: Answers) -> tuple[Hello, ...]:
        refused = {rank: reply for rank, reply in answers.replies.items() if isinstance(reply, Refused)}
        if refused:
            raise refusal(refused)
        hellos = tuple(reply for _, reply in sorted(answers.replies.items()) if isinstance(reply, Hello))
        if len(hellos) != self._spec.world_size:
            error = explain_failure(self._scene(answers, "starting up"))
            raise LaunchFailed(str(error)) if isinstance(error, SessionError) else error
        for hello in hellos:
            if hello.environment != hellos[0].environment:
                other = sorted(hello.environment.items() ^ hellos[0].environment.items())
                raise LaunchFailed(f"{self._named}: ranks 0 and {hello.rank} run in unlike environments: {other}")
        return hellos

    def _ask(self, command: Command, *, doing: str, replies_s: float) -> Mapping[int, Done]:
        """Every rank's Done; or, when all ranks refused, their refusal as an exception."""
        self._require_open()
        with self._ending_on_error():
            answers = self._wait(self._mailbox.send(command), replies_s=replies_s)
            done = {rank: reply for rank, reply in answers.replies.items() if isinstance(reply, Done)}
            refused = {rank: reply for rank, reply in answers.replies.items() if isinstance(reply, Refused)}
            if self._spec.world_size not in (len(done), len(refused)):
                raise explain_failure(self._scene(answers, doing))
        if refused:
            raise refusal(refused)
        return done

    def _wait(self, index: int, *, replies_s: float) -> Answers:
        patience = Patience(replies_s=replies_s, after_refused_s=self._deadlines.refusal_s)
        return self._mailbox.wait(index, patience=patience, launcher_lives=self._launched.lives)

    def _scene(self, answers: Answers, doing: str) -> Scene:
        return Scene(
            session=self._spec.session, doing=doing, answers=answers, launch=self._launched, directory=self._directory
        )

    def _progress(self, arm: str) -> ArmProgress:
        self._require_open()
        if arm not in self._arms:
            known = ", ".join(repr(name) for name in self._arms) or "none"
            raise SpecError(f"{self._named} has no arm {arm!r}; prepared arms: {known}")
        return self._arms[arm]

    def _require_open(self) -> None:
        if self._over is not None:
            raise SessionError(f"{self._named} can't be used: {self._over}")

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end((str(error) or type(error).__name__).splitlines()[0])
            raise

    def _end(self, reason: str) -> None:
        """Leave no process and no lock behind; only the first reason is kept."""
        if self._over is None or not self._hellos:
            self._over = reason
        self._held.close()

    def _end_processes(self) -> None:
        left = end_processes(self._directory)
        if self._launch is not None:
            self._launch.wait(1.0)  # reaps a launcher that was killed
        if left:
            raise SessionError(f"{self._named}: not even SIGKILL ended the processes {left}")
