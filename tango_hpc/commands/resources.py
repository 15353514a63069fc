"""The resources that a job asks Slurm for on each node beside GPUs: CPUs for each rank, and memory by the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.commands.profiles import BY_PLAN, Profile
from tango_hpc.runner.environment import CPUS_OF_GPU_RANK
from tango_hpc.stages.stage import Stage

GIB = 2**30
# On top of the plan, whose share of CUDA and NCCL is an estimate, and which leaves out what tmpfs holds; in whole
# steps.
MEMORY_MARGIN = 0.1
MEMORY_STEP_GIB = 8
# Options of sbatch that say how much memory; two of them exclude each other.
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True)
class Memory:
    """Of each node: `option` is the value of sbatch's --mem (None: not asked for), `why` where it comes from."""

    option: str | None
    why: str


def cpus_per_rank(config: Config, profile: Profile) -> int:
    """Return CPUs for each rank: the profile's, else the threads that the configuration asks for, else what the device
    needs.
    """
    default = CPUS_OF_GPU_RANK if config.launch.device == "cuda" else 1
    return profile.cpus_per_rank or config.launch.threads_per_rank or default


def node_memory(configs: Sequence[Config], stages: Sequence[Stage], profile: Profile) -> Memory:
    """Return memory of each node for a job, or an array of jobs, that runs `stages` of one of `configs`.

    What the profile says (an exclusive node's is all of it), else what the fullest stage needs by the plan and
    `MEMORY_MARGIN` more. A CPU job, whose cluster gives memory by the CPU, and one whose models have no known sizes ask
    for none.
    """
    for option in MEMORY_OPTIONS:
        if option in profile.sbatch:
            return Memory(None, f"{option}={profile.sbatch[option]} of the profile's sbatch options")
    if profile.memory is None:
        return Memory(None, "the cluster's default, as the profile's memory is null")
    if profile.memory != BY_PLAN:
        return Memory(profile.memory, "the profile's memory")
    if configs[0].launch.device == "cpu":
        return Memory(None, "the cluster's default, as this job uses no GPUs and the profile's memory is not set")
    if profile.exclusive:
        return Memory("0", "whole nodes, as the profile is exclusive")
    try:
        needed = max(stage.node_bytes(config) for config in configs for stage in stages)
    except UserError as error:
        return Memory(None, f"the cluster's default; set memory in the profile, as the plan cannot tell: {error}")
    steps = -(-int(needed * (1 + MEMORY_MARGIN)) // (MEMORY_STEP_GIB * GIB))
    option = f"{steps * MEMORY_STEP_GIB}G"
    return Memory(option, f"{needed / GIB:.0f} GiB by the plan and {MEMORY_MARGIN:.0%} more")


def asked_of_a_node(config: Config, profile: Profile, memory: Memory) -> str:
    """Return the CPUs and the memory that the job asks of a node, in words."""
    launch = config.launch
    ranks = f"{launch.tasks_per_node} rank{'s' if launch.tasks_per_node > 1 else ''}"
    size = {None: "no amount of", "0": "all its"}.get(memory.option, memory.option)
    cpus = cpus_per_rank(config, profile)
    return f"{ranks} of {cpus} CPU{'s' if cpus > 1 else ''}, {size} memory ({memory.why})"
