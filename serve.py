# MIT License, see LICENSE.
"""Decode with a target model and its EAGLE-3 draft head.

    python serve.py --prompt "import os"                              the demo's pair (made by: python train.py)
    torchrun serve.py --target DIR --draft DIR --prompt "Hello"       one answer, streamed
    torchrun serve.py --target DIR --draft DIR --bench FILE.jsonl     the same prompts with and without the head, alternating
    torchrun serve.py --target DIR --draft DIR --check FEATURES|DATA  is the head fed wrongly, or weak?
    python serve.py --target DIR --plan 8 --memory 80 --bandwidth 3350  what each of 8 GPUs would hold and read; loads no weights

torchrun --nproc-per-node N splits target and head over N GPUs (or CPU processes).

A line of FILE.jsonl has MT-bench `turns` (the first is used), `messages`, `prompt` or `input_ids`.
"""
import argparse
import time
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tqdm import tqdm

import eagle3
from eagle3 import Engine, FeatureLayout, Sampling, Shard, SpecConfig, SpecStats

DEMO = Path("runs/demo")
TIE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}  # logit gap under which two greedy texts may part by rounding


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    # models
    add("--target", help="the target's Hugging Face folder (default: the demo's)")
    add("--draft", help="the head's folder (with --target and no --draft: plain decoding)")
    add("--layers", help="states the head's boundaries, such as 2,15,27 or embed,3,31; must equal the layout that the head carries")
    # what to do
    add("--prompt", help="text to answer")
    add("--prompt-ids", help="token ids to continue, such as 1,2,3")
    add("--raw", action="store_true", help="no chat template")
    add("--check", metavar="FEATURES|DATA", help="tell wrong wiring from a weak head, on training rows: a folder of features, or a JSONL file")
    add("--held-out", metavar="FILE", help="--check: rows that the head was not trained on")
    add("--bench", metavar="FILE", help="JSONL file of prompts to time with and without the head")
    add("--plan", type=int, metavar="RANKS", help="memory and reading per rank, and whether it fits; without loading weights")
    add("--max-length", type=int, help="--plan: prompt and new tokens of a request (default: the target's context)")
    add("--memory", type=float, metavar="GB", help="--plan: of a rank")
    add("--bandwidth", type=float, metavar="GB/S", help="--plan: of a rank's memory")
    add("--plot", metavar="FILE.png|svg", help="--bench: draw speed-up and acceptance by prompt category and by depth, and where a round's time goes")
    add("--limit", type=int, help="at most this many prompts of --bench (default: all)")
    add("--max-new-tokens", type=int, default=128, help="per prompt")
    add("--max-batch", type=int, default=1, help="requests decoded at once in --bench and --plan")
    add("--replay", type=float, metavar="AL", help="--bench the engine itself: the head runs, but its guesses are replaced by the recorded plain "
        "text, spoilt at random so that about AL tokens a round are accepted")
    add("--peer", choices=["transformers"], help="--bench also times transformers' generate, in turns with the others")
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
    add("--no-compile", action="store_true", help="--bench without torch.compile (one-off answers are never compiled: it would cost more than it saves)")
    add("--dtype", choices=list(TIE), help="of target and head (default: as the target is stored)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    if sum(x is not None for x in (args.prompt, args.prompt_ids, args.bench, args.check, args.plan)) != 1:
        raise ValueError("give one of --prompt TEXT, --prompt-ids 1,2,3, --bench FILE, --check FEATURES|DATA and --plan RANKS")
    if args.plan and not args.target or not args.plan and any((args.max_length, args.memory, args.bandwidth)):
        raise ValueError("--plan needs --target; --max-length, --memory and --bandwidth belong to --plan")
    if args.check and not (args.target and args.draft):
        raise ValueError("--check needs --target and --draft")
    if args.held_out and not args.check:
        raise ValueError("--held-out belongs to --check")
    for name in ("limit", "max_new_tokens", "max_batch", "plan", "max_length", "memory", "bandwidth"):
        if getattr(args, name) is not None and not getattr(args, name) >= (1e-9 if name in ("memory", "bandwidth") else 1):
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {getattr(args, name)}")
    if args.target and not args.draft and not args.plan and any((args.layers, args.num_steps, args.draft_topk, args.num_draft_tokens)):
        raise ValueError("--layers, --num-steps, --draft-topk and --num-draft-tokens are about a draft head: give --draft")
    if (args.replay is not None or args.peer or args.plot) and not args.bench:
        raise ValueError("--replay, --peer and --plot belong to --bench")
    if args.plot:
        eagle3.require_pyplot(args.plot)
    if args.replay is not None and args.replay < 1:
        raise ValueError(f"--replay is an acceptance length, 1 or more: got {args.replay}")
    args.device = eagle3.torch_device(args.device)
    args.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    return args


def resolve_spec(args) -> SpecConfig | tuple[SpecConfig, ...] | None:
    given = (args.num_steps, args.draft_topk, args.num_draft_tokens)
    if all(x is None for x in given):
        return None if args.spec == "none" else eagle3.AUTO_SHAPES
    if args.spec or any(x is None for x in given):
        raise ValueError("--num-steps, --draft-topk and --num-draft-tokens go together, without --spec: give all three, or --spec auto|none")
    return SpecConfig(*given)


def load(args, ranks: Shard):
    """Target, head (or None) and spec (or None), this rank's part of them; prints what was resolved."""
    spec = resolve_spec(args)  # before any weights are read
    if args.target is None:
        if args.draft is not None:
            raise ValueError("--draft needs its --target")
        args.target, args.draft = DEMO / "target", DEMO / "draft"
        if not (args.draft / "config.json").exists():
            raise FileNotFoundError("no --target was given, and the demo's pair is not there: make it with `python train.py` "
                                    "(some minutes), or name a --target")
    stated = None
    if args.layers:
        config = eagle3.read_target_config(args.target)
        stated = FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers)
    target = eagle3.load_target(args.target, args.dtype, args.device, ranks)
    args.dtype = str(target.norm.weight.dtype).removeprefix("torch.")
    head = eagle3.load_draft(args.draft, target, stated) if args.draft and spec else None
    print(f"eagle3 serve: torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.dtype}, {args.target}"
          + (f", split over {ranks.size} ranks" if ranks.size > 1 else ""))
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
    begun = time.perf_counter()
    while engine.busy:
        for _, tokens in engine.step():
            print("".join(f"{token} " for token in tokens) if stream is None else stream.push(tokens), end="", flush=True)
    seconds = time.perf_counter() - begun
    print("" if stream is None else stream.push([], final=True))
    if request.finish_reason == "error":
        raise ValueError("the target's logits were not finite: check its weights and --dtype")
    return {"prompt_tokens": len(prompt), "new_tokens": len(request.output), "finish_reason": request.finish_reason,
            "tok_s": round(len(request.output) / seconds, 1),
            "acceptance_length": rounded(request.stats.acceptance_length if head else None)}


def plan(args) -> dict:
    """What --target, and a head, take of each of --plan ranks; nothing is loaded."""
    config = eagle3.read_target_config(args.target)
    dtype = eagle3.torch_dtype(args.dtype or config.dtype)
    stated = FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers) if args.layers else None
    if args.draft:
        stored = eagle3.read_json(Path(args.draft) / "config.json")
        own = eagle3.read_draft_config(stored, eagle3.read_layout(stored, {}, stated, args.draft))
    else:
        layout, drafted = stated or FeatureLayout.default(config.hidden_size, config.num_layers), min(32000, config.vocab_size)
        own = eagle3.DraftConfig.for_target(config, layout, drafted - drafted % args.plan)
    shard, length, batch = Shard(0, args.plan), args.max_length or config.max_position_embeddings, args.max_batch
    with torch.device("meta"):
        whole, target, head = eagle3.Target(config), eagle3.Target(config, shard), eagle3.DraftHead(own, shard=shard)
    size = lambda parameters: sum(p.numel() for p in parameters) * dtype.itemsize
    packed = lambda module: (size(layer.weight for layer in module.modules() if isinstance(layer, eagle3.Linear)) if args.device == "cpu" else 0)
    kv = lambda config, layers: 2 * layers * batch * length * len(range(config.num_kv_heads)[shard.part(config.num_kv_heads)]) * config.head_dim * dtype.itemsize
    weights, cached, head_size = size(target.parameters()) + packed(target), kv(config, config.num_layers), size(head.parameters()) + packed(head) + kv(own, 1)
    tokens = min(512, length)  # a chunk of a prompt: scores, their softmax in fp32, and both in dtype; or the MLP's three widths
    attending = tokens * (config.num_heads // shard.size) * length * (2 * dtype.itemsize + 8)
    activations = max(attending, 3 * tokens * config.intermediate_size // shard.size * dtype.itemsize) + 8 * tokens * config.hidden_size * dtype.itemsize
    read = size(target.parameters()) - (0 if config.tie_word_embeddings else size(target.embed_tokens.parameters())) + cached
    collectives = 2 * config.num_layers + 4 if shard.size > 1 else 0
    fits = None if args.memory is None else weights + cached + head_size + activations <= args.memory * 1e9
    gb = lambda size: round(size / 1e9, 4)
    print(f"{args.target} over {shard.size} ranks in {str(dtype).removeprefix('torch.')}: {sum(p.numel() for p in whole.parameters()) / 1e9:.3f} billion parameters")
    print(f"  each rank holds {gb(weights)} GB of weights" + (" (each Linear's twice: as stored, and packed for the CPU)" if args.device == "cpu" else "")
          + f", {gb(cached)} GB of KV cache for {batch} requests of {length} tokens, {gb(head_size)} GB of the head{'' if args.draft else ' (the default one)'} "
          f"with its cache, and about {gb(activations)} GB while it reads a prompt")
    print(f"  a plain step reads {gb(read)} GB on each rank, all requests at that length, and takes part in {collectives} collectives"
          + (f": at {args.bandwidth:g} GB/s at least {read / args.bandwidth / 1e6:.2f} ms" if args.bandwidth else ""))
    if fits is not None:
        print(f"  {'fits' if fits else 'does NOT fit'} in {args.memory:g} GB")
    return {"ranks": shard.size, "weights_gb": gb(size(whole.parameters())), "weights_gb_per_rank": gb(weights), "kv_gb_per_rank": gb(cached),
            "activations_gb_per_rank": gb(activations), "head_gb_per_rank": gb(head_size), "bytes_per_token_per_rank": read // batch,
            "collectives_per_token": collectives, "floor_ms": rounded(read / args.bandwidth / 1e6 if args.bandwidth else None, 4), "fits": fits}


def rounded(x: float | None, digits: int = 3) -> float | None:
    return None if x is None else round(x, digits)


class Prompt(NamedTuple):
    name: str      # file:line
    category: str  # as in the file; "all" where it names none
    ids: list[int]


def bench_prompts(args, config: eagle3.TargetConfig) -> list[Prompt]:
    prompts, tokenizer = [], cache(partial(eagle3.load_tokenizer, args.target))
    for name, record in eagle3.read_records(args.bench):
        if args.limit is not None and len(prompts) == args.limit:
            break
        if record is None:
            raise ValueError(f"{name} is not a JSON object")
        loaded = None if "input_ids" in record else tokenizer()
        try:
            prompt = eagle3.encode_prompt(record, loaded, args.raw)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
        room = config.max_position_embeddings - args.max_new_tokens
        if not 1 <= len(prompt) <= room or min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(f"{name}: a prompt needs 1 to {room} ids (the context less --max-new-tokens) within 0..{config.vocab_size - 1}: "
                             f"got {len(prompt)} ids")
        prompts.append(Prompt(name, str(record.get("category", "all")), prompt))
    if not prompts:
        raise ValueError(f"{args.bench} holds no prompt")
    return prompts


class ReplayEngine(Engine):
    """Measures the engine, whatever the head knows: the head and the target run in full, but what they choose is the recorded text, with
    each guess spoilt at random so that a round emits about `acceptance_length` tokens."""

    def __init__(self, *args, acceptance_length: float, **kwargs):
        super().__init__(*args, **kwargs)
        guesses = max(shape.ceiling for shape in self.shapes) - 1
        if acceptance_length > guesses + 1:
            raise ValueError(f"--replay {acceptance_length} is more than a perfect head reaches: {guesses + 1}")
        low, high = 0.0, 1.0  # a guess is right with probability p: 1 + p + ... + p^guesses tokens a round
        for _ in range(50):
            p = (low + high) / 2
            low, high = (p, high) if sum(p**i for i in range(guesses + 1)) < acceptance_length else (low, p)
        self.probability, self.generator, self.recorded = high, torch.Generator().manual_seed(0), {}

    def record(self, texts: list[list[int]], prompts: list[list[int]]) -> None:
        """Prompt and plain output of the next requests."""
        self.recorded = {tuple(prompt): text for text, prompt in zip(texts, prompts)}
        self.texts = torch.zeros(self.max_batch, self.max_length + self.margin + 1, dtype=torch.int64, device=self.device)

    def _occupy(self, slot, request):
        super()._occupy(slot, request)
        if request and self.recorded:
            text = torch.tensor(self.recorded[tuple(request.prompt)], device=self.device)
            self.texts[slot, :len(text)] = text

    def _draft(self, shape, columns, size):
        tree = super()._draft(shape, columns, size)
        if shape is None or not self.recorded:
            return tree
        mask = eagle3.ancestor_mask(tree.parents)
        depth = mask.sum(-1) - 1
        places = (self.lengths[:size, None] + depth).clamp(max=self.texts.shape[1] - 1)  # an idle slot stands behind its end
        recorded = self.texts[:size].gather(1, places)
        rows = torch.arange(len(depth), device=self.device)
        on_path = mask[rows, depth.argmax(1)]  # the ancestors of a deepest node
        right = (torch.rand(depth.shape, generator=self.generator) < self.probability).to(self.device) & on_path
        tokens = torch.where(right, recorded, (recorded + 1) % self.target.config.vocab_size)
        return tree._replace(tokens=torch.where(depth == 0, tree.tokens, tokens))

    def _choose(self, own_logits, positions):
        chosen, scores = super()._choose(own_logits, positions)
        return (self.texts[:len(positions)].gather(1, positions.clamp(max=self.texts.shape[1] - 1)) if self.recorded else chosen), scores


class Peer:
    """transformers' own generate on the same weights."""

    def __init__(self, args):
        transformers = eagle3.require_package("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(args.target, dtype=eagle3.torch_dtype(args.dtype)).to(args.device).eval()
        self.args = args

    @torch.no_grad()
    def seconds(self, prompts: list[list[int]]) -> tuple[float, int]:
        """One prompt after the other, greedily; returns the time and the new tokens."""
        begun, new = time.perf_counter(), 0
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.args.device)
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.args.max_new_tokens, do_sample=False)
            new += out.shape[1] - len(prompt)
        return time.perf_counter() - begun, new


@dataclass
class Tally:
    """What --bench saw of one category of prompts."""
    prompts: int = 0
    ratios: list[float] = field(default_factory=list)  # speed-up by batch
    stats: SpecStats = field(default_factory=SpecStats)

    def summary(self, depth: int) -> dict:
        return {"prompts": self.prompts, "speedup": rounded(median(self.ratios)), "acceptance_length": rounded(self.stats.acceptance_length),
                "per_position_acceptance": [rounded(a) for a in self.stats.per_position_acceptance(depth)]}


def plot_bench(picture: str, by_category: dict[str, dict], per_position: list[float], ms_plain: float | None, times: dict) -> None:
    pyplot = eagle3.require_pyplot(picture)
    figure, ((speed, length), (depths, parts)) = pyplot.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    for axes, key, title in ((speed, "speedup", "speed-up over plain decoding (median)"), (length, "acceptance_length", "acceptance length")):
        bars = axes.barh(list(by_category), [summary[key] or 0 for summary in by_category.values()], color="tab:blue")
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.invert_yaxis()
        axes.set_title(title)
    depths.bar(range(1, len(per_position) + 1), per_position, color="tab:green")
    depths.set(title="share of rounds in which a guess at this depth was accepted", xlabel="depth", ylim=(0, 1))
    parts.barh(["plain step"], [ms_plain or 0], color="tab:gray", label="plain")
    left = 0.0
    for name, color in (("draft", "tab:orange"), ("verify", "tab:blue"), ("host", "tab:red")):
        parts.barh(["round"], [times[name] or 0], left=left, color=color, label=name)
        left += times[name] or 0
    parts.set(title="where a round's time goes (medians)", xlabel="ms")
    parts.legend()
    figure.savefig(picture)
    print(f"drew {picture}")


def timed(engine: Engine, prompts: list[list[int]], args):
    begun = time.perf_counter()
    requests = eagle3.run_requests(engine, prompts, args.max_new_tokens, sampling=args.sampling)
    return requests, time.perf_counter() - begun


def bench(args, ranks: Shard) -> dict:
    """Each batch of prompts plainly and speculatively, in turns (A B, B A, ...), and whether the texts are the same."""
    if args.peer and ranks.size > 1:
        raise ValueError("--peer runs transformers in one process: leave out torchrun, or --peer")
    target, head, spec = load(args, ranks)
    if head is None:
        raise ValueError("--bench compares with and without a head: give --draft, and not --spec none")
    prompts = bench_prompts(args, target.config)
    longest = max(len(prompt.ids) for prompt in prompts) + args.max_new_tokens
    kind = Engine if args.replay is None else partial(ReplayEngine, acceptance_length=args.replay)
    engines = {"plain": Engine(target, max_batch=args.max_batch, max_length=longest),
               "spec": kind(target, head, spec, max_batch=args.max_batch, max_length=longest)}
    peer = Peer(args) if args.peer else None
    if peer:
        peer.seconds([prompts[0].ids])
    for engine in engines.values() if args.no_compile else tqdm(engines.values(), desc="compiling", unit="engine"):  # warm-up, not timed
        if not args.no_compile:
            engine.compile()
        eagle3.run_requests(engine, [prompt.ids for prompt in prompts[:args.max_batch]], min(8, args.max_new_tokens), sampling=args.sampling)
        engine.times = {name: [] for name in engine.times}
    seconds, tokens = {"plain": 0.0, "spec": 0.0, "peer": 0.0}, {"plain": 0, "spec": 0, "peer": 0}
    stats, ratios, identical, ties, plain_steps, tallies, by_prompt = SpecStats(), [], 0, 0, 0, {}, []
    shapes = spec if isinstance(spec, tuple) else (spec,)
    ceiling, depth = max(shape.ceiling for shape in shapes), max(shape.num_steps for shape in shapes)
    for start in tqdm(range(0, len(prompts), args.max_batch), desc="plain and speculative", unit="batch"):
        chosen, results, took = prompts[start:start + args.max_batch], {}, {}
        batch = [prompt.ids for prompt in chosen]
        order = ("plain", "spec") if args.replay is not None or start // args.max_batch % 2 == 0 else ("spec", "plain")
        for name in order:
            if args.replay is not None and name == "spec":
                engines["spec"].record([prompt + request.output for prompt, request in zip(batch, results["plain"])], batch)
            results[name], took[name] = timed(engines[name], batch, args)
            seconds[name] += took[name]
            tokens[name] += sum(len(request.output) for request in results[name])
        if peer:
            took["peer"], new = peer.seconds(batch)
            seconds["peer"], tokens["peer"] = seconds["peer"] + took["peer"], tokens["peer"] + new
        rate = {name: sum(len(r.output) for r in results[name]) / took[name] for name in results}
        ratios.append(rate["spec"] / rate["plain"])
        names = {prompt.category for prompt in chosen}
        tally = tallies.setdefault(names.pop() if len(names) == 1 else "mixed", Tally())
        tally.prompts, tally.ratios = tally.prompts + len(chosen), tally.ratios + [ratios[-1]]
        for prompt, plain, fast in zip(chosen, results["plain"], results["spec"]):
            stats, plain_steps, tally.stats = stats + fast.stats, plain_steps + fast.plain_steps, tally.stats + fast.stats
            if fast.stats.rounds:
                by_prompt.append((fast.stats.acceptance_length, prompt.name))
            parted = eagle3.first_divergence(target, prompt.ids, plain.output, fast.output, args.sampling)
            identical += parted is None
            if parted is not None:
                ties += parted[1] < TIE[args.dtype]
                tqdm.write(f"texts part after {parted[0]} tokens, where the two tokens' logits are {parted[1]:.2g} apart: "
                           + ("a rounding tie" if parted[1] < TIE[args.dtype] else "NOT a tie"))
    middle = lambda values: median(values) if values else None  # no round at all where every answer is one token
    ms_plain = middle(engines["plain"].times["round"])
    times = {name: middle(values) for name, values in engines["spec"].times.items()}
    rate = {name: tokens[name] / seconds[name] for name in seconds if seconds[name]}
    if args.replay is not None:
        print("REPLAY: the guesses are the recorded text, spoilt at random; this measures the engine, not the head, and not exactness")
        identical = ties = None
    break_even, acceptance = (times["round"] / ms_plain if ms_plain and times["round"] else None), stats.acceptance_length
    if acceptance and break_even:
        print(f"acceptance length {acceptance:.2f} of at most {ceiling}; break-even {break_even:.2f}"
              + ("" if acceptance > break_even else ": cannot pay")
              + (f"; drafted in {stats.rounds} of {stats.rounds + plain_steps} rounds" if isinstance(spec, tuple) else ""))
    print(f"plain {rate['plain']:.1f} tok/s, speculative {rate['spec']:.1f} tok/s: {rate['spec'] / rate['plain']:.2f} times "
          f"(by batch {min(ratios):.2f} to {max(ratios):.2f}); prefill included"
          + (f"; transformers {rate['peer']:.1f} tok/s" if peer else ""))
    by_category = {name: tally.summary(depth) for name, tally in tallies.items()}
    if args.plot and ranks.rank == 0:
        plot_bench(args.plot, by_category, stats.per_position_acceptance(depth), ms_plain, times)
    return {"prompts": len(prompts), "new_tokens": args.max_new_tokens, "batch": args.max_batch, "dtype": args.dtype, "device": args.device,
            "temperature": args.temperature, "seed": args.seed if args.temperature > 0 else None,
            "spec": "auto" if isinstance(spec, tuple) else [spec.num_steps, spec.topk, spec.num_draft_tokens],
            "plain_tok_s": rounded(rate["plain"], 1), "spec_tok_s": rounded(rate["spec"], 1),
            "speedup": rounded(rate["spec"] / rate["plain"]),
            "expected_speedup": rounded(acceptance / break_even if acceptance and break_even else None),
            "acceptance_length": rounded(acceptance),
            "per_position_acceptance": [rounded(a) for a in stats.per_position_acceptance(depth)], "ceiling": ceiling,
            "break_even": rounded(break_even), "identical": identical, "ties": ties, "ms_plain": rounded(ms_plain, 2),
            "ms_draft": rounded(times["draft"], 2), "ms_verify": rounded(times["verify"], 2), "ms_host": rounded(times["host"], 2),
            "by_category": by_category, "worst": [{"prompt": name, "acceptance_length": rounded(length)} for length, name in sorted(by_prompt)[:10]],
            "replay": args.replay, "peer_tok_s": rounded(rate.get("peer"), 1), "torch": torch.__version__, "threads": torch.get_num_threads()}


CHECK_ROWS, CHECK_TOKENS, CHECK_STEPS, CHECK_NEW_TOKENS = 8, 512, 4, 48
WEAK, GENERALISES = 0.4, 0.6  # first-step accuracy below which a head is weak, and held-out accuracy as a share of that on training rows


def check_rows(path: str, args, config: eagle3.TargetConfig) -> list[eagle3.Row]:
    rows, report, _ = eagle3.read_rows([path], cache(partial(eagle3.load_tokenizer, args.target)), CHECK_TOKENS, config.eos_token_ids,
                                       config.vocab_size, limit=CHECK_ROWS)
    if not rows:
        raise ValueError(f"no usable row in {path}: {'; '.join(report) or 'the file is empty'}")
    return rows


@torch.no_grad()
def as_served(target: eagle3.Target, layout: FeatureLayout, rows: list[eagle3.Row]) -> tuple[list[tuple], list[dict]]:
    """Each row's (tokens, loss_mask), and the hidden states that serving computes for it, the teacher included."""
    tensors = [tuple(x.to(target.norm.weight.device) for x in row.tensors()) for row in rows]
    boundaries = (*layout.boundaries, layout.num_layers)
    return tensors, [{b: x[0] for b, x in target(tokens[None], boundaries=boundaries).captures.items()} for tokens, _ in tensors]


@torch.no_grad()
def teacher_forced(head: eagle3.DraftHead, tokens, loss_mask, captures: dict) -> list[float]:
    """Accuracy by step on these rows."""
    batches = (eagle3.prepare_ttt(head, row[None], mask[None], {b: x[None] for b, x in hidden.items()}, CHECK_STEPS)
               for row, mask, hidden in zip(tokens, loss_mask, captures))
    stats = sum((eagle3.ttt_loss(head, batch)[1] for batch in batches), eagle3.TTTStats.zeros(CHECK_STEPS))
    return [round(a, 3) for a in stats.accuracy]


def serve_rows(target, head, rows: list[eagle3.Row], spec: SpecConfig) -> dict:
    """What serving gets when it continues from the rows' answers, and what a round costs there."""
    room = target.config.max_position_embeddings - CHECK_NEW_TOKENS
    prompts = [list(row.tokens[:row.loss_mask.index(True) + 1][:room]) for row in rows]
    longest, stats = max(map(len, prompts)) + CHECK_NEW_TOKENS, SpecStats()
    engines = [Engine(target, max_length=longest), Engine(target, head, spec, max_length=longest)]
    for prompt in prompts:
        eagle3.run_requests(engines[0], [prompt], CHECK_NEW_TOKENS)
        stats = stats + eagle3.run_requests(engines[1], [prompt], CHECK_NEW_TOKENS)[0].stats
    plain, rounds = (engine.times["round"] for engine in engines)
    return {"acceptance_length": rounded(stats.acceptance_length), "ceiling": spec.ceiling,
            "break_even": rounded(median(rounds) / median(plain) if plain and rounds else None)}


class WiringFault(Exception):
    """A cause by its name in the README, and what to say about it."""

    def __init__(self, cause: str, text: str):
        super().__init__(text)
        self.cause = cause


def same_tokenizer(made_with: dict, target: eagle3.Target, what: str) -> None:
    ours, theirs = made_with["tokenizer"], target.fingerprint["tokenizer"]
    if None not in (ours, theirs) and ours != theirs:
        raise WiringFault("another tokenizer", f"{what} with another tokenizer: serve the target that was used then")


def load_checked(args, ranks: Shard) -> tuple[eagle3.Target, eagle3.DraftHead, bool]:
    """(a) Target and head, as far as their files agree; and whether the head was made with other weights of the same sizes."""
    target = eagle3.load_target(args.target, args.dtype, args.device, ranks)
    stated = FeatureLayout.parse(args.layers, target.config.hidden_size, target.config.num_layers) if args.layers else None
    own = eagle3.read_json(Path(args.draft) / "config.json").get("target_fingerprint")
    if own:
        same_tokenizer(own, target, "the head was trained")
    try:
        head = eagle3.load_draft(args.draft, target, stated)
    except eagle3.LayoutMismatch:
        raise
    except ValueError as error:
        raise WiringFault("draft vocabulary" if "d2t" in str(error) else "head and target", str(error)) from None
    print(f"  (a) the head reads {head.config.layout}")
    return target, head, bool(own) and own["weights"] != target.fingerprint["weights"]


def read_stored(folder: eagle3.FeatureFolder, target: eagle3.Target, layout: FeatureLayout) -> list[eagle3.StoredRow]:
    """The folder's first rows that have something supervised."""
    same_tokenizer(folder.fingerprint, target, "the features were made")
    layout.require_stored(folder.names, str(folder.folder))
    indices = range(min(folder.num_rows, 4 * CHECK_ROWS))
    stored = [folder.read(i) for i in tqdm(indices, desc="stored rows", leave=False)]
    stored = [row for row in stored if not row.skipped and row.loss_mask[:CHECK_TOKENS].any()][:CHECK_ROWS]
    if not stored:
        raise ValueError(f"the first {len(indices)} rows in {folder.folder} were all skipped, or have nothing supervised")
    return stored


def compare_stored(folder: eagle3.FeatureFolder, stored: list[eagle3.StoredRow], target, head, tensors, evidence: dict) -> list[eagle3.BlockMatch]:
    """(b) Stored hidden states against those that serving computes."""
    layout, like = head.config.layout, target.norm.weight
    names = tuple(dict.fromkeys((*layout.names, folder.teacher)))
    matches = eagle3.identify_blocks([(row.tokens[:256], {name: row.hidden[name][:256] for name in names}) for row in stored[:4]], target)
    print("  (b) stored features against those that serving computes: " + "; ".join(map(str, matches)))
    evidence["blocks"] = {m.claimed: [m.best, round(m.similarity, 4), m.runner_up, round(m.runner_up_similarity, 4), m.shift] for m in matches}
    read_as = {**{f"h.{b}": b for b in layout.boundaries}, folder.teacher: "normed" if folder.teacher.endswith("normed") else layout.num_layers}
    hidden = [{b: row.hidden[name][:CHECK_TOKENS].to(like.device, like.dtype) for name, b in read_as.items()} for row in stored]
    evidence["accuracy_on_stored"] = teacher_forced(head, *zip(*tensors), hidden)
    return matches


def search_other_features(head, tensors, target, evidence: dict) -> None:
    """Raise WiringFault if the head knows other hidden states better than those that it is fed."""
    found = eagle3.find_features(head, tensors[:4], target, partial(tqdm, desc="other features", leave=False))
    evidence["other_features"] = {key: rounded(value, 4) if isinstance(value, float) else value for key, value in found._asdict().items()}
    if found.is_better:
        raise WiringFault(
            "rows shifted by one token" if found.shift else eagle3.explain_blocks(head.config.layout.boundaries, found.boundaries),
            f"the head knows boundaries {','.join(map(str, found.boundaries))}" + (f", moved by {found.shift:+d} token," if found.shift else "")
            + f" better than those that it is fed: first-step accuracy {found.accuracy:.3f} against {found.wired_accuracy:.3f}, loss {found.loss:.3f} "
            f"against {found.wired_loss:.3f}; it was probably trained on those (or, if it is weak, on their neighbours)")


def diagnose(args, ranks: Shard, evidence: dict) -> str:
    """The verdict; fills `evidence`. Raises WiringFault or LayoutMismatch."""
    target, head, other_weights = load_checked(args, ranks)
    folder, matches = eagle3.FeatureFolder(args.check) if Path(args.check).is_dir() else None, []
    if folder:
        stored = read_stored(folder, target, head.config.layout)
        other_weights = other_weights or folder.fingerprint["weights"] != target.fingerprint["weights"]
        rows = [eagle3.Row(row.tokens[:CHECK_TOKENS].tolist(), row.loss_mask[:CHECK_TOKENS].tolist(), "stored") for row in stored]
    else:
        rows = check_rows(args.check, args, target.config)
    tensors, served = as_served(target, head.config.layout, rows)
    if folder:
        matches = compare_stored(folder, stored, target, head, tensors, evidence)
    accuracy = evidence["accuracy_as_served"] = teacher_forced(head, *zip(*tensors), served)
    spec = SpecConfig(CHECK_STEPS, 1, CHECK_STEPS + 1)
    result = evidence["served"] = serve_rows(target, head, rows, spec)
    print("  (c) accuracy by step on training rows: " + (f"{evidence['accuracy_on_stored']} on stored features, " if folder else "")
          + f"{accuracy} as served; acceptance length {result['acceptance_length']} of at most {spec.ceiling}, break-even {result['break_even']}")
    fault = eagle3.wiring_fault(matches, other_weights) if folder else None
    if fault:
        raise WiringFault(*fault)
    search_other_features(head, tensors, target, evidence)
    held = None
    if args.held_out:
        held_rows = check_rows(args.held_out, args, target.config)
        held_tensors, hidden = as_served(target, head.config.layout, held_rows)
        held = evidence["accuracy_held_out"] = teacher_forced(head, *zip(*held_tensors), hidden)
        evidence["served_held_out"] = serve_rows(target, head, held_rows, spec)
        print(f"  (d) held out: {held} as served; acceptance length {evidence['served_held_out']['acceptance_length']}")
    if other_weights and accuracy[0] < WEAK:
        raise WiringFault("other target weights", "the head was trained for other weights of the same sizes (a fine-tune?): serve those, or train on these")
    if accuracy[0] < WEAK:
        print(f"  nothing is wired wrongly, and the head guesses {100 * accuracy[0]:.0f} % of the first tokens right: train it longer, on the "
              "target's own answers")
        return "weak head"
    if held and held[0] < GENERALISES * accuracy[0]:
        print(f"  it knows its training rows ({accuracy[0]:.2f}) but not others ({held[0]:.2f}): train on more rows, fewer times each")
        return "does not generalise"
    print("  nothing is wired wrongly, and the head is sound")
    return "ok"


def check(args, ranks: Shard) -> dict:
    evidence: dict = {"thresholds": {"match": eagle3.MATCH, "weak_below": WEAK, "generalises_from": GENERALISES}}
    try:
        verdict, cause = diagnose(args, ranks, evidence), None
    except (WiringFault, eagle3.LayoutMismatch) as fault:
        print(f"  {fault}")
        verdict, cause, evidence["error"] = "wiring", getattr(fault, "cause", "layout"), str(fault)
    print(f"verdict: {verdict}" + (f" ({cause})" if cause else ""))
    return {"verdict": verdict, "cause": cause, "evidence": evidence}


def main(ranks: Shard) -> dict:
    args = parse_args()
    if args.plan:
        return plan(args)
    return check(args, ranks) if args.check else bench(args, ranks) if args.bench else answer(args, ranks)


if __name__ == "__main__":
    eagle3.run_script("serve.py", main)
