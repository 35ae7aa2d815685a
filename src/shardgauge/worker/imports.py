"""Imports torch and a device's package, or says which of the ways to fail it was."""

from __future__ import annotations

import importlib
import sys

from shardgauge.errors import MissingDependency
from shardgauge.spec import DeviceName

_INSTALL = "pip install -c constraints-cpu.txt torch"


def require_torch(device: DeviceName) -> None:
    """Import torch, and torch_npu for an NPU.

    Raises:
        MissingDependency: one of them is not installed, or is installed and cannot be loaded.
    """
    try:
        importlib.import_module("torch")
    except RuntimeError as error:
        cause = f", because of {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
        raise MissingDependency(
            f"import torch raised RuntimeError: {error}{cause}. A device package that torch loads by itself is broken: "
            "repair it (on an NPU: source CANN's set_env.sh), or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        ) from error
    except ImportError as error:
        raise MissingDependency(_explain("torch", error, f"install it with `{_INSTALL}`")) from error
    if device == "npu":
        _require_torch_npu()


def _require_torch_npu() -> None:
    advice = "install the torch_npu of this torch version, and source CANN's set_env.sh"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, RuntimeError) as error:
        raise MissingDependency(_explain("torch_npu", error, advice)) from error


def _explain(package: str, error: Exception, advice: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return f"{package} is not installed for {sys.executable}; {advice}"
    how = f"import {package} raised {type(error).__name__}: {error}"
    return f"{package} is installed and cannot be loaded: {how}; {advice}"
