"""`tango plan`: memory, batches and weight-sync traffic of a configuration, as a table or as JSON.

The JSON has `fits` (bool), `problems` (list of str), `ranks`, `device`, and

- `stage`, whose memory this is;
- `memory.gpu` and `memory.node`: `{"limit_bytes": int|null, "peak_bytes": int|null, "phases": [{"phase", "role",
  "total_bytes", "items": {name: bytes}}]}`; `gpu` is one GPU, the fullest of each phase (no phases on a CPU), `node`
  the fullest node's host memory, which on a CPU is all there is;
- `batch`: by role, the fields of `plan.batch.RoleBatch`, and of an engine `max_num_seqs` and `gpu_share`
  (of the GPU, in use while it generates; null on a CPU) as it starts with them, `kv_cache_tokens`, `kv_cache_sequences`
  (of full length), and the waves that it takes for its responses: `waves`, `evaluation_waves`, and `longest_waves`
  where all are of full length (null where nothing is trained);
- `processes`: by stage that the configuration has, `per_rank` (the role that each process of a rank plays; "trainer"
  where roles are fine-tuned) and `per_node` (how many of them a node runs, beside the small parents that start them);
- `communicators`: NCCL's, as `plan.communicators.count_communicators` gives them; null on a CPU;
- `schedule`: optimizer steps of each role, and questions drawn;
- `models`: by the first role of each, `parameters`, `trainable`, and `upload_bytes`: what comes from the host to a GPU
  in a step that updates the model (null on a CPU, and where it is not trained);
- `reshard`: by model that is trained, as `tango_hpc.models.weight_sync.planned.plan_report` gives it;
- `time`, of a training run on a machine whose rates are known: `commands.plan_time`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.model_shape import check_parallel
from tango_hpc.commands.plan_time import show_time
from tango_hpc.method.hooks import known_settings
from tango_hpc.method.role_schedule import role_schedule
from tango_hpc.models.engine.capacity import GIB, engine_memory, resident_gpu_bytes, role_engine
from tango_hpc.models.weight_sync.planned import plan_report as reshard_report
from tango_hpc.plan.batch import role_batch
from tango_hpc.plan.communicators import count_communicators
from tango_hpc.plan.memory import Phase, plan_memory
from tango_hpc.stages.model_folder import check_known
from tango_hpc.stages.stage import STAGES, TRAIN, Stage


def make_plan(config: Config, *, gpu_gb: float, node_gb: float | None, stage: Stage = TRAIN) -> dict[str, Any]:
    """Return the plan as JSON-ready values.

    Raises UserError for a model without sizes, one that cannot be used, or one that cannot be cut this way.
    """
    whole, config = config, stage.taking_part(config)
    shapes = {name: role_shape(config, name) for name in config.models}
    for name, role in config.roles.items():
        check_parallel(role_shape(config, name), role.parallel.tensor, role.parallel.pipeline)
        check_known(role.model.path, name, config)
    reshard = reshard_report(config)
    sync_bytes = {name: synced["total"]["peak_extra_bytes"] for name, synced in reshard.items()}
    memory = plan_memory(
        config, gpu_gb=gpu_gb, node_gb=node_gb, sync_bytes=sync_bytes, takes_checkpoints=stage.takes_checkpoints
    )
    kept, checkpoint = config.checkpoint, sum(memory.checkpoint_bytes.values())
    weights = sum(memory.weights_bytes.values())
    return {
        "fits": not memory.problems,
        "problems": memory.problems,
        "device": config.launch.device,
        "ranks": config.world_size,
        "stage": stage.name,
        "processes": {name: _processes(whole, named) for name, named in STAGES.items() if named.is_configured(whole)},
        "communicators": (
            count_communicators(config, takes_checkpoints=stage.takes_checkpoints)
            if config.launch.device == "cuda"
            else None
        ),
        "models": {
            name: _model(config, name, shape.num_parameters, memory.upload_bytes.get(name))
            for name, shape in shapes.items()
        },
        "memory": {
            "gpu": _place(memory.gpu, memory.gpu_bytes),
            "node": _place(memory.node, memory.node_bytes),
        },
        "checkpoint": {
            "background": kept.background,
            "background_from_bytes": memory.background_bytes if stage.trains else None,
            "bytes": checkpoint if stage.trains else None,
            "keep": kept.keep,
            "weights_bytes": weights if stage.trains else None,
            "keep_weights": kept.keep_weights,
            "disk_bytes": (kept.keep + 1) * checkpoint + kept.keep_weights * weights if stage.trains else None,
        },
        "batch": {name: _batch(config, name, memory.gpu_bytes, stage) for name in config.roles},
        "schedule": _schedule(whole, config),
        "reshard": reshard,
    }


def _model(config: Config, name: str, parameters: int, upload_bytes: int | None) -> dict[str, Any]:
    return {"parameters": parameters, "trainable": config.models[name].trainable, "upload_bytes": upload_bytes}


def _schedule(whole: Config, config: Config) -> dict[str, Any]:
    """Return the optimizer steps of a training run, and the questions that they may draw."""
    steps = Counter(role_schedule(whole))
    max_draws = known_settings(config.run.dir, config.algorithm.advantages.generator)["max_draws"]
    draws = steps["generator"] * max_draws + steps["verifier"] * config.train.verifier_draws
    return {
        "generator_steps": steps["generator"],
        "verifier_steps": steps["verifier"],
        "draws": max_draws,
        "verifier_draws": config.train.verifier_draws,
        "questions": draws * config.train.questions_per_step,
    }


def _batch(config: Config, role_name: str, gpu_bytes: int | None, stage: Stage) -> dict[str, Any]:
    """Return a role's batch of a step, and what its engine takes at once. `gpu_bytes` is null on a CPU."""
    engine, sizes = engine_memory(config, role_name, gpu_bytes or 0), role_batch(config, role_name)
    tokens = max(engine.cache, 0) // role_engine(config, role_name).cache_bytes_per_token
    used = engine.total + resident_gpu_bytes(config)
    longest = min(tokens // sizes.longest, engine.num_seqs)
    waves = {
        "waves": math.ceil(sizes.rollouts_per_engine / engine.num_seqs),
        "evaluation_waves": math.ceil(sizes.evaluations_per_engine / engine.num_seqs),
        "longest_waves": math.ceil(sizes.rollouts_per_engine / max(longest, 1)),
    }
    return asdict(sizes) | {
        "max_num_seqs": engine.num_seqs,
        "gpu_share": round(used / gpu_bytes, 4) if gpu_bytes else None,
        "kv_cache_tokens": tokens,
        "kv_cache_sequences": longest,
        **(waves if stage.trains else dict.fromkeys(waves)),
    }


def _processes(config: Config, stage: Stage) -> dict[str, Any]:
    roles = stage.roles(config)
    return {"per_rank": roles, "per_node": config.launch.tasks_per_node * len(roles)}


def _place(phases: Sequence[Phase], limit: int | None) -> dict[str, Any]:
    return {
        "limit_bytes": limit,
        "peak_bytes": max((phase.total for phase in phases), default=None),
        "phases": [
            {"phase": phase.name, "role": phase.role, "total_bytes": phase.total, "items": phase.items}
            for phase in phases
        ],
    }


def show_plan(plan: dict[str, Any], console: Console) -> None:
    """Print the plan as tables."""
    for name in plan["batch"]:
        _show_role(plan, name, console)
    for stage, processes in plan["processes"].items():
        console.print(
            f"processes of {stage}: {' and '.join(processes['per_rank'])} on each rank, {processes['per_node']:,} on"
            " each node"
        )
    if plan["communicators"] is not None:
        found = plan["communicators"]
        console.print(f"NCCL communicators: at most {found['per_node']:,} on a node, {found['per_gpu']} on a GPU")
    if plan["checkpoint"]["bytes"] is not None:
        _show_training(plan, console)
    if "time" in plan:
        show_time(plan["time"], console)
    for place, title in (("gpu", "One GPU"), ("node", "Memory of one node")):
        memory = plan["memory"][place]
        if memory["phases"]:
            console.print(_memory_table(title, memory))


def _show_role(plan: dict[str, Any], name: str, console: Console) -> None:
    """Print a role's parameters, its responses, its engine and, if the role is trained, its weight sync."""
    model, numbers = plan["models"].get(name), plan["batch"][name]
    about = "the generator's model"
    if model is not None:
        about = f"{model['parameters'] / 1e6:,.1f}M parameters{'' if model['trainable'] else ', not trained'}"
    console.print(f"[bold]{name}[/bold]: {about}")
    cache = f"{numbers['kv_cache_tokens']:,} tokens ({numbers['kv_cache_sequences']:,} full sequences at once)"
    share = f" and {numbers['gpu_share']:.0%} of the GPU" if numbers["gpu_share"] is not None else ""
    if numbers["waves"] is None:
        console.print(
            f"  an engine takes {numbers['max_num_seqs']:,} sequences at once{share}; its cache holds {cache}"
        )
        return
    console.print(
        f"  {numbers['responses']:,} responses a step, at most {numbers['tokens']:,} tokens: "
        f"{numbers['micro_batches']} micro-batches of at most {numbers['micro_batch_tokens']:,} tokens on each "
        "data-parallel rank"
    )
    waves, longest = numbers["waves"], numbers["longest_waves"]
    console.print(
        f"  an engine takes {numbers['max_num_seqs']:,} sequences at once{share}: its "
        f"{numbers['rollouts_per_engine']:,} responses of a step in {_in_waves(waves)}"
        f"{f' ({longest:,} where all are as long as allowed)' if longest > waves else ''}, its "
        f"{numbers['evaluations_per_engine']:,} of an evaluation in {_in_waves(numbers['evaluation_waves'])}; "
        f"its cache holds {cache}"
    )
    if model is not None and model["upload_bytes"] is not None:
        console.print(f"  an update brings {decimal(model['upload_bytes'])} from host memory to each GPU")
    sync = plan["reshard"].get(name)
    if sync is not None:
        total = sync["total"]
        console.print(
            f"  weight sync: {total['received_bytes'] / 1e6:,.1f} MB move between ranks "
            f"({sync['ratio_to_minimum']:.2f} of the minimum), {total['local_bytes'] / 1e6:,.1f} MB stay on theirs; "
            f"gathering full tensors would move {total['gather_bytes'] / 1e6:,.1f} MB"
        )


def _show_training(plan: dict[str, Any], console: Console) -> None:
    """Print the steps and the questions of a training run, and the disk that its checkpoints take."""
    steps, saved = plan["schedule"], plan["checkpoint"]
    console.print(
        f"{steps['generator_steps']:,} generator and {steps['verifier_steps']:,} verifier steps, "
        f"{'at most ' if max(steps['draws'], steps['verifier_draws']) > 1 else ''}{steps['questions']:,} questions"
    )
    if saved["background"] is None:
        console.print(
            "checkpoints are written while training goes on where a node gives the job "
            f"{saved['background_from_bytes'] / GIB:,.0f} GiB or more (checkpoint.background)"
        )
    older = (
        f", with the weights of {saved['keep_weights']} older steps (checkpoint.keep_weights, "
        f"{decimal(saved['weights_bytes'])} each),"
    )
    console.print(
        f"a checkpoint takes {decimal(saved['bytes'])} of disk; {saved['keep']} kept whole (checkpoint.keep) and one"
        f" being written{older if saved['keep_weights'] else ''} take {decimal(saved['disk_bytes'])}"
    )


def _in_waves(count: int) -> str:
    return "one wave" if count == 1 else f"{count:,} waves"


def _memory_table(title: str, memory: dict[str, Any]) -> Table:
    limit = memory["limit_bytes"]
    table = Table(title=f"{title}, GiB" + (f" (of {limit / GIB:.1f})" if limit else ""), title_justify="left")
    table.add_column("phase")
    table.add_column("role")
    table.add_column("total", justify="right")
    table.add_column("parts")
    for phase in memory["phases"]:
        total = phase["total_bytes"]
        style = "red" if limit is not None and total > limit else ""
        merged: Counter[str] = Counter()
        for name, value in phase["items"].items():  # "generator: weights" and "verifier: weights" read as one
            merged[name.rpartition(": ")[2]] += value
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in merged.most_common() if value >= GIB / 200)
        table.add_row(phase["phase"], phase["role"], f"{total / GIB:.2f}", parts, style=style)
    return table
