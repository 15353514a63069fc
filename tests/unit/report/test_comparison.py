"""Runs beside each other: which arm a run is of, means over seeds, and what it took to reach the plain
algorithm's end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.image import imread
from typer.testing import CliRunner

from tango_hpc.base.errors import UserError
from tango_hpc.commands.cli import app
from tango_hpc.report.comparison import Mean, arms_of, collect, curve, table

HEADER = {"stage": "train", "time": 0.0}


def tree(seed: int, *, verifier: bool = True, **algorithm: Any) -> dict[str, Any]:
    return {
        "seed": seed,
        "generator": {"trainable": True},
        "verifier": {"trainable": True} if verifier else None,
        "algorithm": {
            "advantages": {"generator": {"name": "grpo", "settings": {}}, "verifier": {"name": "grpo", "settings": {}}},
            "alpha_start": 0.1,
            "min_verifier_j": None,
            **algorithm,
        },
        "train": {"generator_steps": 4},
    }


def write_run(folder: Path, config: dict[str, Any], roles: str, accuracies: dict[int, float], f1: float) -> None:
    """A run whose steps each made 100 tokens in 2 seconds."""
    (folder / "control").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    names = {"g": "generator", "v": "verifier"}
    steps = [
        {**HEADER, "step": step, "role": names[role], "tokens/generated": 100, "seconds/total": 2.0, "alpha": 0.1}
        for step, role in enumerate(roles, 1)
    ]
    evaluations = [
        {**HEADER, "step": step, "generator/accuracy": accuracy}
        | ({"verifier/step_f1": 0.5 + step / 100, "verifier/present_outcome_f1": f1} if config["verifier"] else {})
        for step, accuracy in accuracies.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, end in ((0, 0.5), (1, 0.7)):
        alone = tree(seed, verifier=False, alpha_start=0.0)
        write_run(tmp_path / f"cells/alone_{seed}", alone, "gggg", {0: 0.1, 2: 0.3, 4: end}, 0)
    for seed, half in ((0, 0.6), (1, 0.62)):
        write_run(tmp_path / f"cells/tango_{seed}", tree(seed), "vggvgg", {0: 0.1, 1: 0.1, 3: half, 6: 0.9}, 0.8)
    write_run(tmp_path / "cells/held", tree(0, min_verifier_j=0.1), "vggvgg", {0: 0.1, 6: 0.2}, 0.4)
    return tmp_path


def of_file(name: str) -> dict[str, Any]:
    """A run of seed 0 with the advantages of a file, in both roles."""
    both = {role: {"name": name, "settings": {}} for role in ("generator", "verifier")}
    return tree(0, advantages=both)


def test_an_arm_is_named_by_what_is_trained_and_by_what_is_unusual() -> None:
    frozen, still = tree(0), tree(0)
    frozen["generator"]["trainable"] = False
    still["verifier"]["trainable"] = False
    trees = [tree(0), tree(1), tree(0, alpha_start=0.5), tree(0, verifier=False), frozen, still, of_file("rloo")]
    trees.append(of_file("/home/me/mine.py"))
    one, solves = tree(0), tree(0)
    one["verifier"], solves["verifier"] = ({"trainable": learns, "same_as": "generator"} for learns in (True, False))
    trees += [one, solves]
    assert arms_of(trees) == [
        "Tango, GRPO",
        "Tango, GRPO",
        "Tango, GRPO, alpha_start=0.5",
        "GRPO alone",
        "generator frozen, GRPO",
        "verifier frozen, GRPO",
        "Tango, RLOO",
        "Tango, mine",
        "one model, GRPO",
        "one model, solutions only, GRPO",
    ]
    grid = [tree(0, alpha_start=value) for value in (0.1, 0.2, 0.3)]
    assert arms_of(grid) == [f"Tango, GRPO, alpha_start={value}" for value in (0.1, 0.2, 0.3)]


def test_settings_of_a_role_make_an_arm_and_where_its_model_lies_does_not() -> None:
    trees = [tree(seed) for seed in (0, 1, 0, 1)]
    for number, one in enumerate(trees):
        one["generator"] |= {"optimizer": {"learning_rate": (1e-5, 2e-5)[number // 2]}, "model": {"path": str(number)}}
    assert [arm.partition(", ")[2] for arm in arms_of(trees)] == [
        f"GRPO, learning_rate={rate}" for rate in (1e-05, 1e-05, 2e-05, 2e-05)
    ]


def test_no_run_takes_the_place_of_another_one_of_its_seed(folder: Path) -> None:
    write_run(folder / "cells/again", tree(0), "vggvgg", {0: 0.1, 6: 0.3}, 0.8)
    rows = {row.arm: row for row in table(collect(folder))}
    assert rows["Tango, GRPO"].seeds + rows["Tango, GRPO (cells/tango_0)"].seeds == 3


def test_seeds_are_compared_where_all_of_them_are(folder: Path) -> None:
    """While a sweep runs, one seed of an arm is done and another has only begun."""
    write_run(folder / "cells/begun", tree(2), "vgg", {0: 0.1, 3: 0.5}, 0.8)
    row = next(row for row in table(collect(folder)) if row.arm == "Tango, GRPO")
    assert row.seeds == 3 and row.final["accuracy"][0] == pytest.approx((0.6 + 0.62 + 0.5) / 3)
    assert row.to_reach is None  # 0.9 is of two seeds
    assert [mean.of_all for mean in curve(collect(folder), row.arm, "generator_steps", "accuracy")] == [True] * 2 + [
        False
    ]


def test_seeds_whose_warm_ups_came_at_other_times_are_compared_by_steps_of_the_generator(folder: Path) -> None:
    """Older runs could have their warm-up later, or never."""
    arm = "Tango, GRPO, max_draws=3"
    runs = ((0, "ggvvvgg", {0: 0.1, 2: 0.3, 5: 0.4, 7: 0.8}), (1, "gvgvgvg", {0: 0.1, 3: 0.3, 7: 0.7}))
    for seed, roles, accuracies in (*runs, (2, "gggg", {0: 0.1, 2: 0.2, 4: 0.6})):
        config = tree(seed)
        config["algorithm"]["advantages"]["generator"]["settings"]["max_draws"] = 3
        write_run(folder / f"cells/waits_{seed}", config, roles, accuracies, 0.8)
    assert next(row for row in table(collect(folder)) if row.arm == arm).final["accuracy"][0] == pytest.approx(0.7)
    frozen = tree(0)
    frozen["generator"]["trainable"] = False
    write_run(folder / "cells/frozen", frozen, "vv", {0: 0.1, 1: 0.1, 2: 0.1}, 0.3)
    row = next(row for row in table(collect(folder)) if row.arm == "generator frozen, GRPO")
    assert row.final["first_step_f1"][0] == pytest.approx(0.52)  # after both of its verifier's steps


def test_what_is_to_be_reached_is_of_all_seeds_too(folder: Path) -> None:
    write_run(folder / "cells/begun", tree(2, verifier=False, alpha_start=0.0), "gg", {0: 0.1, 2: 0.36}, 0)
    rows = {row.arm: row for row in table(collect(folder))}
    assert (
        rows["GRPO alone"].target == pytest.approx(0.32)
        and rows["GRPO alone"].final["accuracy"][0] == rows["GRPO alone"].target
    )
    assert rows["Tango, GRPO"].to_reach == {"generator_steps": 2, "tokens": 300, "seconds": 6}


def test_a_score_that_a_seed_lacks_is_no_mean_over_the_others(folder: Path) -> None:
    file = folder / "cells/tango_1/evaluations.jsonl"
    file.write_text(
        file.read_text().replace('"verifier/present_outcome_f1": 0.8', '"verifier/present_outcome_f1": null')
    )
    row = next(row for row in table(collect(folder)) if row.arm == "Tango, GRPO")
    assert row.seeds == 2 and "outcome_f1" not in row.final and row.final["accuracy"][0] == 0.9


def test_models_make_an_arm_where_runs_of_one_seed_began_with_others(folder: Path) -> None:
    """Beside two seeds with one verifier, three with another."""
    for seed in range(3):
        config = tree(seed, note="x")
        config["verifier"] |= {"model": {"path": f"/runs/{'start' if seed < 2 else 'other'}/verifier"}}
        if seed < 2:
            write_run(folder / f"more/start_{seed}", config, "vgg", {0: 0.1, 3: 0.5}, 0.8)
        other = tree(seed, note="x")
        other["verifier"] |= {"model": {"path": "/runs/other/verifier"}}
        write_run(folder / f"more/other_{seed}", other, "vgg", {0: 0.1, 3: 0.7}, 0.8)
    rows = {row.arm: row for row in table(collect(folder / "more"))}
    assert {arm: (row.seeds, row.final["accuracy"][0]) for arm, row in rows.items()} == {
        "Tango, GRPO": (3, pytest.approx(0.7)),
        "Tango, GRPO, verifier=start/verifier": (2, 0.5),
    }


def test_curves_are_means_over_seeds(folder: Path) -> None:
    points = collect(folder)
    assert curve(points, "GRPO alone", "generator_steps", "accuracy") == [
        Mean(0, 0.1, 0.1, 0.1, True),
        Mean(2, 0.3, 0.3, 0.3, True),
        Mean(4, pytest.approx(0.6), pytest.approx(0.6 - 0.02**0.5), pytest.approx(0.6 + 0.02**0.5), True),
    ]
    # By generator steps the evaluations before and after the warm-up are at 0: the last one counts.
    tango = curve(points, "Tango, GRPO", "tokens", "accuracy")
    assert [(mean.x, mean.mean) for mean in tango] == [(100, 0.1), (300, 0.61), (600, 0.9)]
    by_verifier = curve(points, "Tango, GRPO", "verifier_steps", "outcome_f1")
    assert [(mean.x, mean.mean) for mean in by_verifier] == [(0, 0.8), (1, 0.8), (2, 0.8)]  # on present solutions


def test_what_it_took_is_of_the_evaluation_that_reached_it(tmp_path: Path) -> None:
    """A seed that got on farther, with fewer tokens a step, does not put the others' tokens in another place."""
    write_run(tmp_path / "0", tree(0, verifier=False), "gggg", {0: 0.1, 2: 0.3, 4: 0.6}, 0)
    write_run(tmp_path / "1", tree(1, verifier=False), "gggggg", {0: 0.1, 2: 0.3, 4: 0.6, 6: 0.7}, 0)
    steps = tmp_path / "1/metrics.jsonl"
    steps.write_text(steps.read_text().replace('"tokens/generated": 100', '"tokens/generated": 10'))
    points = collect(tmp_path)
    assert [mean.x for mean in curve(points, "GRPO alone", "tokens", "accuracy")] == [0, 110, 220, 60]
    (row,) = table(points)
    assert row.to_reach == {"generator_steps": 4, "tokens": 220, "seconds": 8}


def test_what_it_took_to_reach_the_plain_algorithms_end(folder: Path) -> None:
    rows = {row.arm: row for row in table(collect(folder))}
    assert rows["GRPO alone"].final == {"accuracy": (pytest.approx(0.6), pytest.approx(0.02**0.5))}
    assert rows["GRPO alone"].to_reach == {"generator_steps": 4, "tokens": 400, "seconds": 8}
    assert rows["Tango, GRPO"].to_reach == {"generator_steps": 2, "tokens": 300, "seconds": 6}
    assert rows["Tango, GRPO"].final["outcome_f1"] == (0.8, 0.0) and rows["Tango, GRPO"].seeds == 2
    # On the solutions of the first evaluation: before training, and at the end.
    assert rows["Tango, GRPO"].first_step_f1 == 0.5 and rows["Tango, GRPO"].final["first_step_f1"][0] == 0.56
    held = rows["Tango, GRPO, min_verifier_j=0.1"]
    assert held.to_reach is None and held.final["accuracy"] == (0.2, None)


def test_an_arm_is_held_against_the_algorithm_alone_with_the_same_settings(tmp_path: Path) -> None:
    """Where it was run with them: the learning rate of one arm was tried without a verifier, the blend of another was
    not.
    """
    merged = {"generator": {"name": "merged", "settings": {}}, "verifier": {"name": "grpo", "settings": {}}}
    runs = [(seed, 1e-5, {}) for seed in (0, 1)] + [(0, 2e-5, {})]
    for verifier in (False, True):
        for seed, rate, algorithm in runs if not verifier else [*runs, (0, 1e-5, {"advantages": merged})]:
            config = tree(seed, verifier=verifier, **algorithm)
            config["generator"]["optimizer"] = {"learning_rate": rate}
            end = 0.3 if rate == 1e-5 else 0.8
            roles, accuracies = ("vggvgg", {1: 0.1, 3: 0.35, 6: 0.5}) if verifier else ("gggg", {0: 0.1, 4: end})
            write_run(tmp_path / f"{verifier}_{seed}_{rate}_{len(algorithm)}", config, roles, accuracies, 0.8)
    rows = {row.arm: row for row in table(collect(tmp_path))}
    assert {arm: (row.target, row.to_reach and row.to_reach["generator_steps"]) for arm, row in rows.items()} == {
        "GRPO alone": (0.3, 4),
        "GRPO alone, learning_rate=2e-05": (0.8, 4),
        "Tango, GRPO": (0.3, 2),
        "Tango, GRPO, learning_rate=2e-05": (0.8, None),
        "Tango, GRPO, name=merged": (0.3, 2),
    }


def test_figure_and_table_come_again_from_the_small_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    done = CliRunner().invoke(app, ["report", folder.name])
    assert done.exit_code == 0, done.output
    assert [Path(line).name for line in done.output.split()] == ["curves.csv", "comparison.md", "comparison.png"]
    first = {name: (folder / name).read_bytes() for name in ("curves.csv", "comparison.md", "comparison.png")}
    assert "| Tango, GRPO | 2 | 90.0 ± 0.0 |" in first["comparison.md"].decode()
    for file in (folder / "cells").rglob("metrics.jsonl"):
        file.unlink()
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    assert {name: (folder / name).read_bytes() for name in first} == first


def test_the_small_file_keeps_what_runs_that_are_gone_have_measured(folder: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    first = (folder / "curves.csv").read_text()
    shutil.rmtree(folder / "cells/tango_0")
    write_run(folder / "cells/held_1", tree(1, min_verifier_j=0.1), "vggvgg", {0: 0.1, 6: 0.4}, 0.4)
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    # Two of the three runs that are there now have the threshold, so that it is usual and the others are not.
    again = (folder / "curves.csv").read_text().replace("Tango, GRPO, min_verifier_j=None", "TANGO")
    again = again.replace('"Tango, GRPO"', '"Tango, GRPO, min_verifier_j=0.1"').replace("TANGO", "Tango, GRPO")
    assert set(first.splitlines()) < set(again.splitlines())
    said = (folder / "comparison.md").read_text()
    assert "| Tango, GRPO, min_verifier_j=None | 2 | 90.0 ± 0.0 |" in said
    shutil.rmtree(folder / "cells/held")
    write_run(folder / "cells/again", tree(0, min_verifier_j=0.1), "vgg", {0: 0.1, 3: 0.5}, 0.4)
    arms = {point.arm: point.run for point in collect(folder) if point.run in ("cells/held", "cells/again")}
    assert set(arms.values()) == {"cells/held", "cells/again"} and any("(cells/held)" in arm for arm in arms)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(b"evaluation,0,", b"evaluation,x,", 1), "line 6: is no point of a curve"),
        (lambda text: text[: text.rindex(b"evaluation") + 12], r"line \d+: is no point of a curve \(more or fewer"),
        (lambda text: text.replace(b"Tango", b"\xff", 1), "is no text"),
        (lambda text: text.replace(b"kind", b"sort", 1), "the first line must name the columns arm, "),
        (lambda text: text.split(b"\n")[0] + b"\n", "holds no point of a curve"),
    ],
)
def test_a_damaged_small_file_is_refused(folder: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    file = folder / "curves.csv"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=rf"curves.csv.*{message}"):
        collect(folder)


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run that has trained, and no curves.csv"):
        collect(tmp_path)


RESULTS = sorted((Path(__file__).parents[3] / "docs/results").iterdir())


@pytest.mark.parametrize("kept", RESULTS, ids=lambda path: path.name)
def test_results_in_the_docs_are_made_again_from_their_curves(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_bytes((kept / "curves.csv").read_bytes())
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    made = (tmp_path / "comparison.md").read_text()
    assert made == (kept / "comparison.md").read_text()
    assert (tmp_path / "curves.csv").read_bytes() == (kept / "curves.csv").read_bytes()
    for picture in (tmp_path / "comparison.png", kept / "comparison.png"):
        pixels = imread(picture)
        assert picture.stat().st_size > 50_000 and pixels.shape[0] > 1000
        assert (pixels[:, :3, :3] == 1).all() and (pixels[:, -3:, :3] == 1).all()  # nothing is cut off at the sides
    shown = (kept.parents[1] / "reproduce.md").read_text()
    assert made.split("\n\n")[0] in shown and f"results/{kept.name}/comparison.png" in shown
