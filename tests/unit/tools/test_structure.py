"""The house stays as docs/architecture.md draws it: every package above what it imports, no circles, no large file."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

from tango_hpc.stages.stage import STAGES

ROOT = Path(__file__).parents[3]
MODULES = runpy.run_path(str(ROOT / "docs/figures/modules.py"))


def sources() -> dict[Path, str]:
    """Every file of the package with what it says."""
    found = {file: file.read_text() for file in ROOT.glob("tango_hpc/**/*.py")}
    assert len(found) > 100
    return found


def test_no_file_and_no_package_imports_another_round_about() -> None:
    graph = MODULES["imports"](ROOT)
    assert len(graph) > 100
    assert MODULES["circles"](graph) == []
    assert MODULES["circles"](MODULES["rooms"](graph)) == []


def test_the_graph_has_the_imports_of_every_kind() -> None:
    graph = MODULES["imports"](ROOT)
    assert graph.keys() == {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in sources()
    }
    assert {"tango_hpc.stages.held_out", "tango_hpc.method.equations"} <= graph["tango_hpc.stages.tango"]
    assert "tango_hpc.runner.local" in graph["tango_hpc.commands.cli"]  # inside a function
    assert (
        "tango_hpc.models.trainer.hf_io" in graph["tango_hpc.stages.convert"]
    )  # a module by its name, inside a function
    assert "tango_hpc.models.parallel.exchange" in graph["tango_hpc.stages.rank"]  # for types
    between = MODULES["rooms"](graph)
    assert {"models", "method", "questions"} <= between["stages"]
    assert "stages" not in between["models"] and between["base"] == set()
    assert re.findall(r"^\s*from \.", "\n".join(sources().values()), re.MULTILINE) == []  # which it would not see


def test_a_circle_would_be_found() -> None:
    assert MODULES["circles"]({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert MODULES["floors"]({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"c": 1, "b": 2, "a": 3}


def test_vllm_is_imported_in_one_folder_and_megatron_in_two() -> None:
    def folders(package: str) -> set[str]:
        pattern = re.compile(rf"^\s*(?:from|import) {package}\b", re.MULTILINE)
        return {file.relative_to(ROOT).parent.as_posix() for file, text in sources().items() if pattern.search(text)}

    assert folders("vllm") == {"tango_hpc/models/engine"}
    assert folders("megatron") == {"tango_hpc/models/parallel", "tango_hpc/models/trainer"}


def test_the_page_names_every_package() -> None:
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs/architecture.md").read_text()))
    packages = {folder.name for folder in (ROOT / "tango_hpc").iterdir() if (folder / "__init__.py").is_file()}
    assert {"stages", "models", "runner"} < packages <= named


def compared_names(text: str) -> list[str]:
    """Return the comparisons of `text` in which a stage's name stands as a string."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [side for operand in [node.left, *node.comparators] for side in ast.walk(operand)]
            if any(isinstance(side, ast.Constant) and side.value in STAGES for side in sides) and re.search(
                r"stage|name", ast.unparse(node)
            ):
                found.append(ast.unparse(node))
    return found


def test_a_stage_is_told_from_another_by_its_object() -> None:
    assert compared_names('if stage == "train" or entry["stage"] in ("sft", x): ...') != []
    outside = {file: text for file, text in sources().items() if file.parent != ROOT / "tango_hpc/stages"}
    assert {str(file): found for file, text in outside.items() if (found := compared_names(text))} == {}
