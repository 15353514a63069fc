"""What the checks of several calls found: lines of FOLDER/gpu_check.jsonl, from which the page is written.

A call writes its machine and the checks that it knows, and two lines for each check that it runs: that it has started,
and how it ended. A check that has only started took its process along. Results of another card do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FAILED = "failed"
# A check that was still running when the time of its call was over.
CUT = "cut"
MOST_CUTS = 2


def read_state(path: Path) -> list[Record]:
    """Return the records of all calls, in the order in which they were written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may still be under way


def add_record(path: Path, **record: Any) -> None:
    """Append one record."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


def last_call(records: Sequence[Record]) -> int:
    """Return the number of the last call, 0 if there was none."""
    return max((record["call"] for record in records), default=0)


def open_check(records: Sequence[Record]) -> Record | None:
    """Return the start of the check that has not ended, if any."""
    return records[-1] if records and "start" in records[-1] else None


def part_of(check: str) -> int:
    """Return the number of a check's part, which stands in its file's name."""
    found = re.search(r"test_(\d+)_", check)
    assert found, check
    return int(found[1])


def results(records: Sequence[Record], card: str) -> dict[str, list[Record]]:
    """Return how each check ended on this card, once for each time that it ran."""
    calls = {record["call"] for record in records if record.get("machine", {}).get("card") == card}
    found: dict[str, list[Record]] = {}
    for record in records:
        if "end" in record and record["call"] in calls:
            found.setdefault(record["end"], []).append(record)
    return found


def is_settled(ends: Sequence[Record], call: int, again: Sequence[str]) -> bool:
    """Return whether this call has no need to run the check that ended like this.

    A check that did not run or was cut off runs anew in the next call; one that passed or failed only when asked.
    """
    if not ends:
        return False
    last = ends[-1]
    if last["call"] == call:
        return True
    if str(part_of(last["end"])) in again or (last["outcome"] == FAILED and FAILED in again):
        return False
    return last["outcome"] in ("passed", FAILED)


def outcome_of_cut(ends: Sequence[Record]) -> str:
    """Return what a check is that the end of a call cuts off: failed, once it was cut off before."""
    cuts = 1
    for record in reversed(ends):
        if record["outcome"] != CUT:
            break
        cuts += 1
    return FAILED if cuts >= MOST_CUTS else CUT
