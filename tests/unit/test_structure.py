"""The house stays as docs/architecture.md draws it: every package above what it imports, no circles, no large file."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = runpy.run_path(str(ROOT / "docs/figures/modules.py"))


def test_no_file_and_no_package_imports_another_round_about() -> None:
    graph = MODULES["imports"](ROOT)
    assert len(graph) > 100
    assert MODULES["circles"](graph) == []
    assert MODULES["circles"](MODULES["rooms"](graph)) == []


def test_a_circle_would_be_found() -> None:
    assert MODULES["circles"]({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert MODULES["floors"]({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"c": 1, "b": 2, "a": 3}


def test_files_stay_small() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in ROOT.glob("tango_hpc/**/*.py")}
    assert {str(file): length for file, length in lengths.items() if length > 400} == {}


def test_vllm_is_imported_in_one_folder_and_megatron_in_two() -> None:
    def folders(package: str) -> set[str]:
        pattern = re.compile(rf"^\s*(?:from|import) {package}\b", re.MULTILINE)
        return {
            file.relative_to(ROOT).parts[1]
            for file in ROOT.glob("tango_hpc/**/*.py")
            if pattern.search(file.read_text())
        }

    assert folders("vllm") == {"rollout"}
    assert folders("megatron") == {"parallel", "policy"}


def test_the_page_names_every_package() -> None:
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs/architecture.md").read_text()))
    packages = {folder.name for folder in (ROOT / "tango_hpc").iterdir() if (folder / "__init__.py").is_file()}
    assert packages <= named
