"""`products: auto` takes bfloat16 on CPUs where it is faster than float32, by what the CPU says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tango_hpc.models.trainer import products


@pytest.mark.parametrize(
    ("amx", "avx512", "vendor", "rounds"),
    [
        (True, True, "GenuineIntel", True),
        (False, True, "GenuineIntel", False),  # measured: half the speed of float32
        (False, True, "AuthenticAMD", True),
        (False, False, "AuthenticAMD", False),
    ],
)
def test_auto_asks_the_cpu(monkeypatch: pytest.MonkeyPatch, amx: bool, avx512: bool, vendor: str, rounds: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(Path, "read_text", lambda self: f"processor : 0\nvendor_id : {vendor}\n")
    assert products.rounds_products("auto") is rounds
    assert products.rounds_products("bfloat16") and not products.rounds_products("float32")
