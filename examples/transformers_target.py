# MIT License, see LICENSE.
"""Train a head for anybody's nn.Module: hooks read the hidden states of a model that eagle3.py knows nothing of.

    python examples/transformers_target.py MODEL TEXT.txt --out HEAD [--steps 100]

MODEL is a transformers model, by folder or hub name; the head learns to follow the text, in pieces. The model needs an
embedding, one list of decoder layers, a final norm and an lm_head. Not compiled: hooks on a compiled module capture
nothing, and are refused.
"""
import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eagle3
from eagle3 import DraftConfig, DraftHead, FeatureLayout, TargetEnds, capture_hidden_states, prepare_ttt, ttt_loss


def new_head(model, folder: str) -> DraftHead:
    """A head for the model: it shares the model's embedding, and its teacher is the model's norm and lm_head."""
    config = eagle3.read_target_config(folder)
    layout = FeatureLayout.default(config.hidden_size, config.num_layers)
    target = TargetEnds(config, model.model.embed_tokens, model.model.norm, model.lm_head)
    vocabulary = torch.arange(config.vocab_size)  # eagle3.choose_draft_ids takes the most frequent ones
    return (
        DraftHead(DraftConfig.for_target(config, layout, len(vocabulary)), vocabulary)
        .init_weights(seed=0)
        .attach(target)
    )


def train_step(model, head: DraftHead, optimizer, tokens: torch.Tensor) -> eagle3.TTTStats:
    """tokens [B,T], all of them trained on."""
    with capture_hidden_states(model, head.config.layout) as captures, torch.no_grad():
        model(tokens)
    batch = prepare_ttt(head, tokens, torch.ones_like(tokens, dtype=torch.bool), captures, ttt_steps=3)
    loss, stats = ttt_loss(head, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return stats


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder or hub name of a transformers model")
    parser.add_argument("text", type=Path, help="a file of text to learn from")
    parser.add_argument("--out", required=True, help="the head's folder")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    args = parser.parse_args(argv)
    folder = eagle3.model_folder(args.model)
    model = (
        eagle3.require_package("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    )
    ids = torch.tensor(eagle3.load_tokenizer(folder).encode(args.text.read_text(encoding="utf-8")))
    rows = ids[:len(ids) // args.length * args.length].view(-1, args.length)
    if not len(rows):
        raise ValueError(f"{args.text} has {len(ids)} tokens, fewer than one row of --length {args.length}")
    head = new_head(model, folder)
    optimizer, bar = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.0), tqdm(
        range(args.steps), desc="training"
    )
    for step in bar:
        stats = train_step(model, head, optimizer, rows[[step % len(rows), (step + 1) % len(rows)]])
        bar.set_postfix_str(f"loss {stats.loss:.2f}, accuracy {stats.accuracy[0]:.2f}")
    print(f"saved {args.out}: {eagle3.save_draft(head, args.out)}")
    return {"out": args.out, "loss": stats.loss, "accuracy": stats.accuracy}


if __name__ == "__main__":
    eagle3.run_script("transformers_target.py", lambda shard: main())
