"""Pictures of a plan: who owns which tokens and which heads, and how full each device's memory is."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from hexiseq.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMED_RANKS = 64


def plan_svg(plan: Plan) -> str:
    """The plan as SVG text: a row per rank with its tokens, query heads and memory, coloured by device type."""
    import matplotlib

    matplotlib.use("Agg")
    # A fixed salt gives the same file for the same plan.
    matplotlib.rcParams["svg.hashsalt"] = "hexiseq"
    import matplotlib.pyplot as plt

    shards = plan.shards()
    types = list(dict.fromkeys(device.type for device in plan.devices))
    palette = plt.get_cmap("tab10")
    colours = [palette(types.index(plan.devices[shard.rank].type) % 10) for shard in shards]
    height = 1.6 + 0.28 * len(shards)
    figure, (tokens, heads, memory) = plt.subplots(
        1, 3, figsize=(12, height), sharey=True, width_ratios=(5, 3, 2), layout="constrained"
    )
    for row, (shard, colour) in enumerate(zip(shards, colours, strict=True)):
        tokens.broken_barh([(a, b - a) for a, b in shard.tokens], (row - 0.4, 0.8), color=colour)
        heads.broken_barh([(shard.heads[0], shard.num_heads)], (row - 0.4, 0.8), color=colour)
        if plan.predicted:
            limit = plan.predicted.memory_limit_gb[shard.rank]
            memory.barh(row, limit, color="0.9")
            memory.barh(row, plan.predicted.memory_gb[shard.rank], color=colour, height=0.5)
    _finish(tokens, "tokens of the sequence", plan.seq_len)
    _finish(heads, "query heads in the group", plan.num_heads)
    memory.set_xlabel("memory, GB (grey: limit)")
    tokens.invert_yaxis()
    if len(shards) <= _MOST_NAMED_RANKS:
        labels = [f"{s.rank}  {plan.devices[s.rank].type}  group {plan.place(s.rank)[1]}" for s in shards]
        tokens.set_yticks(range(len(shards)), labels)
    title = f"{plan.policy}: {plan.seq_len:,} tokens on {plan.world_size} devices"
    if plan.predicted:
        title += f", predicted {plan.predicted.step_seconds:.3g} s a step"
    figure.suptitle(title)
    handles = [plt.Rectangle((0, 0), 1, 1, color=palette(i % 10)) for i in range(len(types))]
    figure.legend(handles, types, loc="outside lower center", ncols=min(len(types), 6), frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def _finish(axes: Axes, label: str, end: int) -> None:
    axes.set_xlim(0, end)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
