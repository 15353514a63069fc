"""The learning-rate schedule, at points worked out by hand."""

from __future__ import annotations

import pytest

from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.models.trainer.learning_rate import learning_rate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, {0: 1.0, 50: 1.0, 99: 1.0, 500: 1.0}),
        ({"schedule": "constant", "warmup_ratio": 0.1}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0}),
        ({"schedule": "cosine", "final_ratio": 0.1}, {0: 1.0, 33: 0.775, 66: 0.325, 99: 0.1, 200: 0.1}),
        ({"schedule": "exponential", "final_ratio": 0.01}, {0: 1.0, 99: 0.01}),
        ({"schedule": "exponential", "final_ratio": 0.01, "warmup_ratio": 0.01}, {0: 1.0, 1: 1.0, 50: 0.1, 99: 0.01}),
    ],
)
def test_schedule(settings: dict[str, object], expected: dict[int, float]) -> None:
    config = OptimizerConfig(learning_rate=3.0, **settings)
    for step, share in expected.items():
        assert learning_rate(config, step, 100) == pytest.approx(3.0 * share)
