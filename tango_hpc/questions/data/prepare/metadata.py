"""The metadata column of prepared rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def read_metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a prepared row; empty for rows of other makers, which need not have that column."""
    return json.loads(row["metadata"]) if row.get("metadata") else {}
