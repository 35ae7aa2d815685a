"""Real launches of two ranks with a fake arm; each costs seconds, so what does not destroy a session shares one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardgauge.errors import (
    DeviceBusy,
    LaunchFailed,
    MissingDependency,
    MissingDevice,
    RankDied,
    RankHung,
    RankRaised,
    SessionError,
    SpecError,
    UnsupportedSwitch,
)
from shardgauge.launch.arms import ArmProgress, Deadlines
from shardgauge.launch.device_lock import device_ids, locked_devices
from shardgauge.launch.process_tree import session_processes
from shardgauge.launch.session import Session
from shardgauge.launch.torchrun import Torchrun, rank_environment
from shardgauge.protocol import Done, SessionSpec
from shardgauge.records import RankBlock, StepRecord
from shardgauge.rundir import SessionDir
from shardgauge.spec import DeviceName, Experiment, Fault, FaultKind, Mesh, Switches
from tests.unit.fake_arm import TOGETHER
from tests.unit.fake_ranks import FakeRanks

HERE = Path(__file__).parent
FAKE_ARM = Torchrun(environment={"PYTHONPATH": str(HERE)}, worker_arguments=("--arm", "fake_arm:build_arm"))
TWO_RANKS = Experiment(engine="reference", mesh=Mesh(shape=(2,)))
IMPATIENT = Deadlines(block_s=5, first_step_s=0)


def with_fault(kind: FaultKind, *, seed: int) -> Experiment:
    """An experiment in which rank 1 has the fault at step 2."""
    return TWO_RANKS.model_copy(update={"faults": (Fault(kind=kind, rank=1, step=2),), "seed": seed})


def session_in(root: Path, name: str = "s", *, device: DeviceName = "cpu", **options: Any) -> Session:
    """A session of two ranks with a lock of its own, not opened yet."""
    spec = SessionSpec(
        session=name, engine="reference", device=device, world_size=2, align_dir=str(root), parent_pid=os.getpid()
    )
    defaults = {"launcher": FAKE_ARM, "lock_dir": root / "locks"}
    return Session(spec, SessionDir(root / name), **(defaults | options))


def shim(root: Path, **modules: str) -> Torchrun:
    """A launcher whose ranks find `modules` (name to source) before the real ones."""
    folder = root / "shim"
    folder.mkdir()
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    path = os.pathsep.join((str(folder), str(HERE)))
    return Torchrun(environment={"PYTHONPATH": path}, worker_arguments=FAKE_ARM.worker_arguments)


def assert_nothing_left(root: Path, name: str = "s") -> None:
    """No process of the session lives, and nobody holds its devices."""
    assert session_processes(SessionDir(root / name)) == ()
    code = "import sys, filelock; filelock.FileLock(sys.argv[1]).acquire(timeout=0)"
    subprocess.run([sys.executable, "-c", code, str(root / "locks" / "cpu.lock")], check=True)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session that several tests use; its closing is a test of a clean end."""
    root = tmp_path_factory.mktemp("live")
    with session_in(root) as session:
        yield session
    assert_nothing_left(root)


def test_every_rank_says_what_it_runs_on(live: Session) -> None:
    """The hellos are one a rank; the environment names versions and threads, and no rank or host."""
    assert [hello.rank for hello in live.hellos] == [0, 1]
    assert len({hello.pid for hello in live.hellos}) == 2
    assert live.environment["OMP_NUM_THREADS"] == "1"
    assert {"python", "torch", "platform", "cpu_count"} <= set(live.environment)
    assert os.uname().nodename not in live.environment.values()


def test_blocks_of_two_arms_alternate(live: Session) -> None:
    """Each arm goes on where it stopped, and each rank's block is its own."""
    live.prepare("first", TWO_RANKS)
    live.prepare("second", TWO_RANKS)
    expected = {"first": 0, "second": 0}
    for arm, steps in (("first", 2), ("second", 1), ("second", 3), ("first", 2)):
        blocks = live.run(arm, steps=steps)
        assert [block.rank for block in blocks] == [0, 1]
        for block in blocks:
            assert [record.step for record in block.steps] == [*range(expected[arm], expected[arm] + steps)]
            assert block.steps[0].duration_ns == 1 + expected[arm] + block.rank
        expected[arm] += steps
    live.discard("first")
    live.discard("second")


def test_gradients_are_asked_for(live: Session) -> None:
    """`gradients` reaches the ranks."""
    live.prepare("arm", TWO_RANKS)
    assert live.run("arm", steps=1)[0].steps[0].grad_norms is None
    assert live.run("arm", steps=1, gradients=True)[0].steps[0].grad_norms == (1.0,)
    live.discard("arm")


def test_a_smaller_mesh_has_fewer_blocks(live: Session) -> None:
    """Only the members of the arm's mesh answer with a block."""
    live.prepare("arm", TWO_RANKS.model_copy(update={"mesh": Mesh(shape=(1,))}))
    assert [block.rank for block in live.run("arm", steps=1)] == [0]
    live.discard("arm")


def test_a_refused_arm_leaves_the_session_usable(live: Session) -> None:
    """All ranks refuse with a named error; the arm's name is free, and others run."""
    with pytest.raises(UnsupportedSwitch, match="the fake arm has no comm_fusion"):
        live.prepare("arm", TWO_RANKS.model_copy(update={"switches": Switches(comm_fusion=True)}))
    live.prepare("arm", TWO_RANKS)
    assert len(live.run("arm", steps=1)) == 2
    live.discard("arm")


def test_what_cannot_be_asked_is_not_sent(live: Session) -> None:
    """A user's mistake is a SpecError, and the session goes on."""
    with pytest.raises(SpecError, match="has no arm 'x'; prepared arms: none"):
        live.run("x", steps=1)
    with pytest.raises(SpecError, match="has no arm 'x'"):
        live.discard("x")
    with pytest.raises(SpecError, match="fsdp8 needs 8 ranks, session 's' has 2"):
        live.prepare("x", Experiment(engine="reference"))
    live.prepare("x", TWO_RANKS)
    with pytest.raises(SpecError, match="has an arm 'x' already"):
        live.prepare("x", TWO_RANKS)
    with pytest.raises(SpecError, match="at least one step, not 0"):
        live.run("x", steps=0)
    live.discard("x")


def test_two_sessions_at_once_and_the_waiting_one_uses_no_core(live: Session, tmp_path: Path) -> None:
    """Launches do not share a port; while one starts, which takes seconds, the ranks of the other sleep."""
    ranks = [psutil.Process(hello.pid) for hello in live.hellos]
    before_s = [sum(rank.cpu_times()[:2]) for rank in ranks]
    with session_in(tmp_path) as other:
        other.prepare("arm", TWO_RANKS)
        assert len(other.run("arm", steps=1)) == 2
    used_s = [sum(rank.cpu_times()[:2]) - before for rank, before in zip(ranks, before_s, strict=True)]
    assert max(used_s) < 0.1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("kind", "seed", "error", "said"),
    [
        (
            "raising_rank",
            TOGETHER,
            RankRaised,
            ("rank 1: ArithmeticError: the fake arm raises", 'fake_arm.py", line', "in strike"),
        ),
        ("dead_rank", TOGETHER, RankDied, ("rank 1 was killed by SIGKILL", "memory runs out")),
        ("hung_rank", 42, RankHung, ("no answer from rank 1", "rank 0 answered", 'fake_arm.py", line', "in strike")),
        ("lost_forward_prefetch", TOGETHER, SessionError, ("rank 1 was asked for steps [2, 3] and sent [2]",)),
    ],
)
def test_a_failing_rank_ends_the_session(
    tmp_path: Path, kind: FaultKind, seed: int, error: type[SessionError], said: tuple[str, ...]
) -> None:
    """The error names what happened, the rank, the steps and the logs; no process and no lock is left."""
    deadlines = IMPATIENT if kind == "hung_rank" else Deadlines()
    with session_in(tmp_path, deadlines=deadlines) as session:
        session.prepare("arm", with_fault(kind, seed=seed))
        session.run("arm", steps=2)
        with pytest.raises(SessionError) as caught:
            session.run("arm", steps=2)
        assert_nothing_left(tmp_path)
        with pytest.raises(SessionError, match="can't be used: session 's'"):
            session.run("arm", steps=1)
    assert caught.type is error
    message = str(caught.value)
    for words in (*said, "running steps 2 to 3 of arm 'arm'", str(tmp_path / "s" / "logs")):
        assert words in message


def test_ranks_that_disagree_end_the_session(tmp_path: Path) -> None:
    """An arm that only some ranks have is none."""
    with session_in(tmp_path) as session, pytest.raises(SessionError, match="disagreed preparing arm 'arm'") as caught:
        session.prepare("arm", TWO_RANKS.model_copy(update={"switches": Switches(forward_prefetch=1)}))
    assert "rank 0 said done\nrank 1 said refused (UnsupportedSwitch: rank 1 has no prefetch)" in str(caught.value)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; build_arm = os.environ['RANK'] == '1' and os._exit(3)", ("rank 1 ended with exit code 3",)),
        ("raise ArithmeticError('at import')", ("ArithmeticError: at import", 'broken.py", line 1')),
    ],
    ids=["dies", "raises"],
)
def test_ranks_that_do_not_come_up(tmp_path: Path, source: str, said: tuple[str, ...]) -> None:
    """A launch that fails says how, on which rank, and leaves nothing."""
    launcher = shim(tmp_path, broken=source)
    launcher = Torchrun(environment=launcher.environment, worker_arguments=("--arm", "broken:build_arm"))
    with pytest.raises(LaunchFailed) as caught, session_in(tmp_path, launcher=launcher):
        pass
    for words in (*said, "starting up", str(tmp_path / "s" / "logs")):
        assert words in str(caught.value)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("script", "start_s", "said"),
    [
        ("time.sleep(3600)", 1, "hung starting up: no answer from ranks 0, 1 .*; no rank answered"),
        ("hello(0); sys.exit('told so')", 120, "the launcher ended with exit code 1; no answer from rank 1.*told so"),
        ("hello(0); os.kill(os.getpid(), 9)", 120, "the launcher was killed by SIGKILL; no answer from rank 1"),
        ("hello(0, a='1'); hello(1, a='2'); time.sleep(3600)", 120, "ranks 0 and 1 run in unlike environments: .*'1'"),
        ("hello(0); done(1); time.sleep(3600)", 120, "disagreed starting up:\nrank 0 said hello\nrank 1 said done"),
    ],
)
def test_greetings_that_are_none(tmp_path: Path, script: str, start_s: float, said: str) -> None:
    """Every rank says hello in time, from the same environment; else there is no session."""
    session = session_in(tmp_path, launcher=FakeRanks(script=script), deadlines=Deadlines(start_s=start_s))
    with pytest.raises(LaunchFailed, match=f"(?s){said}"), session:
        pass
    assert_nothing_left(tmp_path)


GREETING = "hello(0); hello(1)\n"


@pytest.mark.parametrize(
    ("script", "close_s", "error", "said"),
    [
        ("ranks[0].fetch(); done(0); done(1); time.sleep(3600)", 4, RankHung, "said good-bye and did not end"),
        ("ranks[0].fetch(); done(0); done(1); sys.exit('abort')", 60, RankDied, "did not end cleanly.*abort"),
        ("time.sleep(3600)", 1, RankHung, "hung closing: no answer from ranks 0, 1"),
    ],
)
def test_ranks_that_do_not_end(tmp_path: Path, script: str, close_s: float, error: type[Exception], said: str) -> None:
    """A session that does not close cleanly is an error, and is ended all the same."""
    session = session_in(tmp_path, launcher=FakeRanks(script=GREETING + script), deadlines=Deadlines(close_s=close_s))
    with pytest.raises(error, match=f"(?s){said}"), session:
        pass
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("script", "exits", "error", "said"),
    [
        ("fail(1); sys.exit(1)", {0: -signal.SIGTERM, 1: 1}, RankRaised, "rank 1: rank 1 fails\nits traceback"),
        ("fail(1); sys.exit(1)", {0: -signal.SIGSEGV, 1: 1}, RankDied, "rank 0 was killed by SIGSEGV"),
        (
            "fail(1); time.sleep(0.1); fail(0)",
            {0: 1, 1: 1},
            RankRaised,
            r"rank 1: rank 1 fails \(rank 0 raised after it\)",
        ),
        ("fail(1); sys.exit(1)", {0: 3, 1: 1}, RankDied, "rank 0 ended with exit code 3"),
    ],
)
def test_the_first_cause_is_named(
    tmp_path: Path, script: str, exits: Mapping[int, int], error: type[Exception], said: str
) -> None:
    """A rank that was killed, not the peers that it took with it; a rank that raised, not those ended after it."""
    launcher = FakeRanks(script=GREETING + "ranks[0].fetch(); ranks[1].due = 1\n" + script, exits=exits)
    with session_in(tmp_path, launcher=launcher) as session, pytest.raises(error, match=said):
        session.prepare("arm", TWO_RANKS)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_callers_exception_is_not_covered(tmp_path: Path, error: type[BaseException]) -> None:
    """A failing test inside the session fails with its own error; the ranks end, whether or not they heed SIGTERM."""
    launcher = FakeRanks(script=GREETING + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)")
    with pytest.raises(error, match="mine"), session_in(tmp_path, launcher=launcher):
        raise error("mine")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "raise ImportError('libtorch.so: cannot open')",
            "importing torch raised ImportError: libtorch.so: cannot open",
        ),
        (
            "raise RuntimeError('Failed to load the backend')",
            "importing torch raised RuntimeError: Failed to load the b",
        ),
    ],
)
def test_a_torch_that_the_launcher_cannot_import(tmp_path: Path, source: str, said: str) -> None:
    """The message has the exception and says what to install."""
    with (
        pytest.raises(MissingDependency, match=said) as caught,
        session_in(tmp_path, launcher=shim(tmp_path, torch=source)),
    ):
        pass
    assert "pip install" in str(caught.value)
    assert_nothing_left(tmp_path)


def test_torch_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched where there is no torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"torch is not installed for .*pip install"), session_in(tmp_path):
        pass
    assert not (tmp_path / "s" / "launcher.log").exists()


@pytest.mark.parametrize(
    ("device", "modules", "said"),
    [
        ("cpu", {"torch": "raise ModuleNotFoundError('no', name='torch')"}, "torch is not installed for"),
        ("cpu", {"torch": "raise ImportError('libc10.so')"}, "import torch raised ImportError: libc10.so"),
        (
            "npu",
            {"torch": "raise RuntimeError('Failed to load: torch_npu') from ImportError('libhccl.so')"},
            "import torch raised RuntimeError: Failed to load: torch_npu, because of ImportError: libhccl.so",
        ),
        (
            "npu",
            {"torch": "", "torch_npu": "raise ModuleNotFoundError('', name='torch_npu')"},
            "torch_npu is not installed",
        ),
        (
            "npu",
            {"torch": "", "torch_npu": "raise ImportError('libhccl.so: cannot open')"},
            "torch_npu is installed and cannot be loaded: import torch_npu raised ImportError: libhccl.so: cannot open",
        ),
        ("npu", {"torch": "", "torch_npu": ""}, "fine"),
        ("cuda", {"torch": "", "torch_npu": "raise ImportError('libhccl.so')"}, "fine"),
    ],
)
def test_a_rank_says_which_import_failed(
    tmp_path: Path, device: DeviceName, modules: Mapping[str, str], said: str
) -> None:
    """Absent, broken, or broken through torch's own loading of it: three different messages."""
    code = "import sys; from shardgauge.worker.imports import *\ntry: require_torch(sys.argv[1]); print('fine')\n"
    code += "except MissingDependency as error: print(error)"
    environment = os.environ | shim(tmp_path, **modules).environment
    command = [sys.executable, "-c", code, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout


@pytest.mark.parametrize(
    ("torch_npu", "error", "said"),
    [
        (
            "raise ImportError('libhccl.so: cannot open')",
            MissingDependency,
            "import torch_npu raised ImportError: libhccl",
        ),
        (
            "import torch\nclass Npu:\n  @staticmethod\n  def device_count(): return 1\n"
            "  set_device = synchronize = max_memory_allocated = None\ntorch.npu = Npu",
            MissingDevice,
            "2 ranks asked, 1 npu device present",
        ),
    ],
)
def test_what_an_npu_session_lacks(tmp_path: Path, torch_npu: str, error: type[Exception], said: str) -> None:
    """A rank's refusal before its hello becomes the error of the same name."""
    launcher = shim(tmp_path, torch_npu=torch_npu)
    with pytest.raises(error, match=said), session_in(tmp_path, device="npu", launcher=launcher):
        pass
    assert session_processes(SessionDir(tmp_path / "s")) == ()


def test_a_session_directory_is_used_once(tmp_path: Path) -> None:
    """Another session's messages are never taken for this one's."""
    (tmp_path / "s").mkdir()
    with pytest.raises(LaunchFailed, match=r"could not be set up in .*File exists"), session_in(tmp_path):
        pass


def test_a_lock_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The message has the path and the system's reason."""
    (tmp_path / "file").touch()
    session = session_in(tmp_path, lock_dir=tmp_path / "file" / "locks")
    with pytest.raises(LaunchFailed, match=r"could not be set up in .*Not a directory: .*locks"), session:
        pass


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """A parent that gets SIGKILL can't close anything; its ranks and their launcher notice."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit import test_session as t\n"
        "with t.session_in(Path(sys.argv[1])): print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(HERE.parents[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"open\n"
        processes = session_processes(SessionDir(tmp_path / "s"))
        assert len(processes) == 3
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    assert_nothing_left(tmp_path)


HOLDER = "import sys; from pathlib import Path; from shardgauge.launch.device_lock import locked_devices\n"
HOLDER += "with locked_devices(('cpu',), lock_dir=Path(sys.argv[1]), timeout_s=0):\n"
HOLDER += "    print('held', flush=True); sys.stdin.read()"


def test_a_device_in_use_names_its_holder(tmp_path: Path) -> None:
    """Another process's session is waited for, and then named; nothing is launched."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "locks")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        busy = session_in(tmp_path, deadlines=Deadlines(device_lock_s=0.1))
        with pytest.raises(DeviceBusy, match=f"cpu is in use .*pid {holder.pid} .*locked_devices"), busy:
            pass
        holder.communicate()
    assert not (tmp_path / "s").exists()
    assert_nothing_left(tmp_path)


def test_one_process_shares_its_devices(tmp_path: Path) -> None:
    """Sessions of one process hold a device together, until the last lets go."""
    with locked_devices(("cpu",), lock_dir=tmp_path / "locks", timeout_s=0):
        with locked_devices(("cpu",), lock_dir=tmp_path / "locks", timeout_s=0):
            pass
        with pytest.raises(subprocess.CalledProcessError):
            assert_nothing_left(tmp_path)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("device", "environment", "ids"),
    [
        ("cpu", {"CUDA_VISIBLE_DEVICES": "1"}, ("cpu",)),
        ("npu", {}, ("npu0", "npu1")),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}, ("npu4", "npu5")),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "7, 3"}, ("cuda7", "cuda3")),
    ],
)
def test_a_session_locks_the_devices_that_it_sees(
    device: DeviceName, environment: Mapping[str, str], ids: tuple[str, ...]
) -> None:
    """Two jobs on one machine with different visible devices do not wait for each other."""
    assert device_ids(device, world_size=2, environment=environment) == ids


def block(rank: int, *steps: int) -> RankBlock:
    """A block of those steps, a second each."""
    records = (StepRecord(step=n, duration_ns=10**9, loss=1.0, counts={}, payload_bytes={}) for n in steps)
    return RankBlock(rank=rank, steps=tuple(records), peak_memory_bytes=1)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ((block(0, 4, 5), None), "rank 1 sent no block"),
        ((block(0, 4, 5), block(1, 4, 5), block(2, 4, 5)), "rank 2 sent a block; fsdp2 has ranks 0 to 1"),
        ((block(0, 4, 5), block(1, 4)), r"rank 1 was asked for steps \[4, 5\] and sent \[4\]"),
        ((block(0, 4, 5), block(1)), r"rank 1 was asked for steps \[4, 5\] and sent \[\]"),
        ((block(0, 5, 6), block(1, 4, 5)), r"rank 0 was asked for steps \[4, 5\] and sent \[5, 6\]"),
        ((block(0, 4, 5), block(1, 4, 5, 6)), r"rank 1 was asked for steps \[4, 5\] and sent \[4, 5, 6\]"),
        ((block(0, 4, 5), block(0, 4, 5)), "in the name of rank 0"),
    ],
)
def test_an_incomplete_block_is_no_block(blocks: tuple[RankBlock | None, ...], complaint: str) -> None:
    """Exactly the members, exactly the steps that were asked for."""
    progress = ArmProgress(arm="arm", experiment=TWO_RANKS, next_step=4)
    done = {rank: Done(rank=rank, block=block) for rank, block in enumerate(blocks)}
    with pytest.raises(SessionError, match=complaint):
        progress.check(done, steps=2)


def test_deadlines_follow_the_slowest_step() -> None:
    """Before the first block a step may take long; afterwards it may take a multiple of what was seen."""
    deadlines = Deadlines(block_s=5, first_step_s=100, step_factor=20)
    progress = ArmProgress(arm="arm", experiment=TWO_RANKS)
    assert progress.allowance_s(3, deadlines) == 5 + 300
    later = progress.after((block(0, 0, 1), block(1, 0, 1)))
    assert later.next_step == 2
    assert later.allowance_s(3, deadlines) == 5 + 60


def test_an_outer_launch_leaves_nothing_in_the_ranks_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite that is itself started by torchrun or slurm launches ranks like any other."""
    monkeypatch.chdir(tmp_path)
    outer = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME"), "1"),
        **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES"), "1"),
        "OMP_NUM_THREADS": "64",
        "PYTHONPATH": "here",
        "HCCL_BUFFSIZE": "200",
        "GLOO_SOCKET_IFNAME": "eth9",
    }
    ranks = rank_environment(outer, directory=SessionDir(tmp_path), extra={"EXTRA": "1"})
    assert not set(ranks) & (set(outer) - {"OMP_NUM_THREADS", "PYTHONPATH", "HCCL_BUFFSIZE", "GLOO_SOCKET_IFNAME"})
    assert ranks["OMP_NUM_THREADS"] == "1"
    assert ranks["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "here")
    assert (ranks["HCCL_BUFFSIZE"], ranks["GLOO_SOCKET_IFNAME"], ranks["EXTRA"]) == ("200", "eth9", "1")


def test_this_process_never_imports_torch() -> None:
    """Launching, talking and diagnosing need none of it."""
    assert "torch" not in sys.modules
