"""The families of models: the page about them, and the sizes of published members."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc.base.families import FAMILIES
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.published import PUBLISHED
from tango_hpc.commands.reference import MARKS, families_table

# Of the safetensors of each release, as its page on the hub says.
PARAMETERS = {
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-32B": 32_762_123_264,
    "Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "OLMo-2-1124-7B-Instruct": 7_298_617_344,
    "Olmo-3-7B-Instruct": 7_298_011_136,
    "SmolLM3-3B": 3_075_098_624,
    "gemma-3-1b-it": 999_885_952,
    "Phi-4-mini-instruct": 3_836_021_760,
    "granite-3.1-2b-instruct": 2_533_531_648,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_member_of_each_family_has_its_size(name: str) -> None:
    assert ModelShape.from_hf_config(PUBLISHED[name]).num_parameters == PARAMETERS[name]


def test_every_family_has_a_published_member() -> None:
    assert {PUBLISHED[name]["model_type"] for name in PARAMETERS} == set(FAMILIES)


def test_the_table_of_families_is_up_to_date() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    table = page.split(MARKS[0])[1].split(MARKS[1])[0]
    assert table == families_table(), "run: python -m tango_hpc.commands.reference"
