"""What can go wrong, one class a kind. Every message says what, the value, what to do and where to look."""

from __future__ import annotations


class ShardgaugeError(Exception):
    """Base of every error that a user can cause or should read. The faces print it without a traceback."""


class SpecError(ShardgaugeError, ValueError):
    """An experiment, mesh, preset or option asks for something that does not exist or does not fit."""


class UnsupportedSwitch(SpecError):
    """The engine, or the tree that it was imported from, lacks a switch that the experiment asks for."""


class Undecidable(ShardgaugeError):
    """This machine, or this way of measuring, cannot answer; nothing is wrong with the engine or the evidence."""


class MissingDependency(ShardgaugeError, ImportError):
    """A package that the chosen engine or device needs cannot be imported here."""


class MissingDevice(ShardgaugeError):
    """Fewer devices are present than the session has ranks."""


class DeviceBusy(ShardgaugeError):
    """Another process holds the device lock."""


class AlignDataError(ShardgaugeError):
    """The alignment data (initial weights, batches) is missing, truncated or not what the manifest says."""


class RecordError(ShardgaugeError, ValueError):
    """A recorded result or journal line is malformed, incomplete, or of a version this reader does not know."""


class ThresholdError(ShardgaugeError, ValueError):
    """thresholds.yaml, or the tests that stand for its entries, contradict themselves or each other."""


class JournalWriteFailed(ShardgaugeError, OSError):
    """A journal line could not be written whole; everything journalled before it is intact."""


class SessionError(ShardgaugeError):
    """A launched session could not do what it was asked; nothing of it is left running."""


class LaunchFailed(SessionError):
    """The ranks never came up."""


class RankDied(SessionError):
    """A rank's process ended without raising: killed, crashed, or out of memory."""


class RankRaised(SessionError):
    """A rank raised an exception; the message carries the first failing rank's traceback."""


class RankHung(SessionError):
    """A rank did not answer before the deadline."""


class NotMeasurable(ShardgaugeError):
    """The evidence is missing, incomplete or not comparable: no verdict can be given from it."""
