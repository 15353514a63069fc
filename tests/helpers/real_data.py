"""Public data sets beside the checkout, for the tests that read them where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

REAL = Path(__file__).parents[3] / "shared/data"
needs_real_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"real data sets are not at {REAL}")
