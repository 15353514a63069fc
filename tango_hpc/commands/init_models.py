"""The models that a user of `tango init` names: where they lie, how they come, which are smaller."""

from __future__ import annotations

from pathlib import Path

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.published import PUBLISHED

# Owners on the Hugging Face hub by how the names of their models begin.
HUB = {
    "Qwen": "Qwen", "Llama": "meta-llama", "DeepSeek": "deepseek-ai", "Mistral": "mistralai", "gemma": "google",
    "OLMo": "allenai", "Olmo": "allenai", "SmolLM3": "HuggingFaceTB", "Phi": "microsoft", "granite": "ibm-granite",
}  # fmt: skip


def find_model(named: str) -> Path:
    """Return the folder of a model that a user names: a folder, a published name, or an id in the local cache of
    Hugging Face. Raises UserError for one of which no sizes are known.
    """
    folder = Path(named).expanduser()
    if (folder / "config.json").is_file():
        return folder
    snapshots = Path.home() / ".cache/huggingface/hub" / f"models--{named.replace('/', '--')}" / "snapshots"
    cached = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if cached:
        return cached[-1].parent
    if folder.name in PUBLISHED:
        return Path("models") / folder.name
    raise UserError(
        f"no sizes of the model {named!r} are known: it is no folder with a config.json, not in the local cache of "
        f"Hugging Face, and none of {', '.join(PUBLISHED)}. Get it first: tango import OWNER/NAME --out models/NAME"
    )


def hub_name(named: str) -> str:
    if "/" in named:
        return named
    owner = next((owner for start, owner in HUB.items() if named.startswith(start)), "OWNER")
    return f"{owner}/{named}"


def smaller_models(config: Config) -> list[str]:
    """Return published models that are smaller than the generator's, its own family first, the largest first."""
    shape = role_shape(config, "generator")
    sizes = {name: ModelShape.from_hf_config(known) for name, known in PUBLISHED.items() if name[0].isupper()}
    longest = max(role.longest for role in config.roles.values())
    fitting = [
        name
        for name, found in sizes.items()
        if found.num_parameters < 0.9 * shape.num_parameters and PUBLISHED[name]["max_position_embeddings"] >= longest
    ]
    return sorted(fitting, key=lambda name: (sizes[name].family != shape.family, -sizes[name].num_parameters))
