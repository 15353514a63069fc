"""python -m tools.bench: who is measured when, what is told of it, and what a user gets wrong."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tango_hpc.base.errors import UserError
from tools.bench.__main__ import bench
from tools.bench.catalogue import COMPARISONS
from tools.bench.growth import exponent
from tools.bench.measure import SCHEMA, Measurement, alternate, machine, report, speeds, table


def test_the_sides_take_turns_and_who_begins_changes() -> None:
    calls: list[str] = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert "".join(calls) in ("baabba", "abbaab"), "one turn to warm up, two that count"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_ratio_goal_and_table() -> None:
    fast = speeds("x", "a thing", "another", "tokens/s", [30.0, 20.0, 40.0], [10.0, 10.0, 10.0], 2.5, note=1)
    slow = Measurement("y", "a thing", "another", "s", [2.0], [1.0], [2.0], 1.5, at_least=False)
    assert (fast.ratio, fast.met, slow.ratio, slow.met) == (3.0, True, 2.0, False)
    assert "| 3 (2 to 4) | >= 2.5 | yes |" in table([fast, slow]) and "| <= 1.5 | **no** |" in table([fast, slow])
    told = json.loads(json.dumps(report(machine(), [fast, slow])))
    assert told["schema"] == SCHEMA and told["machine"]["cores"] >= 1
    assert told["comparisons"][0]["ratios"] == [3.0, 2.0, 4.0] and told["comparisons"][0]["met"] is True


def test_every_key_of_the_json_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/performance.md").read_text()
    row = Measurement("y", "a thing", "another", "s", [2.0], [1.0], [2.0])
    keys = {*report(machine(), [row]), *machine(), *row.to_json()}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_an_exponent_is_that_of_the_power_law() -> None:
    assert exponent([(n, 3.0 * n**1.25) for n in (1.0, 4.0, 16.0)]) == pytest.approx(1.25)


def test_every_comparison_has_its_function() -> None:
    for name, comparison in COMPARISONS.items():
        module, _, function = comparison.function.partition(":")
        assert callable(getattr(import_module(f"tools.bench.{module}"), function)), name


def command() -> typer.Typer:
    """Return the command of `python -m tools.bench`."""
    app = typer.Typer()
    app.command()(bench)
    return app


def test_list_names_all() -> None:
    result = CliRunner().invoke(command(), ["--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(COMPARISONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], "there is no benchmark 'speed'"),
        (["update", "--config", "x.yaml"], "--config is for reshard alone"),
        (["reshard", "--set", "a=1"], "--set changes settings of --config"),
        (["update", "--out", "nowhere/x.json"], "there is no folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(words: list[str], message: str) -> None:
    result = CliRunner().invoke(command(), words)
    assert isinstance(result.exception, UserError) and message in str(result.exception)
