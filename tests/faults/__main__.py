"""`python -m tests.faults [--folder DIR] [--only WORDS] [--cells FAULT/PHASE ...] [--adapters] [--again] [--write
docs/promises.md]`: the fault matrix.

Runs every cell that has no good result yet and prints it, then the whole table. Results are kept in DIR/results.jsonl.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.faults.cells import CELLS, FAULTS, POINTS, Cell
from tests.faults.matrix import ADAPTERS, Matrix, Result, add_result, read_results

BEGIN, END = "<!-- table: python -m tests.faults -->", "<!-- end of the table -->"


def table(results: dict[Cell, Result]) -> str:
    """The matrix in Markdown: exit code and seconds until the end, + seconds in which the next attempt ended
    the run.
    """
    lines = ["| | " + " | ".join(POINTS) + " |", "| --- |" + " --- |" * len(POINTS)]
    for fault in FAULTS:
        shown = [_shown(results.get(Cell(fault, phase))) for phase in POINTS]
        lines.append(f"| {fault} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(result: Result | None) -> str:
    if result is None:
        return ""
    if result.problem:
        return f"**{result.problem}**"
    code = "power cut" if result.code == -9 else str(result.code)
    resumed = f" + {result.resumed_seconds:.0f} s" if result.resumed_seconds else ""
    return f"{code}, {result.seconds:.0f} s{resumed}"


def main() -> int:
    """Entry point; 1 where a cell is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fault-matrix"))
    parser.add_argument("--only", nargs="*", default=[], help="words of the cells to run, as 'disk full' or loading")
    parser.add_argument("--cells", nargs="*", default=[], help="cells to run, as 'disk full/loading'")
    parser.add_argument("--adapters", action="store_true", help="of runs that train adapters; another --folder")
    parser.add_argument("--again", action="store_true", help="also cells that were good")
    parser.add_argument("--write", type=Path, help="put the table between its marks in this page; runs nothing")
    options = parser.parse_args()
    file = options.folder / "results.jsonl"
    results = read_results(file)
    if options.write is None:
        wanted = [cell for cell in CELLS if not options.only or {cell.fault, cell.phase} & set(options.only)]
        if options.cells:
            wanted = [cell for cell in CELLS if f"{cell.fault}/{cell.phase}" in options.cells]
            assert len(wanted) == len(options.cells), f"no cells: {options.cells}"
        todo = [cell for cell in wanted if options.again or cell not in results or results[cell].problem]
        matrix = Matrix(options.folder, *(ADAPTERS if options.adapters else ()))
        todo.sort(key=lambda cell: (FAULTS.index(cell.fault) + 2 * list(POINTS).index(cell.phase)) % len(FAULTS))
        for number, cell in enumerate(todo, 1):
            result = results[cell] = matrix.run(cell)
            add_result(file, result)
            end = result.problem or f"{_shown(result)}: {result.message[:200]}"
            print(f"[{number}/{len(todo)}] {cell.fault}, {cell.phase}: {end}", flush=True)
        print(f"\n{table(results)}\n")
    else:
        text = options.write.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        options.write.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")
    good = sum(not result.problem for result in results.values())
    print(f"{good} of {len(CELLS)} cells are as they must be, {len(results) - good} are not")
    return int(good < len(results))


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
    sys.exit(main())
