# MIT License, see LICENSE.
"""What each of N GPUs would hold and read to serve a target and its head; loads no weights, so it runs on any machine.

    python examples/plan.py DIR --ranks 8 --memory 80 --bandwidth 3350 --max-length 8192 --max-batch 8

DIR needs config.json only (a name on the Hugging Face hub will do). The last line is JSON.
"""
import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eagle3
from eagle3 import DraftConfig, DraftHead, FeatureLayout, Shard, Target, TargetConfig

PROMPT_CHUNK = 512  # tokens of a prompt that are read at once


def packed_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Of the second copy of every Linear, that the CPU's library wants."""
    return sum(eagle3.stored_bytes(layer, dtype) for layer in module.modules() if isinstance(layer, eagle3.Linear))


def activation_bytes(config: TargetConfig, shard: Shard, length: int, dtype: torch.dtype) -> int:
    """While a chunk of a prompt is read: scores, their softmax in fp32, both in dtype; or the MLP's three widths."""
    tokens = min(PROMPT_CHUNK, length)
    attending = tokens * (config.num_heads // shard.size) * length * (2 * dtype.itemsize + 8)
    mlp = 3 * tokens * config.intermediate_size // shard.size * dtype.itemsize
    return max(attending, mlp) + 8 * tokens * config.hidden_size * dtype.itemsize


def read_bytes(target: Target, batch: int, dtype: torch.dtype) -> int:
    """Of the weights, that one plain step of so many requests reads: neither the embedding's table nor experts that
    nobody chose."""
    config, size = target.config, partial(eagle3.stored_bytes, dtype=dtype)
    experts = [layer for layer in target.modules() if isinstance(layer, eagle3.ExpertLinear)]
    idle = (
        1 - min(1, batch * config.experts.experts_per_token / config.experts.num_experts) if experts else 0
    )  # at least
    table = 0 if config.tie_word_embeddings else size(target.embed_tokens)
    return size(target) - table - round(idle * sum(map(size, experts)))


def count_parameters(target: Target) -> int:
    return sum(x.numel() for x in target.parameters()) + sum(
        2 * x.numel() for x in target.buffers() if x.dtype == torch.uint8
    )


def draft_config(config: TargetConfig, draft: str | None, layers: str | None, ranks: int) -> DraftConfig:
    """Of the head in the folder `draft`, or of the one that train.py makes by default."""
    stated = FeatureLayout.parse(layers, config.hidden_size, config.num_layers) if layers else None
    if draft:
        return eagle3.read_draft_config(draft, config, stated)
    drafted = eagle3.default_draft_vocab_size(config.vocab_size)
    layout = stated or FeatureLayout.default(config.hidden_size, config.num_layers)
    return DraftConfig.for_target(config, layout, drafted - drafted % ranks)


def plan(args: argparse.Namespace) -> dict:
    config, shard = eagle3.read_target_config(args.target), Shard(0, args.ranks)
    dtype = eagle3.torch_dtype(args.dtype or config.dtype)
    length, batch = args.max_length or config.max_position_embeddings, args.max_batch
    own = draft_config(config, args.draft, args.layers, args.ranks)
    with torch.device("meta"):
        whole, target, head = Target(config), Target(config, shard), DraftHead(own, shard=shard)
    size = partial(eagle3.stored_bytes, dtype=dtype)
    packed = partial(packed_bytes, dtype=dtype) if args.cpu else lambda module: 0

    def cache_bytes(layers: int, heads: int, *widths: int) -> int:
        return layers * batch * length * shard.count(heads) * sum(widths) * dtype.itemsize

    weights, cached = size(target) + packed(target), cache_bytes(config.num_layers, *config.cached)
    head_size = size(head) + packed(head) + cache_bytes(1, own.num_kv_heads, own.head_dim, own.head_dim)
    activations, read = activation_bytes(config, shard, length, dtype), read_bytes(target, batch, dtype) + cached
    collectives = 2 * config.num_layers + 4 if shard.size > 1 else 0
    floor = read / args.bandwidth / 1e6 if args.bandwidth else None  # ms
    fits = None if args.memory is None else weights + cached + head_size + activations <= args.memory * 1e9
    gb = lambda size: round(size / 1e9, 4)
    billions, dtype_name = count_parameters(whole) / 1e9, str(dtype).removeprefix("torch.")
    print(f"{args.target} over {shard.size} ranks in {dtype_name}: {billions:.3f} billion parameters")
    print(
        f"  each rank holds {gb(weights)} GB of weights"
        + (" (each Linear's twice: as stored, and packed for the CPU)" if args.cpu else "")
        + f", {gb(cached)} GB of KV cache for {batch} requests of {length} tokens, {gb(head_size)} GB of the head"
        f"{'' if args.draft else ' (the default one)'} with its cache, and about {gb(activations)} GB to read a prompt"
    )
    print(
        f"  a plain step reads {gb(read)} GB on each rank, all requests at that length, and takes part in "
        f"{collectives} collectives" + (f": at {args.bandwidth:g} GB/s at least {floor:.2f} ms" if floor else "")
    )
    if fits is not None:
        print(f"  {'fits' if fits else 'does NOT fit'} in {args.memory:g} GB")
    return {
        "ranks": shard.size,
        "weights_gb": gb(size(whole)),
        "weights_gb_per_rank": gb(weights),
        "kv_gb_per_rank": gb(cached),
        "activations_gb_per_rank": gb(activations),
        "head_gb_per_rank": gb(head_size),
        "bytes_per_token_per_rank": read // batch,
        "collectives_per_token": collectives,
        "floor_ms": floor and round(floor, 4),
        "fits": fits,
    }


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the target's Hugging Face folder, or hub name")
    parser.add_argument("--ranks", type=int, default=8, help="GPUs that share it (default: 8)")
    parser.add_argument("--draft", help="the head's folder, or hub name (default: the head that train.py makes)")
    parser.add_argument("--layers", help="states the head's boundaries, such as 2,15,27")
    parser.add_argument("--max-length", type=int, help="tokens of a request (default: the target's context)")
    parser.add_argument("--max-batch", type=int, default=1, help="requests at once")
    parser.add_argument("--memory", type=float, metavar="GB", help="of a rank: does it fit?")
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of a rank's memory: what does a step take at least?"
    )
    parser.add_argument("--dtype", help="bfloat16, float16, float32 or float64 (default: as the target is stored)")
    parser.add_argument(
        "--cpu", action="store_true", help="ranks are CPU processes, which hold a packed copy of every Linear"
    )
    args = parser.parse_args(argv)
    for name in ("ranks", "max_length", "max_batch", "memory", "bandwidth"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0: got {getattr(args, name)}")
    args.target = eagle3.model_folder(args.target, with_weights=False)
    args.draft = args.draft and eagle3.model_folder(args.draft, with_weights=False)
    return plan(args)


if __name__ == "__main__":
    eagle3.run_script("plan.py", lambda shard: main())
