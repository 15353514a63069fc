"""The file that `tango init` writes: settings, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tango_hpc.base.config import Config
from tango_hpc.models.engine.capacity import GIB
from tango_hpc.plan.memory import gpu_phases

AGAIN = {"selective": "norms and activations are computed again", "full": "layers are computed again"}


@dataclass
class Draft:
    """The settings of the file, and the reason for each by its dotted key."""

    tree: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, reason: str = "") -> None:
        """Put a value under a dotted key."""
        *sections, name = key.split(".")
        node = self.tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
        if reason:
            self.reasons[key] = reason


def draft_cut(draft: Draft, role: str, config: Config, memory_gib: float | None) -> None:
    """Put what of a role's cut differs from the defaults into the draft, with its reasons."""
    settings, defaults = config.models[role], type(config.models[role]).model_fields
    phases = gpu_phases(config, role, memory_gib) if memory_gib is not None else []
    training = max((phase.total / GIB for phase in phases if "gradients" in phase.items), default=None)
    memory = f"training fills {training:.0f} of {memory_gib:.0f} GiB" if training is not None else "less memory"
    cut = settings.parallel
    sizes = {name: getattr(cut, name) for name in ("tensor", "pipeline") if getattr(cut, name) > 1}
    if sizes:
        draft.set(f"{role}.parallel", sizes | ({"sequence": True} if cut.sequence else {}), memory)
    if settings.recompute != defaults["recompute"].default:
        draft.set(f"{role}.recompute", settings.recompute, f"{AGAIN[settings.recompute]}: {memory}")
    if settings.micro_batch_tokens != defaults["micro_batch_tokens"].default:
        reason = "larger ones are no faster" if sizes or settings.recompute != "none" else memory
        draft.set(f"{role}.micro_batch_tokens", settings.micro_batch_tokens, reason)
    if settings.rollout.tensor > 1:
        draft.set(f"{role}.rollout.tensor", settings.rollout.tensor, "its ranks share the weights that a token reads")


def lines_of(draft: Draft) -> Iterator[str]:
    """Yield the file's lines: sections in blocks, small ones in a line, reasons as comments."""
    for name, value in draft.tree.items():
        yield ""
        yield from _node(name, name, value, draft.reasons, "")


def _node(name: str, key: str, value: Any, reasons: Mapping[str, str], indent: str) -> Iterator[str]:
    inner = [other for other in reasons if other.startswith(f"{key}.")]
    comment = f"  # {reasons[key]}" if key in reasons else ""
    if isinstance(value, dict) and (inner or any(isinstance(one, dict) for one in value.values())):
        yield f"{indent}{name}:{comment}"
        for below, one in value.items():
            yield from _node(below, f"{key}.{below}", one, reasons, indent + "  ")
        return
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
    yield f"{indent}{name}: {text}{comment}"
