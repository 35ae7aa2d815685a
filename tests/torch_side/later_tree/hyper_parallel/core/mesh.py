"""The mesh: its shape, and groups that the stand-in only takes from outside."""

from typing import Any

import torch


class DeviceMesh:
    """Ranks in an array, with named dimensions."""

    def __init__(
        self, device_type: str, mesh: torch.Tensor, *, mesh_dim_names: tuple[str, ...], _init_backend: bool = True
    ) -> None:
        assert not _init_backend, "the stand-in makes no process groups"
        self.device_type = device_type
        self.mesh_shape = tuple(mesh.shape)
        self.mesh_dim_names = mesh_dim_names

    def get_group(self, mesh_dim: int) -> Any:
        """Replaced by whoever has the groups."""
        raise NotImplementedError(mesh_dim)
