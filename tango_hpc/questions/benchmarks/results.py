"""Results of an evaluation from the answers to its sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tango_hpc.questions import benchmarks
from tango_hpc.questions.benchmarks import estimates as metrics
from tango_hpc.questions.benchmarks.records import GREEDY, Answer, facts, generator_estimates, verifier_estimates

GROUPS = {"math": "mathematics, average", "out_of_domain": "out of domain, average"}


def model_results(sets: dict[str, list[Answer]]) -> dict[str, Any]:
    """Return entries by set, and the unweighted averages over the sets of a group, as the paper's tables have them."""
    entries: dict[str, Any] = {}
    greedy: dict[str, list[list[float]]] = {}
    for name, answers in sets.items():
        benchmark = benchmarks.get_benchmark(name) if name != "task" else None
        asked_verifier = benchmark is not None and benchmark.group == "verifier"
        estimates = verifier_estimates(answers) if asked_verifier else generator_estimates(answers)
        first = [answer for answer in answers if answer.sample == GREEDY]
        entries[name] = {
            "title": benchmark.title if benchmark is not None else "held-out questions",
            "questions": len(first),
            "estimates": estimates,
            "facts": facts(answers),
        }
        if benchmark is not None and not asked_verifier:
            greedy.setdefault(benchmark.group, []).append([float(answer.correct) for answer in first])
    for group, title in GROUPS.items():
        if len(greedy.get(group, [])) > 1:
            average = metrics.mean_of_means(greedy[group])
            entries[f"{group}_average"] = {
                "title": f"{title} of {len(greedy[group])}",
                "questions": average.count,
                "estimates": {"pass@1": average},
            }
    return entries


def summary_values(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the main number of each set for summary.json, of the last model that has it; `results` by model
    and set.
    """
    values: dict[str, float | None] = {}
    for sets in results.values():
        for name, entry in sets.items():
            estimates = entry["estimates"]
            key = next((key for key in ("pass@1", "F1 average", *estimates) if key in estimates), None)
            if key is not None:
                values[f"eval.{name}"] = estimates[key].value
    return values
