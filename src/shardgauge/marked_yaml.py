"""YAML read so that a fault can be shown where it stands: every value keeps its line, every number its digits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from shardgauge.errors import ThresholdError

Place = tuple[str | int, ...]
# The C loader reads a file of claims in a tenth of the time; where PyYAML was built without it, the Python one serves.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


@dataclass(frozen=True, kw_only=True)
class MarkedDocument:
    """Plain data (fractions as `Decimal`, as written), and the line, from 1, at which each place of it begins."""

    data: Any
    lines: Mapping[Place, int]

    def line_of(self, place: Place) -> int:
        """The line of `place`, or of the nearest thing around it that has one."""
        while place not in self.lines and place:
            place = place[:-1]
        return self.lines.get(place, 1)


def read_marked_yaml(path: Path) -> MarkedDocument:
    """Read a YAML file; a key that stands twice in one mapping is refused, not overwritten.

    Raises:
        ThresholdError: the file is unreadable, not YAML, or uses a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ThresholdError(f"{path}: cannot be read: {error}") from error
    return parse_marked_yaml(text, name=str(path))


def parse_marked_yaml(text: str, *, name: str) -> MarkedDocument:
    """The same of a text; `name` stands for the file in messages."""
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ThresholdError(f"{name}:{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ThresholdError(f"{name}: not YAML: {error}") from error
    lines: dict[Place, int] = {(): 1}
    data = None if root is None else _build(root, (), lines, name)
    return MarkedDocument(data=data, lines=lines)


def _build(node: yaml.Node, place: Place, lines: dict[Place, int], name: str) -> Any:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, place, lines, name)
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, (*place, index), lines, name) for index, child in enumerate(node.value)]
    return _build_scalar(node)


def _build_mapping(node: yaml.MappingNode, place: Place, lines: dict[Place, int], name: str) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in built:
            first = lines[(*place, key)]
            raise ThresholdError(f"{name}:{line}: {key!r} stands here a second time, first in line {first}; keep one")
        lines[(*place, key)] = line
        built[key] = _build(value_node, (*place, key), lines, name)
    return built


# A plain scalar has style None from the Python loader and "" from the C one.
def _build_scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if isinstance(node, yaml.ScalarNode) and node.style not in (None, ""):
        return text
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("-").isdigit() else Decimal(text)
    if text.lower() in (".nan", ".inf", "-.inf", "+.inf"):
        return float(text.replace(".", ""))
    return _WORDS.get(text.lower(), text)
