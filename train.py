# MIT License, see LICENSE.
"""Train an EAGLE-3 draft head for a target model.

    python train.py                                                      the demo: a small target and its head, from nothing
    torchrun train.py --target DIR --data FILE.jsonl --out DIR           a head for a real target; features are made on the fly
    torchrun train.py --target DIR --data FILE.jsonl --out DIR --resume  go on with an interrupted run, to the same losses
    torchrun train.py --target DIR --data FILE.jsonl --regenerate OUT.jsonl   the target's own answers, to train on; goes on with what is missing
    torchrun train.py --target DIR --data FILE.jsonl --extract DIR       store the features; goes on with what is missing
    python train.py --inspect DIR [--target DIR]                         what stored features are
    torchrun train.py --target DIR --features DIR --out DIR              a head from stored features, without the target's layers

A row of FILE.jsonl has OpenAI `messages`, ShareGPT `conversations`, `prompt` + `completion`, `text`, or `input_ids` (+ `loss_mask`).
--out becomes the head's folder (config.json, model.safetensors), with metrics.jsonl and checkpoint/ inside.
"""
import argparse
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import eagle3
from eagle3 import DraftConfig, DraftHead, FeatureFolder, FeatureLayout, Row, Shard, SpecConfig, SpecStats, Target, TTTStats

DEMO, DEMO_STEPS, DEMO_SAMPLING = Path("runs/demo"), (200, 440), eagle3.Sampling(0.7, seed=1)  # optimizer steps of its target and head
DEMO_ROWS, DEMO_PROMPT, DEMO_NEW_TOKENS = 512, 32, 160  # what the target writes for its head: rows, and bytes that are given and made of each
EVAL_PROMPTS, EVAL_NEW_TOKENS, EVAL_ROWS = 16, 64, 64  # served at the end; held-out rows scored


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    # what
    add("--target", help="the target's Hugging Face folder, or hub name (with no --target: the demo)")
    add("--data", action="append", default=[], help="JSONL file of training rows; may be given several times")
    add("--held-out", help="JSONL file of held-out rows (default: the last 1 %% of the rows)")
    add("--regenerate", metavar="OUT.jsonl", help="write rows in which the target itself answers the prompts of --data, all turns")
    add("--extract", metavar="DIR", help="store the hidden states of all rows there; several processes share the rows")
    add("--features", metavar="DIR", help="train on hidden states stored by --extract, instead of --data")
    add("--inspect", metavar="DIR", help="say what a folder of features holds and lacks; with --target, which boundaries its columns are")
    add("--out", help="the head's folder, made by this run")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    # the head
    add("--layers", help="boundaries whose hidden states the head reads, such as 2,15,27 or embed,3,31 (default: 2, L//2, L-3)")
    add("--draft-vocab-size", type=int, help="tokens that the head can draft (default: all up to 32000; 8192 of up to 65536; else 32000)")
    add("--head", metavar="NAME=VALUE,...", help="what is not as in the target, by config.json's names: num_key_value_heads=8,fc_norm=true")
    # training
    add("--ttt-steps", type=int, default=7, help="steps of the training-time test")
    add("--chain-share", type=float, default=1.0, help="of the trained slots, how many go on past step 0, drawn anew each time")
    add("--max-length", type=int, help="tokens; longer rows are cut, and counted (default: 2048)")
    add("--batch-size", type=int, default=4, help="rows per forward, over all ranks")
    add("--accumulate", type=int, default=1, help="forwards per optimizer step")
    add("--lr", type=float, default=3e-4, help="peak learning rate (warm-up 1.5 %%, cosine to a tenth)")
    add("--epochs", type=int, default=1, help="passes over the rows")
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--seed", type=int, default=0, help="initial weights and order of the rows")
    add("--save-every", type=int, default=200, help="optimizer steps between checkpoints (0 = only at the end)")
    # --regenerate
    add("--max-new-tokens", type=int, default=1024, help="--regenerate: tokens per answer; one that is cut off ends its conversation")
    add("--max-batch", type=int, default=32, help="--regenerate: conversations at once")
    add("--temperature", type=float, default=0.0, help="--regenerate: 0 = the most likely token")
    add("--top-p", type=float, default=1.0, help="--regenerate: sample from the most likely tokens that together reach p (1 = all)")
    add("--no-compile", action="store_true", help="--regenerate without torch.compile, for a few short answers")
    # machine
    add("--split-target", choices=["auto", "yes", "no"], default="auto",
        help="each rank holds a part of the target, or all of it (auto: a part, where all takes more than half of a rank's memory)")
    add("--dtype", choices=["bfloat16", "float32", "float64"],
        help="of the target and of products (default: bfloat16, or float32 on a CPU where that is faster); master weights are fp32 at least")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    if not args.target:  # the demo has smaller defaults
        parser.set_defaults(batch_size=4, lr=6e-3, ttt_steps=3, steps=DEMO_STEPS[1], dtype="float32")
        args = parser.parse_args(argv)
    args.device = eagle3.torch_device(args.device)
    jobs, sources = (sum(map(bool, given)) for given in ((args.out, args.extract, args.regenerate), (args.data, args.features)))
    if args.inspect:
        if jobs or sources:
            raise ValueError("--inspect takes only --target")
        return args
    args.changes = DraftConfig.parse_changes(args.head) if args.head else {}
    for is_wrong, text in (
            (not args.target and (args.resume or args.layers or args.head or args.held_out),
             "the demo (no --target) starts anew each time: it takes no --resume, --layers, --head or --held-out"),
            (jobs != bool(args.target) or sources != bool(args.target) or args.features and not args.out,
             "a real target takes --target, --data and one of --out, --extract and --regenerate; or --target, --features and --out (with none of "
             "them, train.py runs the demo)"),
            (args.head and not args.out or args.regenerate and (args.layers or args.held_out) or not args.out and args.resume,
             "--head and --resume belong to --out (the others go on by themselves), --layers and --held-out to heads and features"),
            (args.features and (args.held_out or args.max_length),
             "--features hold the rows as they were extracted: --held-out and --max-length belong to --data"),
            (not 0 < args.chain_share <= 1, f"--chain-share must be above 0, and at most 1: got {args.chain_share}")):
        if is_wrong:
            raise ValueError(text)
    args.sampling = eagle3.Sampling(args.temperature, top_p=args.top_p, seed=args.seed)
    args.max_length = 2048 if args.max_length is None else args.max_length
    eagle3.require_at_least(args, 0, "save_every")
    eagle3.require_at_least(args, 1, "ttt_steps", "batch_size", "max_batch", "max_new_tokens", "accumulate", "epochs", "max_length", "steps",
                            "draft_vocab_size")
    return args


def begun_dtype(args) -> str | None:
    """Of the run that this one goes on with."""
    checkpoint, answers = Path(args.out or "") / "checkpoint" / "training.safetensors", Path(args.regenerate or "")
    if args.resume and checkpoint.exists():
        return json.loads(eagle3.open_tensors(checkpoint).metadata()["state"])["settings"]["dtype"]
    if args.extract and (Path(args.extract) / "manifest.json").exists():
        return FeatureFolder(args.extract).dtype
    files = (answers, answers.with_suffix(f".0{answers.suffix}")) if args.regenerate else ()
    found = [re.match(rb'.*"made": "\w+-(\w+)"', file.open("rb").readline()) for file in files if file.is_file()]
    return next((match[1].decode() for match in found if match), None)


def load_own_part(args, ranks: Shard) -> Target:
    """The target, or this rank's part of it if it has to be split."""
    with torch.device("meta"):
        size = eagle3.stored_bytes(Target(eagle3.read_target_config(args.target)), eagle3.torch_dtype(args.dtype))
    memory = (torch.cuda.get_device_properties(args.device).total_memory if args.device.startswith("cuda")
              else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    is_split = ranks.size > 1 and (args.split_target == "yes" or args.split_target == "auto" and size > memory / 2)
    print(f"the target is split over {ranks.size} ranks\n" * is_split, end="")
    target = eagle3.load_target(args.target, args.dtype, args.device, ranks if is_split else Shard())
    eagle3.pack(target)
    return target


# -----------------------------------------------------------------------------
# Rows


def load_rows(paths, tokenizer, config: eagle3.TargetConfig, max_length: int) -> tuple[list[Row], int]:
    """All usable rows, and how many were skipped; what was skipped or cut is shown with its reason and first line."""
    rows, report, first = eagle3.read_rows(paths, tokenizer, max_length, config.eos_token_ids, config.vocab_size)
    for reason, count in report.most_common():
        print(f"  {count} rows {reason} (first: {first[reason]})")
    return rows, sum(count for reason, count in report.items() if reason.startswith("skipped"))


class OnlineRows:
    """Rows whose hidden states the target computes when they are needed. A rank trains on its own; a split target computes all ranks' rows."""

    def __init__(self, target: Target, layout: FeatureLayout, rows: list[Row], args, ranks: Shard):
        self.target, self.rows, self.args, self.ranks = target, rows, args, ranks
        self.boundaries = (*layout.boundaries, layout.num_layers)
        self.lengths, self.identity = [len(row.tokens) for row in rows], eagle3.rows_hash(rows)

    def load(self, indices: list[int]) -> list[Row]:
        return [self.rows[i] for i in indices]

    def inputs(self, rows: list[Row]) -> tuple | None:
        """This rank's rows (None: it has none), and their tokens, loss mask and hidden states as prepare_ttt takes them: the target's pass."""
        own = slice(self.ranks.rank, None, self.ranks.size)
        together, mine = self.target.shard.size > 1, rows[own]
        if not mine and not together:
            return None
        tokens, loss_mask = eagle3.collate(rows if together else mine, self.args.device)
        with torch.no_grad():
            captures = self.target(tokens, boundaries=self.boundaries).captures
        if together:
            tokens, loss_mask, captures = tokens[own], loss_mask[own], {b: hidden[own] for b, hidden in captures.items()}
        return (mine, tokens, loss_mask, captures) if mine else None


class StoredRows:
    """Rows whose hidden states --extract stored; those that were skipped there keep their place, and are left out. Each rank reads its own."""

    def __init__(self, folder: FeatureFolder, layout: FeatureLayout, rows: range, args, ranks: Shard):
        self.folder, self.rows, self.args, self.ranks = folder, rows, args, ranks
        teacher = "normed" if folder.teacher.endswith(".normed") else layout.num_layers  # as prepare_ttt wants it
        self.boundaries = {**{b: f"h.{b}" for b in layout.boundaries}, teacher: folder.teacher}
        self.lengths, self.identity = [folder.lengths[i] for i in rows], folder.manifest["rows_hash"]

    def load(self, indices: list[int]) -> list[Row]:
        """Runs in the reading thread, a step ahead."""
        own = indices[self.ranks.rank::self.ranks.size]
        return [row for i in own if not (row := self.folder.read(self.rows[i], tuple(self.boundaries.values()))).skipped]

    def inputs(self, rows: list[Row]) -> tuple | None:
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        captures = {b: pad([row.hidden[name] for row in rows]).to(self.args.device, eagle3.torch_dtype(self.args.dtype))
                    for b, name in self.boundaries.items()} if rows else {}
        return (rows, *eagle3.collate(rows, self.args.device), captures) if rows else None


def regenerate(args, ranks: Shard) -> dict:
    """Let the target answer the prompts of --data itself, all turns, many conversations at once; appends each one when it is over."""
    target = load_own_part(args, ranks)
    shard = target.shard
    rank, world = Shard() if shard.size > 1 else ranks  # a split target answers for all ranks; whole ones share the records
    out = Path(args.regenerate)
    out = out.with_suffix(f".{rank}{out.suffix}") if world > 1 else out
    tokenizer = cache(partial(eagle3.load_tokenizer, args.target))
    length = min(args.max_length, target.config.max_position_embeddings)
    settings = [target.fingerprint, [(Path(file).name, Path(file).stat().st_size) for file in args.data], length, args.max_new_tokens,
                args.temperature, args.top_p, args.seed, rank, world]
    made = f"{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]}-{args.dtype}"
    done = eagle3.finished_conversations(out, made)
    eagle3.wait_for_all(shard)  # rank 0 is about to write
    records = (found for found in enumerate(itertools.chain.from_iterable(map(eagle3.read_records, args.data)))
               if found[0] % world == rank and found[0] not in done)
    engine = eagle3.Engine(target, max_batch=args.max_batch, max_length=length, one_alone=False)
    if not args.no_compile:
        engine.compile()
    running, report, tokens, begun = {}, Counter(), 0, time.perf_counter()  # running: request -> conversation

    def go_on(conversation: eagle3.Conversation) -> None:
        """Submit the conversation's next turn; write it when there is none, or it cannot be asked. Raises what was wrong with the first turn."""
        try:
            prompt = conversation.next_prompt()
            if prompt and len(prompt) + args.max_new_tokens > length:
                raise ValueError(f"a first prompt that leaves no room for --max-new-tokens {args.max_new_tokens} within {length} tokens (see "
                                 "--max-length)")
            if prompt:
                sampling = replace(args.sampling, seed=args.seed + conversation.index)
                running[engine.submit(prompt, args.max_new_tokens, sampling=sampling)] = conversation
                return
        except eagle3.MALFORMED:  # the turns before this one are good
            if not conversation.rows:
                raise
        file.write(conversation.lines(made))
        bar.update()

    def fill(records) -> None:
        """Keep twice as many conversations as are decoded at once."""
        while len(running) < 2 * args.max_batch and (found := next(records, None)):
            index, (name, record) = found
            try:
                if record is None:
                    raise ValueError("not a JSON object in UTF-8")
                go_on(eagle3.Conversation(record, tokenizer() if eagle3.needs_tokenizer(record) else None, index, name))
            except eagle3.MALFORMED as error:
                report[eagle3.why_skipped(error)] += 1

    with open(os.devnull if shard.rank else out, "a", 1, encoding="utf-8") as file, tqdm(initial=len(done), desc="conversations", unit="") as bar:
        fill(records)
        while engine.busy:
            for request, new in engine.step():
                tokens += len(new)
                if request.finish_reason is None or request not in running:  # a short answer comes twice: the prefill's token, then the round's
                    continue
                conversation = running.pop(request)
                if request.finish_reason == "error":
                    report["skipped: the target's logits were not finite (check its weights and --dtype)"] += 1
                else:
                    conversation.answer(request.prompt, request.output, request.finish_reason == "stop")
                    go_on(conversation)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - begun):.0f} tok/s", refresh=False)
            fill(records)
    for reason, count in report.most_common():
        print(f"  {count} records {reason}")
    return {"out": str(out), "conversations": bar.n, "skipped": report.total(), "tokens": tokens,
            "tok_s": round(tokens / (time.perf_counter() - begun), 1)}


def extract(args, ranks: Shard) -> dict:
    """Store the target's hidden states of all rows, or of what is missing. Each rank writes its own; a split target computes those of all."""
    config = eagle3.read_target_config(args.target)
    layout = FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers)
    target = load_own_part(args, ranks)
    shard = target.shard
    rows, skipped = load_rows(args.data, cache(partial(eagle3.load_tokenizer, args.target)), config, args.max_length)
    folder = FeatureFolder.create(args.extract, layout, target, rows)
    missing = eagle3.share(folder.missing(), shard)  # a split target computes the same rows everywhere
    total, needed, free = sum(folder.lengths), sum(folder.lengths[i] for i in missing), shutil.disk_usage(folder.folder).free
    print(f"{len(rows)} rows, {total} tokens, {len(folder.names)} boundaries: {folder.row_bytes(total) / 1e9:.3f} GB in all, "
          f"{folder.row_bytes(needed) / 1e9:.3f} GB to write, {free / 1e9:.3f} GB free")
    if folder.row_bytes(needed) > free:
        raise ValueError(f"{folder.folder} has {free / 1e9:.3f} GB free, {folder.row_bytes(needed) / 1e9:.3f} GB are needed: free some, or take fewer "
                         "rows or boundaries")
    mine, window, begun = [i for i in missing if i % ranks.size == ranks.rank], args.batch_size * 64, time.perf_counter()
    computed = missing if shard.size > 1 else mine
    boundaries, pending = tuple(int(name[2:]) for name in folder.names), deque()
    with ThreadPoolExecutor(1) as writer, tqdm(total=len(computed), desc="extracting", unit="row") as bar:
        for start in range(0, len(computed), window):
            near = sorted(computed[start:start + window], key=lambda i: folder.lengths[i])
            for batch in (near[i:i + args.batch_size] for i in range(0, len(near), args.batch_size)):
                padded, _ = eagle3.collate([rows[i] for i in batch], args.device)
                with torch.no_grad():
                    captures = {f"h.{b}": hidden.cpu() for b, hidden in target(padded, boundaries=boundaries).captures.items()}
                for at, index in enumerate(batch):
                    if index % ranks.size == ranks.rank:
                        hidden = {name: x[at, :folder.lengths[index]] for name, x in captures.items()}
                        pending.append(writer.submit(folder.write, index, rows[index], hidden))
                while len(pending) > 4 * args.batch_size:  # writing overlaps with computing, a few batches behind
                    pending.popleft().result()
                bar.update(len(batch))
        for future in pending:
            future.result()
    tokens = sum(folder.lengths[i] for i in mine)
    unsound = [(i, why) for i in mine if (why := folder.read(i, ()).skipped)]
    for index, why in unsound[:10]:
        print(f"  row {rows[index].name} was skipped: {why}")
    written, not_finite, tokens = eagle3.all_reduce(torch.tensor([len(mine), len(unsound), tokens]), ranks).tolist()
    return {"out": str(folder.folder), "rows": written, "rows_skipped": skipped, "rows_not_finite": not_finite, "tokens": tokens,
            "tok_s": round(tokens / (time.perf_counter() - begun), 1), "gb": round(folder.row_bytes(tokens) / 1e9, 3)}


def inspect(args) -> dict:
    """What a folder of features holds and lacks and, with a target, which boundaries its columns really are."""
    folder = FeatureFolder(args.inspect)
    root = folder.folder
    print(f"{root}: {folder.layout}, teacher {folder.teacher}, {folder.dtype}, {folder.num_rows} rows")
    paths = [folder.path(i) for i in range(folder.num_rows)]
    strangers = sorted({*root.rglob("*.safetensors")} - {*paths, root / "rows.safetensors"})
    missing, unsound, first, contents, totals = [], [], [], [], Counter()  # contents: hashes, to find rows that are there twice
    for i, path in enumerate(tqdm(paths, desc="rows", unit="row")):
        try:
            row = folder.read(i, () if len(first) >= 4 else None)
        except FileNotFoundError:
            missing.append(path)
        except ValueError as error:
            unsound.append(str(error))
        else:
            totals.update(tokens=len(row.tokens), supervised=int(row.loss_mask.sum()), empty=not row.loss_mask.any())
            contents.append(hash(row.tokens.numpy().tobytes()))
            if row.hidden:
                first.append((row.tokens[:256], {name: hidden[:256] for name, hidden in row.hidden.items()}))
    groups, gone = (Counter(path.parent for path in some) for some in (paths, missing))
    for group, count in groups.items():
        print(f"  {group.relative_to(root)}: {count - gone[group]} of {count} rows")
    for what, names in (("missing", missing), ("not sound", unsound), ("not part of this folder", strangers)):
        if names:
            print(f"  {len(names)} {what}: {'; '.join(map(str, names[:5]))}" + (" ..." if len(names) > 5 else ""))
    double = len(contents) - len(set(contents))
    print(f"  {totals['tokens']} tokens (longest row {max(folder.lengths)}), {100 * totals['supervised'] / max(totals['tokens'], 1):.1f} % "
          f"supervised, {totals['empty']} rows with nothing supervised, {double} rows that are there twice")
    matches, fault = [], None
    if args.target and first:  # in their own dtype: rounding sends tokens to other experts
        target = eagle3.load_target(args.target, folder.dtype, args.device)
        if folder.layout.hidden_size != target.config.hidden_size:
            raise ValueError(f"these features are {folder.layout.hidden_size} wide, the target's hidden size is {target.config.hidden_size}: "
                             "name the target that they were made with")
        matches = eagle3.identify_blocks(first, target)
        fault = eagle3.wiring_fault(matches, folder.fingerprint["weights"] != target.fingerprint["weights"])
        print("".join(f"  {match}\n" for match in matches)
              + (f"  WIRING: {fault[0]}: {fault[1]}" if fault else "  every block is what its name says"))
    return {"rows": len(paths), "missing": len(missing), "unsound": len(unsound), "foreign": len(strangers), "duplicates": double,
            "tokens": totals["tokens"], "supervised": totals["supervised"], "cause": fault and fault[0],
            "blocks": {match.claimed: match.best if match.similarity >= eagle3.MATCH else None for match in matches} or None}


# -----------------------------------------------------------------------------
# Training


def shown(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def learning_rate(step: int, total: int, peak: float) -> float:
    """Linear warm-up over 1.5 % of the steps, then cosine down to a tenth."""
    warmup = max(1, round(0.015 * total))
    cosine = math.cos(math.pi * (step - warmup) / max(1, total - warmup))
    return peak * ((step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + cosine))


def forward(head: DraftHead, batch: eagle3.TTTBatch, args, num_counted: torch.Tensor | None = None) -> tuple[torch.Tensor, TTTStats]:
    with torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.dtype == "bfloat16"):
        return eagle3.ttt_loss(head, batch, num_counted)


def train_step(head: DraftHead, source: OnlineRows | StoredRows, optimizer, loaded: list[list], step: int, args) -> tuple[TTTStats, float]:
    """One optimizer step over accumulated batches; returns its statistics, over all ranks, and the gradient norm before clipping."""
    ranks, prepared, names, stats = source.ranks, [], [], TTTStats.zeros(args.ttt_steps)
    for own, *inputs in filter(None, map(source.inputs, loaded)):  # this rank may have no rows here, and --extract may have skipped them
        seeds = [zlib.crc32(repr((args.seed, step, row.tokens.tolist())).encode()) for row in own]  # whatever the rank, and the source
        prepared.append(eagle3.prepare_ttt(head, *inputs, args.ttt_steps, [row.name for row in own], args.chain_share, seeds))
        names += [row.name for row in own]
    num_counted = eagle3.all_reduce(sum((batch.num_counted for batch in prepared), torch.zeros(args.ttt_steps, dtype=torch.int64)), ranks)
    if not num_counted.any():
        return stats, 0.0
    optimizer.zero_grad()
    for batch in prepared:
        loss, part = forward(head, batch, args, num_counted)
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss.item()} on rows {', '.join(names)}: lower --lr, or look at these rows")
        loss.backward()
        stats = stats + part
    if ranks.size > 1:
        for parameter in head.parameters():
            parameter.grad = eagle3.all_reduce(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, ranks)
    norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
    if not norm.isfinite():
        raise ValueError(f"a gradient is not finite on rows {', '.join(names)}: lower --lr, or look at these rows")
    optimizer.step()
    return stats.summed(ranks), norm.item()


def save_checkpoint(folder: Path, head: DraftHead, optimizer, state: dict) -> None:
    """Everything that a resumed run needs, in one file that is renamed into place."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    for name, parameter in head.named_parameters():
        tensors.update({f"{key}.{name}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")})
    eagle3.write_tensors(folder / "training.safetensors", tensors, {"state": json.dumps(state)})


def load_checkpoint(file: Path, head: DraftHead, optimizer, settings: dict) -> dict:
    """Restore head and optimizer; refuses, by name, settings that would change the curve."""
    stored = eagle3.open_tensors(file)
    state = json.loads(stored.metadata()["state"])
    changed = [f"{key} was {was}, now {value}" for key, value in settings.items() if value != (was := state["settings"].get(key))]
    if changed:
        raise ValueError(f"--resume continues the same run, but {'; '.join(changed)}: give the same options, or another --out")
    head.load_state_dict({name: stored.get_tensor(f"head.{name}") for name in head.state_dict()})
    for name, parameter in head.named_parameters():
        optimizer.state[parameter] = {"step": torch.tensor(float(state["step"]), device=parameter.device),
                                      **{key: stored.get_tensor(f"{key}.{name}").to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}}
    return state


def new_head(layout: FeatureLayout, target: Target | eagle3.TargetEnds, counts: torch.Tensor, args) -> DraftHead:
    """A head with random weights, its draft vocabulary chosen from the rows' supervised tokens."""
    V = target.config.vocab_size
    size = args.draft_vocab_size or eagle3.default_draft_vocab_size(V)
    config = DraftConfig.for_target(target.config, layout, size, **args.changes)
    head = DraftHead(config, eagle3.choose_draft_ids(counts, size)).init_weights(args.seed)
    print(f"features {layout}, draft vocabulary {size} of {V} "
          f"({100 * counts[head.t2d].sum().item() / max(1, counts.sum().item()):.1f} % of the supervised tokens)")
    if args.dtype == "float64":
        head.double()
    return head.to(args.device).attach(target)


def online(args, ranks: Shard) -> tuple[DraftHead, OnlineRows, OnlineRows, int]:
    """Head, training rows, held-out rows, and how many lines were skipped."""
    config = eagle3.read_target_config(args.target)
    layout = FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers)
    for file in (*args.data, *filter(None, [args.held_out])):
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file} is not there")
    target = load_own_part(args, ranks)
    tokenizer = cache(partial(eagle3.load_tokenizer, args.target))
    rows, skipped = load_rows(args.data, tokenizer, config, args.max_length)
    count = 0 if args.held_out else eagle3.held_out_count(len(rows))
    held_out = rows[-count:] if count else load_rows([args.held_out], tokenizer, config, args.max_length)[0]
    rows = rows[:len(rows) - count]
    ends = eagle3.load_target_ends(args.target, args.dtype, args.device) if target.shard.size > 1 else target  # what a rank's own rows need
    head = new_head(layout, ends, eagle3.token_counts(rows, config.vocab_size), args)
    return head, *(OnlineRows(target, layout, part, args, ranks) for part in (rows, held_out)), skipped


def offline(args, ranks: Shard) -> tuple[DraftHead, StoredRows, StoredRows, int]:
    """The same from stored features; of the target only its two ends are loaded."""
    folder = FeatureFolder(args.features)
    target = eagle3.load_target_ends(args.target, args.dtype, args.device)
    eagle3.require_same_target(folder.fingerprint, target.fingerprint, f"the features in {folder.folder}", "the one that is loaded")
    layout = FeatureLayout.parse(args.layers, target.config.hidden_size, target.config.num_layers) if args.layers else folder.layout
    folder.layout.require(replace(folder.layout, hidden_size=layout.hidden_size, num_layers=layout.num_layers), f"the features in {folder.folder}",
                          "the target")
    layout.require_stored(folder.names, str(folder.folder))
    missing = folder.missing()
    if missing:
        raise ValueError(f"{folder.folder} lacks {len(missing)} of {folder.num_rows} rows (first: {missing[0]}): run the same --extract again")
    head = new_head(layout, target, folder.counts, args)
    cut = folder.num_rows - eagle3.held_out_count(folder.num_rows)
    return head, *(StoredRows(folder, layout, part, args, ranks) for part in (range(cut), range(cut, folder.num_rows))), 0


def train(args, ranks: Shard = Shard()) -> dict:
    """The whole run: rows, head, steps, checkpoints, evaluation. Returns the summary that is printed as the last line."""
    out = Path(args.out)
    checkpoint = out / "checkpoint" / "training.safetensors"
    if args.resume and not checkpoint.exists():
        raise FileNotFoundError(f"--resume: there is no checkpoint in {out}; leave --resume out to start")
    if not args.resume and (checkpoint.exists() or (out / "config.json").exists()):
        raise ValueError(f"{out} holds a run already: go on with --resume, or choose another --out")
    eagle3.wait_for_all(ranks)  # rank 0 is about to write there
    head, source, held_out, skipped = offline(args, ranks) if args.features else online(args, ranks)
    lengths = source.lengths
    print(f"{len(lengths)} rows to train on, {len(held_out.lengths)} held out, {skipped} skipped")
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    per_epoch = math.ceil(math.ceil(len(lengths) / args.batch_size) / args.accumulate)
    total = args.steps or args.epochs * per_epoch
    settings = {"layers": head.config.layout.flag, "draft_vocab_size": head.config.draft_vocab_size, "steps": total,
                **{key: getattr(args, key) for key in ("head", "ttt_steps", "chain_share", "max_length", "batch_size", "accumulate", "lr", "seed", "dtype")},
                "rows": source.identity, "target": head.target.fingerprint}
    new = {"step": 0, "tokens": 0, "seconds": 0.0, "settings": settings}
    state = load_checkpoint(checkpoint, head, optimizer, settings) if args.resume else new
    out.mkdir(parents=True, exist_ok=True)
    metrics = out / "metrics.jsonl" if ranks.rank == 0 else Path(os.devnull)
    if ranks.rank == 0:  # lines behind the checkpoint belong to steps that will be made again
        kept = metrics.read_text().splitlines()[:state["step"]] if args.resume and metrics.exists() else []
        eagle3.write_text(metrics, "".join(line + "\n" for line in kept))
    bar = tqdm(total=total, initial=state["step"], desc="training", unit="step")
    begun, batches = time.perf_counter() - state["seconds"], lru_cache(2)(partial(eagle3.epoch_batches, lengths, args.batch_size, args.seed))

    def load(step: int) -> tuple[list[list], int]:  # a step's rows, and their tokens
        first = step % per_epoch * args.accumulate
        chosen = batches(step // per_epoch)[first:first + args.accumulate] if step < total else []
        return [source.load(batch) for batch in chosen], sum(lengths[row] for batch in chosen for row in batch)

    with metrics.open("a", buffering=1) as log, ThreadPoolExecutor(1) as reader:
        coming = reader.submit(load, state["step"])
        for step in range(state["step"], total):
            loaded, num_tokens = coming.result()
            coming = reader.submit(load, step + 1)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total, args.lr)
            stats, norm = train_step(head, source, optimizer, loaded, step, args)
            state["step"], state["tokens"] = step + 1, state["tokens"] + num_tokens
            state["seconds"] = time.perf_counter() - begun
            simulated = stats.simulated_acceptance_length
            log.write(json.dumps({"step": step + 1, "loss": stats.loss, "accuracy": stats.accuracy, "simulated_acceptance_length": simulated,
                                  "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm, "tokens": state["tokens"]}) + "\n")
            bar.set_postfix_str(f"loss {stats.loss:.2f}, acc {shown(stats.accuracy)}, " + (f"acceptance {simulated:.2f}, " if simulated else "")
                                + f"{state['tokens'] / state['seconds']:.0f} tok/s")
            bar.update()
            if ranks.rank == 0 and (step + 1 == total or args.save_every and (step + 1) % args.save_every == 0):
                save_checkpoint(checkpoint.parent, head, optimizer, state)
    bar.close()
    if ranks.rank == 0:
        print(f"saved {out}: {eagle3.save_draft(head, out, 'float32' if args.dtype == 'float64' else args.dtype)}")
    eagle3.wait_for_all(ranks)
    return {"out": str(out), "steps": total, "rows": len(lengths), "rows_skipped": skipped, "tokens": state["tokens"],
            "tok_s": round(state["tokens"] / max(state["seconds"], 1e-9), 1), **evaluate(head, held_out, out, args)}


# -----------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def score(head: DraftHead, source: OnlineRows | StoredRows, args) -> TTTStats:
    """Teacher-forced statistics of the head on the first rows, over all ranks."""
    stats, indices = TTTStats.zeros(args.ttt_steps), list(range(len(source.lengths)))[:EVAL_ROWS]
    batches = [indices[start:start + args.batch_size] for start in range(0, len(indices), args.batch_size)]
    for own, *inputs in filter(None, map(source.inputs, map(source.load, tqdm(batches, desc="scoring", unit="batch", leave=False)))):
        stats = stats + forward(head, eagle3.prepare_ttt(head, *inputs, args.ttt_steps, [row.name for row in own]), args)[1]
    stats = stats.summed(source.ranks)
    if not stats.num_trained.any():
        raise ValueError("no held-out row is left to score: all were skipped by --extract")
    return stats


def eval_prompt(row: Row) -> list[int]:
    """What comes before the row's first answer; for a row that is all answer, its first 32 tokens (or half)."""
    answer = row.loss_mask.tolist().index(True)
    return row.tokens[:answer if answer else min(32, (len(row.tokens) + 1) // 2)].tolist()


def evaluate(head: DraftHead, source: OnlineRows | StoredRows, out: Path, args) -> dict:
    """Score held-out rows and, where the target is there, serve held-out prompts with the head as it was saved, and simulate serving on what
    that wrote: two acceptance lengths of one text, measured and predicted. Where they differ, the wiring is at fault."""
    held, steps = score(head, source, args), args.ttt_steps
    simulated = held.simulated_acceptance_length or 1.0  # no round at all: every answer is two tokens long
    summary = {"loss": round(held.loss, 4), "accuracy": [round(a, 4) for a in held.accuracy],
               "simulated_acceptance_length": round(simulated, 3), "acceptance_length": None}
    print(f"held-out: loss {held.loss:.3f}, accuracy by step {shown(held.accuracy)}, simulated acceptance length {simulated:.2f} (what serving "
          "gets, where these rows are the target's own greedy answers)")
    if args.features:
        print("not served: stored features need only the target's ends. Compare what serving gets with serve.py --target DIR --draft "
              f"{out} --check {args.features}")
        return summary
    if source.target.shard.size == 1 and source.ranks.rank:  # a whole target serves on rank 0
        return summary
    target, served, written = source.target, SpecStats(), []
    served_head = eagle3.load_draft(out, target)
    room = head.config.max_position_embeddings - EVAL_NEW_TOKENS
    prompts = [prompt for prompt in map(eval_prompt, source.rows) if len(prompt) <= room][:EVAL_PROMPTS]
    for prompt in tqdm(prompts, desc="serving held-out prompts", unit="prompt"):
        request, = eagle3.speculative_generate(target, served_head, [prompt], SpecConfig(steps, 1, steps + 1), EVAL_NEW_TOKENS)
        served = served + request.stats
        if len(request.output) > 1:
            written.append(Row(prompt + request.output, [False] * len(prompt) + [True] * len(request.output), "a served answer"))
    if written and served.rounds:
        rows = OnlineRows(target, head.config.layout, written, args, target.shard)
        simulated = score(eagle3.load_draft(out, head.target), rows, args).simulated_acceptance_length or 1.0
        summary.update(simulated_acceptance_length=round(simulated, 3), acceptance_length=round(served.acceptance_length, 3))
        print(f"served {len(prompts)} held-out prompts, {steps} guesses a round: acceptance length {served.acceptance_length:.2f} (simulated on "
              f"the same answers: {simulated:.2f}); accepted by position {shown(served.per_position_acceptance(steps))}")
    return summary


# -----------------------------------------------------------------------------
# The demo


def make_demo_target(folder: Path, prompts: Path, args) -> None:
    """Train a small byte-level Llama on the source of Python's standard library, and write beginnings for it to go on from."""
    torch.manual_seed(0)
    target = Target(eagle3.TargetConfig.from_json({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 1, "vocab_size": eagle3.ByteTokenizer.vocab_size, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "eos_token_id": eagle3.ByteTokenizer.eos_id})).to(args.device)
    matrices = [parameter for parameter in target.layers.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in target.parameters() if not any(parameter is matrix for matrix in matrices)]
    for parameter in target.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.5 * parameter.shape[1] ** -0.5)
    optimizers = [torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),  # half the steps that AdamW alone takes
                  torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    steps, B, T = DEMO_STEPS[0], 32, 128
    modules = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    parts = [[module for i, module in enumerate(modules) if (i % 20 == 0) == is_held_out] for is_held_out in (False, True)]
    train_bytes, held_bytes = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8).long() for part in parts)

    def loss_on(data: torch.Tensor, count: int, generator=None) -> torch.Tensor:
        starts = torch.randint(len(data) - T - 1, (count,), generator=generator)
        rows = data[starts[:, None] + torch.arange(T + 1)].to(args.device)
        return F.cross_entropy(target.logits(target(rows[:, :-1]).last).flatten(0, 1), rows[:, 1:].flatten())

    bar = tqdm(range(steps), desc="demo target", unit="step")
    for step in bar:
        loss = loss_on(train_bytes, B)
        target.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 1e-2)
            optimizer.step()
        bar.set_postfix_str(f"{loss.item() / math.log(2):.2f} bits per byte")
    with torch.no_grad():
        bits = loss_on(held_bytes, 512, torch.Generator().manual_seed(1)).item() / math.log(2)
    print(f"the demo's target: {bits:.2f} bits per byte on modules of the standard library that it never saw")
    starts = torch.randint(len(train_bytes) - DEMO_PROMPT, (DEMO_ROWS,)).tolist()
    texts = (bytes(train_bytes[start:start + DEMO_PROMPT].tolist()).decode(errors="ignore") for start in starts)
    eagle3.write_text(prompts, "".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    folder.mkdir(parents=True, exist_ok=True)
    eagle3.write_text(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "ByteTokenizer"}))
    eagle3.save_target(target, folder)


def compare_speeds(args) -> dict:
    """What a newcomer wants to see: text that the target writes with its head, and how much sooner it comes than without."""
    target = eagle3.load_target(args.target, args.dtype, args.device)
    head, tokenizer, spec = eagle3.load_draft(args.out, target), eagle3.load_tokenizer(args.target), SpecConfig(3, 1, 4)
    prompts = [tokenizer.encode(text) for text in ("import os", "class Parser:\n", "def main(", "    if not ", "# Copyright", "try:\n")]
    plain, fast = (eagle3.Engine(target, *more, max_length=64 + DEMO_NEW_TOKENS) for more in ((), (head, spec)))
    seconds, answers = {plain: [], fast: []}, {plain: [], fast: []}
    for turn, prompt in enumerate(tqdm([prompts[0], *prompts], desc="with and without the head", unit="prompt")):  # the first turn warms up
        for engine in (plain, fast) if turn % 2 else (fast, plain):
            begun = time.perf_counter()
            answers[engine] += eagle3.run_requests(engine, [prompt], DEMO_NEW_TOKENS, sampling=DEMO_SAMPLING)
            seconds[engine].append(time.perf_counter() - begun)
    text = tokenizer.decode(prompts[0] + answers[fast][1].output).replace("\n", "\n    ")
    print(f"\nwhat the target writes, with its head (temperature {DEMO_SAMPLING.temperature:g}):\n\n    {text}\n")
    stats, speedup = sum((answer.stats for answer in answers[fast][1:]), SpecStats()), sum(seconds[plain][1:]) / sum(seconds[fast][1:])
    print(f"Each pass of the target gave {stats.acceptance_length:.2f} tokens instead of 1: its head guessed {spec.num_steps} ahead, of which "
          + ", ".join(f"{100 * rate:.0f} %" for rate in stats.per_position_acceptance(spec.num_steps)) + " were right so far; "
          f"the same {len(prompts)} texts came {speedup:.2f} times as fast as without the head, measured in turns.")
    return {"tokens_per_pass": round(stats.acceptance_length, 2), "speedup": round(speedup, 2)}


def demo(args, ranks: Shard) -> dict:
    """Target, head and report with nothing downloaded: the same regenerate() and train() as for any other."""
    target, prompts, answers, out = (DEMO / name for name in ("target", "prompts.jsonl", "answers.jsonl", "draft"))
    args.target, args.data, args.out = str(target), [str(answers)], str(out)
    asked = {**vars(args), "data": [str(prompts)], "regenerate": str(answers), "sampling": DEMO_SAMPLING, "temperature": DEMO_SAMPLING.temperature,
             "max_new_tokens": DEMO_NEW_TOKENS, "max_batch": 128, "no_compile": True}
    if ranks.rank == 0:
        if not (target / "config.json").exists() or not prompts.exists():
            shutil.rmtree(DEMO, ignore_errors=True)
            DEMO.mkdir(parents=True)
            make_demo_target(target, prompts, args)
        shutil.rmtree(out, ignore_errors=True)
        regenerate(argparse.Namespace(**asked), Shard())
    eagle3.wait_for_all(ranks)
    summary = train(args, ranks)
    summary.update(compare_speeds(args) if ranks.rank == 0 else {})
    print('now decode with it: python serve.py --prompt "import os" --max-new-tokens 200 --temperature 0.7')
    return summary


def main(ranks: Shard = Shard(), argv=None) -> dict:
    args = parse_args(argv)
    args.target = args.target and eagle3.model_folder(args.target)
    if args.inspect:
        return inspect(args)
    args.dtype = args.dtype or eagle3.share(begun_dtype(args), ranks)
    args.dtype = args.dtype or eagle3.choose_dtype("bfloat16", args.device, "decoding" if args.regenerate else "training", ranks)
    run = extract if args.extract else regenerate if args.regenerate else train if args.target else demo
    print(f"eagle3 {run.__name__}: torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.dtype}, rank {ranks.rank} of "
          f"{ranks.size}")
    try:
        return run(args, ranks)
    except KeyboardInterrupt:
        if run is train:
            print("--resume goes on from the last checkpoint in --out", file=sys.stderr)
        raise


if __name__ == "__main__":
    eagle3.run_script("train.py", main)
