"""The look of drawings: matplotlib figures become SVG whose colours follow the page.

The colours name things and never change: the generator is blue, the verifier orange, a phase has its own. In the SVG
they become CSS variables, so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
from typing import Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

# Light-page colours; style.css holds both themes under the same names. No two are equal, though some look so: the
# SVG's colours are told apart by their value when they become variables.
COLORS = {
    "generator": "#2468d2",
    "verifier": "#d2690f",
    "third": "#0d8f72",
    "rollout": "#2469d2",
    "try": "#7a4fc0",
    "verify": "#d26a0f",
    "train": "#0d8f73",
    "logprobs": "#8a55d6",
    "reshard": "#d63a74",
    "turns": "#b79a00",
    "other": "#9aa3ad",
    "ink": "#36414d",
    "grid": "#e3e7ec",
}
_INKED = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = {
    **dict.fromkeys(_INKED, COLORS["ink"]),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.8),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": COLORS["grid"],
    "legend.handlelength": 1.4,
    "legend.fontsize": 9,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
}


def svg(figure: Figure, label: str) -> Markup:
    """Return the figure as an SVG element whose colours are CSS variables; `label` is what a screen reader says."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box is not None, text[:200]
    text = f'<svg role="img" aria-label="{escape(label)}" {view_box[0]}>' + text[text.index(">") + 1 :]
    for name, color in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    return Markup(text)
