"""Registers this suite's fixtures; what they do stands in fixtures/."""

pytest_plugins = ["fixtures.engines"]
