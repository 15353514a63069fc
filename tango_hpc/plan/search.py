"""The fastest way to cut a run's models over a machine, of those that fit: what `tango init` writes down.

Each model is cut by itself: its trainer by tensor and pipeline parallelism, recomputation and micro-batches; its engine
by tensor parallelism. What fits is decided by the plan's bytes, with a margin; what is fastest, by its seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import check_parallel, check_rollout_tensor
from tango_hpc.models.engine.capacity import GIB, cache_problem
from tango_hpc.plan.cards import Machine
from tango_hpc.plan.lengths import Load
from tango_hpc.plan.memory import gpu_phases, plan_memory
from tango_hpc.plan.seconds import Cost, Costs

# Cuts that differ by less than this in their seconds count as equally fast: the model of costs is no better.
EQUAL = 1.05
# Of a GPU's memory, what the plan may fill in training: its bytes are estimates, and allocators waste some.
MARGIN = 0.95
RECOMPUTE = ("none", "selective", "full")
LARGEST_MICRO_BATCH = 32768
SHORT = 3  # cuts of a trainer and of an engine that are combined
UNIT = 1024  # of the tokens of a micro-batch


@dataclass(frozen=True)
class Cut:
    """How one role's model is cut, with the memory of its fullest phase and the seconds that depend on it."""

    role: str
    settings: dict[str, Any]  # by dotted key below the role
    peak_bytes: int
    seconds: float  # of the role's part of an average step

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order among cuts: the faster first; of equally fast ones those of fewer ranks, then of less memory."""
        return _in_steps(self.seconds), self.num_ranks, self.peak_bytes

    @property
    def num_ranks(self) -> int:
        """The ranks that share a copy of the model."""
        return math.prod(value for key, value in self.settings.items() if key.endswith(("tensor", "pipeline")))


def _in_steps(seconds: float) -> int:
    """Return seconds as a number of steps, each `EQUAL` times the one before."""
    return round(math.log(max(seconds, 1e-9), EQUAL))


def _rank(pairs: Sequence[Sequence[Cut]]) -> tuple[int, int, float]:
    """Return the order among cuts of all models together."""
    cuts = list(itertools.chain(*pairs))
    total = sum(cut.seconds for cut in cuts)
    return _in_steps(total), sum(cut.num_ranks for cut in cuts), total


def trainer_cuts(config: Config, role: str, machine: Machine, load: Load) -> list[Cut]:
    """Return the trainer's cuts that fit, the fastest first."""
    found: list[Cut] = []
    for (tensor, pipeline), recompute in itertools.product(_sizes(config, role), RECOMPUTE):
        place = {"parallel.tensor": tensor, "parallel.pipeline": pipeline, "parallel.sequence": tensor > 1}
        if machine.memory_gib is not None and any(cut.settings.items() >= place.items() for cut in found):
            continue  # it fits with less computed again
        for size in _micro_batches(config, role):
            changed = place | {"recompute": recompute, "micro_batch_tokens": size}
            candidate = _with(config, role, changed)
            peak = _peak(candidate, role, machine, ("logprobs", "train"))
            if machine.memory_gib is not None and peak > MARGIN * machine.memory_gib * GIB:
                break  # larger ones take more
            costs, seconds = Costs(candidate, machine, load), 0.0
            if config.models[role].trainable:
                parts = (costs.update(one) + costs.logprobs(one) + _turns(costs, role) for one in config.roles_of(role))
                seconds = sum(part.seconds for part in parts)
            found.append(Cut(role, changed, peak, seconds))
    return sorted(found, key=lambda cut: cut.rank)


def engine_cuts(config: Config, role: str, machine: Machine, load: Load) -> list[Cut]:
    """Return the engine's cuts that fit, the fastest first."""
    found = []
    for tensor in _powers(config.launch.tasks_per_node):
        changed = {"rollout.tensor": tensor}
        try:
            check_rollout_tensor(role_shape(config, role), tensor)
        except UserError:
            continue
        candidate = _with(config, role, changed)
        if config.world_size % tensor or cache_problem(candidate, role, int((machine.memory_gib or 0) * GIB)):
            continue
        peak = _peak(candidate, role, machine, ("rollout", "verify"))
        if machine.memory_gib is not None and peak > machine.memory_gib * GIB:
            continue
        found.append(Cut(role, changed, peak, _generating(Costs(candidate, machine, load), role).seconds))
    return sorted(found, key=lambda cut: cut.rank)


def best_cuts(config: Config, machine: Machine, load: Load, *, number: int, node_gb: float | None) -> list[Config]:
    """Return the fastest configurations that fit, at most `number`; none where nothing fits."""
    trainers = {role: trainer_cuts(config, role, machine, load) for role in config.models}
    engines = {role: engine_cuts(config, role, machine, load) for role in config.models}
    if not all([*trainers.values(), *engines.values()]):
        return []
    choices = [
        [
            (trainer, engine)
            for trainer in _shortlist(trainers[role], machine)
            for engine in engines[role][:SHORT]
            if _meets(config, role, machine, trainer, engine)
        ]
        for role in config.models
    ]
    combinations = sorted(itertools.product(*choices), key=_rank)
    found: list[Config] = []
    for pairs in combinations:
        candidate = config
        for cut in itertools.chain(*pairs):
            candidate = _with(candidate, cut.role, cut.settings)
        if node_gb is None or _fits_host(candidate, machine, node_gb):
            found.append(candidate)
        if len(found) == number:
            break
    return found


def _meets(config: Config, role: str, machine: Machine, trainer: Cut, engine: Cut) -> bool:
    """Return whether the weights of trainer and engine fit together, as in a weight sync."""
    both = _with(config, role, trainer.settings | engine.settings)
    return machine.memory_gib is None or _peak(both, role, machine, ("reshard",)) <= machine.memory_gib * GIB


def _shortlist(cuts: Sequence[Cut], machine: Machine) -> list[Cut]:
    """Return the fastest cut of each tensor and pipeline size; on a CPU, where host memory decides, all cuts."""
    if machine.memory_gib is None:
        return list(cuts)
    first: dict[tuple[int, int], Cut] = {}
    for cut in cuts:
        first.setdefault((cut.settings["parallel.tensor"], cut.settings["parallel.pipeline"]), cut)
    return list(first.values())[:SHORT]


def _sizes(config: Config, role: str) -> list[tuple[int, int]]:
    """Return the tensor and pipeline sizes that a role's model can be cut by."""
    shape, launch = role_shape(config, role), config.launch
    found = []
    for tensor, pipeline in itertools.product(_powers(launch.tasks_per_node), _powers(config.world_size)):
        try:
            check_parallel(shape, tensor, pipeline)
        except UserError:
            continue
        if config.world_size % (tensor * pipeline) == 0:
            found.append((tensor, pipeline))
    return found


def _micro_batches(config: Config, role: str) -> list[int]:
    """Return the sizes of micro-batches that are tried: whole longest sequences, doubled."""
    longest = max(config.roles[one].longest for one in config.roles_of(role))
    sizes = [-(-longest // UNIT) * UNIT]
    while sizes[-1] * 2 <= LARGEST_MICRO_BATCH:
        sizes.append(sizes[-1] * 2)
    return sizes


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _with(config: Config, role: str, changed: dict[str, Any]) -> Config:
    """Return the configuration with other settings of a role, which are valid."""
    settings = config.models[role]
    update: dict[str, Any] = {}
    for key, value in changed.items():
        section, _, name = key.rpartition(".")
        if section:
            now = update.get(section, getattr(settings, section))
            update[section] = now.model_copy(update={name: value})
        else:
            update[name] = value
    return config.model_copy(update={role: settings.model_copy(update=update)})


def _peak(config: Config, role: str, machine: Machine, names: Sequence[str]) -> int:
    if machine.memory_gib is None:
        return 0
    phases = gpu_phases(config, role, machine.memory_gib)
    return max((phase.total for phase in phases if phase.name in names), default=0)


def _fits_host(config: Config, machine: Machine, node_gb: float) -> bool:
    buckets = dict.fromkeys(config.models, 0)
    plan = plan_memory(config, gpu_gb=machine.memory_gib or 0, node_gb=node_gb, sync_bytes=buckets)
    return not plan.problems


def _turns(costs: Costs, role: str) -> Cost:
    return sum(costs.turns(role).values(), Cost())


def _generating(costs: Costs, model: str) -> Cost:
    """Return what a model's engines write in a generator step."""
    written = costs.written("generator")
    roles = costs.config.roles_of(model)
    of_model = [cost for role, cost in zip(("generator", "verifier"), written.values(), strict=False) if role in roles]
    return sum(of_model, Cost())
