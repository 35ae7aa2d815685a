"""A stand-in for hyper_parallel as it became after 2026-03: its interface and habits, in few words of our own.

It trains, so that the adapter's later path is run and not only read: lists of modules, comm_fusion, ranges that the
tree opens itself, names and precision set up in the root's first forward, and no CPU.
"""

from contextlib import nullcontext

from hyper_parallel.core.mesh import DeviceMesh as DeviceMesh

SkipDTensorDispatch = nullcontext
