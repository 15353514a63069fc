"""What settings are made of: strict sections, and numbers within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tango_hpc.config.paths import absolute

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
# As seen from where the command is typed; a job, and whoever goes on with the run, may be elsewhere.
FilePath = Annotated[Path, AfterValidator(absolute)]


MIN_TEMPERATURE = 0.01  # vLLM raises those between 0 and this to it


def _samples_as_told(value: float) -> float:
    """The trainer would take another distribution for sampled."""
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"vLLM samples at no temperature below {MIN_TEMPERATURE}; give {MIN_TEMPERATURE} or more")
    return value


# Of sampling; and where 0 means greedy.
Temperature = Annotated[float, Field(gt=0.0, allow_inf_nan=False), AfterValidator(_samples_as_told)]
TemperatureOrGreedy = Annotated[float, Field(ge=0.0, allow_inf_nan=False), AfterValidator(_samples_as_told)]


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
