"""Cluster profiles: what one Slurm cluster wants of every job, in a YAML file of its own. Unknown keys are refused."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from tango_hpc.base.config.load import NOT_YAML, YamlLoader, explain_mistake
from tango_hpc.base.config.values import Positive, Section
from tango_hpc.base.errors import UserError

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MEMORY = re.compile(r"\d+[KMGT]?")
BY_PLAN = "auto"


class _Loader(YamlLoader):
    """Reads numbers and dates as text, so that Slurm gets what the file says: 1:00:00, 010 and 1e3 as well."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null", ":merge"))]
    for first, resolvers in YamlLoader.yaml_implicit_resolvers.items()
}


class Apptainer(Section):
    """Runs the ranks in a container; the supervisor stays outside, next to Slurm's commands."""

    image: Path = Field(description="The .sif file, on storage that compute nodes see.")
    python: str = Field("python", description="Python inside the image; it needs this package's dependencies.")
    options: list[str] = Field(default_factory=list, description="For apptainer exec, e.g. --nv, --bind=/scratch.")


class Pyxis(Section):
    """Runs the ranks in a container by Slurm's Pyxis plugin (Enroot); the supervisor stays outside."""

    image: str = Field(description="--container-image: a .sqsh file, or an image that compute nodes can fetch.")
    python: str = Field("python", description="Python inside the image; it needs this package's dependencies.")
    mounts: list[str] = Field(
        default_factory=list,
        description="--container-mounts, such as /scratch: runs, models, data and this environment.",
    )
    options: list[str] = Field(
        default_factory=list, description="Further options of srun, e.g. --no-container-entrypoint."
    )


class Profile(Section):
    """One cluster. What is left out is not asked for. Strings may hold environment variables of the job: $SCRATCH."""

    account: str | None = Field(None, description="Whom the hours are charged to.")
    partition: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = Field(None, description="Node features, e.g. a100|h100.")
    exclude: str | None = Field(None, description="Nodes not to use, e.g. n[3,7].")
    time: str = Field("24:00:00", description="Wall-clock limit of one attempt: minutes, h:m:s, or d-h:m:s.")
    memory: str | None = Field(
        BY_PLAN,
        description=(
            "Memory of each node, e.g. 480G; 0 asks for all of it, null for none in particular. auto: with GPUs "
            "what the plan says, or all of an exclusive node; else none in particular."
        ),
    )
    exclusive: bool = Field(False, description="Whole nodes only.")
    cpus_per_rank: Positive | None = Field(
        None, description="Default: launch.threads_per_rank, or 8 for a rank with a GPU and 1 without."
    )
    gpu_request: Literal["gpus-per-node", "gres", "gpus-per-task"] = Field(
        "gpus-per-node",
        description=(
            "The option for GPUs; by task only where a cluster wants it so, and with --gpu-bind=none: ranks must see"
            " their peers' GPUs."
        ),
    )
    gpu_type: str | None = Field(None, description="e.g. a100: asks for --gpus-per-node=a100:4.")
    requeue: bool | Literal["chain"] = Field(
        True,
        description=(
            "Let the job requeue itself. chain: where that is forbidden, each job submits the next one, which "
            "waits for its end. false: it ends saying how to resume."
        ),
    )
    mail_user: str | None = None
    mail_type: str | None = Field(None, description="e.g. END,FAIL.")
    sbatch: dict[str, str | int | bool] = Field(
        default_factory=dict, description="Any other sbatch option by its long name; true for one without a value."
    )

    modules: list[str] = Field(default_factory=list, description="Loaded in this order.")
    venv: Path | None = Field(None, description="Virtual environment to activate.")
    conda: str | None = Field(None, description="Conda environment, by name or path.")
    setup: list[str] = Field(default_factory=list, description="Shell commands before the run; one that fails ends it.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of supervisor and ranks.")
    apptainer: Apptainer | None = None
    pyxis: Pyxis | None = None

    cache_dir: str | None = Field(None, description="For the caches of vLLM, Triton, torch: not the home directory.")
    stage_weights_to: str | None = Field(
        None, description="Node-local folder to which model weights are copied before the start, e.g. $SLURM_TMPDIR."
    )
    socket_interface: str | None = Field(None, description="Network interface of NCCL's and Gloo's sockets, e.g. ib0.")
    infiniband_devices: str | None = Field(None, description="NCCL_IB_HCA, e.g. mlx5_0,mlx5_1.")

    @model_validator(mode="after")
    def _check_containers(self) -> Profile:
        if self.apptainer is not None and self.pyxis is not None:
            raise ValueError("name either apptainer or pyxis: ranks run in one container")
        return self

    @field_validator("time")
    @classmethod
    def _check_time(cls, value: str) -> str:
        time_limit_minutes(value)
        return value

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        if value not in (None, BY_PLAN) and not _MEMORY.fullmatch(value or ""):
            raise ValueError("must be a number with K, M, G or T, e.g. 480G, or auto, or null")
        return value


def time_limit_minutes(text: str) -> int:
    """Parse Slurm's time formats (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s) to whole minutes, rounded up."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError("must be minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError("must be more than nothing")
    return -(-total // 60)


def profile_folders(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where profiles are looked for: the user's own before the examples."""
    config_home = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    shipped = Path(__file__).resolve().parents[2] / "slurm" / "profiles"
    return [config_home / "tango_hpc" / "profiles", shipped, Path("slurm/profiles").absolute()]


def load_profile(name: str | None) -> Profile:
    """Return the profile of that name, or in that file; without one, Slurm's defaults. Raises UserError with all
    mistakes.
    """
    if name is None:
        return Profile()
    file = _find(name)
    try:
        tree = yaml.load(file.read_text(), Loader=_Loader)
    except (*NOT_YAML, OSError) as error:
        raise UserError(f"cannot read the profile {file}: {error}") from None
    if not isinstance(tree, dict | None):
        raise UserError(f"the profile {file} must hold a mapping of settings, not {type(tree).__name__}")
    try:
        return Profile.model_validate(tree or {})
    except ValidationError as error:
        lines = "\n".join(f"  - {explain_mistake(item, Profile)}" for item in error.errors())
        raise UserError(f"the profile {file} has mistakes:\n{lines}") from None


def _find(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise UserError(f"no profile file {name}")
    folders = [folder for folder in profile_folders() if folder.is_dir()]
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    raise UserError(
        f"no profile named {name!r}; there are: {', '.join(names) or 'none'}. "
        f"Your own go to {profile_folders()[0]}/NAME.yaml"
    )


def setup_lines(profile: Profile, private_variables: Path) -> list[str]:
    """Return the shell lines that make a job's environment; one that fails ends the job, named.

    The variables of `env`, which may be secrets, are read from a file that only the user may read.
    """
    steps = [f"module load {shlex.quote(module)}" for module in profile.modules]
    if profile.venv is not None:
        steps.append(f"source {_with_variables(str(profile.venv) + '/bin/activate')}")
    if profile.conda is not None:
        steps.append('eval "$(conda shell.bash hook)"')
        steps.append(f"conda activate {_with_variables(profile.conda)}")
    steps += profile.setup
    lines = [f"{step} || {{ echo {shlex.quote(f'tango: failed: {step}')}; exit 78; }}" for step in steps]
    exports = export_lines(job_variables(profile))
    if profile.env:
        exports.append(f"source {shlex.quote(str(private_variables))} || exit 78")
    return [*lines, "set -u  # ends the job where a variable named below is not set on this node", *exports, "set +u"]


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """Return the shell lines that set `variables`, whose values may hold variables of the job."""
    return [f"export {name}={_with_variables(value)}" for name, value in variables.items()]


def job_variables(profile: Profile) -> dict[str, str]:
    """Return environment variables that the profile's other keys ask for, by name; those of `env` come after them."""
    variables: dict[str, str] = {"HF_HUB_OFFLINE": "1"}
    if profile.cache_dir is not None:
        names = {
            "XDG_CACHE_HOME": "", "HF_HOME": "/huggingface", "VLLM_CACHE_ROOT": "/vllm", "TRITON_CACHE_DIR": "/triton",
            "TORCHINDUCTOR_CACHE_DIR": "/inductor", "MPLCONFIGDIR": "/matplotlib", "FLASHINFER_WORKSPACE_BASE": "",
        }  # fmt: skip
        variables |= {name: profile.cache_dir + below for name, below in names.items()}
    if profile.socket_interface is not None:
        variables |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), profile.socket_interface)
    if profile.infiniband_devices is not None:
        variables["NCCL_IB_HCA"] = profile.infiniband_devices
    if profile.stage_weights_to is not None:
        variables["TANGO_STAGE_WEIGHTS_TO"] = profile.stage_weights_to
    if profile.apptainer is not None:
        box = profile.apptainer
        words = ["apptainer", "exec", *box.options, str(box.image), box.python, "-P", "-m", "tango_hpc.stages.rank"]
        variables["TANGO_RANK_COMMAND"] = shlex.join(words)
    if profile.pyxis is not None:
        enroot = profile.pyxis
        mounts = [f"--container-mounts={','.join(enroot.mounts)}"] if enroot.mounts else []
        variables["TANGO_SRUN_OPTIONS"] = shlex.join([f"--container-image={enroot.image}", *mounts, *enroot.options])
        variables["TANGO_RANK_COMMAND"] = shlex.join([enroot.python, "-P", "-m", "tango_hpc.stages.rank"])
    return variables


def variables_here(profile: Profile) -> dict[str, str]:
    """Return the variables of `job_variables` and `env` for a job on this machine, with its variables in them
    filled in.

    Raises UserError where one of these is not set.
    """
    variables: dict[str, str] = {}
    for name, value in (job_variables(profile) | profile.env).items():  # in the order in which a job exports them

        def filled_in(found: re.Match[str], name: str = name) -> str:
            known = variables.get(found[1], os.environ.get(found[1]))
            if known is None:
                raise UserError(
                    f"{found[0]}, in what the profile gives {name}, is not set here; set it, or take a profile without"
                    " it for jobs on this machine"
                )
            return known

        variables[name] = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", filled_in, value)
    return variables


def _with_variables(text: str) -> str:
    """Quote `text` for bash; the job's shell still replaces $NAME and ${NAME}."""
    escaped = re.sub(r'(["\\`])', r"\\\1", text)
    return '"' + re.sub(r"\$(?!\{?[A-Za-z_])", r"\\$", escaped) + '"'
