"""A hyper_parallel tree, imported from where the user has it; what it can do is found by looking, never by version."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardgauge.errors import MissingDependency, SpecError, UnsupportedSwitch

PACKAGE = "hyper_parallel"
_API = f"{PACKAGE}.core.fully_shard.api"
# The tree reads it at its first import, keeps the choice, and prefers MindSpore when it is not set.
_PLATFORM_VARIABLE = "HYPER_PARALLEL_PLATFORM"


@dataclass(frozen=True, kw_only=True)
class HyperTree:
    """The imported package, its `fully_shard` module, and the directory that holds the package."""

    path: Path
    package: Any
    api: Any

    @property
    def keywords(self) -> tuple[str, ...]:
        """`fully_shard`'s parameters, in order."""
        return tuple(inspect.signature(self.api.fully_shard).parameters)

    @property
    def takes_module_list(self) -> bool:
        """Whether one call wraps several modules as one unit; a tree that can says so in its annotation."""
        first = next(iter(inspect.signature(self.api.fully_shard).parameters.values()))
        return "list" in str(first.annotation).lower()

    def lacks(self, switch: str, reason: str) -> UnsupportedSwitch:
        """The error that says why this tree cannot serve `switch`."""
        return UnsupportedSwitch(
            f"hyper_torch cannot serve {switch}: {reason}. The tree is {self.path}, its signature "
            f"fully_shard({', '.join(self.keywords)}); give a later tree with --gauge-hyper-src, or leave {switch} out"
        )

    def forget_metadata(self) -> None:
        """Empty the caches that trees with comm_fusion key by object identity.

        A new model's parameters can stand at the addresses of a freed one's and would be given its sizes.
        """
        for module in loaded_modules("param_group"):
            cache = getattr(module, "AllGatherMetadataCache", None)
            if cache is not None:
                cache._cache.clear()


def loaded_modules(part: str) -> tuple[ModuleType, ...]:
    """The package's modules that are loaded and have `part` in their name."""
    return tuple(
        module
        for name, module in list(sys.modules.items())
        if name.startswith(f"{PACKAGE}.") and part in name and module is not None
    )


def load_tree(source: str | None) -> HyperTree:
    """Import hyper_parallel for torch, from a checkout or (None) as it is installed.

    Raises:
        SpecError: `source` is no readable checkout, or this process has hyper_parallel from elsewhere.
        MissingDependency: the import failed; the message says on what.
    """
    directory = _installed_directory() if source is None else _checkout(source)
    _refuse_other_tree(directory)
    os.environ[_PLATFORM_VARIABLE] = "torch"
    try:
        with _first_on_path(directory):
            package = importlib.import_module(PACKAGE)
            api = importlib.import_module(_API)
    except Exception as error:
        # Whatever a foreign package raises on import (numpy 2 alone gives AttributeError, TypeError and ImportError),
        # it cannot be used; half of it must not stay behind for the next attempt to find.
        for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        raise MissingDependency(
            f"hyper_parallel in {directory} cannot be imported: {type(error).__name__}: {error}. {_advice(error)}"
        ) from error
    return HyperTree(path=directory, package=package, api=api)


def _checkout(source: str) -> Path:
    path = Path(source).expanduser().absolute()
    try:
        inside = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise SpecError(
            f"hyper_parallel source {source} cannot be read: {error.strerror}; give the directory of a checkout, the "
            f"one that contains {PACKAGE}/"
        ) from error
    if PACKAGE not in inside:
        hint = f"; {path.parent} does" if path.name == PACKAGE else ""
        raise SpecError(
            f"hyper_parallel source {source} does not contain {PACKAGE}/{hint}: give a checkout's directory"
        )
    return path


def _installed_directory() -> Path:
    for finder in sys.meta_path:
        # Asked one by one: importlib.util.find_spec would answer with whatever is imported already.
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(PACKAGE, None) if find_spec else None
        if spec is not None and spec.origin:
            return Path(spec.origin).absolute().parents[1]
    raise MissingDependency(
        f"{PACKAGE} is not installed in {sys.prefix}; install it there, or name a checkout with --gauge-hyper-src"
    )


def _refuse_other_tree(directory: Path) -> None:
    loaded = sys.modules.get(PACKAGE)
    if loaded is None:
        return
    home = Path(str(loaded.__file__)).absolute().parents[1]
    if home.resolve() != directory.resolve():
        raise SpecError(
            f"this process has imported hyper_parallel from {home} and cannot import it from {directory} too; "
            "one session serves one source, start another for the other"
        )


@contextmanager
def _first_on_path(directory: Path) -> Iterator[None]:
    """Only while importing: a checkout also has top-level directories such as tests that must shadow nothing."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))


def _advice(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name == PACKAGE or error.name.startswith(f"{PACKAGE}."):
            return "The tree has no fully_shard for torch: give one of 2026-03 or later"
        package = {"yaml": "PyYAML"}.get(error.name, error.name)
        return f"The tree needs {package}: pip install {package}"
    numpy = sys.modules.get("numpy")
    if numpy is not None and int(numpy.__version__.split(".")[0]) >= 2:
        return f"The tree was written for numpy < 2 and numpy {numpy.__version__} is installed: pip install 'numpy<2'"
    return "The tree and this torch may not fit: compare its requirements.txt with what is installed"
