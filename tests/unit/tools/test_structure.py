"""The house stays as docs/architecture.md draws it: every package above what it imports, no circles, no long function."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

from tango_hpc.stages.stage import STAGES

ROOT = Path(__file__).parents[3]
WINGS = ("base", "questions", "method", "models", "plan", "runner", "report", "stages", "commands")
LINES_OF_FUNCTION = 60
ATTRIBUTES_OF_CLASS = 18
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


def long_functions(text: str) -> list[tuple[str, int]]:
    """Return the functions of `text` that have more than `LINES_OF_FUNCTION` lines."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    return [(name, length) for name, length in lengths if length > LINES_OF_FUNCTION]


def wide_classes(text: str) -> list[tuple[str, int]]:
    """Return the classes of `text` that set more than `ATTRIBUTES_OF_CLASS` attributes on themselves."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            stored = [item for item in ast.walk(node) if isinstance(item, ast.Attribute)]
            names = {
                item.attr for item in stored if isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self"
            }
            found += [(node.name, len(names))] * (len(names) > ATTRIBUTES_OF_CLASS)
    return found


def test_functions_fit_a_screen_and_classes_have_few_attributes() -> None:
    long = "def f():\n" + "    x = 1\n" * LINES_OF_FUNCTION
    assert long_functions(long) == [("f", LINES_OF_FUNCTION + 1)]
    wide = "class A:\n    def f(self):\n" + "".join(f"        self.a{i} = 1\n" for i in range(ATTRIBUTES_OF_CLASS + 1))
    assert wide_classes(wide) == [("A", ATTRIBUTES_OF_CLASS + 1)]
    assert {str(file): found for file, text in sources().items() if (found := long_functions(text))} == {}
    assert {str(file): found for file, text in sources().items() if (found := wide_classes(text))} == {}


def test_a_wing_imports_only_those_before_it_and_the_runner_base_alone() -> None:
    between = MODULES["rooms"](MODULES["imports"](ROOT))
    wings = {folder.name for folder in (ROOT / "tango_hpc").iterdir() if (folder / "__init__.py").is_file()}
    assert wings == set(WINGS)
    for place, wing in enumerate(WINGS):
        allowed = {"base"} if wing == "runner" else set(WINGS[:place])
        assert between[wing] <= allowed, wing


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    vague = re.compile(r'^\s*r?"""(What|Whether|Who|Which)\b', re.MULTILINE)
    assert vague.search('    """What a step is like."""\n')
    assert [str(file) for file, text in sources().items() if vague.search(text)] == []
