from __future__ import annotations

import subprocess
import sys

import pytest

import shardgauge
from shardgauge.cli import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m shardgauge` with `arguments`."""
    command = [sys.executable, "-m", "shardgauge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_version() -> None:
    """`python -m shardgauge --version` says which one it is."""
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"shardgauge {shardgauge.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--fast"], ["doctor", "again"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a usage line, as of any Unix command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: shardgauge" in capsys.readouterr().err


def test_align_passes_its_arguments_and_exit_code_through() -> None:
    """A user's mistake is one message on stderr and exit code 2, without a traceback."""
    done = run("align", "--preset", "qwen9-huge")
    assert done.returncode == 2
    assert "unknown preset 'qwen9-huge'" in done.stderr
    assert "Traceback" not in done.stderr


def test_align_without_torch_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where torch is not installed, the message says so and what to do."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["align", "--preset", "qwen3-nano"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("shardgauge: align makes its data with torch")
    assert "pip install" in message


def test_doctor_shows_packages_and_devices_without_importing_torch() -> None:
    """It must work where torch is broken."""
    code = "import sys; from shardgauge.cli import main; main(['doctor']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shown = [line.split()[0] for line in done.stdout.splitlines()]
    assert shown == ["shardgauge", "torch", "torch_npu", "hyper_parallel", "mindspore", "npu", "cuda"]
