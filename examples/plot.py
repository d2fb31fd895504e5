# MIT License, see LICENSE.
"""Pictures of a training run and of a benchmark (pip install matplotlib).

    python examples/plot.py HEAD/metrics.jsonl run.png       loss, accuracy by step and simulated acceptance length
    torchrun serve.py --target DIR --draft HEAD --bench PROMPTS.jsonl > bench.txt
    python examples/plot.py bench.txt bench.png              by category and depth, and where a round's time goes

The picture is a .png, .svg or .pdf file.
"""
import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eagle3

POINTS = 50  # each is the mean of as many optimizer steps as it takes


def pyplot():
    """matplotlib's, drawing to files."""
    eagle3.require_package("matplotlib").use("Agg")
    from matplotlib import pyplot
    return pyplot


def draw_run(lines: list[dict], plt):
    """The lines of a metrics.jsonl, against training tokens."""
    span = max(1, len(lines) // POINTS)
    groups = [lines[i:i + span] for i in range(0, len(lines) - span + 1, span)]
    mean = lambda value: [sum(map(value, group)) / span for group in groups]
    tokens, steps = [group[-1]["tokens"] / 1e6 for group in groups], len(lines[0]["accuracy"])
    is_simulated = any(line["simulated_acceptance_length"] for line in lines)  # not with a chain share below 1
    figure, panels = plt.subplots(1, 2 + is_simulated, figsize=(8 + 4 * is_simulated, 3.4), layout="constrained")
    panels[0].plot(tokens, mean(lambda line: line["loss"]), color="tab:blue")
    panels[0].set_title("loss")
    for step in range(steps):
        color = plt.cm.viridis(0.9 * step / max(1, steps - 1))
        panels[1].plot(tokens, mean(lambda line: line["accuracy"][step]), color=color, label=f"step {step}")
    panels[1].set_title("accuracy on training rows")
    panels[1].legend(fontsize="x-small")
    if is_simulated:
        panels[2].plot(tokens, mean(lambda line: line["simulated_acceptance_length"] or math.nan), color="tab:green")
        panels[2].set_title("simulated acceptance length\non training rows")
    for axes in panels:
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
    return figure


def draw_bench(summary: dict, plt):
    """The JSON line of serve.py --bench."""
    figure, ((speed, length), (depths, parts)) = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    categories = summary["by_category"]
    titles = {"speedup": "speed-up over plain decoding (median)", "acceptance_length": "acceptance length"}
    for axes, (key, title) in zip((speed, length), titles.items()):
        bars = axes.barh(list(categories), [found[key] or 0 for found in categories.values()], color="tab:blue")
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.invert_yaxis()
        axes.set_title(title)
    accepted = [share or 0 for share in summary["per_position_acceptance"]]
    depths.bar(range(1, len(accepted) + 1), accepted, color="tab:green")
    depths.set(title="share of rounds in which a guess at this depth was accepted", xlabel="depth", ylim=(0, 1))
    parts.barh(["plain step"], [summary["ms_plain"] or 0], color="tab:gray", label="plain")
    left = 0.0
    for name, color in (("draft", "tab:orange"), ("verify", "tab:blue"), ("host", "tab:red")):
        ms = summary[f"ms_{name}"] or 0
        parts.barh(["round"], [ms], left=left, color=color, label=name)
        left += ms
    parts.set(title="where a round's time goes (medians)", xlabel="ms")
    parts.legend()
    return figure


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="a metrics.jsonl, or what serve.py --bench printed")
    parser.add_argument("picture", type=Path, help="the file to draw")
    args = parser.parse_args(argv)
    if args.picture.suffix not in (".png", ".svg", ".pdf") or not args.picture.resolve().parent.is_dir():
        raise ValueError(f"the picture must be a .png, .svg or .pdf file in a folder that exists: got {args.picture}")
    if not args.measured.is_file():
        raise FileNotFoundError(f"{args.measured} is not there")
    lines = [
        json.loads(line) for line in args.measured.read_text(encoding="utf-8").splitlines() if line.startswith("{")
    ]
    if not lines or not {"loss", "by_category"} & set(lines[-1]):
        raise ValueError(f"{args.measured} holds neither a step of a training run nor the summary of serve.py --bench")
    plt = pyplot()
    figure = draw_run(lines, plt) if "loss" in lines[-1] else draw_bench(lines[-1], plt)
    figure.savefig(args.picture)
    print(f"drew {args.picture}")
    return {"picture": str(args.picture)}


if __name__ == "__main__":
    eagle3.run_script("plot.py", lambda shard: main())
