"""`python -m tools.bench growth`: how the seconds of a step, a plan, a sampler and a report grow with the work.

A step here is a rollout and an update of one role on one rank, in one process, so that nothing but the named size
grows. The exponent of a power law is fitted through all points; where it is above 1.1, `details` has them to look at.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tango_hpc.base.config.roles import TinyModelConfig
from tools.bench.local_ranks import run_on_ranks
from tools.bench.measure import Measurement
from tools.bench.workload import (
    GROUP_SIZE,
    make_model,
    read_config,
    read_settings,
    run_config,
    run_training,
    write_settings,
)

_LIMIT = 1.1
_RANKS = (1, 2, 4, 8, 16)
_ROWS = (
    307,
    3070,
)  # of metrics: 200 generator steps, 40 of the warm-up and every fourth after it; and ten times as many
# Of a 7B model.
_PAPER_SIZE = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """One row for each size that grows; its ratio is the exponent."""
    write_settings(folder / "growth", {"repeats": min(repeats, 3)})
    found = run_on_ranks("tools.bench.growth:on_rank", folder / "growth", ranks=1, threads=1)
    write_settings(folder / "growth-ranks", {"repeats": min(repeats, 3)})
    by_ranks = [
        (ranks, run_on_ranks("tools.bench.growth:update_on_ranks", folder / "growth-ranks", ranks=ranks, threads=1))
        for ranks in _RANKS
    ]
    found["ranks"] = [(ranks, update) for ranks, (update, _) in by_ranks]
    if all(sent < update for _, (update, sent) in by_ranks):
        found["ranks, without adding up gradients and gathering weights"] = [
            (ranks, update - sent) for ranks, (update, sent) in by_ranks
        ]
    found |= _around(folder)
    return [_row(name, points) for name, points in found.items()]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Of the power law through (size, seconds), by least squares of the logarithms."""
    logs = [(math.log(size), math.log(seconds)) for size, seconds in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def _row(name: str, points: list[tuple[float, float]]) -> Measurement:
    (small, fast), (large, slow) = points[0], points[-1]
    what = f"{small:g} to {large:g}"
    return Measurement(f"growth-{name}", what, "its size: the ratio is the exponent", "s", [slow], [fast],
                       [exponent(points)], _LIMIT, False, {"points": [list(point) for point in points]})  # fmt: skip


def on_rank(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step by questions, rollouts of a question, tokens of a response and parameters."""
    import numpy as np

    from tango_hpc.base.config.roles import ModelConfig, OptimizerConfig, RoleConfig
    from tango_hpc.base.types import GenerationRequest, SamplingSettings, TrainSequence
    from tango_hpc.models.engine.engine import RolloutEngine
    from tango_hpc.models.trainer.loss import LossSettings
    from tango_hpc.models.trainer.policy import Policy

    repeats = read_settings(folder)["repeats"]
    random = np.random.default_rng(0)
    loss = LossSettings()

    def stepper(model: Path) -> Callable[[int, int, int], float]:
        engine = RolloutEngine(
            model, tensor=1, dtype="float32", max_model_len=512, max_num_seqs=256, max_batched_tokens=4096,
            device="cpu", load_weights=True, kv_cache_bytes=2**28,
        )  # fmt: skip
        policy = Policy(
            RoleConfig(model=ModelConfig(path=model)), "float32", optimizer=OptimizerConfig(), total_steps=10**6
        )

        def seconds(questions: int, rollouts: int, tokens: int) -> float:
            prompts = [random.integers(3, 48, 24).tolist() for _ in range(questions)]
            requests = [
                GenerationRequest(prompt, seed * rollouts + i)
                for seed, prompt in enumerate(prompts)
                for i in range(rollouts)
            ]
            best = math.inf
            for _ in range(repeats):
                start = time.perf_counter()
                made = engine.generate(requests, SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=tokens))
                policy.update(
                    [
                        TrainSequence(request.prompt_ids, one.token_ids, [1.0] * len(one.token_ids), one.logprobs)
                        for request, one in zip(requests, made, strict=True)
                    ],
                    loss,
                )
                best = min(best, time.perf_counter() - start)
            return best

        return seconds

    sizes = [
        TinyModelConfig(hidden_size=hidden, intermediate_size=2 * hidden, num_layers=4, num_heads=hidden // 32,
                        num_kv_heads=hidden // 64)
        for hidden in (128, 192, 256, 384, 512)
    ]  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {}
    small = stepper(make_model(folder / "model-128", sizes[0]))
    found["questions"] = [(n, small(n, GROUP_SIZE, 32)) for n in (4, 8, 16, 32, 64)]
    found["rollouts"] = [(n, small(8, n, 32)) for n in (2, 4, 8, 16, 32)]
    found["response-tokens"] = [(n, small(8, 4, n)) for n in (16, 32, 64, 128, 256)]
    by_size = []
    for model_sizes in sizes:
        model = make_model(folder / f"model-{model_sizes.hidden_size}", model_sizes)
        step = small if model_sizes is sizes[0] else stepper(model)
        parameters = model_sizes.num_layers * model_sizes.hidden_size**2 * 9
        by_size.append((float(parameters), step(8, 4, 32)))
    found["parameters"] = by_size
    return found


def update_on_ranks(folder: Path) -> tuple[float, float]:
    """CPU seconds of all ranks for one update of a batch that grows with them; of that, those of its collectives alone.

    Ranks share the cores of one machine, so their wall time grows with their number by itself; what is asked is
    whether working together costs more: the CPU time of an update, summed over ranks. Its collectives add up gradients
    and gather weights.
    """
    import numpy as np
    import torch
    import torch.distributed as dist

    from tango_hpc.base.config.roles import ModelConfig, OptimizerConfig, RoleConfig
    from tango_hpc.base.types import TrainSequence
    from tango_hpc.models.parallel.collectives import max_over_ranks
    from tango_hpc.models.trainer.policy import Policy

    model = folder / "model"
    if dist.get_rank() == 0:
        make_model(model, TinyModelConfig(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2))
    dist.barrier()
    policy = Policy(
        RoleConfig(model=ModelConfig(path=model)), "float32", optimizer=OptimizerConfig(), total_steps=10**6
    )
    random = np.random.default_rng(0)
    batch = [
        TrainSequence(tokens[:16], tokens[16:])
        for tokens in random.integers(3, 48, (16 * dist.get_world_size(), 64)).tolist()
    ]
    size = dist.get_world_size()
    gradients = torch.zeros(-(-sum(shard.numel() for shard in policy.named_shards().values()) // size) * size)
    share = gradients[: len(gradients) // size].clone()

    def collectives() -> None:
        if size > 1:
            dist.reduce_scatter_tensor(share, gradients)
            dist.all_gather_into_tensor(gradients, share)

    def seconds(work: Callable[[], object]) -> float:
        best = math.inf
        for _ in range(read_settings(folder)["repeats"] + 1):
            dist.barrier()
            start = time.process_time()
            work()
            best = min(best, max_over_ranks([time.process_time() - start])[0] * size)
        return best

    return seconds(lambda: policy.update_sft(batch)), seconds(collectives)


def _around(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """The sampler, the plan and the report at the paper's size and at ten times it."""
    from tango_hpc.base.run.directory import RunDirectory
    from tango_hpc.commands.plan_report import make_plan
    from tango_hpc.questions.data.sampler import QuestionSampler
    from tango_hpc.report.run_page import write_report

    found: dict[str, list[tuple[float, float]]] = {"sampler": [], "plan": [], "report": []}
    for rows in (45_500, 455_000, 4_550_000):
        start = time.perf_counter()
        sampler = QuestionSampler(rows, 0)
        for _ in range(200):
            sampler.draw(256)
        found["sampler"].append((float(rows), time.perf_counter() - start))
    model = make_model(folder / "planned", TinyModelConfig())
    reported = folder / "reported"
    reported.mkdir(exist_ok=True)
    written = run_training(run_config(reported, model, verifier=True, steps=2, questions=4, verifier_steps_per_cycle=1))
    directory = RunDirectory(reported / "run")
    write_report(directory)  # the first one loads fonts and templates
    for rows in _ROWS:
        repeated = [written[i % len(written)] | {"step": i + 1} for i in range(rows)]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in repeated))
        start = time.perf_counter()
        write_report(directory)
        found["report"].append((float(rows), time.perf_counter() - start))
    of_model = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(of_model | _PAPER_SIZE))
    for ranks in (32, 320):
        work = folder / f"plan-{ranks}"
        work.mkdir(exist_ok=True)
        config = read_config(run_config(work, model, verifier=True, steps=1, questions=256, ranks=ranks))
        start = time.perf_counter()
        make_plan(config, gpu_gb=80.0, node_gb=None)
        found["plan"].append((float(ranks), time.perf_counter() - start))
    return found
