"""The parts of settings: strict sections, and numbers within bounds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tango_hpc.base.config.paths import absolute

MOST = 10**12  # no setting means more; arithmetic with it stays within what arrays and files can count
LONGEST_NAME = 255  # of a file, in bytes, on Linux


def _at_most(value: float) -> float:
    """Beside the bounds that the reference page lists for each setting."""
    if value > MOST:
        raise ValueError(f"must be at most {MOST:,}")
    return value


def _possible(path: Path) -> Path:
    """Return `path` if a file system can look for it; raise ValueError otherwise."""
    if "\0" in str(path):
        raise ValueError("must not hold a null character")
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in path.parts):
        raise ValueError(f"has a name of more than {LONGEST_NAME} bytes, which no file system takes")
    return path


Count = Annotated[int, Field(ge=0), AfterValidator(_at_most)]
Positive = Annotated[int, Field(ge=1), AfterValidator(_at_most)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False), AfterValidator(_at_most)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False), AfterValidator(_at_most)]
# Relative to the folder of the command; a job, or a later command, may have another working directory.
FilePath = Annotated[Path, AfterValidator(absolute), AfterValidator(_possible)]
# What layers whose weights are float32 multiply in on a CPU. auto: bfloat16 where the CPU has instructions for it.
ProductDtype = Literal["float32", "bfloat16", "auto"]

MIN_TEMPERATURE = 0.01  # vLLM raises those between 0 and this to it


def _samples_as_told(value: float) -> float:
    """Return the trainer would take another distribution for sampled."""
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"vLLM samples at no temperature below {MIN_TEMPERATURE}; give {MIN_TEMPERATURE} or more")
    return value


# Of sampling; and where 0 means greedy.
Temperature = Annotated[float, Field(gt=0.0, allow_inf_nan=False), AfterValidator(_samples_as_told)]
TemperatureOrGreedy = Annotated[float, Field(ge=0.0, allow_inf_nan=False), AfterValidator(_samples_as_told)]


def of_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON, which workers read and made files carry."""
    try:
        if json.loads(json.dumps(settings, allow_nan=False)) == settings:
            return settings
        problem = "keys must be text: put them in quotes"
    except (TypeError, ValueError) as error:
        problem = f"{error}: put a date in quotes, a set into a list"
    raise ValueError(f"must hold text, numbers, true, false, null, lists and dictionaries; {problem}")


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
