"""Runs beside each other, as the paper's Figure 4 has them: curves of each arm over seeds, and a table.

Arms differ in what is trained, by the algorithm, and by other settings in which runs differ. The curves are
kept in one small file, curves.csv, from which figure and table can be made again without the runs: what is there keeps
the place of a run that is gone.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tango_hpc.base.config.load import read_tree
from tango_hpc.base.config.paths import absolute, flatten
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_atomically
from tango_hpc.base.formats import label_of
from tango_hpc.base.run.directory import RunDirectory, runs_below
from tango_hpc.base.run.metrics import MetricsRow, read_evaluations, read_metrics

STAGE = "train"
CURVES = "curves.csv"
SCORES = ("outcome_f1", "step_f1", "outcome_pr_f1", "step_pr_f1", "outcome_j", "step_j", "correct_share")
FIRST = ("first_outcome_f1", "first_step_f1")  # on the solutions of the first evaluation, which stay the same
# Where rows of metrics.jsonl and of evaluations.jsonl have them.
OF_STEP = {score: f"verifier/{score}" for score in SCORES}
OF_EVALUATION = {score: f"verifier/present_{score}" for score in SCORES}
OF_EVALUATION |= {"first_outcome_f1": "verifier/outcome_f1", "first_step_f1": "verifier/step_f1"}
COUNTS = ("step", "generator_steps", "verifier_steps", "tokens", "seconds")
NUMBERS = (*COUNTS, "accuracy", *SCORES, *FIRST, "alpha")
COLUMNS = ("arm", "algorithm", "seed", "run", "kind", *NUMBERS)
# Settings that do not make another arm: where a run lies, how it is started, what it writes.
NO_ARM = ("run", "seed", "data", "launch", "checkpoint", "sft", "eval", "teacher", "reshard")
NO_ARM_OF_TRAINING = ("eval_every", "dump_every", "trace_steps")
# Of a role: which files its weights are in (every seed may have its own, but see `_models_apart`), where they lie, how
# a
# batch is cut; and what the name of the arm says anyway.
NO_ARM_OF_ROLE = ("model.", "parallel.", "rollout.", "micro_batch_tokens", "recompute", "trainable")
NAMES = {
    "grpo": "GRPO", "rloo": "RLOO", "reinforce_plus_plus": "REINFORCE++", "dr_grpo": "Dr. GRPO", "dapo": "DAPO",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A line of curves.csv: a training step, scored on its own solutions, or an evaluation on unseen questions.

    `numbers`: the counts and sums up to here over both roles (tokens generated, seconds of optimizer steps), accuracy,
    and the scores of the verifier on the present generator's solutions; what was not measured is missing. `run` is the
    run's place below the folder.
    """

    arm: str
    algorithm: str
    seed: int
    run: str
    kind: str  # "step" or "evaluation"
    numbers: Mapping[str, float]


def collect(folder: Path) -> list[Point]:
    """Return the measurements of the runs below `folder`, and those of other runs that curves.csv has kept there.

    Raises `UserError` without either, or where curves.csv is damaged.
    """
    folder = absolute(folder)  # as run directories are
    runs = [RunDirectory(path) for path in sorted(runs_below(folder))]
    runs = [run for run in runs if read_metrics(run, STAGE)]
    if not runs:
        return read_points(folder / CURVES)
    trees = [read_tree(run.config) for run in runs]
    points: list[Point] = []
    arms: dict[str, str] = {}
    known: dict[tuple[str, int], str] = {}
    for run, tree, arm in zip(runs, trees, arms_of(trees), strict=True):
        place = str(run.path.relative_to(folder)) if run.path != folder else run.path.name
        arms[place] = arm = _apart(known, arm, tree["seed"], place)
        points += _points(run, arm, _algorithm(tree), tree["seed"], place)
    kept = read_points(folder / CURVES) if (folder / CURVES).is_file() else []
    # What is usual among runs may be another setting than it was when these were there: their arms are now named
    # otherwise.
    now = {point.arm: arms[point.run] for point in kept if point.run in arms}
    for point in kept:
        if point.run not in arms:
            points.append(replace(point, arm=_apart(known, now.get(point.arm, point.arm), point.seed, point.run)))
    return points


def _apart(known: dict[tuple[str, int], str], arm: str, seed: int, place: str) -> str:
    """Return the arm of the run at `place`, or, where another run of its seed is there already, a curve of its own."""
    return arm if known.setdefault((arm, seed), place) == place else f"{arm} ({place})"


def arms_of(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each run's arm, by its resolved configuration; settings that most runs of a kind share are
    left out.
    """
    kinds = [_kind(tree) for tree in trees]
    flat = [{key: value for key, value in flatten(tree).items() if not _is_of_no_arm(key)} for tree in trees]
    for settings in flat:
        if settings.get("algorithm.alpha_schedule") == "constant":
            settings.pop("algorithm.alpha_end", None)  # nothing reads it
    for settings, models in zip(flat, _models_apart(trees, kinds, flat), strict=True):
        settings |= models
    names = []
    for kind, settings in zip(kinds, flat, strict=True):
        alike = [other for other_kind, other in zip(kinds, flat, strict=True) if other_kind == kind]
        own = {}
        for key, value in settings.items():
            usual, count = Counter(repr(other.get(key)) for other in alike).most_common(1)[0]
            if repr(value) != usual or (count <= len(alike) / 2 and count < len(alike)):
                own[key] = value
        names.append(", ".join(filter(None, (kind, label_of(own) if own else ""))))
    return names


def _models_apart(
    trees: Sequence[Mapping[str, Any]], kinds: Sequence[str], flat: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return the models that runs began with, where they make an arm: where runs that are alike in all else have the
    same seed.

    Models are named by what tells their paths apart.
    """
    apart: list[dict[str, str]] = [{} for _ in trees]
    for role in ("generator", "verifier"):
        paths = [str((tree.get(role) or {}).get("model", {}).get("path")) for tree in trees]
        models: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        for kind, settings, tree, path in zip(kinds, flat, trees, paths, strict=True):
            models[kind, repr(sorted(settings.items(), key=repr)), tree["seed"]].add(path)
        for kind in {kind for (kind, _, _), different in models.items() if len(different) > 1}:
            members = [i for i in range(len(trees)) if kinds[i] == kind]
            common = os.path.commonpath([os.path.dirname(paths[i]) for i in members])
            for i in members:
                apart[i][role] = os.path.relpath(paths[i], common)
    return apart


def _is_of_no_arm(key: str) -> bool:
    section, _, setting = key.partition(".")
    if section == "train":
        return setting.startswith(NO_ARM_OF_TRAINING)
    of_role = section in ("generator", "verifier")
    return section in NO_ARM or (of_role and (not setting or setting.startswith(NO_ARM_OF_ROLE)))


def _algorithm(tree: Mapping[str, Any]) -> str:
    """Return the name of the file that the generator's advantages come from; of a variant of GRPO, that."""
    name = Path(tree["algorithm"]["advantages"]["generator"]["name"]).stem
    return "grpo" if name in ("merged", "prof") else name


def named(algorithm: str) -> str:
    """Return an algorithm as a page says it."""
    return NAMES.get(algorithm, algorithm)


def _kind(tree: Mapping[str, Any]) -> str:
    algorithm = named(_algorithm(tree))
    if tree["verifier"] is None:
        return f"{algorithm} alone"
    learns = tree["generator"]["trainable"], tree["verifier"]["trainable"]
    if "same_as" in tree["verifier"]:
        what = {(True, False): ", solutions only", (False, True): ", judgements only"}.get(learns, "")
        return f"one model{what}, {algorithm}"
    if not learns[0]:
        return f"generator frozen, {algorithm}"
    return f"{'Tango' if learns[1] else 'verifier frozen'}, {algorithm}"


def _points(run: RunDirectory, arm: str, algorithm: str, seed: int, place: str) -> Iterable[Point]:
    done = {"generator_steps": 0.0, "verifier_steps": 0.0, "tokens": 0.0, "seconds": 0.0}
    reached = {0: dict(done)}
    for row in read_metrics(run, STAGE):
        done[f"{row['role']}_steps"] += 1
        done["tokens"] += row["tokens/generated"] or 0
        done["seconds"] += row["seconds/total"] or 0.0
        reached[row["step"]] = dict(done)
        yield Point(arm, algorithm, seed, place, "step", _numbers(row, OF_STEP, reached[row["step"]]))
    for row in read_evaluations(run, STAGE):
        if row["step"] in reached:
            yield Point(arm, algorithm, seed, place, "evaluation", _numbers(row, OF_EVALUATION, reached[row["step"]]))


def _numbers(row: MetricsRow, keys: Mapping[str, str], done: Mapping[str, float]) -> dict[str, float]:
    found = {"step": row["step"], **done, "accuracy": row.get("generator/accuracy"), "alpha": row.get("alpha")}
    found |= {name: row.get(key) for name, key in keys.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def write_points(path: Path, points: Sequence[Point]) -> None:
    """Keep the points, numbers with six digits."""
    lines = [",".join(COLUMNS)]
    for point in points:
        numbers = (f"{point.numbers[name]:.6g}" if name in point.numbers else "" for name in NUMBERS)
        named = (f'"{point.arm}"', point.algorithm, str(point.seed), f'"{point.run}"', point.kind)
        lines.append(",".join([*named, *numbers]))
    write_atomically(path, "\n".join(lines) + "\n")


def read_points(path: Path) -> list[Point]:
    """Return the points that `write_points` kept. Raises `UserError` where the file is missing or of another form."""
    if not path.is_file():
        raise UserError(
            f"{path.parent} holds no run that has trained, and no {path.name}; give a run or a folder of runs"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error}") from None
    points = []
    reader = csv.DictReader(text.splitlines())
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise UserError(
            f"{path}: the first line must name the columns {', '.join(COLUMNS)}; where the runs are still there, remove"
            " the file, and it is made anew"
        )
    for number, row in enumerate(reader, 2):
        try:
            if None in row or None in row.values():
                raise ValueError("more or fewer columns than the first line names")
            numbers = {name: float(row[name]) for name in NUMBERS if row[name] or name in COUNTS}
            points.append(Point(row["arm"], row["algorithm"], int(row["seed"]), row["run"], row["kind"], numbers))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: is no point of a curve ({error})") from None
    if not points:
        raise UserError(f"{path} holds no point of a curve")
    return points


@dataclass(frozen=True)
class Mean:
    """A number over the seeds of an arm, at one evaluation; `of_all`: every seed has measured it there."""

    x: float
    mean: float
    low: float
    high: float
    of_all: bool


def curve(points: Sequence[Point], arm: str, x: str, y: str) -> list[Mean]:
    """Return `y` over `x` at an arm's evaluations, the mean over the seeds that have measured it.

    Evaluations belong together that have the same number of steps of the role that `x` is about, the generator's unless
    it is `verifier_steps`; of several of one seed the last counts. `low` and `high` are one standard deviation away, or
    the mean itself of a single seed.
    """
    steps = "verifier_steps" if x == "verifier_steps" else "generator_steps"
    groups: dict[float, dict[int, Mapping[str, float]]] = {}
    seeds = set()
    for point in points:
        if point.arm == arm and point.kind == "evaluation":
            seeds.add(point.seed)
            if y in point.numbers:
                groups.setdefault(point.numbers[steps], {})[point.seed] = point.numbers
    found = []
    for _, same in sorted(groups.items()):  # in the order of steps: what fewer seeds have reached may have taken less
        values = [numbers[y] for numbers in same.values()]
        mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        at = statistics.fmean(numbers[x] for numbers in same.values())
        found.append(Mean(at, mean, mean - spread, mean + spread, same.keys() == seeds))
    return found


@dataclass(frozen=True)
class Row:
    """An arm of the table: each score at the last evaluation that all its seeds have reached, by steps of the generator
    or, where it is frozen, of the verifier; and what it took to reach the plain algorithm's. A score that a seed lacks
    there (no solution was right) is missing.
    """

    arm: str
    seeds: int
    first_step_f1: float | None  # on the first evaluation's solutions, before training
    final: dict[str, tuple[float, float | None]]  # mean and standard deviation
    to_reach: dict[str, float] | None  # generator steps, tokens and seconds; None where it was not reached
    target: float | None


def table(points: Sequence[Point]) -> list[Row]:
    """Return a row for each arm, in the order of the points.

    `to_reach` is of the first evaluation at which the mean over all seeds is at least the last mean over all seeds of
    the arm without a verifier that has the same algorithm, and the same settings if there is such an arm.
    """
    rows = []
    for arm in dict.fromkeys(point.arm for point in points):
        of_arm = [point for point in points if point.arm == arm and point.kind == "evaluation"]
        trained = "generator_steps" if any(point.numbers["generator_steps"] for point in of_arm) else "verifier_steps"
        num_seeds = len({point.seed for point in of_arm})
        end = _end(points, arm, trained)
        final = {}
        for name in ("accuracy", *SCORES, *FIRST):
            for entry in curve(points, arm, trained, name):
                if end is not None and entry.x == end.x and entry.of_all:
                    final[name] = entry.mean, entry.high - entry.mean if num_seeds > 1 else None
        plain = _end(points, _without_verifier(points, arm), "generator_steps")
        target = None if plain is None else plain.mean
        judged = curve(points, arm, "verifier_steps", "first_step_f1")
        before = judged[0].mean if judged and judged[0].of_all else None
        rows.append(Row(arm, num_seeds, before, final, _to_reach(points, arm, target), target))
    return rows


def _without_verifier(points: Sequence[Point], arm: str) -> str:
    """Return the arm without a verifier to hold `arm` against: its algorithm's with the settings that `arm` is named
    after.
    """
    plain = f"{named(next(point.algorithm for point in points if point.arm == arm))} alone"
    settings = ", ".join(part for part in arm.split(", ") if "=" in part)
    alike = f"{plain}, {settings}"
    return alike if any(point.arm == alike for point in points) else plain


def _end(points: Sequence[Point], arm: str, x: str) -> Mean | None:
    """Return the accuracy at the last evaluation that all seeds of an arm have reached."""
    return next((entry for entry in reversed(curve(points, arm, x, "accuracy")) if entry.of_all), None)


def _to_reach(points: Sequence[Point], arm: str, target: float | None) -> dict[str, float] | None:
    names = ("generator_steps", "tokens", "seconds")
    curves = {name: curve(points, arm, name, "accuracy") for name in names}
    for place, entry in enumerate(curves["generator_steps"]):
        if target is not None and entry.of_all and entry.mean >= target:
            return {name: curves[name][place].x for name in names}
    return None


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the table with shares in percent, mean ± standard deviation over seeds."""
    shown = ("accuracy", "step_f1", "outcome_f1", "step_pr_f1", "outcome_pr_f1", "outcome_j")
    titles = ["arm", "seeds", "accuracy", "step F1", "outcome F1", "step F1 (p, r)", "outcome F1 (p, r)", "outcome J"]
    on_first = any(row.first_step_f1 is not None for row in rows)
    titles += [*(["step F1, first solutions"] if on_first else []), "generator steps", "million tokens", "seconds"]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for row in rows:
        cells = [row.arm, str(row.seeds), *(_percent(row.final.get(name)) for name in shown)]
        if on_first:
            before, judged = row.first_step_f1, _percent(row.final.get("first_step_f1"))
            cells.append(f"{100 * before:.1f} → {judged}" if before is not None and judged else "")
        if row.to_reach is None:
            cells += ["not reached" if row.target is not None else "", "", ""]
        else:
            steps, tokens, seconds = (row.to_reach[name] for name in ("generator_steps", "tokens", "seconds"))
            cells += [f"{steps:.0f}", f"{tokens / 1e6:.2f}", f"{seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Last evaluation on unseen questions, in percent, mean ± standard deviation over seeds; the verifier judges the"
        " present generator's solutions. F1: harmonic mean of the accuracies on right and on wrong ones; (p, r): of"
        " precision and recall, as the paper's authors have it. "
        + ("First solutions: those of the evaluation before training, judged then and at the end. " if on_first else "")
        + "The last three columns: what it took, warm-up included, until the mean accuracy over seeds was that which"
        " the "
        "same algorithm has at the end without a verifier, with the same settings if it was run with them.",
        "",
        (
            "In the picture lines are means over seeds, thin where not all seeds are, and bands one standard deviation"
            " to either side. A verifier that is not trained makes no steps: its dotted line is its score at the last"
            " evaluation."
        ),
    ]
    return "\n".join(lines) + "\n"


def _percent(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return ""
    mean, spread = value
    return f"{100 * mean:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")
