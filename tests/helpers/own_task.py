"""What docs/your_own_task.md shows, as files."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.runs import ROOT

PAGE = (ROOT / "docs/your_own_task.md").read_text()


def write_what_the_page_shows(folder: Path) -> tuple[str, str]:
    """`chain.py` and `chain.yaml` of the page, beside the shipped configs; their texts."""
    (code,) = re.findall(r"`chain\.py`:\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (settings,) = re.findall(r"`chain\.yaml`, .*?\n\n```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "chain.py").write_text(code)
    (folder / "chain.yaml").write_text(settings)
    (folder / "configs").symlink_to(ROOT / "configs")
    return code, settings
