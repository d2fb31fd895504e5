# MIT License, see LICENSE.
"""Decode with a target model and its EAGLE-3 draft head.

    torchrun serve.py --target DIR --draft DIR                        the server: OpenAI's API on http://127.0.0.1:8000/v1
    python serve.py --prompt "import os"                              the demo's pair (made by: python train.py)
    torchrun serve.py --target DIR --draft DIR --prompt "Hello"       one answer, streamed
    torchrun serve.py --target DIR --draft DIR --bench FILE.jsonl     the same prompts with and without the head, alternating
    torchrun serve.py --target DIR --draft DIR --check FEATURES|DATA  is the head fed wrongly, or weak?

torchrun --nproc-per-node N splits target and head over N GPUs (or CPU processes).

A line of FILE.jsonl has MT-bench `turns` (the first is used), `messages`, `prompt` or `input_ids`.
"""
import argparse
import hmac
import itertools
import json
import math
import os
import queue
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tqdm import tqdm

import eagle3
from eagle3 import Engine, FeatureLayout, Sampling, Shard, SpecConfig, SpecStats

DEMO = Path("runs/demo")
CHECK_ROWS = 8
TIE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}  # logit gap under which two greedy texts may part by rounding


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    # models
    add("--target", help="the target's Hugging Face folder, or hub name (default: the demo's)")
    add("--draft", help="the head's folder, or hub name (with --target and no --draft: plain decoding)")
    add("--layers", help="states the head's boundaries, such as 2,15,27 or embed,3,31; must equal the layout that the head carries")
    # what to do
    add("--prompt", help="text to answer")
    add("--prompt-ids", help="token ids to continue, such as 1,2,3")
    add("--raw", action="store_true", help="no chat template")
    add("--check", metavar="FEATURES|DATA", help="tell wrong wiring from a weak head, on training rows: a folder of features, or a JSONL file")
    add("--held-out", metavar="FILE", help="--check: rows that the head was not trained on")
    add("--bench", metavar="FILE", help="JSONL file of prompts to time with and without the head")
    add("--max-length", type=int, help="the server: prompt and new tokens of a request (default: 4096, at most the target's context)")
    add("--limit", type=int, help="--bench: at most this many prompts")
    add("--max-new-tokens", type=int, default=128, help="per prompt")
    add("--max-batch", type=int, help="requests decoded at once by the server (default: 8) and in --bench (default: 1)")
    # the server
    add("--host", default="127.0.0.1", help="address to listen at; others than this machine's own can reach 0.0.0.0")
    add("--port", type=int, default=8000, help="port to listen at (0: a free one)")
    add("--name", help="the model's name in the API (default: the target's folder)")
    add("--max-queue", type=int, default=256, help="requests that may wait for a slot; more get 429")
    add("--api-key", help="clients must send it as a bearer token")
    # speculation: --spec, or all three of the others
    add("--spec", choices=["auto", "none"], help="auto: measure, and draft as much as pays, or not at all (the default); none: never draft")
    add("--num-steps", type=int, help="consecutive guesses per round")
    add("--draft-topk", type=int, help="guesses per node; 1 drafts a chain")
    add("--num-draft-tokens", type=int, help="nodes verified per round, the root included")
    # sampling; the same seed gives the same text with and without a head
    add("--temperature", type=float, default=0.0, help="0 = the most likely token")
    add("--top-k", type=int, default=0, help="sample from the k most likely (0 = all)")
    add("--top-p", type=float, default=1.0, help="sample from the most likely that together reach p (1 = all)")
    add("--min-p", type=float, default=0.0, help="sample from those at least min-p times as likely as the most likely (0 = all)")
    add("--seed", type=int, default=0, help="of the sampling noise")
    # machine
    add("--no-compile", action="store_true", help="--bench and the server without torch.compile (one-off answers are never compiled)")
    add("--dtype", choices=list(TIE), help="of target and head (default: as stored, but float32 on a CPU that decodes faster in it)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    jobs = sum(x is not None for x in (args.prompt, args.prompt_ids, args.bench, args.check))
    args.max_batch = (1 if jobs else 8) if args.max_batch is None else args.max_batch
    for is_wrong, text in (
            (jobs > 1, "give at most one of --prompt TEXT, --prompt-ids 1,2,3, --bench FILE and --check FEATURES|DATA (none: the server)"),
            (jobs and args.max_length, "--max-length belongs to the server"),
            (args.check and not (args.target and args.draft), "--check needs --target and --draft"),
            (args.held_out and not args.check, "--held-out belongs to --check"),
            (args.draft and not args.target, "--draft needs its --target"),
            (args.target and not args.draft and any((args.layers, args.num_steps, args.draft_topk, args.num_draft_tokens)),
             "--layers, --num-steps, --draft-topk and --num-draft-tokens are about a draft head: give --draft")):
        if is_wrong:
            raise ValueError(text)
    eagle3.require_at_least(args, 1, "limit", "max_new_tokens", "max_batch", "max_length", "max_queue")
    args.device = eagle3.torch_device(args.device)
    args.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    args.name = args.name or Path(args.target or DEMO / "target").resolve().name
    args.target, args.draft = (path and eagle3.model_folder(path) for path in (args.target, args.draft))
    return args


def resolve_spec(args) -> SpecConfig | tuple[SpecConfig, ...] | None:
    given = (args.num_steps, args.draft_topk, args.num_draft_tokens)
    if all(x is None for x in given):
        return None if args.spec == "none" else eagle3.AUTO_SHAPES
    if args.spec or any(x is None for x in given):
        raise ValueError("--num-steps, --draft-topk and --num-draft-tokens go together, without --spec: give all three, or --spec auto|none")
    return SpecConfig(*given)


def stated_layout(args, config: eagle3.TargetConfig) -> FeatureLayout | None:
    return FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers) if args.layers else None


def load_own_part(args, ranks: Shard) -> eagle3.Target:
    """The target, or this rank's part of it; settles args.dtype."""
    args.dtype = args.dtype or eagle3.choose_dtype(eagle3.read_target_config(args.target).dtype, args.device, "decoding", ranks)
    return eagle3.load_target(args.target, args.dtype, args.device, ranks)


def load(args, ranks: Shard):
    """Target, head (or None) and spec (or None), this rank's part of them; prints what was resolved."""
    spec = resolve_spec(args)  # before any weights are read
    if args.target is None:
        args.target, args.draft = DEMO / "target", DEMO / "draft"
        if not (args.draft / "config.json").exists():
            raise FileNotFoundError("no --target was given, and the demo's pair is not there: make it with `python train.py` (some minutes), or "
                                    "name a --target")
    stated = stated_layout(args, eagle3.read_target_config(args.target))
    target = load_own_part(args, ranks)
    head = eagle3.load_draft(args.draft, target, stated) if args.draft and spec else None
    print(f"eagle3 serve: torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.dtype}, {args.target}"
          + f", split over {ranks.size} ranks" * (ranks.size > 1))
    shown = "no draft, or whichever pays most of: " + "; ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec)
    print(f"draft head {args.draft}: features {head.config.layout}; {shown}" if head else "plain decoding")
    return target, head, spec if head else None


def answer(args, ranks: Shard) -> dict:
    """Stream one answer."""
    target, head, spec = load(args, ranks)
    if args.prompt_ids is not None:
        parts = args.prompt_ids.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"--prompt-ids must be token ids such as 1,2,3: got {args.prompt_ids!r}")
        prompt, stream = [int(part) for part in parts], None
    else:
        tokenizer = eagle3.load_tokenizer(args.target)
        if not args.raw and not tokenizer.has_chat_template:
            print("the target has no chat template: the prompt goes in as it is")
        prompt, stream = eagle3.encode_prompt({"prompt": args.prompt}, tokenizer, args.raw), eagle3.TextStream(tokenizer)
    engine = Engine(target, head, spec, max_length=len(prompt) + args.max_new_tokens)
    request = engine.submit(prompt, args.max_new_tokens, sampling=args.sampling)
    begun, rounds, shown = time.perf_counter(), 0, sys.stdout.isatty()
    while engine.busy:
        for _, tokens in engine.step():
            drafted, rounds = tokens[:-1] if head else [], rounds + 1  # a round's last token is the target's own
            for part, tint in ((drafted, f"\033[3{2 + rounds % 3 * 2}m"), (tokens[len(drafted):], "")):
                text = "".join(f"{token} " for token in part) if stream is None else stream.push(part) if part else ""
                print(f"{tint}{text}\033[0m" if tint and text and shown else text, end="", flush=True)
    seconds = time.perf_counter() - begun
    print("" if stream is None else stream.push([], final=True))
    if request.finish_reason == "error":
        raise ValueError("the target's logits were not finite: check its weights and --dtype")
    return {"prompt_tokens": len(prompt), "new_tokens": len(request.output), "finish_reason": request.finish_reason,
            "tok_s": round(len(request.output) / seconds, 1), "acceptance_length": rounded(request.stats.acceptance_length if head else None)}


def rounded(x: float | None, digits: int = 3) -> float | None:
    return None if x is None else round(x, digits)


class Prompt(NamedTuple):
    name: str      # file:line
    category: str  # as in the file; "all" where it names none
    ids: list[int]


def read_prompts(path: str, args, config: eagle3.TargetConfig) -> list[Prompt]:
    tokenizer, room, V = cache(partial(eagle3.load_tokenizer, args.target)), config.max_position_embeddings - args.max_new_tokens, config.vocab_size
    prompts = []
    for name, record in itertools.islice(eagle3.read_records(path), args.limit):
        if record is None:
            raise ValueError(f"{name} is not a JSON object")
        loaded = None if "input_ids" in record else tokenizer()
        try:
            prompt = eagle3.encode_prompt(record, loaded, args.raw)
        except eagle3.MALFORMED as error:
            raise ValueError(f"{name}: {error}") from None
        if not 1 <= len(prompt) <= room or min(prompt) < 0 or max(prompt) >= V:
            raise ValueError(f"{name}: a prompt needs 1 to {room} ids (the context less --max-new-tokens) within 0..{V - 1}: got {len(prompt)} ids")
        prompts.append(Prompt(name, str(record.get("category", "all")), prompt))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


@dataclass
class Tally:
    """What --bench saw of some prompts."""
    prompts: int = 0
    ratios: list[float] = field(default_factory=list)  # speed-up by batch
    stats: SpecStats = field(default_factory=SpecStats)

    def summary(self, depth: int) -> dict:
        return {"prompts": self.prompts, "speedup": rounded(median(self.ratios)), "acceptance_length": rounded(self.stats.acceptance_length),
                "per_position_acceptance": [rounded(a) for a in self.stats.per_position_acceptance(depth)]}


ENOUGH_ROUNDS = 50  # drafted, for an acceptance length to within a tenth or two
SPEED_AT = (1.5, 2, 2.5, 3, 4)  # acceptance lengths for which --bench says what each shape would gain


def median_of(rounds, part: str) -> float | None:
    """ms of the rounds' `part`; None where there was no round, since every answer is one token."""
    return median(getattr(r, part) for r in rounds) if rounds else None


def shape_name(shape: SpecConfig | None) -> str:
    return f"{shape.num_steps}-{shape.topk}-{shape.num_draft_tokens}" if shape else "none"


def shape_table(ms_plain: float | None, rounds) -> dict[str, dict[str, float]]:
    """Of every draft shape that ran: the median ms of a round, and how many plain steps that is, which is the acceptance length from which on
    it pays. What it gains at any acceptance length is that length over this one. Prints both."""
    found = {shape: median_of([r for r in rounds if r.shape == shape], "ms") for shape in dict.fromkeys(r.shape for r in rounds) if shape}
    lines = [("shape", "ms a round", "break-even", *(f"{length} tokens" for length in SPEED_AT))] if ms_plain and found else []
    for shape, ms in found.items() if ms_plain else ():
        lines.append((shape_name(shape), f"{ms:.2f}", f"{ms / ms_plain:.2f}", *(f"{length * ms_plain / ms:.2f}x" for length in SPEED_AT)))
    print("".join(f"  {''.join(f'{cell:<12}' for cell in line)}\n" for line in lines), end="")
    return {shape_name(shape): {"ms": rounded(ms), "break_even": rounded(ms / ms_plain)} for shape, ms in found.items()} if ms_plain else {}


def compare_texts(target, prompt: Prompt, plain: eagle3.Request, fast: eagle3.Request, args) -> tuple[bool, bool]:
    """Whether the texts are the same, and whether they part at a rounding tie."""
    parted = eagle3.first_divergence(target, prompt.ids, plain.output, fast.output, args.sampling)
    is_tie = parted is not None and parted[1] < TIE[args.dtype]
    if parted is not None:
        tqdm.write(f"texts part after {parted[0]} tokens, where the two tokens' logits are {parted[1]:.2g} apart: "
                   + ("a rounding tie" if is_tie else "NOT a tie"))
    return parted is None, is_tie


def bench(args, ranks: Shard) -> dict:
    """Each batch of prompts plainly and speculatively, in turns (A B, B A, ...), and whether the texts are the same."""
    target, head, spec = load(args, ranks)
    if head is None:
        raise ValueError("--bench compares with and without a head: give --draft, and not --spec none")
    prompts = read_prompts(args.bench, args, target.config)
    size = dict(max_batch=args.max_batch, max_length=max(len(prompt.ids) for prompt in prompts) + args.max_new_tokens, one_alone=False)
    speculative = Engine(target, head, spec, **size)
    engines = {"plain": Engine(target, **size, margin=speculative.margin), "spec": speculative}
    for engine in engines.values() if args.no_compile else tqdm(engines.values(), desc="compiling", unit="engine"):  # warm-up, not timed
        if not args.no_compile:
            engine.compile()
        eagle3.run_requests(engine, [prompt.ids for prompt in prompts[:args.max_batch]], min(8, args.max_new_tokens), sampling=args.sampling)
        engine.reset_measurements()
    seconds, tokens, total, tallies, same, by_prompt = Counter(), Counter(), Tally(), {}, [], []
    for start in tqdm(range(0, len(prompts), args.max_batch), desc="plain and speculative", unit="batch"):
        chosen, results, rate = prompts[start:start + args.max_batch], {}, {}
        for name in ("plain", "spec") if start // args.max_batch % 2 == 0 else ("spec", "plain"):
            begun = time.perf_counter()
            results[name] = eagle3.run_requests(engines[name], [prompt.ids for prompt in chosen], args.max_new_tokens, sampling=args.sampling)
            took, count = time.perf_counter() - begun, sum(len(request.output) for request in results[name])
            seconds[name], tokens[name], rate[name] = seconds[name] + took, tokens[name] + count, count / took
        names = {prompt.category for prompt in chosen}
        for tally in (total, tallies.setdefault(names.pop() if len(names) == 1 else "mixed", Tally())):
            tally.prompts, tally.ratios = tally.prompts + len(chosen), [*tally.ratios, rate["spec"] / rate["plain"]]
            tally.stats = sum((request.stats for request in results["spec"]), tally.stats)
        same += [compare_texts(target, *each, args) for each in zip(chosen, *(results[name] for name in engines))]
        by_prompt += [(r.stats.acceptance_length, prompt.name) for prompt, r in zip(chosen, results["spec"]) if r.stats.rounds]
    rate = {name: tokens[name] / seconds[name] for name in engines}
    rounds, shapes, stats = engines["spec"].rounds, engines["spec"].shapes, total.stats
    drafted, ceiling, depth = [r for r in rounds if r.shape], max(s.ceiling for s in shapes), max(s.num_steps for s in shapes)
    ms_plain = median_of(engines["plain"].rounds, "ms")
    ms = {part: rounded(median_of(drafted, part), 2) for part in ("draft", "verify", "host")}
    by_shape = {shape_name(shape): sum(r.shape == shape for r in rounds) for shape in (None, *shapes)}
    break_even = median_of(drafted, "ms") / ms_plain if ms_plain and drafted else None
    acceptance = stats.acceptance_length if stats.rounds >= ENOUGH_ROUNDS else None
    print("rounds by shape (steps-topk-tokens): " + ", ".join(f"{name} {count}" for name, count in by_shape.items()))
    table = shape_table(ms_plain, rounds)
    if acceptance and break_even:
        print(f"acceptance length {acceptance:.2f} of at most {ceiling}; break-even {break_even:.2f}" + ("" if acceptance > break_even else ": cannot pay"))
    else:
        print(f"acceptance length: too few rounds to tell ({stats.rounds} drafted, {ENOUGH_ROUNDS} would do): give more prompts, or fix a shape, such as "
              f"--num-steps {shapes[0].num_steps} --draft-topk {shapes[0].topk} --num-draft-tokens {shapes[0].num_draft_tokens}")
    print(f"plain {rate['plain']:.1f} tok/s, speculative {rate['spec']:.1f} tok/s: {rate['spec'] / rate['plain']:.2f} times "
          f"(by batch {min(total.ratios):.2f} to {max(total.ratios):.2f}); prefill included")
    return {**total.summary(depth), "new_tokens": args.max_new_tokens, "batch": args.max_batch, "dtype": args.dtype, "device": args.device,
            "temperature": args.temperature, "seed": args.seed if args.temperature > 0 else None,
            "spec": "auto" if isinstance(spec, tuple) else [spec.num_steps, spec.topk, spec.num_draft_tokens],
            "plain_tok_s": rounded(rate["plain"], 1), "spec_tok_s": rounded(rate["spec"], 1), "speedup": rounded(rate["spec"] / rate["plain"]),
            "acceptance_length": rounded(acceptance), "ceiling": ceiling, "rounds_by_shape": by_shape, "shapes": table,
            "break_even": rounded(break_even), "identical": sum(is_same for is_same, _ in same), "ties": sum(is_tie for _, is_tie in same),
            "ms_plain": rounded(ms_plain, 2), **{f"ms_{part}": value for part, value in ms.items()},
            "by_category": {name: tally.summary(depth) for name, tally in tallies.items()},
            "worst": [{"prompt": name, "acceptance_length": rounded(length)} for length, name in sorted(by_prompt)[:10]],
            "torch": torch.__version__, "threads": torch.get_num_threads()}


CHECK_TOKENS, CHECK_STEPS, CHECK_NEW_TOKENS = 512, 4, 48
WEAK, GENERALISES = 0.4, 0.6  # first-step accuracy below which a head is weak, and held-out accuracy as a share of that on training rows


def check_rows(path: str, args, config: eagle3.TargetConfig) -> list[eagle3.Row]:
    return eagle3.read_rows([path], cache(partial(eagle3.load_tokenizer, args.target)), CHECK_TOKENS, config.eos_token_ids,
                            config.vocab_size, limit=CHECK_ROWS)[0]


@torch.no_grad()
def teacher_forced(head: eagle3.DraftHead, rows: list[eagle3.Row], stored: list[dict] | None = None) -> list[float]:
    """Accuracy by step on these rows: on stored hidden states, or on those that serving computes."""
    batches, boundaries = [], (*head.config.layout.boundaries, head.config.layout.num_layers)
    for i, row in enumerate(rows):
        tokens, loss_mask = eagle3.collate([row], head.norm.weight.device)
        captures = stored[i] if stored else head.target(tokens, boundaries=boundaries).captures
        batches.append(eagle3.prepare_ttt(head, tokens, loss_mask, captures, CHECK_STEPS))
    stats = sum((eagle3.ttt_loss(head, batch)[1] for batch in batches), eagle3.TTTStats.zeros(CHECK_STEPS))
    return [round(a, 3) for a in stats.accuracy]


def serve_rows(target, head, rows: list[eagle3.Row], spec: SpecConfig) -> dict:
    """What serving gets when it continues from the rows' answers, and what a round costs there."""
    room = target.config.max_position_embeddings - CHECK_NEW_TOKENS
    prompts = [row.tokens[:row.loss_mask.tolist().index(True) + 1][:room].tolist() for row in rows]
    longest, stats = max(map(len, prompts)) + CHECK_NEW_TOKENS, SpecStats()
    engines = [Engine(target, max_length=longest), Engine(target, head, spec, max_length=longest)]
    for prompt in prompts:
        eagle3.run_requests(engines[0], [prompt], CHECK_NEW_TOKENS)
        stats = stats + eagle3.run_requests(engines[1], [prompt], CHECK_NEW_TOKENS)[0].stats
    plain, rounds = (median_of(engine.rounds, "ms") for engine in engines)
    return {"acceptance_length": rounded(stats.acceptance_length), "ceiling": spec.ceiling,
            "break_even": rounded(rounds / plain if plain and rounds else None)}


class WiringFault(Exception):
    """A cause by its name in the README, and what to say about it."""


def load_checked(args, ranks: Shard):
    """(a) Target, head and folder of features (or None), as far as their files agree; and whether one was made with other weights of the same
    sizes."""
    target = load_own_part(args, ranks)
    folder = eagle3.FeatureFolder(args.check) if Path(args.check).is_dir() else None
    ours, others = target.fingerprint, {"the head was trained": eagle3.read_json(Path(args.draft) / "config.json").get("target_fingerprint"),
                                        "the features were made": folder and folder.fingerprint}
    others = {what: made_with for what, made_with in others.items() if made_with}
    for what, made_with in others.items():
        if None not in (ours["tokenizer"], made_with["tokenizer"]) and ours["tokenizer"] != made_with["tokenizer"]:
            raise WiringFault("another tokenizer", f"{what} with another tokenizer: serve the target that was used then")
    try:
        head = eagle3.load_draft(args.draft, target, stated_layout(args, target.config))
    except eagle3.LayoutMismatch:
        raise
    except ValueError as error:
        raise WiringFault("draft vocabulary" if "d2t" in str(error) else "head and target", str(error)) from None
    print(f"  (a) the head reads {head.config.layout}")
    return target, head, folder, any(made_with["weights"] != ours["weights"] for made_with in others.values())


def read_stored(folder: eagle3.FeatureFolder, layout: FeatureLayout) -> list[eagle3.Row]:
    """The beginnings of the folder's first rows that have something supervised."""
    layout.require_stored(folder.names, str(folder.folder))
    indices, cut, rows = range(min(folder.num_rows, 4 * CHECK_ROWS)), lambda x: x[:CHECK_TOKENS], []
    for row in map(folder.read, tqdm(indices, desc="stored rows", leave=False)):
        if not row.skipped and cut(row.loss_mask).any():
            rows.append(eagle3.Row(cut(row.tokens), cut(row.loss_mask), row.name, {name: cut(x) for name, x in row.hidden.items()}))
    if not rows:
        raise ValueError(f"the first {len(indices)} rows in {folder.folder} were all skipped, or have nothing supervised")
    return rows[:CHECK_ROWS]


def compare_stored(folder: eagle3.FeatureFolder, rows: list[eagle3.Row], target, head, evidence: dict) -> list[eagle3.BlockMatch]:
    """(b) Stored hidden states against those that serving computes."""
    layout, like = head.config.layout, target.norm.weight
    read_as = {**{f"h.{b}": b for b in layout.boundaries}, folder.teacher: "normed" if folder.teacher.endswith("normed") else layout.num_layers}
    matches = eagle3.identify_blocks([(row.tokens[:256], {name: row.hidden[name][:256] for name in read_as}) for row in rows[:4]], target)
    print("  (b) stored features against those that serving computes: " + "; ".join(map(str, matches)))
    evidence["blocks"] = {m.claimed: [m.best, round(m.similarity, 4), m.runner_up, round(m.runner_up_similarity, 4), m.shift] for m in matches}
    hidden = [{b: row.hidden[name][None].to(like.device, like.dtype) for name, b in read_as.items()} for row in rows]
    evidence["accuracy_on_stored"] = teacher_forced(head, rows, hidden)
    return matches


def diagnose(args, ranks: Shard, evidence: dict) -> str:
    """The verdict; fills `evidence`. Raises WiringFault or LayoutMismatch."""
    target, head, folder, other_weights = load_checked(args, ranks)
    spec, sound = SpecConfig(CHECK_STEPS, 1, CHECK_STEPS + 1), "what its files say fits the target"
    rows = read_stored(folder, head.config.layout) if folder else check_rows(args.check, args, target.config)
    matches = compare_stored(folder, rows, target, head, evidence) if folder else []
    accuracy = evidence["accuracy_as_served"] = teacher_forced(head, rows)
    result = evidence["served"] = serve_rows(target, head, rows, spec)
    print("  (c) accuracy by step on training rows: " + (f"{evidence['accuracy_on_stored']} on stored features, " if folder else "")
          + f"{accuracy} as served; acceptance length {result['acceptance_length']} of at most {spec.ceiling}, break-even {result['break_even']}")
    if folder:
        sound, fault = "nothing is wired wrongly", eagle3.wiring_fault(matches, other_weights)
        if fault:
            raise WiringFault(*fault)
    held = None
    if args.held_out:
        held_rows = check_rows(args.held_out, args, target.config)
        held = evidence["accuracy_held_out"] = teacher_forced(head, held_rows)
        evidence["served_held_out"] = serve_rows(target, head, held_rows, spec)
        print(f"  (d) held out: {held} as served; acceptance length {evidence['served_held_out']['acceptance_length']}")
    if other_weights and accuracy[0] < WEAK:
        raise WiringFault("other target weights", "the head was trained for other weights of the same sizes (a fine-tune?): serve those, or train "
                          "on these")
    if accuracy[0] < WEAK:
        print(f"  {sound}, {'and' if folder else 'but'} the head guesses {100 * accuracy[0]:.0f} % of the first tokens right: train it longer, on "
              "the target's own answers" + ("" if folder else "; or it was trained on other hidden states than it says: --check a folder of "
                                            "features, which is exact, or see examples/probe.py"))
        return "weak head"
    if held and held[0] < GENERALISES * accuracy[0]:
        print(f"  it knows its training rows ({accuracy[0]:.2f}) but not others ({held[0]:.2f}): train on more rows, fewer times each")
        return "does not generalise"
    print(f"  {sound}, and the head is sound")
    return "ok"


def check(args, ranks: Shard = Shard()) -> dict:
    evidence: dict = {"thresholds": {"match": eagle3.MATCH, "weak_below": WEAK, "generalises_from": GENERALISES}}
    try:
        verdict, cause = diagnose(args, ranks, evidence), None
    except (WiringFault, eagle3.LayoutMismatch) as fault:
        cause, text = fault.args if isinstance(fault, WiringFault) else ("layout", str(fault))
        print(f"  {text}")
        verdict, evidence["error"] = "wiring", text
    print(f"verdict: {verdict}" + (f" ({cause})" if cause else ""))
    return {"verdict": verdict, "cause": cause, "evidence": evidence}


# -----------------------------------------------------------------------------
# The server: one loop that owns the engine, on every rank; on rank 0 HTTP threads hand it requests and wait for tokens


BODY_LIMIT, IO_SECONDS, STALE_SECONDS, IDLE_SECONDS = 4 << 20, 30.0, 30.0, 1.0  # of a request's body; of a silent client; of a loop that hangs
REFUSED = ("suffix", "best_of", "echo", "logit_bias", "tools", "tool_choice", "functions", "function_call", "response_format", "presence_penalty",
           "frequency_penalty", "repetition_penalty", "guided_json", "guided_regex", "modalities", "audio", "prediction", "min_tokens")


class Refusal(Exception):
    """What an HTTP client did wrong, or must wait for."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    def json(self) -> dict:
        kinds = {401: "authentication_error", 404: "NotFoundError", 429: "rate_limit_error", 500: "InternalServerError", 503: "server_error"}
        return {"error": {"message": str(self), "type": kinds.get(self.status, "invalid_request_error"), "param": self.param, "code": self.status}}


@dataclass(eq=False)
class Job:
    """One choice of one HTTP request."""
    index: int
    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: tuple[int, ...] | None  # None: the target's
    sampling: Sampling
    logprobs: int | None
    events: queue.SimpleQueue              # shared by the request's choices: (index, tokens, logprobs, finish reason)


class Loop:
    """Runs the engine. Rank 0 collects what HTTP threads want; every rank applies the same, then takes the same step."""

    def __init__(self, engine: Engine, max_queue: int):
        self.engine, self.max_queue, self.changed = engine, max_queue, threading.Condition()
        self.inbox: list[tuple] = []             # (kind, number, Job or nothing)
        self.numbers = itertools.count()
        self.jobs: dict[int, Job] = {}           # rank 0's, until they have ended
        self.requests: dict[int, eagle3.Request] = {}
        self.draining, self.ticked, self.begun = False, 0.0, time.time()
        self.totals: Counter = Counter()
        self.stats, self.recent = SpecStats(), Counter()  # recent: tokens by second
        self.waits: dict[str, deque] = {"time_to_first_token": deque(maxlen=1000), "time_per_output_token": deque(maxlen=1000)}

    def submit(self, jobs: list[Job]) -> list[int]:
        """For HTTP threads, as cancel is: numbers to cancel by. Raises Refusal where the queue is full, or the server is about to end."""
        with self.changed:
            if self.draining:
                raise Refusal(503, "the server is shutting down")
            waiting = len(self.jobs) - self.engine.running
            if len(self.jobs) + len(jobs) > self.max_queue + self.engine.max_batch:
                raise Refusal(429, f"{max(0, waiting)} requests are waiting already (--max-queue {self.max_queue}): try again later")
            numbers = [next(self.numbers) for _ in jobs]
            self.jobs.update(zip(numbers, jobs))
            self.inbox += [("submit", number, job) for number, job in zip(numbers, jobs)]
            self.changed.notify()
        return numbers

    def cancel(self, numbers: list[int]) -> None:
        with self.changed:
            self.inbox += [("cancel", number, None) for number in numbers if number in self.jobs]
            self.changed.notify()

    @property
    def is_healthy(self) -> bool:
        return time.monotonic() - self.ticked < STALE_SECONDS

    def _collect(self) -> list[tuple]:
        """What arrived, as plain values for all ranks; waits if there is nothing to do."""
        with self.changed:
            if not self.inbox and not self.engine.busy and not self.draining:
                self.changed.wait(IDLE_SECONDS)
            taken, self.inbox = self.inbox, []
            news = [(kind, number, job and (job.prompt, job.max_new_tokens, job.eos_token_ids, job.sampling, job.logprobs))
                    for kind, number, job in taken]
            return news + [("end", 0, None)] * (self.draining and not taken and not self.engine.busy)

    def run(self) -> None:
        """Until it is drained. Idle ranks wait on the CPU for rank 0's news, which come every second at least."""
        engine, rank = self.engine, self.engine.shard.rank
        while True:
            self.ticked = time.monotonic()
            self.recent = Counter({second: count for second, count in self.recent.items() if second >= self.ticked - 20})
            for kind, number, what in eagle3.share(self._collect() if rank == 0 else None, engine.shard):
                if kind == "end":
                    return
                if kind == "submit":
                    self.requests[number] = engine.submit(*what)
                elif number in self.requests:
                    engine.cancel(self.requests[number])
                    self._tell(number, [])
            numbers, new = {request: number for number, request in self.requests.items()}, {}
            for request, tokens in engine.step() if engine.busy else ():
                new.setdefault(request, []).extend(tokens)  # the prompt's token and those of the round may come in one step
            for request, tokens in new.items():
                self._tell(numbers[request], tokens)

    def _tell(self, number: int, tokens: list[int]) -> None:
        request = self.requests[number]
        if request.finish_reason:
            del self.requests[number]
        if self.engine.shard.rank:
            return
        job = self.jobs[number]
        job.events.put((job.index, tokens, request.token_logprobs[len(request.output) - len(tokens):len(request.output)], request.finish_reason))
        self.totals["tokens"] += len(tokens)
        self.recent[int(time.monotonic())] += len(tokens)
        if request.finish_reason:
            with self.changed:
                del self.jobs[number]
            self.totals[f"finished {request.finish_reason}"] += 1
            self.totals["prompt tokens"] += len(request.prompt)
            self.totals["reused"] += request.reused
            self.stats = self.stats + request.stats


class Words:
    """A choice's text as it comes: whole characters only, and nothing that may turn out to be a stop string."""

    def __init__(self, tokenizer, stops: list[str]):
        self.stream, self.stops, self.held, self.tokens, self.told = tokenizer and eagle3.TextStream(tokenizer), stops, "", [], []
        self.sent, self.finish_reason, self.offset = "", None, 0  # offset: of the next token, where its log-probability is shown

    def push(self, tokens: list[int], told: list, reason: str | None) -> str:
        """What may be sent now; sets finish_reason at the end, or where a stop string was found."""
        new = ""
        for i, token in enumerate(tokens or [None]):
            is_last = reason is not None and i == max(0, len(tokens) - 1)
            if token is not None:
                self.tokens.append(token)
                self.told += told[i:i + 1]
            self.held += self.stream.push([token] * (token is not None), is_last) if self.stream else ""
            found = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
            if found:
                new, self.held, self.finish_reason = new + self.held[:min(found)], "", "stop"
                break
            keep = 0 if is_last else max((n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])), default=0)
            new, self.held = new + self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        self.finish_reason, self.sent = self.finish_reason or reason, self.sent + new
        return new


def checked(body: dict, name: str, kind, default=None, low=None, high=None):
    """body[name], refused by name if it is of another type or out of bounds."""
    value = body.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        raise Refusal(400, f"{name} must be a {kind.__name__}: got {type(value).__name__}", name)
    if low is not None and value < low or high is not None and value > high:
        raise Refusal(400, f"{name} must be {f'at least {low}' if high is None else f'within {low}..{high}'}: got {value}", name)
    return value


def is_ids(value) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class Api:
    """OpenAI's requests -> jobs, and their answers. Needs no socket."""

    def __init__(self, loop: Loop, tokenizer, name: str):
        self.loop, self.tokenizer, self.name, self.engine = loop, tokenizer, name, loop.engine

    def prompts(self, body: dict, is_chat: bool) -> list[list[int]]:
        prompt = body.get("messages" if is_chat else "prompt")
        try:
            if is_chat:
                texts = lambda content: content if isinstance(content, str) else "".join(part["text"] for part in content)
                messages = [{**message, "content": texts(message["content"])} for message in prompt]
                if not messages or any(message["role"] not in ("system", "developer", "user", "assistant", "tool") for message in messages):
                    raise ValueError("roles are system, developer, user, assistant and tool")
                if not self.tokenizer or not self.tokenizer.has_chat_template:
                    raise Refusal(400, "this model has no chat template: use /v1/completions", "messages")
                return [self.tokenizer.encode(self.tokenizer.chat(messages, True))]
            many = [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt
            if not many or not all(isinstance(p, str) or is_ids(p) for p in many):
                raise ValueError(f"got {type(prompt).__name__}")
            if any(isinstance(p, str) for p in many) and not self.tokenizer:
                raise Refusal(400, "this model has no tokenizer: give token ids", "prompt")
            return [self.tokenizer.encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in many]
        except (TypeError, KeyError, ValueError) as error:  # half a surrogate pair, say
            raise Refusal(400, (f"messages must be a list of objects with a role and text content: {error}" if is_chat else
                                f"prompt must be a text, token ids, or a list of these: {error}"), "messages" if is_chat else "prompt") from None

    def read(self, body, is_chat: bool) -> tuple[list[Job], dict]:
        """The jobs, and how to answer. Raises Refusal before any work."""
        if not isinstance(body, dict):
            raise Refusal(400, "the body must be a JSON object")
        for name in REFUSED:
            asks_nothing = body.get(name) in (None, False, 0, 0.0, [], {}, "", "none", {"type": "text"})
            if not asks_nothing and not (name in ("best_of", "repetition_penalty") and body[name] == 1):
                raise Refusal(400, f"{name} is not supported here", name)
        if checked(body, "model", str, self.name) != self.name:
            raise Refusal(404, f"the model {body['model']!r} is not here: this server has {self.name!r}", "model")
        prompts, limit, V = self.prompts(body, is_chat), self.engine.max_length, self.engine.target.config.vocab_size
        tokens = checked(body, "max_completion_tokens", int, None, 1) or checked(body, "max_tokens", int, None, 1)
        longest = max(map(len, prompts))
        tokens = tokens or (max(1, limit - longest) if is_chat else 16)
        if longest + tokens > limit:
            raise Refusal(400, f"maximum context length is {limit} tokens. However, you requested {longest + tokens}: {longest} in the prompt and "
                          f"{tokens} to write", "messages" if is_chat else "prompt")
        if any(not prompt or min(prompt) < 0 or max(prompt) >= V for prompt in prompts):
            raise Refusal(400, f"a prompt needs at least one token, with ids within 0..{V - 1}", "messages" if is_chat else "prompt")
        stops, ids, options = (body.get(name) or [] for name in ("stop", "stop_token_ids", "stream_options"))
        stops = [stops] if isinstance(stops, str) else stops
        for name, is_sound, text in (
                ("stop", isinstance(stops, list) and len(stops) <= 4 and all(isinstance(stop, str) and stop for stop in stops), "a text, or up to 4"),
                ("stop_token_ids", not ids or is_ids(ids), "token ids"),
                ("stream_options", not options or isinstance(options, dict), "an object")):
            if not is_sound:
                raise Refusal(400, f"{name} must be {text}", name)
        eos = (() if checked(body, "ignore_eos", bool, False) else self.engine.target.config.eos_token_ids) + tuple(ids)
        n, logprobs = checked(body, "n", int, 1, 1, 64), None
        if is_chat and checked(body, "logprobs", bool, False):
            logprobs = checked(body, "top_logprobs", int, 0, 0, 20)
        elif not is_chat:
            logprobs = checked(body, "logprobs", int, None, 0, 20)
        if len(prompts) * n > (most := self.loop.max_queue + self.engine.max_batch):
            raise Refusal(400, f"{len(prompts)} prompts, n={n} each, are more than may wait here ({most})", "n")
        temperature, top_k = checked(body, "temperature", float, 1.0, 0.0, 100.0), max(0, checked(body, "top_k", int, 0, -1, 2**31))
        temperature = 0.0 if temperature < 1e-5 else temperature  # logits divided by less would overflow
        seed = checked(body, "seed", int, None, -2**63, 2**63 - 65)
        seed = int.from_bytes(os.urandom(7), "big") if seed is None else seed
        top_p, min_p = checked(body, "top_p", float, 1.0, 1e-9, 1.0), checked(body, "min_p", float, 0.0, 0.0, 1.0)
        events: queue.SimpleQueue = queue.SimpleQueue()
        jobs = [Job(p * n + i, prompt, tokens, eos, Sampling(temperature, top_k, top_p, min_p, seed + i), logprobs, events)
                for p, prompt in enumerate(prompts) for i in range(n)]
        return jobs, {"stream": checked(body, "stream", bool, False), "usage": checked(options or {}, "include_usage", bool, False), "stops": stops,
                      "ids": checked(body, "return_token_ids", bool, not self.tokenizer), "prompt_tokens": sum(map(len, prompts)), "is_chat": is_chat,
                      "logprobs": logprobs}

    def word(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.tokenizer else str(token)

    def logprobs(self, how: dict, tokens: list[int], told: list, offset: int) -> dict | None:
        if how["logprobs"] is None:
            return None
        finite = lambda x: max(x, -9999.0)
        if how["is_chat"]:
            entry = lambda token, value: {"token": self.word(token), "logprob": finite(value), "bytes": list(self.word(token).encode())}
            return {"content": [{**entry(token, own), "top_logprobs": [entry(*rival) for rival in rivals]}
                                for token, (own, rivals) in zip(tokens, told)]}
        words = [self.word(token) for token in tokens]
        return {"tokens": words, "token_logprobs": [finite(own) for own, _ in told],
                "top_logprobs": [{self.word(token): finite(value) for token, value in rivals} for _, rivals in told],
                "text_offset": list(itertools.accumulate([offset, *map(len, words)]))[:-1]}

    def answer(self, jobs: list[Job], how: dict, is_gone):
        """Yields the chunks of a stream, then the whole answer. Cancels what still runs when it is closed. Raises Refusal."""
        if not self.loop.is_healthy:
            raise Refusal(503, "the engine does not answer (yet)")
        numbers, words, is_chat = self.loop.submit(jobs), [Words(self.tokenizer, how["stops"]) for _ in jobs], how["is_chat"]
        begun = looked = time.monotonic()
        identity = {"id": ("chatcmpl-" if is_chat else "cmpl-") + os.urandom(12).hex(), "created": int(time.time()), "model": self.name,
                    "object": ("chat.completion" + ".chunk" * how["stream"]) if is_chat else "text_completion"}

        def usage() -> dict:
            done = sum(len(word.tokens) for word in words)
            return {"prompt_tokens": how["prompt_tokens"], "completion_tokens": done, "total_tokens": how["prompt_tokens"] + done}

        def choice(index: int, content: dict, first: int = 0, offset: int = 0) -> dict:
            word = words[index]
            ids = {"token_ids": word.tokens[first:]} if how["ids"] else {}
            return {"index": index, **content, "logprobs": self.logprobs(how, word.tokens[first:], word.told[first:], offset),
                    "finish_reason": word.finish_reason, **ids}

        try:
            while any(word.finish_reason is None for word in words):
                if time.monotonic() - looked > 0.5:
                    looked = time.monotonic()
                    if is_gone():
                        raise ConnectionError("the client is gone")
                try:
                    index, tokens, told, reason = jobs[0].events.get(timeout=0.5)
                except queue.Empty:
                    if not self.loop.is_healthy:
                        raise Refusal(503, "the engine does not answer") from None
                    continue
                word = words[index]
                if word.finish_reason is not None:
                    continue
                if reason in ("error", "cancelled"):
                    raise Refusal(500, "the target's logits were not finite: this request failed" if reason == "error" else "cancelled")
                before, offset, new = len(word.tokens), word.offset, word.push(tokens, told, reason)
                if word.finish_reason == "stop" and reason is None:
                    self.loop.cancel([numbers[index]])
                if not before:
                    self.loop.waits["time_to_first_token"].append(time.monotonic() - begun)
                if word.finish_reason and len(word.tokens) > 1:
                    self.loop.waits["time_per_output_token"].append((time.monotonic() - begun) / len(word.tokens))
                if how["stream"] and (new or word.finish_reason or is_chat and not before or how["ids"] or how["logprobs"] is not None):
                    word.offset += sum(len(self.word(token)) for token in word.tokens[before:]) if how["logprobs"] is not None else 0
                    content = {"delta": {**({} if before else {"role": "assistant"}), "content": new}} if is_chat else {"text": new}
                    yield {**identity, "choices": [choice(index, content, before, offset)], **({"usage": None} if how["usage"] else {})}
            if how["stream"]:
                if how["usage"]:
                    yield {**identity, "choices": [], "usage": usage()}
                return
            contents = ({"message": {"role": "assistant", "content": word.sent}} if is_chat else {"text": word.sent} for word in words)
            yield {**identity, "choices": [choice(index, content) for index, content in enumerate(contents)], "usage": usage()}
        finally:
            self.loop.cancel(numbers)

    def models(self) -> dict:
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": int(self.loop.begun), "owned_by": "eagle3",
                                            "max_model_len": self.engine.max_length}]}

    def info(self) -> dict:
        """What was resolved, and how it goes."""
        engine, loop, stats, now = self.engine, self.loop, self.loop.stats, time.monotonic()
        rounds = list(engine.rounds)[-1024:]
        plain, drafted = (median_of([r for r in rounds if bool(r.shape) == is_drafted], "ms") for is_drafted in (False, True))
        depth = max((shape.num_steps for shape in engine.shapes), default=0)
        peak = torch.cuda.max_memory_allocated() / 1e9 if engine.device.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return {"model": self.name, "spec": [str(shape) for shape in engine.shapes] or None, "chosen_by": "auto" if engine.controllers else "flags",
                "features": str(engine.head.config.layout) if engine.head else None, "max_batch": engine.max_batch, "max_length": engine.max_length,
                "max_queue": loop.max_queue, "ranks": engine.shard.size, "dtype": str(engine.target.norm.weight.dtype).removeprefix("torch."),
                "device": str(engine.device), "running": engine.running, "waiting": len(engine.waiting),
                "tokens": loop.totals["tokens"], "memory_gb": rounded(peak),
                "tokens_last_10_s": sum(tokens for second, tokens in list(loop.recent.items()) if now - 10 <= second < int(now)),
                "acceptance_length": rounded(stats.acceptance_length),
                "per_position_acceptance": [rounded(a) for a in stats.per_position_acceptance(depth)],
                "ceiling": max((shape.ceiling for shape in engine.shapes), default=None),
                "break_even": rounded(drafted / plain if drafted and plain else None)}

    def metrics(self) -> str:
        """Prometheus text; the names and meanings are vLLM's."""
        engine, totals, stats = self.engine, self.loop.totals, self.loop.stats
        reasons = sorted(key.removeprefix("finished ") for key in list(totals) if key.startswith("finished "))
        found = [  # name, kind, and values by their label
            ("vllm:request_success_total", "counter", {f',finished_reason="{reason}"': totals[f"finished {reason}"] for reason in reasons}),
            ("vllm:prompt_tokens_total", "counter", {"": totals["prompt tokens"]}),
            ("vllm:generation_tokens_total", "counter", {"": totals["tokens"]}),
            ("vllm:prefix_cache_hits_total", "counter", {"": totals["reused"]}),
            ("vllm:num_requests_running", "gauge", {"": engine.running}),
            ("vllm:num_requests_waiting", "gauge", {"": len(engine.waiting)}),
            ("vllm:spec_decode_num_drafts_total", "counter", {"": stats.rounds}),
            ("vllm:spec_decode_num_accepted_tokens_total", "counter", {"": sum(stats.accepted_at.values())}),
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
             {f',position="{depth}"': count for depth, count in sorted(stats.accepted_at.items())})]
        found += [(f"eagle3:{name}_seconds", "gauge",
                   {f',quantile="{q}"': sorted(values)[int(q * (len(values) - 1))] for q in (0.5, 0.99) if values})
                  for name, values in self.loop.waits.items()]
        return "".join(f"# TYPE {name} {kind}\n" + "".join(f'{name}{{model_name="{self.name}"{label}}} {value}\n' for label, value in values.items())
                       for name, kind, values in found)


class Handler(BaseHTTPRequestHandler):
    """One HTTP connection."""
    protocol_version, timeout, wbufsize = "HTTP/1.1", IO_SECONDS, -1
    server_version, sys_version = "eagle3", ""

    def log_message(self, *_):
        pass

    def send(self, status: int, content, kind: str = "application/json", **headers) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.begin(status, {"Content-Type": kind, "Content-Length": len(data), **headers})
        self.wfile.write(data)
        self.wfile.flush()

    def begin(self, status: int, headers: dict) -> None:
        self.send_response(status)
        for name, value in {**headers, **({"Connection": "close"} if self.close_connection else {})}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def is_gone(self) -> bool:
        waiting = select.poll()  # select() knows only the first 1,024 descriptors
        waiting.register(self.connection, select.POLLIN)
        try:
            return bool(waiting.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def body(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise Refusal(411, "a body with a Content-Length is needed")
        if int(length) > BODY_LIMIT:
            self.close_connection, left = True, min(int(length), 16 * BODY_LIMIT)
            while left > 0 and (part := self.rfile.read(min(left, 1 << 20))):  # a client that still sends would not read the answer
                left -= len(part)
            raise Refusal(413, f"the body may be {BODY_LIMIT} bytes long: got {length}")
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise ConnectionError("half a body")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {error}") from None

    def route(self, method: str) -> None:
        path, api, api_key = self.path.partition("?")[0], self.server.api, self.server.api_key
        gets = {"/health": lambda: {"status": "ok"}, "/v1/models": api.models, "/server_info": api.info, "/metrics": api.metrics}
        posts = {"/v1/completions": False, "/v1/chat/completions": True}
        if "Transfer-Encoding" in self.headers or method == "GET" and self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # where a proxy sees another end of the request than we do, the rest is not ours to read
            raise Refusal(400, "a body comes with a POST, and with a Content-Length")
        shown = self.headers.get("Authorization", "")
        if api_key and path != "/health" and not hmac.compare_digest(shown.encode(), f"Bearer {api_key}".encode()):
            self.close_connection = True  # nothing is read from whom we do not know
            raise Refusal(401, "the API key is missing or wrong")
        content = self.body() if method == "POST" else None
        if path not in gets and path not in posts:
            raise Refusal(404, f"{path} is not here; there are {', '.join((*gets, *posts))}")
        if (path in posts) != (method == "POST"):
            raise Refusal(405, f"{path} takes {'POST' if path in posts else 'GET'}")
        if path in gets:
            if path == "/health" and not api.loop.is_healthy:
                raise Refusal(503, "the engine does not answer")
            return self.send(200, gets[path](), "text/plain; version=0.0.4" if path == "/metrics" else "application/json")
        jobs, how = api.read(content, posts[path])
        chunks = api.answer(jobs, how, self.is_gone)
        return self.stream(chunks) if how["stream"] else self.send(200, next(chunks))

    def stream(self, chunks) -> None:
        first = next(chunks)  # a full queue is still an HTTP error
        self.close_connection = self.streaming = True
        self.begin(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            for chunk in itertools.chain([first], chunks):
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.flush()
        except Refusal as refusal:
            self.wfile.write(b"data: " + json.dumps(refusal.json()).encode() + b"\n\n")
        finally:
            chunks.close()
        self.wfile.write(b"data: [DONE]\n\n")

    def guarded(self, method: str) -> None:
        self.streaming = False
        self.server.answering.add(self)
        try:
            self.route(method)
        except Refusal as refusal:
            self.send(refusal.status, refusal.json(), **({"Retry_After": 1} if refusal.status in (429, 503) else {}))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self.close_connection = True
            print(f"HTTP {method} {self.path}: {type(error).__name__}: {error}", file=sys.stderr)
            if not self.streaming:
                self.send(500, Refusal(500, "an internal error: see the server's log").json())
        finally:
            self.server.answering.discard(self)

    do_GET, do_POST = partialmethod(guarded, "GET"), partialmethod(guarded, "POST")


class Server(ThreadingHTTPServer):
    """api: Api, api_key: str | None and answering: set[Handler] are set by serve()."""
    daemon_threads, request_queue_size = True, 1024

    def handle_error(self, request, client_address):
        pass  # a client that vanished


def serve(args, ranks: Shard) -> dict:
    """The HTTP server, until SIGTERM or Ctrl-C: then accepted requests are finished, and no others taken."""
    target, head, spec = load(args, ranks)
    length = min(args.max_length or 4096, target.config.max_position_embeddings)
    engine = Engine(target, head, spec, max_batch=args.max_batch, max_length=length)
    try:
        tokenizer = eagle3.load_tokenizer(args.target)
    except FileNotFoundError:
        tokenizer = None
        print("no tokenizer: /v1/completions with token ids only")
    loop = Loop(engine, args.max_queue)
    server = Server((args.host, args.port), Handler) if ranks.rank == 0 else None
    if server:  # until the loop runs, /health and the others answer 503
        server.api, server.api_key, server.answering = Api(loop, tokenizer, args.name), args.api_key, set()
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if not args.no_compile:
        print("compiling (--no-compile to leave that out) ...", flush=True)
        engine.compile()

    def drain(*_):
        if ranks.rank == 0 and loop.draining:
            raise KeyboardInterrupt  # asked twice
        loop.draining = True

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, drain)
    loop.ticked = time.monotonic()  # from now on requests are taken
    if server:
        print(f"serving on http://{args.host}:{server.server_address[1]}/v1 (up to {args.max_batch} requests at once, {length} tokens each)",
              flush=True)
    loop.run()
    if server:
        until = time.monotonic() + 10
        while server.answering and time.monotonic() < until:  # the last answers are on their way
            time.sleep(0.02)
        server.shutdown()
    return {"requests": sum(n for key, n in loop.totals.items() if key.startswith("finished ")), "tokens": loop.totals["tokens"],
            "acceptance_length": rounded(loop.stats.acceptance_length)}


def main(ranks: Shard = Shard(), argv=None) -> dict:
    args = parse_args(argv)
    run = check if args.check else bench if args.bench else serve if args.prompt is None and args.prompt_ids is None else answer
    return run(args, ranks)


if __name__ == "__main__":
    eagle3.run_script("serve.py", main)
