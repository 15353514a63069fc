"""What `python -m tools.bench save` measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import save
from tools.bench.workload import QUICKSTART


def test_a_checkpoint_is_saved_with_checksums_and_without_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "_MODEL", QUICKSTART)
    [row] = save.measure(tmp_path, 2)
    assert (row.name, row.goal, row.at_least) == ("save", 1.1, False)
    assert len(row.ours) == len(row.theirs) == len(row.ratios) == 2 and min(row.ours + row.theirs) > 0
    assert row.ratios == [mine / other for mine, other in zip(row.ours, row.theirs, strict=True)]
    assert not (tmp_path / "save/checkpoint").exists()
