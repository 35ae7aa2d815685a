"""shardgauge: published conclusions about sharded training, as a merge gate."""

__version__ = "0.1.0"
