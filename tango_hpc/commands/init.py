"""`tango init`: a short configuration that fits a machine, each line with its reason.

The file holds what differs from the defaults. How each model is cut comes from `plan.search`; `tango plan` of the file
shows the bytes and seconds that decided.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from tango_hpc.base.config import Config
from tango_hpc.base.config.load import Layers, YamlLoader, apply_override, value_at
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.config.roles import RoleSettings
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_atomically
from tango_hpc.base.formats import say
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.published import PUBLISHED
from tango_hpc.commands.init_file import Draft, draft_cut, lines_of
from tango_hpc.commands.init_models import find_model, hub_name, smaller_models
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.commands.profiles import Profile
from tango_hpc.models.engine.capacity import GIB
from tango_hpc.plan.cards import Machine, machine_of
from tango_hpc.plan.here import cards_here, cards_of_partition, parse_gpus
from tango_hpc.plan.host import memory_of_this_machine
from tango_hpc.plan.lengths import assumed_load
from tango_hpc.plan.rates import any_cpu
from tango_hpc.plan.search import best_cuts
from tango_hpc.plan.seconds import plan_time

SHOWN = 3
LENGTHS = ("max_prompt_tokens", "max_response_tokens")
REQUEST_TOKENS = 384  # of a verifier's prompt, beside the question and the solution
ADAPTER = {"rank": 32, "alpha": 64}


@dataclass(frozen=True)
class Asked:
    """The wishes of a user."""

    generator: str
    verifier: str  # a model, "same" or "none"
    gpus: str | None
    nodes: int
    data: Path | None
    adapters: bool
    settings: Sequence[str]
    node_gb: float | None


def write_config(file: Path, asked: Asked, profile: Profile, console: Console) -> None:
    """Write the configuration to `file` and say what else there is. Raises UserError where nothing fits."""
    _check_new(file, ".yaml")
    for setting in asked.settings:
        apply_override({}, setting)  # refuses what is no setting, such as a file
    count, machine = _machine(asked, profile)
    node_gb = asked.node_gb if machine.memory_gib is not None else memory_of_this_machine()
    for adapters in (True,) if asked.adapters else (False, True):
        draft = _draft(asked, count, machine)
        if adapters:
            _draft_adapters(draft, "as asked for" if asked.adapters else "all weights do not fit")
        config = Layers(draft.tree).over(*asked.settings).check("these settings")
        found = best_cuts(config, machine, assumed_load(config), number=SHOWN, node_gb=node_gb)
        if found:
            break
    else:
        raise UserError(_what_would_fit(config, machine, node_gb, asked))
    best = found[0]
    for role in best.models:
        draft_cut(draft, role, best, machine.memory_gib)
    for setting in asked.settings:
        apply_override(draft.tree, setting)
        draft.reasons[setting.partition("=")[0].strip()] = "as asked for"
    text = "\n".join([*_head(file, asked, machine, count), *lines_of(draft)]) + "\n"
    Layers(yaml.load(text, Loader=YamlLoader)).check(str(file))
    write_atomically(file, text)
    _show(found, machine, console)
    say(console, f"Written to {file}. Next: tango plan {file}, tango submit train {file} --profile NAME --dry-run")


def write_task(file: Path) -> None:
    """Write a task file to fill in. Raises UserError where there is a file already."""
    _check_new(file, ".py")
    write_atomically(file, TASK)


def _check_new(file: Path, suffix: str) -> None:
    if file.suffix != suffix:
        raise UserError(f"{file}: name a file that ends in {suffix}")
    if file.exists():
        raise UserError(f"{file} is there already; name another file, or remove it")
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}; make it first")


TASK = '''"""A task of your own: `task: {name: this_file.py}` (docs/your_own_task.md)."""


class MyTask:
    def grade(self, question, answer):
        """Return whether the answer is right, or a score from 0 to 1. `question` is a row of data.train."""
        return answer.strip() == question["answer"].strip()

    def label_steps(self, question, steps):
        """Return +1 or -1 for each step, where that can be known; None otherwise. For curves only."""
        return None
'''


# -- the machine ------------------------------------------------------------------------------------------------


def _machine(asked: Asked, profile: Profile) -> tuple[int, Machine]:
    """Return the ranks of a node, and the machine of one."""
    if asked.gpus == "cpu":
        return 1, any_cpu()
    if asked.gpus is not None:
        count, card = parse_gpus(asked.gpus)
        return count, machine_of(card)
    found = cards_of_partition(profile.partition, profile.gpu_type) if profile.partition or profile.gpu_type else None
    found = found or cards_here()
    if found is None:
        raise UserError(
            "no known GPU was found here; say which there are: --gpus 4xA100-80, or --gpus cpu for this machine"
        )
    return found[0], machine_of(found[1])


# -- the settings -----------------------------------------------------------------------------------------------


def _draft(asked: Asked, count: int, machine: Machine) -> Draft:
    """Return the settings that do not depend on how models are cut."""
    draft = Draft()
    on_cpu = machine.memory_gib is None
    draft.set("run.dir", f"runs/{Path(asked.generator).name}")
    draft.set("task.name", "math")
    data = asked.data or Path("data/train.parquet")
    draft.set("data.train", str(data), "" if asked.data else "made by `tango data`; your own: docs/data.md")
    draft.set("data.eval", "data/eval.parquet", "questions that are never trained on")
    draft.set("protocol.solution", "free", "a chat model's steps are its paragraphs; `tagged` needs fine-tuning")
    _draft_model(draft, "generator", asked.generator, on_cpu)
    if asked.verifier == "none":
        draft.set("verifier", None, "outcome rewards alone")
        for key in ("alpha_start", "alpha_end"):
            draft.set(f"algorithm.{key}", 0.0)
        for key in ("verifier_warmup_steps", "verifier_steps_per_cycle"):
            draft.set(f"train.{key}", 0)
    elif asked.verifier == "same":
        draft.set("verifier.same_as", "generator", "one model in both roles: half the memory")
    else:
        _draft_model(draft, "verifier", asked.verifier, on_cpu)
    if asked.verifier != "none":
        draft.set("verifier.max_prompt_tokens", _judged_tokens(asked), "the question, the solution and the request")
    draft.set("launch.tasks_per_node", count, "a rank for each GPU" if not on_cpu else "one process with all threads")
    if asked.nodes > 1:
        draft.set("launch.nodes", asked.nodes)
    if on_cpu:
        draft.set("launch.device", "cpu")
        draft.set("launch.threads_per_rank", len(os.sched_getaffinity(0)))
        draft.set("train.questions_per_step", 4, "a CPU takes minutes for as many")
    return draft


def _judged_tokens(asked: Asked) -> int:
    """Return the tokens of a verifier's longest prompt, with the generator's lengths as asked for or by default."""
    tree, fields = Layers().over(*asked.settings).tree, RoleSettings.model_fields
    lengths = ((value_at(tree, f"generator.{name}"), fields[name].default) for name in LENGTHS)
    return sum(given if isinstance(given, int) else default for given, default in lengths) + REQUEST_TOKENS


def _draft_adapters(draft: Draft, reason: str) -> None:
    for role in ("generator", "verifier"):
        if "model" in (draft.tree.get(role) or {}):
            draft.set(f"{role}.adapter", dict(ADAPTER), f"low-rank adapters: {reason}")
            draft.set(f"{role}.optimizer.learning_rate", 1e-5, "ten times that of full training")


def _draft_model(draft: Draft, role: str, named: str, on_cpu: bool) -> None:
    path = find_model(named)
    missing = "" if (path / "config.json").is_file() else f"made by: tango import {hub_name(named)} --out {path}"
    draft.set(f"{role}.model.path", str(path), missing)
    if re.search(r"Qwen3-[\d.]+B$", path.name):
        draft.set(
            f"{role}.chat_template_arguments",
            {"enable_thinking": False},
            "thoughts are long; to train them: docs/models.md",
        )
    elif re.search(r"Thinking|R1|SmolLM3|Olmo-3.*Think", path.name):
        draft.set("protocol.judge", "answer", "it thinks first: the verifier judges the text after the thought")
    if on_cpu:
        draft.set(f"{role}.rollout.kv_cache_gb", 0.5, "a CPU's cache has to be said")
        draft.set(f"{role}.rollout.max_num_seqs", 32)


# -- where nothing fits ----------------------------------------------------------------------------------------


def _what_would_fit(config: Config, machine: Machine, node_gb: float | None, asked: Asked) -> str:
    """Return a message for a machine on which nothing fits, not even adapters: more GPUs, or a smaller model."""
    options = []
    launch = config.launch
    for tasks, nodes in itertools.product((1, 2, 4, 8), repeat=2) if machine.memory_gib is not None else ():
        if tasks <= launch.tasks_per_node and nodes <= launch.nodes:
            continue
        larger = {"tasks_per_node": max(tasks, launch.tasks_per_node), "nodes": max(nodes, launch.nodes)}
        more = config.model_copy(update={"launch": launch.model_copy(update=larger)})
        if best_cuts(more, machine, assumed_load(more), number=1, node_gb=node_gb):
            options.append(f"more GPUs: --gpus {larger['tasks_per_node']}x{machine.name} --nodes {larger['nodes']}")
            break
    for name in smaller_models(config):
        smaller = _with_model(config, name)
        if best_cuts(smaller, machine, assumed_load(smaller), number=1, node_gb=node_gb):
            options.append(f"a smaller model: {name}")
            break
    models = " and ".join(dict.fromkeys(role.model.path.name for role in config.models.values()))
    where = f"{config.world_size} x {machine.name}" if machine.memory_gib is not None else "this machine"
    if not options:
        return f"{models} do not fit {where}, nor eight times as many, nor does a smaller model that is known"
    found = "\n".join(f"  - {option}" for option in options)
    return f"{models}: nothing that fits {where} was found. What would fit:\n{found}"


def _with_model(config: Config, name: str) -> Config:
    """Return the configuration with a published model for the generator, and for a verifier that is larger than it."""
    model = config.generator.model.model_copy(update={"path": Path("models") / name})
    size = ModelShape.from_hf_config(PUBLISHED[name]).num_parameters
    larger = [role for role in config.models if role == "generator" or role_shape(config, role).num_parameters > size]
    return config.model_copy(update={role: config.models[role].model_copy(update={"model": model}) for role in larger})


# -- what is written and shown ----------------------------------------------------------------------------------


def _head(file: Path, asked: Asked, machine: Machine, count: int) -> Iterator[str]:
    where = f"{asked.nodes} x {count} x {machine.name}" if machine.memory_gib is not None else f"a CPU ({machine.name})"
    models = asked.generator if asked.verifier == "none" else f"{asked.generator} and {asked.verifier}"
    yield f"# {models} on {where}, by `tango init`; what is not here has its default (docs/configuration.md)."
    yield f"#   tango plan {file}"


def _show(found: Sequence[Config], machine: Machine, console: Console) -> None:
    table = Table(title=f"The fastest that fit, {machine.name}", title_justify="left")
    for title in ("", "generator", "verifier"):
        table.add_column(title)
    for title in ("GiB", "generator step, s", "run, h", "all ranks, h"):
        table.add_column(title, justify="right")
    place = "gpu" if machine.memory_gib is not None else "node"
    for number, config in enumerate(found, 1):
        peak = make_plan(config, gpu_gb=machine.memory_gib or 0, node_gb=None)["memory"][place]["peak_bytes"]
        time = plan_time(config, machine, assumed_load(config))
        seconds = [time.step_seconds("generator"), time.run_seconds / 3600, time.rank_hours]
        shown = [f"{value:,.1f}" for value in seconds] if machine.rates.start else [""] * 3  # a guess is not shown
        cuts = [_cut(config, role) for role in ("generator", "verifier")]
        table.add_row(str(number), *cuts, f"{peak / GIB:.1f}", *shown)
    console.print(table)


def _cut(config: Config, role: str) -> str:
    if role not in config.models:
        return "the generator's" if role in config.roles else ""
    settings = config.models[role]
    cut = settings.parallel
    sizes = "".join(f", {name} {getattr(cut, name)}" for name in ("tensor", "pipeline") if getattr(cut, name) > 1)
    again = f", recompute {settings.recompute}" if settings.recompute != "none" else ""
    return f"{settings.micro_batch_tokens:,} tokens{sizes}{again}; engine of {settings.rollout.tensor}"
