"""Draws docs/figures/weight_sync.svg from a real plan: `python docs/figures/weight_sync.py`.

One attention layer with 8 query heads and 4 key/value heads goes from TP=2 x PP=2 to a rollout TP of 4. The layer
belongs to pipeline stage 0, so ranks 2 and 3 hold nothing of it before the sync.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from tango_hpc.base.model_shape import ModelShape
from tango_hpc.models.layout.engine_layout import engine_layout
from tango_hpc.models.layout.trainer_layout import LocalParam, megatron_layout
from tango_hpc.models.weight_sync.plan import Layouts, build_plan
from tango_hpc.models.weight_sync.transfer import Locator

SHAPE = ModelShape("llama", 2, 32, 64, 8, 4, 4, 128, False, False, False)
CUT = Layouts(SHAPE, world_size=4, tensor=2, pipeline=2, rollout_tensor=4, ranks_per_node=4)
ATTENTION = "model.layers.0.self_attn"
COLOURS = {"q": "#9ecae1", "k": "#a1d99b", "v": "#fdd49e", "o": "#dadaeb"}
LOCAL, NETWORK = "#31a354", "#d94801"
LEFT, RIGHT, WIDTH = 0.0, 7.6, 1.9
ROW = 0.058  # height of one row of the fused matrix
COLUMN = WIDTH / 16  # width of one column of the output projection, which hangs below the rows
O_HEIGHT = 0.5
RANK_HEIGHT = 3.1


def top(rank: int) -> float:
    """Height of the upper edge of a rank's drawing."""
    return -rank * RANK_HEIGHT


def o_top(rank: int, params: dict[str, LocalParam]) -> float:
    """Upper edge of a rank's part of the output projection."""
    return top(rank) - max(param.shape[0] for name, param in params.items() if "qkv" in name) * ROW - 0.12


def draw_shard(ax: plt.Axes, x: float, rank: int, title: str, params: dict[str, LocalParam]) -> None:
    """The rank's pieces of the fused QKV matrix, as rows, and of the output projection, as columns."""
    ax.text(x, top(rank) + 0.12, title, fontsize=9, fontweight="bold")
    if not params:
        ax.text(x, top(rank) - 0.45, "nothing of this layer:\nit holds layer 1", fontsize=8, color="#777777")
        return
    for param in params.values():
        for piece in param.pieces:
            kind = piece.tensor.split(".")[4][0]
            if kind == "o":
                (start, stop), (first, last) = piece.local[1], piece.box[1]
                for column in range(start, stop, 4):
                    head = (first + column - start) // 4
                    box(ax, x + column * COLUMN, o_top(rank, params) - O_HEIGHT, 4 * COLUMN, O_HEIGHT, "o", f"o{head}")
                assert last - first == stop - start
            else:
                (start, stop), (first, _) = piece.local[0], piece.box[0]
                for row in range(start, stop, 4):
                    head = (first + row - start) // 4
                    box(ax, x, top(rank) - (row + 4) * ROW, WIDTH, 4 * ROW, kind, f"{kind}{head}")


def box(ax: plt.Axes, x: float, y: float, width: float, height: float, kind: str, label: str) -> None:
    """One head, with its name."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=COLOURS[kind], edgecolor="white", linewidth=1))
    ax.text(x + width / 2, y + height / 2, label, fontsize=6.5, ha="center", va="center", color="#333333")


def attention_params(layout: dict[str, LocalParam]) -> dict[str, LocalParam]:
    """The parameters that hold pieces of layer 0's attention matrices."""
    return {
        name: param
        for name, param in layout.items()
        if any(piece.tensor.startswith(ATTENTION) for piece in param.pieces)
    }


def trainer(rank: int) -> dict[str, LocalParam]:
    pipeline_rank, tensor_rank = CUT.place(rank)
    return attention_params(megatron_layout(SHAPE, CUT.tensor, CUT.pipeline, tensor_rank, pipeline_rank))


def engine(rank: int) -> dict[str, LocalParam]:
    return attention_params(engine_layout(SHAPE, CUT.rollout_tensor, rank))


def draw_arrows(ax: plt.Axes, rank: int) -> None:
    """What the plan brings to one engine rank, and from where."""
    plan = build_plan(CUT, element_bytes=2, bucket_bytes=1 << 20, rank=rank).mine
    assert plan is not None
    moves = [(rank, segment) for segment in plan.local]
    for part in plan.rounds:
        moves += [(peer, segment) for peer, packs in part.receives.items() for pack in packs for segment in pack]
    target = Locator(engine(rank))
    for source, segment in moves:
        if not segment[0].startswith(ATTENTION):
            continue
        here, there = Locator(trainer(source)).find(segment)[1], target.find(segment)[1]
        colour = LOCAL if source == rank else NETWORK
        if segment[0].endswith("o_proj.weight"):
            # From the column's own height in the drawing, so that the two halves of a shard start apart.
            share = (here[1].start + here[1].stop) / 2 / 16
            start = (LEFT + WIDTH + 0.03, o_top(source, trainer(source)) - share * O_HEIGHT)
            end = (RIGHT - 0.05, o_top(rank, engine(rank)) - 0.5 * O_HEIGHT)
        else:
            start = (LEFT + WIDTH + 0.03, top(source) - (here[0].start + here[0].stop) / 2 * ROW)
            end = (RIGHT - 0.05, top(rank) - (there[0].start + there[0].stop) / 2 * ROW)
        ax.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=8,
                color=colour,
                linewidth=1.1,
                alpha=0.9,
                linestyle="-" if source == rank else (0, (4, 2)),
            )
        )


def main() -> None:
    """Write the figure beside this script."""
    plt.rcParams["svg.hashsalt"] = "weight_sync"
    plt.rcParams["svg.fonttype"] = "none"
    figure, ax = plt.subplots(figsize=(9.5, 10))
    for rank in range(4):
        pipeline_rank, tensor_rank = CUT.place(rank)
        draw_shard(ax, LEFT, rank, f"rank {rank}: trainer, stage {pipeline_rank}, tensor {tensor_rank}", trainer(rank))
        draw_shard(ax, RIGHT, rank, f"rank {rank}: engine, tensor {rank}", engine(rank))
        draw_arrows(ax, rank)
    ax.text(LEFT, 0.75, "Megatron-core, TP=2 x PP=2\nheads lie group by group: q q k v", fontsize=10)
    ax.text(RIGHT, 0.75, "vLLM, TP=4\nall q, then all k, then all v", fontsize=10)
    for y, colour, style, label in ((0.95, LOCAL, "-", "copied on the rank"), (0.65, NETWORK, "--", "sent once")):
        ax.plot([3.6, 4.2], [y, y], color=colour, linestyle=style, linewidth=1.6)
        ax.text(4.3, y, label, fontsize=9, va="center")
    ax.set_xlim(-0.1, RIGHT + WIDTH + 0.2)
    ax.set_ylim(-3 * RANK_HEIGHT - 1.7, 1.4)
    ax.axis("off")
    figure.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
