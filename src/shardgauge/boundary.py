"""The pydantic base of all data that crosses a file or process boundary, and how its faults are worded."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class Boundary(BaseModel):
    """Frozen, finite, and closed: an unknown key is an error, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def explain_validation(error: ValidationError) -> str:
    """One clause a fault: where in the data, what is wrong, and the value that was there."""
    clauses = []
    for fault in error.errors(include_url=False):
        where = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        value = repr(fault["input"])
        shown = value if len(value) <= 60 else value[:57] + "..."
        clauses.append(f"{where}: {fault['msg']} (got {shown})")
    return "; ".join(clauses)
