"""thresholds.yaml as a whole: read, checked, and its faults shown where they stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from shardgauge.boundary import Boundary
from shardgauge.entries import LINE, Claim, Limit, Part, Published, Restatement
from shardgauge.errors import ThresholdError
from shardgauge.marked_yaml import MarkedDocument, Place, read_marked_yaml


class Unclaimed(Boundary):
    """Recorded figures (`P2 step_ms`) that no claim rests on, and why they are kept."""

    figures: tuple[str, ...]
    reason: str


class _File(Boundary):
    format: Literal[1]
    source: str
    reasons: Mapping[str, Any] = {}
    unclaimed: tuple[Unclaimed, ...] = ()
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The file, read: claims by id, and the name by which messages call the file."""

    name: str
    claims: Mapping[str, Claim]
    unclaimed: tuple[Unclaimed, ...]

    def find(self, claim: str) -> Claim:
        """The claim called so.

        Raises:
            ThresholdError: there is none.
        """
        if claim not in self.claims:
            raise ThresholdError(f"{self.name} has no claim {claim!r}; it has: {', '.join(sorted(self.claims))}")
        return self.claims[claim]

    def check_tests(self, tested: Iterable[str]) -> None:
        """Hold the tests' claims against the file's, in both directions.

        Raises:
            ThresholdError: a test stands for no claim, or a claim has no test.
        """
        names = set(tested)
        for name in sorted(names):
            self.find(name)
        for name, claim in self.claims.items():
            if name not in names:
                raise ThresholdError(
                    f"{self.name}:{claim.line}: claim {name!r} has no test; write one marked "
                    f'@pytest.mark.claim("{name}"), or take the entry out'
                )


def read_thresholds(path: Path, *, name: str | None = None) -> Thresholds:
    """Read thresholds.yaml; `name` is what messages call it.

    Raises:
        ThresholdError: the file is unreadable, a key is unknown or stands twice, a number is not finite, or an entry
            contradicts its kind. The message names the file, the line, the entry and what is allowed.
    """
    return load_thresholds(read_marked_yaml(path), name=name or str(path))


def load_thresholds(document: MarkedDocument, *, name: str) -> Thresholds:
    """The same of a document already read."""
    try:
        file = _File.model_validate(_fill_in(document))
    except ValidationError as error:
        raise ThresholdError(_explain_all(document, error, name)) from error
    claims: dict[str, Claim] = {}
    for claim in file.claims:
        if claim.claim in claims:
            first = claims[claim.claim].line
            raise ThresholdError(
                f"{name}:{claim.line}: claim {claim.claim!r} stands here a second time, first in line {first}; keep one"
            )
        claims[claim.claim] = claim
    return Thresholds(name=name, claims=claims, unclaimed=file.unclaimed)


def _fill_in(document: MarkedDocument) -> Any:
    """Give every claim, part and limit its line, and every part what its claim says for all of them."""
    data = document.data
    claims = data.get("claims") if isinstance(data, dict) else None
    if not isinstance(claims, list):
        return data
    filled = [_fill_claim(claim, ("claims", index), document) for index, claim in enumerate(claims)]
    return {**data, "claims": filled}


def _fill_claim(claim: Any, place: Place, document: MarkedDocument) -> Any:
    if not isinstance(claim, dict) or not isinstance(claim.get("parts"), list):
        return claim
    own = {key: value for key, value in claim.items() if key not in ("limits", "unit")}
    shared = {key: claim[key] for key in ("kind", "unit") if key in claim}
    common = _mark_limits(claim.get("limits"), (*place, "limits"), document)
    parts = []
    for index, part in enumerate(claim["parts"]):
        at: Place = (*place, "parts", index)
        if isinstance(part, dict):
            limits = {**common, **_mark_limits(part.get("limits"), (*at, "limits"), document)}
            part = {**shared, **part, "limits": limits, LINE: document.line_of(at)}
        parts.append(part)
    return {**own, "parts": parts, LINE: document.line_of(place)}


def _mark_limits(limits: Any, place: Place, document: MarkedDocument) -> dict[str, Any]:
    if not isinstance(limits, dict):
        return {}
    return {
        device: {**limit, LINE: document.line_of((*place, device))} if isinstance(limit, dict) else limit
        for device, limit in limits.items()
    }


_MODELS: Mapping[str, type[Boundary]] = {
    "claims": Claim,
    "parts": Part,
    "limits": Limit,
    "published": Published,
    "restates": Restatement,
    "unclaimed": Unclaimed,
}


def _explain_all(document: MarkedDocument, error: ValidationError, name: str) -> str:
    """One line a fault; what is said of a list only because of a fault within it is left out."""
    faults = error.errors()
    places = [fault["loc"] for fault in faults]
    deepest = [f for f in faults if not any(p != f["loc"] and p[: len(f["loc"])] == f["loc"] for p in places)]
    return "\n".join(_explain(document, fault, name) for fault in deepest)


def _explain(document: MarkedDocument, fault: Mapping[str, Any], name: str) -> str:
    place = cast(Place, fault["loc"])
    data, entry = document.data, ""
    if len(place) > 1 and place[0] == "claims":
        claim = data["claims"][place[1]]
        entry = f"claim {claim.get('claim', '(unnamed)')!r}: " if isinstance(claim, dict) else ""
    where = ".".join(str(step) for step in place[2 if entry else 0 :] if step != "[key]")
    return f"{name}:{_line_of(document, place)}: {entry}{_describe_fault(fault, place, where)}"


def _describe_fault(fault: Mapping[str, Any], place: Place, where: str) -> str:
    if fault["type"] == "extra_forbidden":
        owner = next((_MODELS[str(step)] for step in reversed(place[:-1]) if step in _MODELS), _File)
        allowed = ", ".join(key for key in owner.model_fields if key != "line")
        more = ", limits, unit" if owner is Claim else ""
        return f"unknown key {where!r}; allowed: {allowed}{more}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    got = "" if fault["type"] in ("missing", "value_error") else f" (got {str(fault['input'])[:60]!r})"
    return f"{where}: {message}{got}" if where else f"{message}{got}"


def _line_of(document: MarkedDocument, place: Place) -> int:
    """The line of a fault; a limit that a part has from its claim stands with the claim."""
    if place[2:3] == ("parts",) and place[4:5] == ("limits",) and place[:6] not in document.lines:
        return document.line_of((*place[:2], *place[4:]))
    return document.line_of(place)
