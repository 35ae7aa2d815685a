"""What the engine finds out about a tree of hyper_parallel, and what it says of one that it cannot use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardgauge.errors import MissingDependency, SpecError, UnsupportedSwitch
from shardgauge.spec import Experiment, build_experiment
from shardgauge.worker.engines import ShardRequest
from shardgauge.worker.engines.hyper_cpu import accept_cpu_mesh
from shardgauge.worker.engines.hyper_hooks import has_ranges, native_order
from shardgauge.worker.engines.hyper_torch import HyperTorchEngine
from shardgauge.worker.engines.hyper_tree import HyperTree, load_tree, loaded_modules

LATER = Path(__file__).parent / "later_tree"
EARLY_API = """
from torch import nn
def fully_shard(module: nn.Module, *, mesh=None, reshard_after_forward=None, mp_policy=None, device=None): ...
"""


@pytest.fixture(autouse=True)
def _no_tree_yet() -> Any:
    """Each test starts and ends without hyper_parallel: a process otherwise keeps its first."""
    forget()
    yield
    forget()


def forget() -> None:
    """Drop hyper_parallel from the imported modules."""
    for name in [n for n in sys.modules if n.split(".")[0] == "hyper_parallel"]:
        del sys.modules[name]


def write_tree(directory: Path, api: str = EARLY_API, package: str = "") -> Path:
    """A tree that consists of its package file and its fully_shard module."""
    core = directory / "hyper_parallel" / "core" / "fully_shard"
    core.mkdir(parents=True)
    for parent in (core, core.parent):
        (parent / "__init__.py").touch()
    (core.parents[1] / "__init__.py").write_text(package)
    (core / "api.py").write_text(api)
    return directory


def request_for(experiment: Experiment) -> ShardRequest:
    """A CPU rank's request; no process group exists, so whatever raises does so before any collective."""
    return ShardRequest(
        experiment=experiment,
        device=torch.device("cpu"),
        member_ranks=tuple(range(experiment.mesh.size)),
        rank=0,
        open_range=torch.profiler.record_function,
    )


def test_early_tree_takes_a_device_and_no_list(tmp_path: Path) -> None:
    """The generation of 2026-03 is told by its signature."""
    tree = load_tree(str(write_tree(tmp_path)))
    assert tree.keywords == ("module", "mesh", "reshard_after_forward", "mp_policy", "device")
    assert not tree.takes_module_list


def test_later_tree_takes_lists_and_comm_fusion() -> None:
    """So are the later ones."""
    tree = load_tree(str(LATER))
    assert "comm_fusion" in tree.keywords
    assert "device" not in tree.keywords
    assert tree.takes_module_list


@pytest.mark.parametrize("annotation", ["'Union[nn.Module, List[nn.Module]]'", "Union[nn.Module, List[nn.Module]]"])
def test_lists_are_seen_in_any_spelling(tmp_path: Path, annotation: str) -> None:
    """Annotations may be evaluated or text."""
    api = f"from typing import List, Union\nfrom torch import nn\ndef fully_shard(module: {annotation}): ...\n"
    assert load_tree(str(write_tree(tmp_path, api))).takes_module_list


def test_platform_is_torch_before_the_first_import(tmp_path: Path) -> None:
    """The tree chooses its platform while it is imported, and MindSpore if nothing is said."""
    package = "import os\nPLATFORM = os.environ.get('HYPER_PARALLEL_PLATFORM')\n"
    assert load_tree(str(write_tree(tmp_path, package=package))).package.PLATFORM == "torch"


def test_source_is_not_left_on_the_path(tmp_path: Path) -> None:
    """A checkout's other directories must not shadow anything."""
    before = list(sys.path)
    load_tree(str(write_tree(tmp_path)))
    assert sys.path == before


def test_unreadable_source_is_named(tmp_path: Path) -> None:
    """A path that does not exist is the user's to correct."""
    with pytest.raises(SpecError, match=r"absent cannot be read: No such file or directory"):
        HyperTorchEngine(str(tmp_path / "absent"))


def test_source_without_the_package_is_named(tmp_path: Path) -> None:
    """So is a directory that is no checkout."""
    with pytest.raises(SpecError, match=f"{tmp_path.name} does not contain hyper_parallel/"):
        HyperTorchEngine(str(tmp_path))


def test_package_given_in_place_of_its_checkout(tmp_path: Path) -> None:
    """The likeliest slip is answered with the right path."""
    write_tree(tmp_path)
    with pytest.raises(SpecError, match=f"{tmp_path} does: give a checkout"):
        HyperTorchEngine(str(tmp_path / "hyper_parallel"))


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("import yaml_that_is_absent", "The tree needs yaml_that_is_absent: pip install yaml_that_is_absent"),
        ("import numpy\nnumpy.no_such_name", r"AttributeError.*numpy < 2 and numpy 2.*pip install 'numpy<2'"),
    ],
)
def test_failing_import_says_on_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, message: str
) -> None:
    """Whatever the tree raises becomes one kind of error, with what to do."""
    monkeypatch.setattr("numpy.__version__", "2.4.0")
    with pytest.raises(MissingDependency, match=message):
        HyperTorchEngine(str(write_tree(tmp_path, package=package)))
    assert "hyper_parallel" not in sys.modules


def test_failed_import_leaves_nothing_behind(tmp_path: Path) -> None:
    """After a failure another tree can still be imported."""
    with pytest.raises(MissingDependency):
        load_tree(str(write_tree(tmp_path / "broken", api="import absent")))
    assert not loaded_modules("")
    assert load_tree(str(write_tree(tmp_path / "whole"))).path == tmp_path / "whole"


def test_tree_without_fully_shard(tmp_path: Path) -> None:
    """A tree from before fully_shard is said to be too old."""
    (tmp_path / "hyper_parallel").mkdir()
    (tmp_path / "hyper_parallel" / "__init__.py").touch()
    with pytest.raises(MissingDependency, match=r"no fully_shard for torch: give one of 2026-03 or later"):
        load_tree(str(tmp_path))


def test_second_tree_in_one_process_is_refused(tmp_path: Path) -> None:
    """Python keeps the first; measuring it under the second's name would be a lie."""
    load_tree(str(write_tree(tmp_path / "first")))
    with pytest.raises(SpecError, match=f"imported hyper_parallel from {tmp_path / 'first'} and cannot"):
        load_tree(str(write_tree(tmp_path / "second")))


def test_same_tree_again_is_fine(tmp_path: Path) -> None:
    """Every experiment of a session makes an engine of its own."""
    first = load_tree(str(write_tree(tmp_path)))
    assert load_tree(str(tmp_path)).api is first.api


def test_installed_package_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a source, the package comes from the environment."""
    monkeypatch.syspath_prepend(str(write_tree(tmp_path)))
    assert load_tree(None).path == tmp_path


def test_neither_installed_nor_given(tmp_path: Path) -> None:
    """Without either, the error names the option."""
    code = (
        "from shardgauge.worker.engines.hyper_tree import load_tree\n"
        "from shardgauge.errors import MissingDependency\n"
        "try:\n    load_tree(None)\nexcept MissingDependency as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "is not installed in" in run.stdout
    assert "--gauge-hyper-src" in run.stdout


def test_comm_fusion_on_an_early_tree_is_refused_by_name(tmp_path: Path) -> None:
    """The error names engine, tree, signature and switch, before any collective."""
    experiment = build_experiment(engine="hyper_torch", switches={"comm_fusion": True})
    with pytest.raises(UnsupportedSwitch) as refused:
        HyperTorchEngine(str(write_tree(tmp_path))).shard(torch.nn.Module(), request_for(experiment))
    for word in ("hyper_torch", "comm_fusion", str(tmp_path), "fully_shard(module, mesh, reshard_after_forward"):
        assert word in str(refused.value)


def test_comm_fusion_needs_lists_for_the_last_unit(tmp_path: Path) -> None:
    """The last two modules, wrapped apart, could not be fused into one collective."""
    api = "from torch import nn\ndef fully_shard(module: nn.Module, *, mesh=None, comm_fusion=False): ...\n"
    experiment = build_experiment(engine="hyper_torch", switches={"comm_fusion": True})
    with pytest.raises(UnsupportedSwitch, match="no list of modules to fuse norm and lm_head"):
        HyperTorchEngine(str(write_tree(tmp_path, api))).shard(torch.nn.Module(), request_for(experiment))


@pytest.mark.parametrize(
    ("shape", "message"), [((2, 1), "a shard axis of 1"), ((7,), r"tok_embeddings.weight of shape \(512, 128\) over 7")]
)
def test_meshes_that_hyper_cannot_shard_over(tmp_path: Path, shape: tuple[int, ...], message: str) -> None:
    """They are refused before any collective: the tree itself would fail late, or train nothing."""
    experiment = build_experiment(engine="hyper_torch", mesh={"shape": shape})
    with pytest.raises(SpecError, match=message):
        HyperTorchEngine(str(write_tree(tmp_path))).shard(torch.nn.Module(), request_for(experiment))


class UnshardFirst:
    """A scheduler that has PR 707's order and no ranges."""

    def _hsdp_forward_pre_hook(self, state: Any, cells: Any) -> None:
        state.unshard()
        for cell in cells:
            cell.prefetch()


class PrefetchFirst:
    """A scheduler that has the order from before PR 707, and ranges."""

    def _hsdp_forward_pre_hook(self, state: Any, cells: Any) -> None:
        for cell in cells:
            cell.prefetch()
        with torch.profiler.record_function(f"pre_forward unshard:{state.module_name}"):
            state.unshard()


def test_order_and_ranges_are_read_off_the_hook() -> None:
    """Both are looked for in the class, even when the instance's hook has been replaced."""
    early, later = UnshardFirst(), PrefetchFirst()
    early._hsdp_forward_pre_hook = later._hsdp_forward_pre_hook  # type: ignore[method-assign]
    assert (native_order(early), has_ranges(early)) == ("unshard_first", False)
    assert (native_order(later), has_ranges(later)) == ("prefetch_first", True)


def test_only_cpu_meshes_are_let_past_the_assertion() -> None:
    """The tree's own judgement of other devices stays, and repairing twice changes nothing."""
    tree = load_tree(str(LATER))
    accept_cpu_mesh(tree)
    repaired = tree.api._get_device_from_mesh
    accept_cpu_mesh(tree)
    assert tree.api._get_device_from_mesh is repaired
    assert repaired(SimpleNamespace(device_type="cpu")) == torch.device("cpu")
    with pytest.raises(AssertionError, match="not xpu"):
        repaired(SimpleNamespace(device_type="xpu"))


def test_sizes_cached_by_identity_are_forgotten() -> None:
    """A freed parameter's address may be a new one's, of another size."""
    tree: HyperTree = load_tree(str(LATER))
    (module,) = loaded_modules("param_group")
    module.AllGatherMetadataCache._cache[1] = "sizes of a freed unit"
    tree.forget_metadata()
    assert not module.AllGatherMetadataCache._cache
