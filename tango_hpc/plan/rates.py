"""The part of this CPU that programs reach: fitted to steps that ran here (`tango doctor --rates`), kept in a file.

The costs of `plan.seconds` are linear in seconds of overheads and in one over a share of the peak. So each phase of a
measured step is an equation, and non-negative least squares gives the rates.

`rates.json` has `{"schema": "tango-rates-1", "cpu": NAME, "measured": [{"dtype", "threads", "ranks", "operations",
"bandwidth", "rates": {the fields of Rates}}]}`: an entry for each kind of launch on this machine.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from tango_hpc.base.config import Config
from tango_hpc.base.files import json_object, write_atomically
from tango_hpc.plan.cards import DISK, Machine, Rates
from tango_hpc.plan.lengths import Load
from tango_hpc.plan.seconds import step_phases

SCHEMA = "tango-rates-1"
_NOTHING = Rates(**{field.name: 0.0 for field in fields(Rates)})
# All that overlaps with nothing and costs nothing: shares without end, no overheads.
_FREE = replace(
    _NOTHING,
    **dict.fromkeys(("training", "prefill", "decoding", "reading", "activations", "links"), math.inf),
)
# The rates that each phase tells about. Those of a share are fitted as one over it.
_SHARES = (("decoding",), ("prefill",), ("training",), ("activations",))
_GROUPS: tuple[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = (
    (("rollout", "verify"), (("decoding",), ("prefill",), ("decode_step",), ("decode_sequence",))),
    (("train",), (("training",), ("activations",), ("layer",), ("update",))),
    (("score",), (("score",), ("score_response",))),
)


@dataclass(frozen=True)
class Observed:
    """A step of a role that ran here: its configuration and load, and the seconds of its phases."""

    config: Config
    load: Load
    role: str
    seconds: Mapping[str, float]


def fitted(observed: Sequence[Observed], machine: Machine, start: float) -> Rates:
    """Return the rates that fit the steps best, relative errors alike. `start`: seconds until a run's first step."""
    found: dict[str, float] = {"reading": 1.0, "links": 1.0, "collective": 0.0, "start": start}
    for phases, groups in _GROUPS:
        rows, targets = [], []
        for step, phase in itertools.product(observed, phases):
            if not step.seconds.get(phase):
                continue
            free = _phase(step, replace(machine, rates=_FREE), phase)
            units = [replace(_FREE, **dict.fromkeys(group, 1.0)) for group in groups]
            taken = [_phase(step, replace(machine, rates=unit), phase) - free for unit in units]
            rows.append(np.array(taken) / step.seconds[phase])
            targets.append(1 - free / step.seconds[phase])
        values = non_negative(np.array(rows), np.array(targets))
        for group, value in zip(groups, values.tolist(), strict=True):
            share = 1 / max(value, 1e-6) if group in _SHARES else value
            found |= dict.fromkeys(group, share)
    return Rates(**found)


def _phase(step: Observed, machine: Machine, phase: str) -> float:
    return step_phases(step.config, machine, step.load, step.role)[phase].seconds


def non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return x of at least 0 that minimises |rows @ x - targets|: the best of all choices of what is not 0."""
    count = rows.shape[1]
    best, least = np.zeros(count), float(np.linalg.norm(targets))
    for chosen in _subsets(count):
        part = np.linalg.lstsq(rows[:, chosen], targets, rcond=None)[0]
        error = float(np.linalg.norm(rows[:, chosen] @ part - targets))
        if (part >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[chosen] = part
    return best


def _subsets(count: int) -> Iterable[list[int]]:
    return (list(chosen) for size in range(1, count + 1) for chosen in itertools.combinations(range(count), size))


def rates_file() -> Path:
    """Return the file of this machine's rates, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tango_hpc/rates.json"


def keep(machine: Machine, config: Config) -> Path:
    """Write the machine's rates for launches like `config`'s into the file, beside those for others."""
    file = rates_file()
    entries = [entry for entry in _entries(file) if not _fits(entry, config)]
    own = {
        "dtype": config.launch.dtype,
        "threads": config.launch.threads_per_rank,
        "ranks": config.launch.tasks_per_node,
    }
    entries.append(
        own | {"operations": machine.operations, "bandwidth": machine.bandwidth, "rates": asdict(machine.rates)}
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"schema": SCHEMA, "cpu": cpu_name(), "measured": entries}, indent=2) + "\n")
    return file


def cpu_machine(config: Config) -> Machine | None:
    """Return the machine of a rank on this CPU, as measured for launches like `config`'s; None where that was not."""
    fitting = [entry for entry in _entries(rates_file()) if _fits(entry, config)]
    if not fitting:
        return None
    entry = fitting[0]
    return machine_of_cpu(entry["operations"], entry["bandwidth"], Rates(**entry["rates"]))


# Of a CPU that was not measured: good enough to choose among cuts, not to say seconds.
_GUESSED = Rates(
    training=0.6, prefill=0.6, decoding=0.3, reading=1.0, activations=0.2, links=1.0, decode_step=5e-3,
    decode_sequence=5e-5, layer=0.0, collective=0.0, update=0.1, score=0.1, score_response=5e-4, start=0.0,
)  # fmt: skip


def any_cpu() -> Machine:
    """Return this CPU as it was measured for some launch; where it was not, a guess, whose `rates.start` is 0."""
    entries = _entries(rates_file())
    if not entries:
        return machine_of_cpu(5e10, 1e10, _GUESSED)
    return machine_of_cpu(entries[0]["operations"], entries[0]["bandwidth"], Rates(**entries[0]["rates"]))


def machine_of_cpu(operations: float, bandwidth: float, rates: Rates = _NOTHING) -> Machine:
    """Return the machine of a rank on this CPU; ranks exchange data through its memory."""
    return Machine(cpu_name(), None, operations, bandwidth, bandwidth, bandwidth, bandwidth, DISK, rates)


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _entries(file: Path) -> list[dict]:
    """Return what the file has measured on this machine; nothing of another machine's, or where there is no file."""
    content = (json_object(file.read_bytes()) or {}) if file.is_file() else {}
    return content["measured"] if content.get("schema") == SCHEMA and content.get("cpu") == cpu_name() else []


def _fits(entry: Mapping, config: Config) -> bool:
    launch = config.launch
    return (entry["dtype"], entry["threads"], entry["ranks"]) == (
        launch.dtype,
        launch.threads_per_rank,
        launch.tasks_per_node,
    )
