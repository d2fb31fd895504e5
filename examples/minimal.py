# MIT License, see LICENSE.
"""The whole of EAGLE-3 in 200 lines, on a transformers model: head, training-time test, draft tree, tree attention,
acceptance, decoding. To be read first, and pasted: it imports nothing of ours. Greedy, one row; eagle3.py has the rest.

    python examples/minimal.py MODEL          a head learns the model's own texts in a minute, and decodes them with it

MODEL is the folder or hub name of a Llama or Qwen.

B rows, T tokens, C hidden size, H heads, G KV heads, D head dim, V vocabulary, Vd draft vocabulary, N tree nodes.
Slot t of the head holds (features at t, token t+1), and guesses token t+2.
"""
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotate(x, positions, theta):
    """Rotary embedding: x [B,T,H,D], positions [B,T]."""
    D = x.shape[-1]
    angle = positions[..., None, None] / theta ** (torch.arange(0, D, 2) / D)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def softmax_attention(q, k, v, visible):
    """q [B,T,H,D], k and v [B,S,G,D], visible [B,T,S]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible[:, None], enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    """Reads embedding and hidden state side by side. Whom a slot sees is the caller's business: attend(q, k, v)."""

    def __init__(self, c):
        super().__init__()
        self.D = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.theta = c.rope_parameters["rope_theta"]
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * self.D, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * self.D, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * self.D, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * self.D, c.hidden_size, bias=False)

    def forward(self, x, positions, attend):
        q, k, v = (project(x).unflatten(-1, (-1, self.D)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(rotate(q, positions, self.theta), rotate(k, positions, self.theta), v).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        norm = lambda: RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, embedding, hidden, positions, attend):
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """fc once per true token, on its features; step() as often as you like, on its own hidden states. The names of
    the tensors are the published ones."""

    def __init__(self, c, boundaries, draft_ids):
        super().__init__()
        self.boundaries = boundaries  # b: the residual stream after b layers, transformers' hidden_states[b]
        self.fc = nn.Linear(len(boundaries) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer, self.norm = DraftLayer(c), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, len(draft_ids), bias=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))  # offsets: target id = i + d2t[i]
        self.register_buffer("t2d", torch.isin(torch.arange(c.vocab_size), draft_ids))  # mask over the vocabulary

    @property
    def draft_ids(self):
        return torch.arange(len(self.d2t)) + self.d2t

    def features(self, out):
        return torch.cat([out.hidden_states[b] for b in self.boundaries], -1)

    def step(self, embed, hidden, tokens, positions, attend):
        """hidden [B,T,C], tokens [B,T] -> the next hidden state, and logits [B,T,Vd]."""
        hidden = self.midlayer(embed(tokens).detach(), hidden, positions, attend)
        return hidden, self.lm_head(self.norm(hidden))


# ---- Training-time test: K steps on its own hidden states. A slot sees the true slots up to it, and its own steps


def shift(x, by):
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def ttt_loss(head, model, tokens, mask, K=7, decay=0.8):
    """tokens, mask [B,T] (True: trained on) -> loss, accuracy by step. Step i of slot t guesses token t+2+i."""
    B, T = tokens.shape
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    hidden, teacher = head.fc(head.features(out)), out.logits  # the teacher's logits at t+1+i
    keys, values, causal, same = [], [], torch.ones(T, T, dtype=torch.bool).tril(), torch.eye(T, dtype=torch.bool)

    def attend(q, k, v):
        keys.append(k), values.append(v)
        visible = torch.cat([causal] + [same] * (len(keys) - 1), 1).expand(B, T, -1)
        return softmax_attention(q, torch.cat(keys, 1), torch.cat(values, 1), visible)

    loss, accuracy = 0.0, []
    for i in range(K):
        positions = torch.arange(T)[None] + i
        hidden, logits = head.step(model.get_input_embeddings(), hidden, shift(tokens, 1 + i), positions, attend)
        trained = torch.stack([shift(mask, 1 + j) for j in range(i + 2)]).all(0)
        guesses, wanted = logits[trained], shift(teacher, 1 + i)[trained]
        right = head.draft_ids[guesses.argmax(-1)] == wanted.argmax(-1)
        counted = head.t2d[wanted.argmax(-1)]  # what the head cannot say teaches it nothing
        loss = loss + decay**i * F.cross_entropy(guesses[counted], wanted[counted][:, head.draft_ids].softmax(-1))
        accuracy.append(right.float().mean().item())
    return loss, accuracy


# ---- The draft tree (EAGLE-2): node 0 is the root, parents[i] < i


class Tree(NamedTuple):
    tokens: torch.Tensor   # [N]
    parents: torch.Tensor  # [N]


def ancestors(parents):
    """[N] -> [N,N]: node i sees node j if j is i, or above it. As an attention mask this is tree attention."""
    see = torch.eye(len(parents), dtype=torch.bool)
    for i in range(1, len(parents)):
        see[i] |= see[parents[i]]
    return see


def grow(step, draft_ids, root, hidden, logits, steps, topk, nodes):
    """Expand the topk best nodes, level by level; keep the best of all candidates, by the sum of log-probabilities.
    hidden [C], logits [Vd]: at the root. step(hidden [n,C], tokens [n], see [n, nodes so far], depth) runs the head."""
    tokens, parents, scores, frontier = [root], [0], [0.0], []

    def add(node, log_p):
        """The topk guesses after a node; returns their numbers."""
        best = log_p.topk(topk)
        for value, index in zip(best.values.tolist(), best.indices.tolist()):
            tokens.append(int(draft_ids[index])), parents.append(node), scores.append(scores[node] + value)
        return range(len(tokens) - topk, len(tokens))

    frontier = list(add(0, logits.log_softmax(-1)))
    hidden, see = hidden.expand(topk, -1), torch.zeros(topk, 0, dtype=torch.bool)
    for depth in range(1, steps):
        see = torch.cat([see, torch.eye(topk, dtype=torch.bool)], 1)
        hidden, logits = step(hidden, torch.tensor([tokens[n] for n in frontier]), see, depth)
        new = [(child, row) for row, node in enumerate(frontier) for child in add(node, logits[row].log_softmax(-1))]
        best = sorted(new, key=lambda pair: -scores[pair[0]])[:topk]
        frontier, rows = [child for child, _ in best], [row for _, row in best]
        hidden, see = hidden[rows], see[rows]
    kept = [0] + sorted(sorted(range(1, len(tokens)), key=lambda n: -scores[n])[:nodes - 1])
    number = {n: i for i, n in enumerate(kept)}
    return Tree(torch.tensor([tokens[n] for n in kept]), torch.tensor([number[parents[n]] for n in kept]))


def accept(tree, chosen):
    """chosen [N]: the target's token after each node -> the nodes of the path that it agrees with, the root first."""
    path = [0]
    while True:
        agreed = (tree.parents == path[-1]) & (tree.tokens == chosen[path[-1]])
        agreed[0] = False
        if not agreed.any():
            return path
        path.append(int(agreed.nonzero()[0]))


@torch.no_grad()
def decode(model, head, prompt, max_new, steps=4, topk=3, nodes=10):
    """prompt: token ids -> the ids that greedy decoding gives, and how many of them each pass of the model gave."""
    from transformers import DynamicCache
    past, embed = DynamicCache(), model.get_input_embeddings()
    keys, values = [], []  # the head's cache, of true slots

    def target(tokens, **how):
        out = model(tokens, past_key_values=past, output_hidden_states=True, **how)
        return out.logits[0].argmax(-1), head.features(out)

    def extend(features, tokens, start):
        """Give the head true slots: the target's features, and the tokens that follow them."""
        positions = start + torch.arange(len(tokens))

        def attend(q, k, v):
            keys.append(k), values.append(v)
            visible = torch.arange(start + len(tokens)) <= positions[:, None]
            return softmax_attention(q, torch.cat(keys, 1), torch.cat(values, 1), visible[None])

        hidden, logits = head.step(embed, head.fc(features), tokens[None], positions[None], attend)
        return hidden[0, -1], logits[0, -1]

    chosen, features = target(torch.tensor([prompt]))
    out, length, rounds = [int(chosen[-1])], len(prompt), 0  # length: of both caches; out[-1] is the root, in neither
    hidden, logits = extend(features, torch.tensor(prompt[1:] + out), 0)
    while len(out) < max_new:
        guessed_keys, guessed_values = [], []

        def step(hidden, tokens, see, depth):
            def attend(q, k, v):
                guessed_keys.append(k), guessed_values.append(v)
                k, v = torch.cat(keys + guessed_keys, 1), torch.cat(values + guessed_values, 1)
                past_slots = torch.ones(len(tokens), length, dtype=torch.bool)
                return softmax_attention(q, k, v, torch.cat([past_slots, see], 1)[None])

            positions = torch.full((1, len(tokens)), length + depth - 1)
            hidden, logits = head.step(embed, hidden[None], tokens[None], positions, attend)
            return hidden[0], logits[0]

        tree = grow(step, head.draft_ids, out[-1], hidden, logits, steps, topk, nodes)  # draft
        see = ancestors(tree.parents)
        visible = torch.cat([torch.ones(len(see), length, dtype=torch.bool), see], 1)[None, None]
        mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
        positions = length + see.sum(-1) - 1
        chosen, features = target(tree.tokens[None], position_ids=positions[None], attention_mask=mask)  # verify
        path = accept(tree, chosen)  # accept
        emitted = chosen[path]  # the accepted guesses, then the target's own bonus token
        kept = [*range(length), *(length + n for n in path)]
        for layer in past.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        hidden, logits = extend(features[:, path], emitted, length)  # the head's slots anew, from true features
        out, length, rounds = out + emitted.tolist(), length + len(path), rounds + 1
    return out[:max_new], (len(out) - 1) / max(1, rounds)


def main(folder, new=96, train_steps=150):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, L = AutoTokenizer.from_pretrained(folder), model.config.num_hidden_layers
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def main():", "Once upon a", "I am")]
    model.generation_config.eos_token_id = None  # write on behind the end of a text, as decode does
    texts = [model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0] for ids in prompts]
    head = DraftHead(model.config, (2, L // 2, L - 3), torch.cat(texts).unique())
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(train_steps):
        tokens = texts[step % len(texts)][None]
        loss, accuracy = ttt_loss(head, model, tokens, torch.ones_like(tokens, dtype=torch.bool), K=3)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        print(f"\rstep {step + 1}: loss {loss.item():.2f}, accuracy {accuracy[0]:.2f}", end="", flush=True)
    for ids, text in zip(prompts, texts):
        found, length = decode(model, head, ids, new)
        same = "the same text" if found == text[len(ids):].tolist() else "ANOTHER text"
        print(f"\n{tokenizer.decode(ids)!r}: {same}, {length:.2f} tokens a pass", end="")
    print()


if __name__ == "__main__":
    main(sys.argv[1])
