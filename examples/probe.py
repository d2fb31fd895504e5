# MIT License, see LICENSE.
"""Which hidden states, and which rope base, was somebody else's head trained on?

    python examples/probe.py --target DIR --draft THEIRS [--prompts FILE.jsonl] [--save DIR]

The target answers some questions, and the head is fed each plausible layout of its own hidden states: what its ids can
mean, one higher and one lower, every system's default and what --layers states, with the config's rope base and with
10000 (and a speculators head with and without norm_before_residual). One that is clearly best is named, if no other
hidden states suit the head better; --save then writes the head in this project's format. Otherwise it cannot tell, and
ends with exit code 1. torchrun splits a large target over several ranks.
"""
import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eagle3
from eagle3 import DraftConfig, DraftHead, FeatureLayout, RopeConfig, Row, Shard, Target, TargetConfig, TTTStats

KNOWS = 0.05  # first-step accuracy from which on a head knows something
STEPS, PROMPTS = 4, 8  # of the training-time test; answers that are scored
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a lighthouse.",
    "How do I make pancakes?",
    "Explain what a prime number is.",
    "List five cities in Europe and what each is known for.",
    "Write a polite letter that asks for a refund.",
    "What happened in the year 1969?",
)
bar = partial(tqdm, leave=False)


def plausible_layouts(folder: str, target: TargetConfig, stated: FeatureLayout | None) -> list[FeatureLayout]:
    """What a head may have been trained on, the likeliest first: what is stated, what its config.json can mean, the
    same one higher and one lower, and what some system captures by default."""
    config, L = eagle3.read_json(Path(folder) / "config.json"), target.num_layers
    readings = [b for found in eagle3.layout_readings(config, target).values() for b in found]
    own = [tuple(config["feature_layout"]["boundaries"])] if "feature_layout" in config else []
    near = [tuple(b + add for b in read) for read in (*own, *readings) for add in (1, -1)]
    defaults = [(2, L // 2, L - 3),      # SafeAILab, SGLang, vLLM, SpecForge, AngelSlim, ModelOpt
                (3, L // 2 + 1, L - 2),  # speculators 0.3 and 0.4
                (2, L // 2 + 1, L - 3),  # SpecForge, online, in autumn 2025
                (1, L // 2 - 1, L - 4),  # the default's layer ids taken for boundaries
                (0, 1, 2)]               # SafeAILab's trainer on an unpatched target
    all_of_them = dict.fromkeys(((stated.boundaries,) if stated else ()) + (*own, *readings, *near, *defaults))
    valid = [b for b in all_of_them if 0 <= b[0] and b[-1] <= L and all(x < y for x, y in zip(b, b[1:]))]
    return [FeatureLayout(b, target.hidden_size, L) for b in valid]


class Scorer:
    """Feeds a head the hidden states of any boundaries, on rows of (tokens [T], loss_mask [T])."""

    def __init__(self, head: DraftHead, rows: list[tuple[Tensor, Tensor]], target: Target, ttt_steps: int):
        self.head, self.prepared = head, []
        for tokens, loss_mask in rows:
            hidden = eagle3.all_boundaries(target, tokens)
            captures = {b: hidden[f"h.{b}"][None] for b in range(target.config.num_layers + 1)}
            self.prepared.append(
                (eagle3.prepare_ttt(head, tokens[None], loss_mask[None], captures, ttt_steps), captures)
            )

    @torch.no_grad()
    def by_row(self, boundaries: tuple[int, ...], moved: int = 0) -> list[TTTStats]:
        """Statistics of each row, with the features moved so many tokens to the right."""
        found = []
        for batch, captures in self.prepared:
            features = torch.cat([captures[b] for b in boundaries], dim=-1).roll(moved, 1)
            found.append(eagle3.ttt_loss(self.head, batch._replace(features=features))[1])
        return found


class Candidate(NamedTuple):
    """How a head does, on some rows, when it is said to be this."""
    config: DraftConfig
    losses: Tensor            # [rows]
    accuracy: float           # of the first step
    acceptance: float | None  # simulated

    @property
    def loss(self) -> float:
        return self.losses.mean().item()

    def is_clearly_better(self, other: "Candidate") -> bool:
        """By three standard errors over the rows, and a quarter of a per cent. (SmolLM2: layouts that differ by one in
        the middle boundary are 0.3 % and five errors apart for a head that guesses 76 %; a wrong rope base was 0.2 %
        and 1.6 errors better for one of 26 %.)"""
        gain = other.losses - self.losses
        least = max(0.0025 * self.loss, 3 * gain.std().item() / len(gain) ** 0.5)
        return self.accuracy >= KNOWS and gain.mean().item() >= least

    def __str__(self) -> str:
        config = self.config
        return (f"--layers {config.layout.flag} (rope base {config.rope.theta:g}, "
                f"norm_before_residual {config.norm_before_residual})")


def rewire(head: DraftHead, config: DraftConfig) -> None:
    """The same weights, said to have been trained on other features, with another rope or norm_before_residual."""
    head.config, head.midlayer.norm_before_residual = config, config.norm_before_residual
    head.rope_frequencies.copy_(config.rope.frequencies(config.head_dim))


def try_configs(
    head: DraftHead, rows: list[tuple[Tensor, Tensor]], target: Target, configs: list[DraftConfig]
) -> list[Candidate]:
    """The head rewired as each of these, the best first. It is left as the best."""
    scorer, candidates = Scorer(head, rows, target, STEPS), []
    for config in bar(configs, desc="layouts"):
        rewire(head, config)
        by_row = scorer.by_row(config.layout.boundaries)
        total = sum(by_row, TTTStats.zeros(STEPS))
        numbers = torch.tensor([*(stats.loss for stats in by_row), total.accuracy[0]], dtype=torch.float64)
        *losses, accuracy = eagle3.broadcast(numbers, target.shard)
        candidates.append(Candidate(config, torch.stack(losses), accuracy.item(), total.simulated_acceptance_length))
    candidates.sort(key=lambda candidate: candidate.loss)
    rewire(head, candidates[0].config)
    return candidates


class Search(NamedTuple):
    boundaries: tuple[int, ...]  # in the order of fc's blocks
    shift: int                   # tokens to the right
    loss: float                  # of the first step, with these
    accuracy: float
    wired_loss: float            # with what the head is fed
    wired_accuracy: float

    @property
    def is_better(self) -> bool:
        """A well-wired head gains nothing from other hidden states, and an untrained one guesses nothing with any
        (SmolLM2, a head after 300 steps: the next boundaries cost it 0.8 % of its loss and 3 % of its accuracy, others
        up to 20 and 40 %)."""
        return (
            self.accuracy >= KNOWS
            and self.accuracy >= 1.02 * self.wired_accuracy
            and self.loss <= 0.995 * self.wired_loss
        )


@torch.no_grad()
def search(head: DraftHead, rows: list[tuple[Tensor, Tensor]], target: Target) -> Search:
    """What the head knows best of all that there is: shifts, neighbours, orders and single blocks are tried, by descent
    of the first step's loss. A weak head that is fed the next boundary guesses nearly as well, but its loss shows
    it."""
    start, L, scorer = head.config.layout.boundaries, head.config.layout.num_layers, Scorer(head, rows, target, 1)
    scores = {}  # (boundaries, shift): loss, accuracy

    def score(boundaries: tuple[int, ...], shift: int) -> None:
        if (boundaries, shift) not in scores and all(0 <= b <= L for b in boundaries):
            stats = sum(scorer.by_row(boundaries, shift), TTTStats.zeros(1))
            numbers = torch.tensor([stats.loss, stats.accuracy[0]], dtype=torch.float64)
            scores[boundaries, shift] = tuple(eagle3.broadcast(numbers, target.shard).tolist())

    best = lambda: min(scores, key=scores.get)
    for shift in (0, 1, -1):
        score(start, shift)
    for change in (1, -1, 2, -2):
        score(tuple(b + change for b in start), 0)
    for order in itertools.permutations(start):
        score(order, 0)
    for _ in bar(range(3), desc="other features"):
        before = best()
        for block in range(len(start)):
            for b in range(L + 1):
                boundaries, shift = best()
                score((*boundaries[:block], b, *boundaries[block + 1:]), shift)
        if best() == before:
            break
    return Search(*best(), *scores[best()], *scores[start, 0])


def answered_rows(target: Target, args: argparse.Namespace) -> list[Row]:
    """The target's own greedy answers, since a head knows those best."""
    records = (
        [record for _, record in eagle3.read_records(args.prompts)]
        if args.prompts
        else [{"prompt": text} for text in QUESTIONS]
    )
    if not records or None in records:
        raise ValueError(f"{args.prompts} must hold a JSON object in every line")
    tokenizer = None if all("input_ids" in record for record in records) else eagle3.load_tokenizer(args.target)
    prompts = [eagle3.encode_prompt(record, tokenizer, args.raw) for record in records[:args.limit]]
    requests = [r for r in eagle3.generate(target, prompts, args.max_new_tokens) if len(r.output) > 2]
    if not requests:
        raise ValueError(
            "the target answers none of the prompts with more than two tokens: name others with --prompts FILE.jsonl"
        )
    return [Row(r.prompt + r.output, [False] * len(r.prompt) + [True] * len(r.output), "answer") for r in requests]


def probe(args: argparse.Namespace, ranks: Shard) -> dict:
    config = eagle3.read_target_config(args.target)
    dtype = args.dtype or eagle3.choose_dtype(config.dtype, args.device, "decoding", ranks)
    target = eagle3.load_target(args.target, dtype, args.device, ranks)
    stated = FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers) if args.layers else None
    layouts = plausible_layouts(args.draft, config, stated)
    head = eagle3.load_draft(args.draft, target, *layouts[:1])
    layouts = [layout for layout in layouts if layout.width == head.config.layout.width]
    ropes = list(
        dict.fromkeys((head.config.rope, RopeConfig(10000.0)))
    )  # SafeAILab's trainer ignores the config's base
    is_speculators = "speculators_config" in eagle3.read_json(Path(args.draft) / "config.json")
    residuals = (True, False) if is_speculators else (head.config.norm_before_residual,)  # readers' defaults differ
    configs = [replace(head.config, layout=layout, rope=rope, norm_before_residual=normed)
               for layout, rope, normed in itertools.product(layouts, ropes, residuals)]
    rows = [
        tuple(x[0] for x in eagle3.collate([row], target.norm.weight.device)) for row in answered_rows(target, args)
    ]
    best, *others = candidates = try_configs(head, rows, target, configs)
    table = [
        {
            "layers": c.config.layout.flag,
            "rope_theta": c.config.rope.theta,
            "norm_before_residual": c.config.norm_before_residual,
            "loss": round(c.loss, 3),
            "accuracy": round(c.accuracy, 3),
            "simulated_acceptance_length": c.acceptance and round(c.acceptance, 3),
        }
        for c in candidates
    ]
    for line in (dict(zip(table[0], table[0])), *table):
        print("  " + "".join(f"{value!s:<{max(len(key) + 2, 10)}}" for key, value in line.items()))
    doubt, found = None, None
    rivals = [candidate for candidate in others if not best.is_clearly_better(candidate)]
    if best.accuracy < KNOWS:
        doubt = "the head guesses too little with any of them"
    else:
        found = search(head, rows[:4], target)
        if found.is_better:
            doubt = (
                f"the head knows boundaries {','.join(map(str, found.boundaries))} better than any of them (accuracy "
                f"{found.accuracy:.3f} against {found.wired_accuracy:.3f}): it was trained on those, or on some near "
                "them; name what to try with --layers"
            )
        elif rivals:
            doubt = f"{best} is best, but not clearly better than {', '.join(map(str, rivals))}"
    print(f"cannot tell: {doubt}" if doubt else f"the head was trained on {best}")
    if args.save and not doubt:
        print(f"saved {args.save}: {eagle3.save_draft(head, args.save)}")
    return {
        "verdict": "cannot tell" if doubt else "ok",
        "cause": doubt,
        "layers": None if doubt else best.config.layout.flag,
        "rope_theta": None if doubt else best.config.rope.theta,
        "tokens": sum(int(mask.sum()) for _, mask in rows),
        "table": table,
        "better_boundaries": list(found.boundaries) if found and found.is_better else None,
        "saved": None if doubt else args.save,
    }


def main(argv=None, ranks: Shard = Shard()) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target's Hugging Face folder, or hub name")
    parser.add_argument("--draft", required=True, help="the head's folder, or hub name")
    parser.add_argument("--layers", help="boundaries to try first, such as 2,15,27")
    parser.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help="questions for the target, as for serve.py --bench (default: some of ours)",
    )
    parser.add_argument("--limit", type=int, default=PROMPTS, help=f"at most so many of them (default: {PROMPTS})")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per answer")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument(
        "--save", metavar="DIR", help="write the head there with what was found, in this project's format"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32", "float64"], help="default: as serve.py chooses"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.save and (ranks.size > 1 or Path(args.save).exists()):
        raise ValueError(
            f"--save {args.save} writes a new folder, from one process: it is there already, or these are {ranks.size}"
        )
    args.device = eagle3.torch_device(args.device)
    args.target, args.draft = map(eagle3.model_folder, (args.target, args.draft))
    return probe(args, ranks)


if __name__ == "__main__":
    eagle3.run_script("probe.py", lambda shard: main(ranks=shard))
