"""The paper suite's results as figures, tables and pictures: what `benchmarks.paper_suite` writes into ``docs/``."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper_settings import FAMILIES, MATCHED, MODES, NICS, NOT_EVEN, Record, Row, main_nics

PAPER = {"testbed": (1.11, 1.19), "simulation": (1.36, 1.72)}  # mean and best gain as published


# Results to figures --------------------------------------------------------------------------------------------


def summary(record: Record, modes: Sequence[str] = tuple(MODES)) -> Record:
    """One line of figures: each policy in the mode, of `modes`, that suits it best.

    ``outcome``: ``all fit``; ``a rival does not fit``: an even policy runs out of memory in every mode, another runs;
    ``no even split fits``; ``nothing fits``. Gains are times the step of the other takes as long as ours.
    """
    solved = {mode: record["modes"][mode] for mode in modes if mode in record["modes"]}
    running = {mode: r for mode, r in solved.items() if r["status"] == "ok"}
    view: Record = dict.fromkeys(
        ("mode", "step_seconds", "even", "even_step_seconds", "gain", "gain_any", "gain_free", "gain_any_free", "gap",
         "balance", "even_balance", "memory_fraction", "even_memory_fraction", "between_models_gb", "round_robin_gb",
         "dealt_gb", "traffic", "traffic_dealt", "solve_seconds", "devices", "excluded", "replicas", "groups",
         "exchange")
    )  # fmt: skip
    view = {**{field.name: record[field.name] for field in dataclasses.fields(Row)}, **view}
    if not running:
        return {**view, "outcome": "nothing fits"}
    mode = min(running, key=lambda m: running[m]["ours"]["step_seconds"])
    ours = running[mode]["ours"]
    view |= {"mode": mode, **{key: ours[key] for key in ours if key in view}}
    view["solve_seconds"] = max(r["solve_seconds"] for r in running.values())
    rivals: dict[str, list[Record]] = {}
    for r in running.values():
        for name, rival in r["rivals"].items():
            rivals.setdefault(name, []).append(rival)
    steps = {
        name: min((r["step_seconds"] for r in found if r["status"] == "ok"), default=None)
        for name, found in rivals.items()
        if name != "hexiseq"
    }
    if any(steps.values()):
        view["gain_any"] = min(step for step in steps.values() if step) / ours["step_seconds"]
    evens = [(r["even"]["step_seconds"], m) for m, r in running.items() if "even" in r]
    lacking = [
        name
        for name, found in rivals.items()
        if name not in NOT_EVEN and steps[name] is None and any(r["status"] == "out_of_memory" for r in found)
    ]
    if (dealt := running[mode].get("round_robin")) and dealt["between_models_gb"]:
        view["round_robin_gb"] = dealt["between_models_gb"]
        view["traffic"] = ours["between_models_gb"] / dealt["between_models_gb"]
    if ours["dealt_gb"]:
        view["traffic_dealt"] = ours["between_models_gb"] / ours["dealt_gb"]
    if not evens:
        return {**view, "outcome": "no even split fits"}
    even = running[min(evens)[1]]["even"]
    view |= {
        "even": even["name"],
        "even_step_seconds": even["step_seconds"],
        "gain": even["step_seconds"] / ours["step_seconds"],
        "even_balance": even.get("balance"),
        "even_memory_fraction": even.get("memory_fraction"),
    }
    own = min(r["ours"]["without_parameters_seconds"] for r in running.values())
    free: dict[str, list[float]] = {}
    for name in ("even", "fast_only"):
        free[name] = [s for r in solved.values() if (s := r[f"{name}_without_parameters_seconds"])]
    if free["even"]:
        view["gain_free"] = min(free["even"]) / own
        view["gain_any_free"] = min(free["even"] + free["fast_only"]) / own
    return {**view, "outcome": "a rival does not fit" if lacking else "all fit"}


def write_csv(views: Sequence[Record], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(views[0]), lineterminator="\n")
        writer.writeheader()
        for view in views:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in view.items()})


# Tables --------------------------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def show(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def mean_best(gains: Sequence[float]) -> str:
    return f"{statistics.mean(gains):.3f} / {max(gains):.3f}" if gains else "–"


def thousands(tokens: int) -> str:
    return "1M" if tokens == 2**20 else f"{tokens // 1024}k"


def named(cluster: str) -> str:
    return cluster.removeprefix("paper_")


def is_main(view: Record) -> bool:
    return view["nics"] == main_nics(view["cluster"])


def mixed(views: Sequence[Record]) -> list[Record]:
    """Without the clusters of one GPU model, which are there to be compared with."""
    return [view for view in views if view["cluster"] not in MATCHED.values()]


def gains_table(results: Sequence[Record]) -> str:
    """Mean and best gain per family and NICs, with and without parameter traffic."""
    kept = [mode for mode in MODES if "kept" in mode]
    again = [mode for mode in MODES if "kept" not in mode]
    rows = []
    for family, nics in itertools.product(FAMILIES, NICS):
        records = mixed([r for r in results if r["family"] == family and r["nics"] == nics])
        if not records:
            continue
        views = [summary(r) for r in records]
        fit = [v for v in views if v["outcome"] == "all fit"]
        partly = [v for v in views if v["outcome"] == "a rival does not fit"]
        label = f"{nics} (main)" if is_main(views[0]) else str(nics)

        def of(key: str, chosen: Sequence[str] = tuple(MODES), records: Sequence[Record] = records) -> str:
            views = [summary(r, chosen) for r in records]
            return mean_best([v[key] for v in views if v["outcome"] == "all fit" and v[key]])

        rows.append([
            family, label, str(len(fit)), of("gain"), of("gain_any"), of("gain_any", again), of("gain_any", kept),
            of("gain_free"), of("gain_any_free"), f"{len(partly)}: {mean_best([v['gain'] for v in partly])}",
            str(sum(v["outcome"] == "no even split fits" for v in views)),
            str(sum(v["outcome"] == "nothing fits" for v in views)),
        ])  # fmt: skip
    return markdown(
        ["family", "NICs", "rows where all fit", "over even", "over any", "any, gathered again", "any, kept",
         "even, parameters free", "any, parameters free", "a rival does not fit", "only ours fits", "nothing fits"],
        rows,
    )  # fmt: skip


def rows_table(views: Sequence[Record], family: str) -> str:
    rows = []
    for v in views:
        if v["family"] != family or not is_main(v):
            continue
        cells = [named(v["cluster"]), v["model"], thousands(v["seq_len"])]
        if v["mode"]:
            gains = [f"{show(v[key], '.3f')} / {show(v[f'{key}_free'], '.3f')}" for key in ("gain", "gain_any")]
            if v["outcome"] != "all fit":
                gains[0] = v["outcome"] if v["gain"] is None else f"{gains[0]} ({v['outcome']})"
            cells += [
                f"{v['step_seconds']:.3g}", *gains, f"{v['gap']:.1%}",
                f"{v['balance']:.2f} / {show(v['even_balance'])}",
                f"{v['memory_fraction']:.0%} / {show(v['even_memory_fraction'], '.0%')}",
                f"{show(v['traffic'])} / {show(v['traffic_dealt'])}", v["mode"],
                f"{v['devices']} of {v['devices'] + v['excluded']}", str(v["replicas"]),
            ]  # fmt: skip
        else:
            cells += ["–", v["outcome"], *["–"] * 8]
        rows.append(cells)
    return markdown(
        ["cluster", "model", "tokens", "step, s", "gain over even / parameters free",
         "gain over any / parameters free", "gap", "balance, ours / even", "memory, ours / even",
         "traffic: against even / own plan, dealt out", "mode", "devices", "replicas"], rows,
    )  # fmt: skip


def traffic_table(views: Sequence[Record]) -> str:
    """Of plans on several GPU models; those on one have no such traffic and are counted apart."""
    rows = []
    for family in FAMILIES:
        found = [v for v in mixed(views) if v["family"] == family and is_main(v) and v["mode"]]
        several = [v for v in found if v["between_models_gb"]]
        cells = []
        for key in ("traffic", "traffic_dealt"):
            ratios = [v[key] for v in several if v[key] is not None]
            cells += [f"{statistics.mean(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else ["–", "–"]
            cells.append(f"{sum(r <= 0.7 for r in ratios)} of {len(ratios)}")
        rows.append([family, str(len(found) - len(several)), *cells])
    return markdown(
        ["family", "on one GPU model", "even grid dealt out: mean", "largest", "30 % below", "own plan dealt out: mean",
         "largest", "30 % below"], rows,
    )  # fmt: skip


def use_table(views: Sequence[Record]) -> str:
    rows = []
    for family in FAMILIES:
        found = [v for v in mixed(views) if v["family"] == family and is_main(v) and v["even_balance"] is not None]
        if found:
            rows.append([
                family, *(f"{statistics.mean(v[key] for v in found):.3f}" for key in ("balance", "even_balance")),
                *(f"{max(v[key] for v in found):.1%}" for key in ("memory_fraction", "even_memory_fraction")),
            ])  # fmt: skip
    return markdown(["family", "balance, ours", "balance, even", "fullest device, ours", "even"], rows)


def pairs(views: Sequence[Record]) -> list[tuple[Record, Record, float]]:
    """Mixed cluster, its homogeneous partner, and the mixed one's step over the best on the other; where both run."""
    by = {(v["cluster"], v["model"], v["seq_len"], v["nics"]): v for v in views if v["family"] == "flops"}
    found = []
    for v in views:
        other = by.get((MATCHED.get(v["cluster"]), v["model"], v["seq_len"], v["nics"]))
        if other and v["step_seconds"] and other["step_seconds"]:
            best = min(s for s in (other["step_seconds"], other["even_step_seconds"]) if s)
            found.append((v, other, v["step_seconds"] / best))
    return found


def pairs_table(results: Sequence[Record]) -> str:
    bounds = {
        (r["cluster"], r["model"], r["seq_len"], r["nics"]): min(m["bound_seconds"] for m in r["modes"].values())
        for r in results
        if r["family"] == "flops"
    }
    rows = []
    for v, other, ratio in pairs([summary(r) for r in results]):
        if is_main(v):
            ideal = [bounds[u["cluster"], u["model"], u["seq_len"], u["nics"]] for u in (v, other)]
            rows.append([
                f"{named(v['cluster'])} / {named(other['cluster'])}", v["model"], thousands(v["seq_len"]),
                f"{v['step_seconds']:.3g}", f"{other['step_seconds']:.3g}", f"{ratio:.3f}",
                f"{ideal[0] / ideal[1]:.3f}", show(v["gain"], ".3f"),
            ])  # fmt: skip
    return markdown(
        ["pair", "model", "tokens", "mixed, s", "A100 alone, s", "mixed / alone", "of the bounds", "gain, mixed"], rows
    )


def against_paper(results: Sequence[Record]) -> str:
    """What the paper reports, and what is found here in the main figures."""
    views = [summary(r) for r in results]
    main = [v for v in mixed(views) if is_main(v)]
    rows = []

    def row(what: str, paper: str, here: str, met: bool) -> None:
        rows.append([what, paper, here, "yes" if met else "**no**"])

    for family, (mean, best) in PAPER.items():
        fit = [v for v in main if v["family"] == family and v["outcome"] == "all fit"]
        for how, key in (
            ("best even split over all devices", "gain"),
            ("any rival, the fastest model alone included", "gain_any"),
            ("best even split, parameters free", "gain_free"),
            ("any rival, parameters free", "gain_any_free"),
        ):
            if gains := [v[key] for v in fit if v[key]]:
                here = statistics.mean(gains)
                row(
                    f"{family}, mean / best gain over {how}", f"{mean:.2f} / {best:.2f}",
                    f"{here:.3f} / {max(gains):.3f}", here >= mean and max(gains) >= best,
                )  # fmt: skip
    if ratios := [ratio for v, _, ratio in pairs(views) if is_main(v)]:
        here = f"{min(ratios):.3f} to {max(ratios):.3f}, mean {statistics.mean(ratios):.3f}"
        row("mixed over FLOP-matched step", "1.03", here, max(ratios) <= 1.03)
    running = [v for v in views if v["mode"]]
    if running:
        fullest = max(v["memory_fraction"] for v in running)
        row("fullest device, all rows", "< 95 %", f"{fullest:.1%}", fullest <= 0.95)
        worst = min((v["gain_any"] for v in running if v["gain_any"]), default=None)
        if worst:
            row("least gain over any rival, all rows", "1", f"{worst:.4f}", worst >= 1 - 1e-9)
    between = [v for v in main if v["between_models_gb"]]
    for what, key, dealt in (("the best even grid", "traffic", "round_robin_gb"),
                             ("our plan", "traffic_dealt", "dealt_gb")):  # fmt: skip
        if views := [v for v in between if v[key] is not None]:
            mean = statistics.mean(v[key] for v in views)
            total = sum(v["between_models_gb"] for v in views) / sum(v[dealt] for v in views)
            name = f"traffic between GPU models, against {what} dealt out in turns"
            row(f"{name}, bytes of all rows", "0.70", f"{total:.2f}", total <= 0.7)
            row(f"{name}, mean of rows", "0.70", f"{mean:.2f}", mean <= 0.7)
    if big := [v["solve_seconds"] for v in running if v["cluster"] == "paper_sim_128"]:
        here = f"median {statistics.median(big):.2f} s, slowest {max(big):.2f} s"
        row("plan for 128 GPUs with its rivals found in, processor time", "< 0.5 s", here, max(big) < 0.5)
    return markdown(["", "paper", "here", "reached"], rows)


def tables(results: Sequence[Record]) -> dict[str, str]:
    """Every table of the document, by the name of its markers."""
    views = [summary(r) for r in results]
    return {
        "paper": against_paper(results),
        "gains": gains_table(results),
        "use": use_table(views),
        "traffic": traffic_table(views),
        "pairs": pairs_table(results),
        **{f"rows-{family}": rows_table(views, family) for family in FAMILIES},
    }


def fill(text: str, parts: dict[str, str]) -> str:
    """The document with each part between its markers, ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, replaced.

    Raises:
        ValueError: a part without its markers, or markers of no part.
    """
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"the document needs the lines {begin} and {end}, once each and in this order")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    if unknown := [n for n in text.split("<!-- begin ")[1:] if n.split(" -->")[0] not in parts]:
        raise ValueError(f"the document has markers of no table: {unknown[0].split(' -->')[0]}")
    return text


# Pictures ------------------------------------------------------------------------------------------------------


COLOURS = {"llama_3b": "tab:green", "llama_7b": "tab:orange", "llama_13b": "tab:blue", "llama3_70b": "tab:red"}
# File name -> axis label, level to compare with, and per line its figure, style and name.
PICTURES: dict[str, tuple[str, float, list[tuple[str, Any, str]]]] = {
    "gain": ("step of the rival / ours", 1.0, [
        ("gain_any", "-", "over any rival"), ("gain", "--", "over the best even split over all devices"),
    ]),
    "balance": ("busy time, mean / longest", 1.0, [
        ("balance", "-", "ours"), ("even_balance", "--", "best even split"),
    ]),
    "memory": ("fullest device, share of memory", 0.95, [
        ("memory_fraction", "-", "ours"), ("even_memory_fraction", "--", "best even split"),
    ]),
    "traffic": ("bytes between models, ours / dealt out", 0.7, [
        ("traffic_dealt", "-", "own plan dealt out"), ("traffic", "--", "best even grid dealt out"),
    ]),
}  # fmt: skip


def pictures(results: Sequence[Record], folder: Path) -> None:
    """`PICTURES`, a panel per cluster, by length; the FLOP-matched pairs."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    views = [summary(r) for r in results]
    shown = [v for v in mixed(views) if is_main(v) and v["family"] != "batch"]
    for name, (label, level, lines) in PICTURES.items():
        by_length(shown, folder / f"{name}.png", label, level, lines)
    matched(pairs(views), folder / "pairs.png")


def by_length(
    views: Sequence[Record], path: Path, label: str, level: float, lines: Sequence[tuple[str, Any, str]]
) -> None:
    """A row of panels per family, a panel per cluster, a line per model and figure over the sequence length."""
    import matplotlib.pyplot as plt

    families = {family: clusters for family in FAMILIES
                if (clusters := list(dict.fromkeys(v["cluster"] for v in views if v["family"] == family)))}  # fmt: skip
    columns = max(map(len, families.values()))
    figure, axes = plt.subplots(
        len(families), columns, figsize=(3.9 * columns, 2.7 * len(families) + 0.7), sharey="row",
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, clusters in zip(axes, families.values(), strict=True):
        for axis, cluster in itertools.zip_longest(row, clusters):
            if cluster is None:
                axis.set_visible(False)
                continue
            found = [v for v in views if v["cluster"] == cluster]
            lengths = sorted({v["seq_len"] for v in found})
            for model, (key, style, _) in itertools.product(dict.fromkeys(v["model"] for v in found), lines):
                points = {v["seq_len"]: v[key] for v in found if v["model"] == model}
                values = [math.nan if (point := points.get(n)) is None else point for n in lengths]
                axis.plot(range(len(lengths)), values, style, color=COLOURS[model], marker="o", markersize=4)
            axis.axhline(level, color="0.5", linewidth=0.8, linestyle=":")
            axis.set_title(named(cluster), fontsize=11)
            _axes(axis, lengths)
        if max(row[0].get_ylim()) > 4:
            row[0].set_yscale("log")
            ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 40) if tick <= max(row[0].get_ylim())]
            row[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            row[0].minorticks_off()
        row[0].set_ylabel(label, fontsize=8)
    models = [model for model in COLOURS if any(v["model"] == model for v in views)]
    _legend(figure, models, [(name, style) for _, style, name in lines])
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _axes(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xticks(range(len(lengths)), [thousands(n) for n in lengths])
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, models: Sequence[str], styles: Sequence[tuple[str, Any]]) -> None:
    """Below the panels: colours are models, line styles what is drawn."""
    import matplotlib.pyplot as plt

    handles = [plt.Line2D([], [], color=COLOURS[model], marker="o", markersize=4) for model in models]
    handles += [plt.Line2D([], [], color="0.3", linestyle=style) for _, style in styles]
    names = [*models, *(name for name, _ in styles)]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)


def matched(found: Sequence[tuple[Record, Record, float]], path: Path) -> None:
    """Step on the mixed cluster over that on its FLOP-matched partner, a panel per pair, a line style per NICs."""
    import matplotlib.pyplot as plt

    styles: dict[int, Any] = dict(zip(NICS, (":", "--", "-"), strict=True))
    styles = {nics: style for nics, style in styles.items() if any(v["nics"] == nics for v, _, _ in found)}
    figure, axes = plt.subplots(1, len(MATCHED), figsize=(10, 3.6), sharey=True, layout="constrained", squeeze=False)
    lengths = sorted({v["seq_len"] for v, _, _ in found})
    models = list(dict.fromkeys(v["model"] for v, _, _ in found))
    for axis, (name, alone) in zip(axes.flat, MATCHED.items(), strict=True):
        axis.axhspan(0.97, 1.03, color="0.92")
        for model, (nics, style) in itertools.product(models, styles.items()):
            points = {
                v["seq_len"]: ratio
                for v, _, ratio in found
                if (v["cluster"], v["model"], v["nics"]) == (name, model, nics)
            }
            values = [points.get(n, math.nan) for n in lengths]
            axis.plot(range(len(lengths)), values, style, color=COLOURS[model], marker="o", markersize=4)
        axis.set_title(f"{named(name)} against {named(alone)}", fontsize=11)
        _axes(axis, lengths)
    axes[0, 0].set_ylabel("step, mixed / A100 alone (grey: ±3 %)", fontsize=9)
    _legend(figure, models, [(f"{n} NIC{'s' if n > 1 else ''} a node", style) for n, style in styles.items()])
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
