"""Results of an evaluation from the Parquet files of its answers: a table, the same as JSON, and a page to read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tango_hpc import benchmarks
from tango_hpc.benchmarks import metrics
from tango_hpc.benchmarks.metrics import Estimate
from tango_hpc.benchmarks.page import write_page
from tango_hpc.benchmarks.records import GREEDY, Answer, facts, generator_estimates, read_answers, verifier_estimates
from tango_hpc.files import write_atomically

GROUPS = {"math": "mathematics, average", "out_of_domain": "out of domain, average"}


def write_results(folder: Path, labels: Sequence[str], names: Sequence[str]) -> dict[str, float | None]:
    """Write results.json, results.md and answers.html; returns the summary's values, those of the last model.

    Sets whose answers are not there yet are left out.
    """
    answers = {
        label: {name: read_answers(path) for name in names if (path := folder / label / f"{name}.parquet").is_file()}
        for label in labels
    }
    results = {label: _of_model(sets) for label, sets in answers.items() if sets}
    write_atomically(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / "results.md", results_table(results))
    write_page(folder / "answers.html", answers, results)
    summary: dict[str, float | None] = {}
    for sets in results.values():
        for name, entry in sets.items():
            key = next(
                (key for key in ("pass@1", "F1 average", *entry["estimates"]) if key in entry["estimates"]), None
            )
            if key is not None:
                summary[f"eval.{name}"] = entry["estimates"][key]["value"]
    return summary


def results_table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: one row for each model and set, every number as `value [low, high]` in percent."""
    columns = list(
        dict.fromkeys(key for sets in results.values() for entry in sets.values() for key in entry["estimates"])
    )
    lines = [
        "# Evaluation",
        "",
        "Percent with 95% intervals: Wilson's for shares of questions, the bootstrap's over questions for the rest.",
        "",
        "| model | set | questions | " + " | ".join(columns) + " | in our format | tokens | cut off |",
        "| --- | --- | ---: |" + " ---: |" * (len(columns) + 3),
    ]
    for label, sets in results.items():
        for entry in sets.values():
            cells = [str(Estimate(**entry["estimates"][key])) if key in entry["estimates"] else "" for key in columns]
            about = entry.get("facts")
            rest = (
                [f"{100 * about['well_formed']:.0f}%", f"{about['mean_tokens']:.0f}", f"{100 * about['cut_off']:.0f}%"]
                if about
                else ["", "", ""]
            )
            lines.append("| " + " | ".join([label, entry["title"], str(entry["questions"]), *cells, *rest]) + " |")
    return "\n".join(lines) + "\n"


def _of_model(sets: dict[str, list[Answer]]) -> dict[str, Any]:
    """Entries by set, and the unweighted averages over the sets of a group, as the paper's tables have them."""
    entries: dict[str, Any] = {}
    greedy: dict[str, list[list[float]]] = {}
    for name, answers in sets.items():
        benchmark = benchmarks.get_benchmark(name) if name != "task" else None
        asked_verifier = benchmark is not None and benchmark.group == "verifier"
        estimates = verifier_estimates(answers) if asked_verifier else generator_estimates(answers)
        first = [one for one in answers if one.sample == GREEDY]
        entries[name] = {
            "title": benchmark.title if benchmark is not None else "held-out questions",
            "questions": len(first),
            "estimates": {key: asdict(estimate) for key, estimate in estimates.items()},
            "facts": facts(answers),
        }
        if benchmark is not None and not asked_verifier:
            greedy.setdefault(benchmark.group, []).append([float(one.correct) for one in first])
    for group, title in GROUPS.items():
        if len(greedy.get(group, [])) > 1:
            average = metrics.mean_of_means(greedy[group])
            entries[f"{group}_average"] = {
                "title": f"{title} of {len(greedy[group])}",
                "questions": average.count,
                "estimates": {"pass@1": asdict(average)},
            }
    return entries
