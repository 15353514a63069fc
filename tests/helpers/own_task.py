"""What docs/your_own_task.md shows, as files."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.runs import ROOT

PAGE = (ROOT / "docs/your_own_task.md").read_text()


def write_what_the_page_shows(folder: Path) -> tuple[str, str]:
    """`odd_digits.py` and `odd_digits.yaml` of the page, beside the shipped configs; their texts."""
    (code,) = re.findall(r"`odd_digits\.py`:\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (settings,) = re.findall(r"`odd_digits\.yaml`, .*?\n\n```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "odd_digits.py").write_text(code)
    (folder / "odd_digits.yaml").write_text(settings)
    (folder / "configs").symlink_to(ROOT / "configs")
    return code, settings
