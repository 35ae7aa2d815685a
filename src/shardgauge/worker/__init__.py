"""The ranks' side: the only code that imports torch. Started as `python -m shardgauge.worker`, imported by nobody."""
