"""The packages of tango_hpc, each above all that it imports: python docs/figures/modules.py [CHECKOUT] [OUT.svg]

Prints what would spoil the picture, circles of files and arrows from a lower floor up, and draws modules.svg.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
Graph = dict[str, set[str]]


def imports(root: Path = ROOT) -> Graph:
    """Module -> modules of this package that it imports, inside functions and for types too."""
    files = {_module(file.relative_to(root)): file for file in sorted((root / "tango_hpc").rglob("*.py"))}
    graph: Graph = {}
    for name, file in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tango_hpc"):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (whole & files.keys()) or {str(node.module)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & files.keys()
        graph[name] = found - {name, "tango_hpc"}
    return graph


def rooms(graph: Graph) -> Graph:
    """The same between packages; a module at the top is a room of its own."""
    between: Graph = defaultdict(set)
    for name, found in graph.items():
        if name != "tango_hpc":
            between[_room(name)] |= {_room(other) for other in found} - {_room(name)}
    return dict(between)


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that import each other round about (strongly connected components of two and more)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            circle = path[path.index(node) :]
            del path[path.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def floors(between: Graph) -> dict[str, int]:
    """The floor of each room: one above the highest that it imports; the ground is 1. There must be no circle."""
    known: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((floor(other) for other in between.get(room, ())), default=0)
        return known[room]

    for room in between:
        floor(room)
    return known


def lines(root: Path = ROOT) -> dict[str, int]:
    """Lines of Python of each room."""
    count: dict[str, int] = defaultdict(int)
    for file in (root / "tango_hpc").rglob("*.py"):
        count[_room(_module(file.relative_to(root)))] += len(file.read_text().splitlines())
    return count


def draw(between: Graph, size: dict[str, int], out: Path) -> None:
    """Boxes on their floors with an arrow for each import of the floor right below, the rest faint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    level = floors(between)
    by_floor: dict[int, list[str]] = defaultdict(list)
    for room in sorted(level, key=lambda room: -size[room]):
        by_floor[level[room]].append(room)
    place = {
        room: (index - (len(found) - 1) / 2, number)
        for number, found in by_floor.items()
        for index, room in enumerate(found)
    }
    figure = Figure(figsize=(11, 1.1 * max(level.values()) + 0.6), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-3.6, 3.6)
    axes.set_ylim(0.5, max(level.values()) + 0.5)
    for room, others in between.items():
        for other in others:
            near = level[room] - level[other] == 1
            axes.annotate(
                "", xy=place[other], xytext=place[room], zorder=1,
                arrowprops={"arrowstyle": "->", "color": "#2468d2", "alpha": 0.75 if near else 0.15,
                            "shrinkA": 16, "shrinkB": 16},
            )  # fmt: skip
    for room, (x, y) in place.items():
        label = f"{room}\n{size[room]:,} lines"
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3fb", "edgecolor": "#36414d"}
        axes.text(x, y, label, ha="center", va="center", fontsize=9, bbox=box, zorder=2)
    figure.savefig(out, metadata={"Date": None})


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def main() -> None:
    """Print and draw."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    graph = imports(root)
    between = rooms(graph)
    print(f"circles of files: {circles(graph) or 'none'}")
    print(f"circles of packages, each an arrow up: {circles(between) or 'none'}")
    print(f"{sum(lines(root).values()):,} lines of Python in {len(graph)} modules")
    if not circles(between):
        out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_suffix(".svg")
        draw(between, lines(root), out)
        print(out)


if __name__ == "__main__":
    main()
