# MIT License, see LICENSE.
"""EAGLE-3 speculative decoding, training and serving, in one file of plain PyTorch.

A large *target* model writes text one token per forward pass. A small *draft head* guesses the next few tokens from the target's own
hidden states; the target then checks all the guesses in one pass and keeps the longest prefix that it would have written itself. The
text is exactly the target's, and each target forward yields several tokens instead of one.

    prompt --> target --------------------> next token (the root)
                 | hidden states at 3 boundaries          |
                 v                                        v
            features [B,T,A*C] --fc--> [B,T,C] --+   embed [B,T,C]
                 ^                               +--------+--> draft head --> tree of N tokens
                 |                                                               |
                 +------- one target forward verifies the whole tree <-----------+
                          the accepted path + 1 bonus token are emitted

Dimension key
    B batch rows   T tokens in this forward   S KV-cache columns   N tree nodes, the root included
    C hidden size  A captured boundaries (3)  H query heads        G KV heads   D head dim
    V target vocabulary   Vd draft vocabulary   K training-time-test steps   L target layers

Glossary
    boundary b         the residual stream after b decoder layers: 0 the embedding, L the last layer before the final norm;
                       transformers' hidden_states[b] for b < L
    features           the hidden states at a FeatureLayout's boundaries, concatenated in ascending order
    slot t             one input of the head: (features at t, token t+1); it predicts token t+2 and has rope position t
    target / draft     also called verifier / speculator
    round              draft, verify, accept, once
    root               the newest token: emitted already, not yet in the target's KV cache
    bonus token        the target's own token after the accepted path; every round emits it
    acceptance length  tokens emitted per target forward, the bonus token included: 1.0 means that nothing was accepted
    training-time test the head unrolled K steps on its own hidden states, as serving unrolls it (EAGLE-3, section 3.2)
    d2t, t2d           checkpoint names: d2t[i] is an OFFSET (target id = i + d2t[i]); t2d is a bool MASK over the target vocabulary

References: EAGLE-3 (Li, Wei, Zhang, Zhang, arXiv 2503.01840), EAGLE-2 (arXiv 2406.16858), official code github.com/SafeAILab/EAGLE.

Contents
    1. Feature layout
    2. Configs
    3. Parallel
    4. Transformer pieces
    5. Latent attention and experts
    6. Target
    7. Hidden-state hooks
    8. Draft head
    9. Training-time test
    10. Sampling
    11. Tree and acceptance
    12. Round
    13. Statistics and controller
    14. Engine
    15. Checkpoints
    16. Text
    17. Training rows
    18. Stored features
    19. Wiring check
    20. Scripts
"""
import base64
import hashlib
import itertools
import json
import math
import os
import pickle
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

__all__ = """FeatureLayout LayoutMismatch TargetConfig Target load_target capture_hidden_states DraftConfig DraftHead load_draft save_draft
ttt_loss SpecConfig Sampling DraftTree grow_tree accept Engine generate speculative_generate""".split()

# -----------------------------------------------------------------------------
# 1. Feature layout
# Which hidden states a head reads is a fact of the head. Three wrong ones are as wide as three right ones, so width proves nothing:
# every place where features change hands compares layouts by name, and no flag skips that. Needs nothing.


class LayoutMismatch(ValueError):
    """Two sides mean different hidden states by 'the features'."""


def config_value(config: dict, key: str, where: str = "config.json"):
    if config.get(key) is None:
        raise ValueError(f"{where} must state {key!r}: it is missing")
    return config[key]


@dataclass(frozen=True)
class FeatureLayout:
    """The boundaries whose hidden states are concatenated into features, and the target that they are boundaries of.

    FeatureLayout((0, 3, 31), hidden_size=7168, num_layers=61) prints as cat([embed, h.3, h.31]). Boundary b is the residual stream after
    b decoder layers. Raises ValueError unless boundaries are strictly ascending within 0..num_layers.
    """
    boundaries: tuple[int, ...]
    hidden_size: int
    num_layers: int

    def __post_init__(self):
        object.__setattr__(self, "boundaries", tuple(self.boundaries))  # lists compare unequal to tuples
        b, last = self.boundaries, self.num_layers
        if not b or any(x >= y for x, y in zip(b, b[1:])) or b[0] < 0 or b[-1] > last:
            raise ValueError(f"boundaries must be strictly ascending, from 0 (or embed) to {last} (the target's layers): got {list(b)}")

    @classmethod
    def default(cls, hidden_size: int, num_layers: int) -> "FeatureLayout":
        """The boundaries (2, L//2, L-3) that EAGLE, SGLang, vLLM and SpecForge capture by default (official: modeling_llama_kv.py)."""
        if num_layers < 7:
            raise ValueError(f"the default boundaries (2, L//2, L-3) need at least 7 layers, this target has {num_layers}: "
                             "name them with --layers")
        return cls((2, num_layers // 2, num_layers - 3), hidden_size, num_layers)

    @classmethod
    def parse(cls, text: str | None, hidden_size: int, num_layers: int) -> "FeatureLayout":
        """'embed,3,31' -> boundaries (0, 3, 31); None: the default ones."""
        if text is None:
            return cls.default(hidden_size, num_layers)
        parts = [part.strip() for part in text.split(",")]
        if not all(part == "embed" or part.isdecimal() for part in parts):
            raise ValueError(f"--layers must be boundaries such as 2,15,27 or embed,3,31: got {text!r}")
        return cls(tuple(0 if part == "embed" else int(part) for part in parts), hidden_size, num_layers)

    @classmethod
    def from_dict(cls, stored: dict) -> "FeatureLayout":
        return cls(*(config_value(stored, key, "feature_layout") for key in ("boundaries", "hidden_size", "num_layers")))

    def to_dict(self) -> dict:
        return {"boundaries": list(self.boundaries), "hidden_size": self.hidden_size, "num_layers": self.num_layers}

    @property
    def width(self) -> int:
        return len(self.boundaries) * self.hidden_size

    @property
    def flag(self) -> str:
        """The --layers text that states this layout."""
        return ",".join("embed" if b == 0 else str(b) for b in self.boundaries)

    @property
    def names(self) -> tuple[str, ...]:
        """The stored names, one tensor each: ('h.0', 'h.3', 'h.31')."""
        return tuple(f"h.{b}" for b in self.boundaries)

    @property
    def shown(self) -> list[str]:
        return ["embed" if b == 0 else f"h.{b}" for b in self.boundaries]

    def __str__(self) -> str:
        return f"cat([{', '.join(self.shown)}])"

    def pack(self, captures: dict[int, Tensor]) -> Tensor:
        """Captured hidden states {b: [..., C]} -> features [..., A*C]; raises LayoutMismatch if one is not there."""
        missing = [b for b in self.boundaries if b not in captures]
        if missing:
            raise LayoutMismatch(f"features {self} need boundaries {missing}, but only {sorted(captures)} were captured")
        return torch.cat([captures[b] for b in self.boundaries], dim=-1)

    def require(self, other: "FeatureLayout", ours: str, theirs: str) -> None:
        """Raise LayoutMismatch, with both sides and the way out, unless the two layouts are equal."""
        if self == other:
            return
        if (self.hidden_size, self.num_layers) != (other.hidden_size, other.num_layers):
            raise LayoutMismatch(
                f"feature layouts differ: {ours} is for a target of {self.num_layers} layers and hidden size {self.hidden_size}, {theirs} for "
                f"one of {other.num_layers} layers and hidden size {other.hidden_size}. Use the target that the head was trained for.")
        blocks = enumerate(itertools.zip_longest(self.shown, other.shown, fillvalue="nothing"))
        alike = f" (both are {self.width} wide, so nothing else would notice)" if self.width == other.width else ""
        raise LayoutMismatch(
            f"feature layouts differ: {ours} is {self}, {theirs} is {other}: "
            f"{', '.join(f'block {i} is {x} against {y}' for i, (x, y) in blocks if x != y)}{alike}. Use --layers {self.flag} to match {ours} "
            f"(or leave --layers out where the layout is carried), or train a head on {other.flag}.")

    def require_stored(self, names, where: str) -> None:
        """Raise LayoutMismatch unless every boundary that these features need is among the stored names."""
        missing = [name for name in self.names if name not in names]
        if missing:
            raise LayoutMismatch(f"{where} does not hold {', '.join(missing)}, which features {self} need; it holds "
                                 f"{', '.join(sorted(names))}. Extract again with --layers {self.flag}, or train on what is there.")


# -----------------------------------------------------------------------------
# 2. Configs
# What a config.json says in a way that this file does not implement is refused by name, and so are missing sizes; absent keys that
# transformers gives a default have that default here. Needs: 1.


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling, from either of the two spellings in use (rope_scaling, rope_parameters)."""
    theta: float
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0  # yarn, from here on
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    KINDS = {"default": ((), ()), "linear": (("factor",), ()),  # the keys that each needs, and may have
             "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
             "yarn": (("factor", "original_max_position_embeddings"),
                      ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"))}

    @classmethod
    def from_json(cls, config: dict) -> "RopeConfig":
        """Read config.json's rope; raises ValueError for an unknown type or key, or where the two spellings contradict each other."""
        spellings = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
        if any(spelling.get("partial_rotary_factor", 1.0) != 1.0 for spelling in (config, *filter(None, spellings))):
            raise ValueError("partial_rotary_factor other than 1.0 is not supported")
        found = [cls._read(spelling, config.get("rope_theta")) for spelling in filter(None, spellings)] or [cls._read({}, config.get("rope_theta"))]
        if found[0] != found[-1]:
            raise ValueError(f"config.json contradicts itself: rope_scaling says {found[0]}, rope_parameters says {found[1]}")
        return found[-1]

    @classmethod
    def _read(cls, spelling: dict, theta: float | None) -> "RopeConfig":
        own = {key: value for key, value in spelling.items() if value is not None and key != "partial_rotary_factor"}
        kinds, inner = [own.pop(key) for key in ("rope_type", "type") if key in own], own.pop("rope_theta", theta)
        if theta not in (None, inner):
            raise ValueError(f"config.json contradicts itself: rope_theta is {theta} and {inner}")
        kind = kinds[0] if kinds else "default"
        if kind not in cls.KINDS:
            raise ValueError(f"rope type {kind!r} is not supported (supported: {', '.join(cls.KINDS)})")
        needs, may_have = map(list, cls.KINDS[kind])
        if not set(needs) <= set(own) <= {*needs, *may_have}:
            raise ValueError(f"rope type {kind!r} takes {needs}, may have {may_have}: config.json has {sorted(own)}")
        return cls(float(10000.0 if inner is None else inner), kind, **own)  # 10000: transformers' default

    def to_json(self) -> dict:
        """Both spellings, for every reader."""
        own = {key: getattr(self, key) for keys in self.KINDS[self.kind] for key in keys if getattr(self, key) is not None}
        return {"rope_theta": self.theta, "rope_scaling": None if self.kind == "default" else {"rope_type": self.kind, **own},
                "rope_parameters": {"rope_type": self.kind, "rope_theta": self.theta, **own}}

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each rotated pair: [D/2], fp32 (as transformers computes them)."""
        frequencies = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        if self.kind == "llama3":  # long wavelengths are stretched by factor, short ones kept, those between interpolated
            turns = self.original_max_position_embeddings / (2 * math.pi / frequencies)  # within the original context
            smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
            frequencies = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        if self.kind == "yarn":  # the same, by the pair's index instead of its wavelength (arXiv 2309.00071)
            turning = lambda turns: (head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
                                     / (2 * math.log(self.theta)))  # the pair that turns so often within the original context
            low, high = turning(self.beta_fast), turning(self.beta_slow)
            low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
            low, high = max(low, 0), min(high, head_dim - 1)
            stretched = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)).clamp(0, 1)
            frequencies = frequencies / self.factor * stretched + frequencies * (1 - stretched)
        return frequencies

    def mscale_of(self, weight: float) -> float:
        """How much yarn sharpens attention over a stretched context."""
        return 0.1 * weight * math.log(self.factor) + 1 if self.kind == "yarn" and self.factor > 1 else 1.0

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)
        return self.mscale_of(1.0)


SIZES = {  # our field: its key in config.json; the same for targets and heads
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab_size": "vocab_size", "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings"}


def read_sizes(config: dict) -> dict:
    heads = config_value(config, "num_attention_heads")
    config = {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads,
              "head_dim": config.get("head_dim") or config_value(config, "hidden_size") // heads}
    return {field: config_value(config, key) for field, key in SIZES.items()}


def write_sizes(config: "TargetConfig | DraftConfig") -> dict:
    return {key: getattr(config, field) for field, key in SIZES.items()}


class LatentConfig(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): widths of what is cached for all heads, and of one head's parts."""
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts: in which layers, how many, and how the router scores and chooses them."""
    dense_layers: tuple[int, ...]  # those that have a plain MLP
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int = 0           # width of the MLP that every token passes as well
    scoring: str = "softmax"       # softmax | sigmoid, which has a bias for choosing
    is_normalised: bool = True     # the chosen weights sum up to
    scale: float = 1.0             # this
    num_groups: int = 1            # experts are chosen from the best
    groups_kept: int = 1           # of these groups


def read_latent(config: dict) -> LatentConfig:
    if not config.get("rope_interleave", True):
        raise ValueError("rope_interleave false is not supported")
    return LatentConfig(config.get("q_lora_rank"), *(config_value(config, key) for key in LatentConfig._fields[1:]))


def read_experts(config: dict, is_deepseek: bool) -> ExpertConfig:
    layers, value = config_value(config, "num_hidden_layers"), partial(config_value, config)
    if not is_deepseek:  # Qwen3-MoE
        every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        return ExpertConfig(
            dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % every),
            num_experts=config.get("num_experts") or value("num_local_experts"), experts_per_token=value("num_experts_per_tok"),
            intermediate_size=value("moe_intermediate_size"), is_normalised=bool(config.get("norm_topk_prob", False)))
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, only) != only:
            raise ValueError(f"{key} {config[key]!r} is not supported (only {only!r} is)")
    size = value("moe_intermediate_size")
    return ExpertConfig(
        dense_layers=tuple(range(value("first_k_dense_replace"))), num_experts=config.get("n_routed_experts") or value("num_local_experts"),
        experts_per_token=value("num_experts_per_tok"), intermediate_size=size, shared_size=size * (config.get("n_shared_experts") or 0),
        scoring="sigmoid", is_normalised=bool(config.get("norm_topk_prob", True)), scale=float(value("routed_scaling_factor")),
        num_groups=value("n_group"), groups_kept=value("topk_group"))


def read_quantization(config: dict) -> str | None:
    """None, "fp8" (blocks of 128 x 128) or "int4" (compressed-tensors, eight values a word, scales by 32); ValueError for any other."""
    stored = config.get("quantization_config")
    if not stored:
        return None
    if stored.get("quant_method") == "fp8" and list(stored.get("weight_block_size") or ()) == [128, 128]:
        return "fp8"
    weights = [group.get("weights") or {} for group in (stored.get("config_groups") or {}).values()]
    kept = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    if stored.get("format") == "pack-quantized" and weights and all(w.get(key) == value for w in weights for key, value in kept.items()):
        return "int4"
    short = {key: stored[key] for key in ("quant_method", "format", "bits", "weight_block_size") if key in stored}
    raise ValueError("these quantised weights are not supported (fp8 in blocks of 128 x 128 and pack-quantized int4 in groups of 32 are): "
                     f"{short} {weights}")


@dataclass(frozen=True)
class TargetConfig:
    """A target's facts, from a Hugging Face config.json (Llama, Qwen2/2.5, Qwen3, Qwen3-MoE, DeepSeek-V3, Kimi-K2 and the text of -K2.5)."""
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]  # the union of config.json's and generation_config.json's
    dtype: str                      # as stored, such as "bfloat16"
    latent: LatentConfig | None = None
    experts: ExpertConfig | None = None
    quantization: str | None = None  # see read_quantization

    DEEPSEEK = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
    ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *DEEPSEEK)

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads: got {self.num_heads} and {self.num_kv_heads}")
        if (self.latent.qk_rope_head_dim if self.latent else self.head_dim) % 2:
            raise ValueError(f"head_dim (with latent attention qk_rope_head_dim) must be even for rope: got {self.latent or self.head_dim}")
        e = self.experts
        if e and not (e.experts_per_token <= e.num_experts // e.num_groups * e.groups_kept and e.num_experts % e.num_groups == 0):
            raise ValueError(f"the router cannot choose so many experts: {e}")

    @classmethod
    def from_json(cls, config: dict, generation_config: dict | None = None) -> "TargetConfig":
        """Raises ValueError, naming it, for an architecture, activation, rope or attention that is not implemented here."""
        architecture = (config.get("architectures") or ["none stated"])[0]
        if architecture not in cls.ARCHITECTURES:
            raise ValueError(f"architecture {architecture!r} is not supported (supported: {', '.join(cls.ARCHITECTURES)})")
        text = config.get("text_config") or {}
        eos = [c.get("eos_token_id") for c in (config, text, generation_config or {})]
        config = {**config, **{key: value for key, value in text.items() if value is not None}}  # a text and vision model's text part
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"activation {config['hidden_act']!r} is not supported (only silu is)")
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("sliding-window attention is not supported: the config turns it on (use_sliding_window or layer_types)")
        eos_ids = sorted({i for e in eos if e is not None for i in (e if isinstance(e, list) else [e])})
        bias = bool(config.get("attention_bias", False))
        latent, experts = None, None
        if architecture in cls.DEEPSEEK:
            latent = read_latent(config)
            config["head_dim"] = latent.v_head_dim
        if architecture in (*cls.DEEPSEEK, "Qwen3MoeForCausalLM"):
            experts = read_experts(config, architecture in cls.DEEPSEEK)
        return cls(
            architecture=architecture, **read_sizes(config),
            num_layers=config_value(config, "num_hidden_layers"), rope=RopeConfig.from_json(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM", o_bias=bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=bool(config.get("mlp_bias", False)), qk_norm=architecture.startswith("Qwen3"),
            eos_token_ids=tuple(eos_ids), dtype=config.get("torch_dtype") or config.get("dtype") or "float32",
            latent=latent, experts=experts, quantization=read_quantization(config))

    @property
    def cached(self) -> tuple[int, int, int]:
        """What the KV cache holds of a token: heads, width of a key, width of a value (0: the keys' beginnings are the values)."""
        if self.latent:
            return 1, self.latent.kv_lora_rank + self.latent.qk_rope_head_dim, 0
        return self.num_kv_heads, self.head_dim, self.head_dim

    def to_json(self) -> dict:
        """A config.json that from_json and transformers read back; of a dense target."""
        if self.experts:
            raise ValueError(f"{self.architecture} is read, but not written")
        return {"architectures": [self.architecture], "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
                "hidden_act": "silu", **write_sizes(self), "num_hidden_layers": self.num_layers,
                "tie_word_embeddings": self.tie_word_embeddings, "attention_bias": self.o_bias, "mlp_bias": self.mlp_bias,
                "eos_token_id": list(self.eos_token_ids) or None, "torch_dtype": self.dtype, **self.rope.to_json()}


@dataclass(frozen=True)
class DraftConfig:
    """A draft head's facts. The flags are off in the official heads; EAGLE-3.1 and the speculators variants turn some on."""
    layout: FeatureLayout          # which hidden states of which target
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int                # the target's
    draft_vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig               # the head's own, always written out: as trained
    max_position_embeddings: int
    fc_norm: bool = False               # RMSNorm each boundary's features before fc
    norm_before_fc: bool = False        # RMSNorm the concatenated features before fc
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False           # feed back the normed hidden state instead of the raw one

    FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")

    def __post_init__(self):
        bad = [key for field, key in SIZES.items() if not getattr(self, field) > 0]
        if bad or self.head_dim % 2 or not self.rope.theta > 0:
            raise ValueError("a head needs an even head_dim, and sizes and a rope_theta above 0: got head_dim "
                             f"{self.head_dim}, rope_theta {self.rope.theta}" + (f", and not above 0 {', '.join(bad)}" if bad else ""))
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other: both norm the features before fc")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must be within 1..{self.vocab_size} (the target's vocabulary): got {self.draft_vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"the head's num_heads must be a multiple of num_kv_heads: got {self.num_heads} and {self.num_kv_heads}")

    @property
    def has_own_embedding(self) -> bool:
        """The target's is shared where it is as wide as the head."""
        return self.hidden_size != self.layout.hidden_size

    @classmethod
    def parse_changes(cls, text: str) -> dict:
        """What of a default head is to be otherwise, by config.json's names: 'head_dim=128,rope_theta=1e6,fc_norm=true'. ValueError by name."""
        sizes, changes = {key: field for field, key in SIZES.items() if field != "vocab_size"}, {}
        for part in text.split(","):
            key, _, value = part.strip().partition("=")
            try:
                if key in cls.FLAGS:
                    changes[key] = {"true": True, "false": False}[value.lower()]
                elif key == "rope_theta":
                    changes["rope"] = RopeConfig(float(value))
                else:
                    changes[sizes[key]] = float(value) if key == "rms_norm_eps" else int(value)
            except (KeyError, ValueError):
                raise ValueError(f"a head is described by name=value, of {', '.join([*sizes, 'rope_theta', *cls.FLAGS])}: got {part!r}") from None
        return changes

    @classmethod
    def for_target(cls, target: TargetConfig, layout: FeatureLayout, draft_vocab_size: int, **changes) -> "DraftConfig":
        """The default head for a target: its sizes and rope base, no rope scaling: a head's rope is its own."""
        layout.require(FeatureLayout(layout.boundaries, target.hidden_size, target.num_layers), "the head's layout", "the target's")
        sizes = {field: getattr(target, field) for field in SIZES}
        return cls(layout=layout, draft_vocab_size=draft_vocab_size, **{**sizes, "rope": RopeConfig(target.rope.theta), **changes})


@dataclass(frozen=True)
class SpecConfig:
    """How much to draft, in SGLang's meaning: num_draft_tokens counts the nodes that one target forward verifies, the root included.

    Raises ValueError for what cannot be; nothing is ever adjusted in silence.
    """
    num_steps: int         # depth of the tree: consecutive guesses
    topk: int              # children per node (1 = a chain)
    num_draft_tokens: int  # nodes verified, the root included

    def __post_init__(self):
        steps, topk, nodes = self.num_steps, self.topk, self.num_draft_tokens
        if min(steps, topk) < 1 or nodes < 2:
            raise ValueError(f"num_steps and topk must be at least 1 and num_draft_tokens at least 2 (root + one guess): got {self}")
        if topk == 1 and nodes != steps + 1:
            wide = next(k for k in range(2, nodes + 1) if k + (steps - 1) * k * k >= nodes - 1)
            raise ValueError(
                f"num_steps={steps}, topk=1, num_draft_tokens={nodes} contradict each other: with topk 1 the draft is a chain of {steps} "
                f"guess{'es' if steps > 1 else ''} and the root, {steps + 1} nodes. Either verify those: --num-draft-tokens {steps + 1}; "
                f"or draft a longer chain: --num-steps {nodes - 1}; or a tree: --draft-topk {wide} or more.")
        largest = topk + (steps - 1) * topk * topk
        if nodes - 1 > largest:
            raise ValueError(
                f"num_draft_tokens={nodes} asks for {nodes - 1} drafted nodes, but num_steps={steps} and topk={topk} draft at most {largest} "
                f"(topk + (num_steps-1) * topk^2): use --num-draft-tokens {largest + 1} or less, or more steps or topk")

    @property
    def ceiling(self) -> int:
        """The acceptance length of a perfect head."""
        return min(self.num_steps, self.num_draft_tokens - 1) + 1

    def __str__(self) -> str:
        return (f"num_steps={self.num_steps}, topk={self.topk}, num_draft_tokens={self.num_draft_tokens} "
                f"(ceiling {self.ceiling} tokens per target forward)")


# -----------------------------------------------------------------------------
# 3. Parallel
# Tensor parallelism. Every rank holds its part of each large weight and of the KV cache; activations are whole on all of them. All that
# ranks say to each other while they compute stands in this section. One rank runs the same code, and says nothing. Needs nothing.
#
#     weight                               split by                     then
#     embed_tokens                         rows (the vocabulary)        all_reduce
#     q_proj, k_proj, v_proj               rows (whole heads)           each rank attends with its own heads
#     gate_proj, up_proj                   rows                         each rank has its own part of the MLP's width
#     o_proj, down_proj                    columns                      all_reduce
#     every expert's three                 as the MLP's                 one all_reduce, the shared expert included
#     latent q_b_proj, kv_b_proj           rows (whole heads)           each rank attends with its own heads, to all of the cache
#     the target's lm_head                 rows (the vocabulary)        all_gather of each rank's best token; of logits if a row truncates
#     the head's fc, lm_head               rows                         all_gather
#     norms, d2t, t2d, router, latent a's  not at all
#
# Where there are fewer KV heads than ranks, several ranks hold the same one.


class Shard(NamedTuple):
    """Which part of a split model this process has: part `rank` of `size`."""
    rank: int = 0
    size: int = 1

    def count(self, whole: int) -> int:
        """Of so many things, how many are this rank's: at least one, which ranks share where there are fewer things than ranks."""
        return max(1, whole // self.size)

    def part(self, whole: int) -> slice:
        """Which ones."""
        return slice(start := self.rank * whole // self.size, start + self.count(whole))


class Split(NamedTuple):
    """How a weight is split: by dimension `dim`, `whole` long as stored, of which `part` is this rank's."""
    dim: int
    part: slice
    whole: int

    def among(self, length: int) -> slice:
        """The part of something that has `length` entries along that dimension, such as words of eight values. ValueError if it cuts one."""
        each = self.whole // length
        if self.part.start % each or self.part.stop % each:
            raise ValueError(f"quantised weights in pieces of {each} cannot be cut at {self.part.start}..{self.part.stop}: use fewer ranks")
        return slice(self.part.start // each, self.part.stop // each)


def all_reduce(x: Tensor, shard: Shard) -> Tensor:
    """The sum over ranks, on each of them."""
    if shard.size > 1:
        dist.all_reduce(x := x.clone())
    return x


def all_gather(x: Tensor, shard: Shard) -> Tensor:
    """[..., n] of each rank -> [..., size * n], in the order of ranks, on each of them."""
    if shard.size == 1:
        return x
    parts = x.new_empty(shard.size, *x.shape)
    dist.all_gather(list(parts.unbind()), x.contiguous())
    return parts.movedim(0, -2).flatten(-2)


def broadcast(x: Tensor, shard: Shard) -> Tensor:
    """Rank 0's x, on each of them: whatever a later forward depends on goes through here, so that ranks cannot part."""
    if shard.size > 1:
        dist.broadcast(x := x.contiguous(), 0)
    return x


def share(news, shard: Shard):
    """Rank 0's plain Python object, on each rank."""
    found = [news]
    if shard.size > 1:
        dist.broadcast_object_list(found, 0, device=torch.device("cpu"))
    return found[0]


def wait_for_all(shard: Shard) -> None:
    all_reduce(torch.zeros(1), shard)


def join_ranks() -> Shard:
    """Meet the other processes that torchrun started; one rank without it. Small decisions travel as CPU tensors, so that no GPU waits."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Shard()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    shard = Shard(dist.get_rank(), dist.get_world_size())
    wait_for_all(shard)  # who fails and leaves at once must not break another's joining
    return shard


def check_split(shard: Shard, what: str, sizes: dict[str, int], num_kv_heads: int) -> None:
    """Raises ValueError, with the numbers of ranks that would do, for a model that cannot be split over so many."""
    fits = lambda ranks: not any(n % ranks for n in sizes.values()) and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)
    if not fits(shard.size):
        stated = ", ".join(f"{name} {n}" for name, n in {**sizes, "num_key_value_heads": num_kv_heads}.items())
        raise ValueError(f"{what} cannot be split evenly over {shard.size} ranks ({stated}): use "
                         f"{' or '.join(str(n) for n in range(1, min(sizes.values()) + 1) if n <= 1024 and fits(n))} ranks")


# -----------------------------------------------------------------------------
# 4. Transformer pieces
# Shared by target and head, training and serving. A layer does not know where its keys and values live: it hands q, k, v to a context,
# and the three contexts (whole rows, KV cache, training-time test) are the only places that differ. Needs: 2, 3.


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision for norms, softmax and losses: fp32, or fp64 where the model is fp64."""
    return torch.promote_types(dtype, torch.float32)


def stored_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Of a module whose parameters will be in dtype; buffers (4-bit values and their scales) are as they are."""
    return sum(p.numel() * dtype.itemsize for p in module.parameters()) + sum(b.numel() * b.element_size() for b in module.buffers())


def gather_nodes(x: Tensor, index: Tensor) -> Tensor:
    """x [B,M,...], index [B,P] -> [B,P,...]."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


PACKED: dict[int, Tensor] = {}  # handle -> weights in the layout of PyTorch's CPU library: compiled code can hold a number, not these
# The bare function, since a hundred calls a forward feel every Python frame; None where PyTorch is built without that library.
run_packed = torch.ops.mkldnn._linear_pointwise.default._op if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None


def packed_linear(x: Tensor, handle: int, size: int, bias: Tensor | None) -> Tensor:
    return run_packed(x, PACKED[handle], bias, "none", [], "")


operators = torch.library.Library("eagle3", "DEF")  # one opaque node for the compiler
operators.define("packed_linear(Tensor x, int handle, int size, Tensor? bias) -> Tensor")
operators.impl("packed_linear", packed_linear, "CPU")
operators.impl("packed_linear", lambda x, handle, size, bias: x.new_empty(*x.shape[:-1], size), "Meta")


class Packed:
    """Several layers' weights [N_i,K], joined into one and packed for the CPU."""
    handles = itertools.count()

    def __init__(self):
        self.handle, self.version = next(self.handles), None

    def __del__(self):
        PACKED.pop(self.handle, None)

    def __reduce__(self):
        return type(None), ()  # a copy of a module starts unpacked

    def update(self, layers: "list[Linear]") -> None:
        """Pack the weights as they are now, unless that was done already."""
        version = [(p.data_ptr(), p._version) for layer in layers for p in layer.parameters()]
        if version != self.version:
            self.version, self.size = version, sum(layer.out_features for layer in layers)
            self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers]).detach()
            weight = torch.cat([layer.weight for layer in layers]).detach()
            PACKED[self.handle] = torch.ops.mkldnn._reorder_linear_weight(weight, None)


def joined_linear(x: Tensor, *layers: "Linear") -> tuple[Tensor, ...]:
    """x [...,K] through each layer [...,N_i]: as one product if pack() has joined exactly these, and nothing here is to be trained."""
    packed, size = layers[0].packed, sum(layer.out_features for layer in layers)
    if packed is None or packed.size != size or torch.is_grad_enabled() or x.dtype != layers[0].weight.dtype:
        return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)
    if x.numel() == x.shape[-1] and torch.compiler.is_compiling():  # one token: the compiler's own loops read the weights faster than the library
        wide = x.to(wide_dtype(x.dtype))
        outs = [(layer.weight.to(wide.dtype) * wide.flatten()).sum(-1) + (0 if layer.bias is None else layer.bias) for layer in layers]
        return tuple(out.to(x.dtype).view(*x.shape[:-1], -1) for out in outs)
    out = torch.ops.eagle3.packed_linear(x, packed.handle, packed.size, packed.bias)
    return out.split([layer.out_features for layer in layers], dim=-1)


class Linear(nn.Linear):
    """nn.Linear. pack() may have joined it with the layers next to it that read the same input."""
    packed: Packed | None = None  # on the first of the joined layers

    def forward(self, x: Tensor) -> Tensor:
        return joined_linear(x, self)[0]


class ColumnParallelLinear(Linear):
    """Output features split over ranks, in pieces of `unit` (a head) that stay whole: this rank's part of the result."""

    def __init__(self, in_features: int, out_features: int, bias: bool, shard: Shard, unit: int = 1):
        pieces = shard.part(out_features // unit)
        super().__init__(in_features, shard.count(out_features // unit) * unit, bias)
        self.split = Split(0, slice(pieces.start * unit, pieces.stop * unit), out_features)


class RowParallelLinear(Linear):
    """Input features split over ranks: each has its part of the input, and all get the whole result. The bias is rank 0's, the others hold 0."""

    def __init__(self, in_features: int, out_features: int, bias: bool, shard: Shard):
        super().__init__(in_features // shard.size, out_features, bias)
        self.shard, self.split = shard, Split(1, shard.part(in_features), in_features)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's summand."""
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self.partial(x), self.shard)


class VocabParallelEmbedding(nn.Embedding):
    """Rows split over ranks: each looks up its own tokens, the others' are zero."""

    def __init__(self, size: int, hidden_size: int, shard: Shard):
        super().__init__(size // shard.size, hidden_size)
        self.shard, self.split = shard, Split(0, shard.part(size), size)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.shard.size == 1:
            return super().forward(tokens)
        own = tokens - self.split.part.start
        absent = (own < 0) | (own >= self.num_embeddings)
        return all_reduce(super().forward(own.masked_fill(absent, 0)).masked_fill(absent[..., None], 0), self.shard)


def pack(module: nn.Module) -> None:
    """On a CPU, keep a second copy of every Linear's weight, joined with its neighbours' and packed, for forwards without gradients: half the
    time of a forward over a few tokens in bf16, a third in fp32 (the results are bitwise the same in bf16). Packs anew what has changed
    since; does nothing on other devices and for a dtype that this CPU cannot pack."""
    if run_packed is None:
        return
    supported = {torch.float32: lambda: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
                 torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported}
    for owner in module.modules():
        alone = {name: child for name, child in owner.named_children() if isinstance(child, Linear)}
        for layers in [[alone.pop(name) for name in names] for names in getattr(owner, "joined", ())] + [[layer] for layer in alone.values()]:
            weight = layers[0].weight
            if weight.device.type != "cpu" or weight.dtype not in supported or not supported[weight.dtype]():
                continue
            layers[0].packed = layers[0].packed or Packed()
            layers[0].packed.update(layers)


class Rope(NamedTuple):
    """cos and sin at each token's position, [B,T,1,D/2] in fp32: computed once per forward, so there is no table to outgrow."""
    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, config: RopeConfig) -> "Rope":  # [B,T], [D/2]
        assert frequencies.dtype in (torch.float32, torch.float64), "rope frequencies must be fp32: load in the wanted dtype, do not cast"
        angles = positions[..., None, None] * frequencies.float()
        return cls(angles.cos() * config.magnitude, angles.sin() * config.magnitude)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + D/2) of x [B,T,heads,D]: the two-halves convention of Hugging Face checkpoints."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Softmax attention with grouped KV heads: q [B,T,H,D], k [B,G,S,D], v [B,G,S,E], visible [B,T,S] bool -> [B,T,H,E].

    visible None means that query t sees keys 0..t (S == T); scale: default D ** -0.5. The query heads that share a KV head are laid side by
    side as its queries, so no key is copied. One token compiled for a CPU is written out in products and sums, which the compiler fuses into
    loops that read keys and values in place: half the time of the library's kernel.
    """
    B, T, H, D = q.shape
    G = k.shape[1]
    if visible is None and D != v.shape[-1] and B > 1:  # latent attention, for which no kernel saves the scores: row by row
        return torch.cat([attention(*(x[b:b + 1] for x in (q, k, v)), scale=scale) for b in range(B)])
    if visible is None:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=G != H, scale=scale).transpose(1, 2)
    q = q.view(B, T, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, H // G * T, D)
    if T == 1 and q.device.type == "cpu" and torch.compiler.is_compiling():
        wide = wide_dtype(q.dtype)
        scores = (q[..., None, :].to(wide) * k[:, :, None].to(wide)).sum(-1) * (scale or D ** -0.5)  # [B,G,H/G,S]
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        out = (weights[..., None] * v[:, :, None].to(wide)).sum(-2).to(v.dtype)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None].repeat(1, 1, H // G, 1), scale=scale)
    return out.view(B, G, H // G, T, -1).permute(0, 3, 1, 2, 4).reshape(B, T, H, -1)


class RowContext:
    """Whole rows, nothing cached: token t sees tokens 0..t. Right padding is never seen by what is left of it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:  # [B,T,H,D], [B,T,G,D], [B,T,G,E]
        return attention(q, k.transpose(1, 2), v.transpose(1, 2), scale=scale)


class KVCache:
    """Preallocated keys and values, one [B,G,S,D] tensor per layer (value_dim 0: values are the keys' beginnings). The caller keeps the
    lengths: columns behind them are free."""

    def __init__(self, num_layers: int, batch: int, num_heads: int, length: int, head_dim: int, dtype: torch.dtype, device="cpu", value_dim=None):
        new = lambda width: [torch.zeros(batch, num_heads, length, width, dtype=dtype, device=device) for _ in range(num_layers if width else 0)]
        self.keys, self.values = new(head_dim), new(head_dim if value_dim is None else value_dim)

    def rows(self, start: int, stop: int) -> "KVCache":
        """Some rows as a batch of their own, on the same memory."""
        view = object.__new__(KVCache)
        view.keys, view.values = [k[start:stop] for k in self.keys], [v[start:stop] for v in self.values]
        return view

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for cached in (*self.keys, *self.values):
            cached[[a, b]] = cached[[b, a]]

    def keep(self, lengths: Tensor, path: Tensor) -> None:
        """Move the columns lengths + path (accepted tree nodes, [B,P]) to lengths + 0..P-1, so that the row is dense again."""
        rows = torch.arange(len(path), device=path.device)[:, None]
        source = lengths[:, None] + path
        into = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        for cached in (*self.keys, *self.values):
            cached[rows, :, into] = cached[rows, :, source]


class CacheContext:
    """T new tokens behind each row's cached prefix.

    Row b's tokens see its columns 0..lengths[b]-1, and of the W columns behind those the ones that block [B,T,W] allows. They are written
    to W's columns offset..offset+T-1 (offset: a tensor of one integer, so that every level of a tree is the same compiled code). Without a
    block, token t sees the new tokens 0..t: a chain or a prefill. With a tree's ancestor mask this is tree attention.
    columns: arange over the columns to read, at least max(lengths) + W of them; a tensor, so that compiled code takes any number.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, num_tokens: int, columns: Tensor, block: Tensor | None = None,
                 offset: Tensor | None = None):
        self.cache, self.reach = cache, columns.shape[0]
        self.rows = torch.arange(len(lengths), device=lengths.device)[:, None]
        self.own = lengths[:, None] + torch.arange(num_tokens, device=lengths.device)  # [B,T] where these tokens go
        if block is None:
            self.visible = columns <= self.own[..., None]
        else:
            self.own = self.own if offset is None else self.own + offset
            within = (columns - lengths[:, None])[:, None].expand(-1, num_tokens, -1)  # [B,T,S]: column within the block
            width = block.shape[-1]
            self.visible = (within < 0) | (within < width) & block.gather(2, within.clamp(0, width - 1))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:  # [B,T,H,D], [B,T,G,D], [B,T,G,E]
        keys = self.cache.keys[layer]
        keys[self.rows, :, self.own] = k
        if self.cache.values:
            values = self.cache.values[layer]
            values[self.rows, :, self.own] = v
        else:
            values = keys[..., :v.shape[-1]]
        return attention(q, keys[:, :, :self.reach], values[:, :, :self.reach], self.visible, scale)


class Attention(nn.Module):
    """Projections, optional per-head q/k norm, rope; the context does the rest. in_size is C, or 2C in the draft head."""
    joined = (("q_proj", "k_proj", "v_proj"),)  # see pack

    def __init__(self, in_size: int, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, shard: Shard,
                 qkv_bias: bool = False, o_bias: bool = False, qk_norm_eps: float | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = ColumnParallelLinear(in_size, num_heads * head_dim, qkv_bias, shard, head_dim)
        self.k_proj, self.v_proj = (ColumnParallelLinear(in_size, num_kv_heads * head_dim, qkv_bias, shard, head_dim) for _ in range(2))
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, o_bias, shard)
        self.q_norm, self.k_norm = (nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rope: Rope, attend) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y.reshape(B, T, -1, self.head_dim) for y in joined_linear(x, self.q_proj, self.k_proj, self.v_proj))
        out = attend(rope.rotate(self.q_norm(q)), rope.rotate(self.k_norm(k)), v)
        return self.o_proj(out.reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU."""
    joined = (("gate_proj", "up_proj"),)  # see pack

    def __init__(self, hidden_size: int, intermediate_size: int, shard: Shard, bias: bool = False):
        super().__init__()
        self.gate_proj, self.up_proj = (ColumnParallelLinear(hidden_size, intermediate_size, bias, shard) for _ in range(2))
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, shard)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's summand."""
        gate, up = joined_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj.partial(F.silu(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self.partial(x), self.down_proj.shard)


# -----------------------------------------------------------------------------
# 5. Latent attention and experts
# What DeepSeek and Kimi (and, of experts, Qwen3-MoE) have in place of a layer's attention and MLP: a reader of Llama skips it. Needs: 2, 3, 4.


class LatentAttention(nn.Module):
    """Multi-head latent attention, absorbed: all heads attend to one latent [c, rope] per token, which is all that is cached. What would
    turn c into a head's keys is applied to its queries instead, what would turn it into values to its result. Names are Hugging Face's."""

    def __init__(self, config: TargetConfig, shard: Shard):
        super().__init__()
        self.latent = latent = config.latent
        query, C, H, bias = latent.qk_nope_head_dim + latent.qk_rope_head_dim, config.hidden_size, config.num_heads, config.o_bias
        norm = partial(RMSNorm, eps=1e-6)  # whatever rms_norm_eps is: so in the published code of DeepSeek and Kimi, and in transformers
        if latent.q_lora_rank:
            self.joined = (("q_a_proj", "kv_a_proj_with_mqa"),)  # see pack
            self.q_a_proj, self.q_a_layernorm = Linear(C, latent.q_lora_rank, bias), norm(latent.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(latent.q_lora_rank, H * query, False, shard, query)
        else:
            self.q_proj = ColumnParallelLinear(C, H * query, False, shard, query)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Linear(C, latent.kv_lora_rank + latent.qk_rope_head_dim, bias), norm(latent.kv_lora_rank)
        each = latent.qk_nope_head_dim + latent.v_head_dim
        heads = shard.part(H)
        self.kv_b_proj = nn.Linear(latent.kv_lora_rank, shard.count(H) * each, bias=False)  # not packed: only its weight is used
        self.kv_b_proj.split = Split(0, slice(heads.start * each, heads.stop * each), H * each)
        self.o_proj = RowParallelLinear(H * latent.v_head_dim, C, bias, shard)
        self.scale = query ** -0.5 * config.rope.mscale_of(config.rope.mscale_all_dim or 0.0) ** 2

    def forward(self, x: Tensor, rope: Rope, attend) -> Tensor:
        B, T, _ = x.shape
        _, rank, nope, rotated, width = self.latent
        if self.latent.q_lora_rank:
            q, kv = joined_linear(x, self.q_a_proj, self.kv_a_proj_with_mqa)
            q = self.q_b_proj(self.q_a_layernorm(q))
        else:
            q, kv = self.q_proj(x), self.kv_a_proj_with_mqa(x)
        to_key, to_value = self.kv_b_proj.weight.view(-1, nope + width, rank).split([nope, width], dim=1)  # [H,nope,rank], [H,width,rank]
        q, q_rope = q.view(B, T, -1, nope + rotated).split([nope, rotated], dim=-1)
        c, k_rope = kv[:, :, None].split([rank, rotated], dim=-1)  # [B,T,1,rank], [B,T,1,rotated]
        c = self.kv_a_layernorm(c)
        rotate = lambda y: rope.rotate(y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))  # pairs lie side by side here, not in two halves
        q = torch.cat([torch.einsum("bthd,hdc->bthc", q, to_key), rotate(q_rope)], dim=-1)
        out = attend(q, torch.cat([c, rotate(k_rope)], dim=-1), c, self.scale)  # [B,T,H,rank]
        return self.o_proj(torch.einsum("bthc,hdc->bthd", out, to_value).reshape(B, T, -1))


def unpack_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """Bytes [...,N,K/2] of two 4-bit values each (value + 8, the lower bits first) and scales [...,N,K/group] -> [...,N,K] in the scales'
    dtype. They are the bytes of the int32 words of the pack-quantized format of compressed-tensors."""
    values = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(scale.dtype) - 8
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


class ExpertLinear(nn.Module):
    """One projection of every expert: weight [E,N,K], or 4-bit values [E,N,K/2] with scales [E,N,K/32], as they are stored."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, split_dim: int, shard: Shard, is_packed: bool):
        super().__init__()
        sizes = [out_features, in_features]
        self.split = Split(split_dim, shard.part(sizes[split_dim]), sizes[split_dim])  # of each expert
        sizes[split_dim] //= shard.size
        self.num_experts, self.sizes = num_experts, sizes
        self.set_packed(is_packed)

    def set_packed(self, is_packed: bool) -> None:
        """Choose between the two forms, before loading; what was held is dropped."""
        new = partial(torch.zeros, device="meta" if any(x.is_meta for x in (*self.parameters(), *self.buffers())) else None)
        N, K = self.sizes
        self.weight = None if is_packed else nn.Parameter(new(self.num_experts, N, K))
        self.register_buffer("weight_packed", new(self.num_experts, N, K // 2, dtype=torch.uint8) if is_packed else None)
        self.register_buffer("weight_scale", new(self.num_experts, N, K // 32, dtype=torch.bfloat16) if is_packed else None)

    @property
    def is_packed(self) -> bool:
        return self.weight is None

    def of(self, expert: Tensor | int, dtype: torch.dtype) -> Tensor:
        """[...] -> the weights of these experts [...,N,K]."""
        return unpack_int4(self.weight_packed[expert], self.weight_scale[expert]).to(dtype) if self.is_packed else self.weight[expert]

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [P,K], each row through its own expert [P] -> [P,N]. Compiled, the loops read the stored weights in place."""
        wide = wide_dtype(x.dtype)
        if torch.compiler.is_compiling() and self.is_packed:  # unpack_int4, its even and odd columns apart
            scale = self.weight_scale[experts][..., None]
            packed = self.weight_packed[experts].unflatten(-1, (scale.shape[-2], -1))  # [P,N,groups,bytes]
            even, odd = x.to(wide).unflatten(-1, (*packed.shape[-2:], 2))[:, None].unbind(-1)
            weight = lambda values: ((values.to(scale.dtype) - 8) * scale).to(wide)
            return (weight(packed & 0xF) * even + weight(packed >> 4) * odd).sum((-2, -1)).to(x.dtype)
        if torch.compiler.is_compiling():
            return (self.weight[experts].to(wide) * x[:, None].to(wide)).sum(-1).to(x.dtype)
        return torch.bmm(self.of(experts, x.dtype), x[..., None])[..., 0]


class MixtureOfExperts(nn.Module):
    """Each token passes the few experts that the router chooses for it, weighted, and the shared expert if there is one."""

    few = 16  # (token, expert) pairs, up to which each reads its expert's weights; beyond, each expert's are read once

    def __init__(self, config: TargetConfig, shard: Shard):
        super().__init__()
        experts = config.experts
        self.config, self.shard = experts, shard
        E, C, I, is_packed = experts.num_experts, config.hidden_size, experts.intermediate_size, config.quantization == "int4"
        self.gate = nn.Linear(C, E, bias=False)
        if experts.scoring == "sigmoid":
            self.gate.register_buffer("e_score_correction_bias", torch.zeros(E))
        self.experts = nn.ModuleDict({name: ExpertLinear(E, *sizes, split_dim, shard, is_packed) for name, sizes, split_dim in (
            ("gate_proj", (C, I), 0), ("up_proj", (C, I), 0), ("down_proj", (I, C), 1))})
        self.shared_experts = MLP(C, experts.shared_size, shard) if experts.shared_size else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n,C] -> weights and ids [n,k] of each token's experts."""
        c, wide = self.config, wide_dtype(x.dtype)
        logits = F.linear(x.to(wide), self.gate.weight.to(wide))
        scores = logits.softmax(-1) if c.scoring == "softmax" else logits.sigmoid()
        ranked = scores if c.scoring == "softmax" else scores + self.gate.e_score_correction_bias
        if c.num_groups > 1:  # a group is as good as its two best
            groups = ranked.unflatten(-1, (c.num_groups, -1))
            kept = groups.topk(2).values.sum(-1).topk(c.groups_kept).indices
            dropped = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
            ranked = groups.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
        chosen = ranked.topk(c.experts_per_token).indices
        weights = scores.gather(-1, chosen)
        if c.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.scale, chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        gate, up, down = self.experts.values()
        if torch.compiler.is_compiling() or chosen.numel() <= self.few:
            each, ids = rows.repeat_interleave(chosen.shape[1], 0), chosen.flatten()
            out = down(F.silu(gate(each, ids)) * up(each, ids), ids).view(*chosen.shape, -1)
            out = (out * weights[..., None].to(out.dtype)).sum(1)
        else:
            out = torch.zeros_like(rows)
            for expert in chosen.unique().tolist():
                row, place = (chosen == expert).nonzero(as_tuple=True)
                own = rows[row]
                own = F.silu(F.linear(own, gate.of(expert, x.dtype))) * F.linear(own, up.of(expert, x.dtype))
                out.index_add_(0, row, F.linear(own, down.of(expert, x.dtype)) * weights[row, place, None].to(x.dtype))
        if self.shared_experts is not None:
            out = out + self.shared_experts.partial(rows)
        return all_reduce(out, self.shard).view_as(x)


# -----------------------------------------------------------------------------
# 6. Target
# The large model, reduced to what speculation needs: one forward that serves whole rows, prefill, a plain step and tree verification, and
# returns the captured boundaries itself, so that training and serving cannot capture differently. Needs: 2, 3, 4, 5.


class TargetLayer(nn.Module):
    def __init__(self, config: TargetConfig, index: int, shard: Shard):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, shard) if config.latent else Attention(
            config.hidden_size, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, shard,
            config.qkv_bias, config.o_bias, config.rms_norm_eps if config.qk_norm else None)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense = config.experts is None or index in config.experts.dense_layers
        self.mlp = MLP(config.hidden_size, config.intermediate_size, shard, config.mlp_bias) if is_dense else MixtureOfExperts(config, shard)

    def forward(self, x: Tensor, rope: Rope, attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class TargetOutput(NamedTuple):
    last: Tensor                 # [B,T,C] boundary L, before the final norm: Target.logits turns it into logits
    captures: dict[int, Tensor]  # boundary -> [B,T,C]


class Target(nn.Module):
    """A decoder of one of TargetConfig's families, or this rank's part of it. Parameter names are Hugging Face's, without the leading
    'model.', and with all experts in one. Raises ValueError where it cannot be split so."""

    def __init__(self, config: TargetConfig, shard: Shard = Shard()):
        super().__init__()
        sizes = {SIZES[name]: getattr(config, name) for name in ("num_heads", "intermediate_size", "vocab_size")}
        if config.experts and config.quantization == "int4":  # words and their groups stay whole
            sizes["groups of 32 of moe_intermediate_size"] = config.experts.intermediate_size // 32
        elif config.experts:
            sizes["moe_intermediate_size"] = config.experts.intermediate_size
        check_split(shard, "the target", sizes, config.cached[0])
        self.config, self.shard = config, shard
        self.fingerprint: dict | None = None  # set by load_target
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, shard)
        self.layers = nn.ModuleList(TargetLayer(config, index, shard) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, False, shard)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        rotated = config.latent.qk_rope_head_dim if config.latent else config.head_dim
        self.register_buffer("rope_frequencies", config.rope.frequencies(rotated), persistent=False)

    def forward(self, tokens: Tensor, context=None, positions: Tensor | None = None, boundaries: tuple[int, ...] = ()) -> TargetOutput:
        """tokens [B,T], positions [B,T] (default 0..T-1) -> the last hidden states, and those at the boundaries asked for."""
        context = context or RowContext()
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        rope = Rope.at(positions, self.rope_frequencies, self.config.rope)
        x, captures = self.embed_tokens(tokens), {}
        for index, layer in enumerate(self.layers):
            if index in boundaries:
                captures[index] = x
            x = layer(x, rope, partial(context.attend, index))
        if len(self.layers) in boundaries:
            captures[len(self.layers)] = x
        return TargetOutput(x, captures)

    def logits(self, last: Tensor, is_normed: bool = False) -> Tensor:
        """[..., C] -> [..., V]; is_normed: last is behind the final norm already."""
        return all_gather(self.lm_head(last if is_normed else self.norm(last)), self.shard)


@dataclass
class TargetEnds:
    """What a head needs of a target when the layers are someone else's (a transformers model): its two ends, and what it is."""
    config: TargetConfig
    embed_tokens: nn.Module
    norm: nn.Module
    lm_head: nn.Module
    fingerprint: dict | None = None

    def logits(self, last: Tensor, is_normed: bool = False) -> Tensor:
        return self.lm_head(last if is_normed else self.norm(last))


# -----------------------------------------------------------------------------
# 7. Hidden-state hooks
# For targets that are somebody else's nn.Module (a transformers model). Hooks registered on a compiled module capture nothing, in silence,
# so that is refused, and so is a boundary that was not captured exactly once per forward. Needs: 1.


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The one ModuleList of num_layers decoder layers in a model; raises ValueError when there is none, or more than one."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers
             and name.split(".")[-1] in ("layers", "h", "blocks")}
    if len(found) != 1:
        raise ValueError(f"the model must have exactly one list of {num_layers} decoder layers (named layers, h or blocks): "
                         f"found {list(found) or 'none'}")
    return next(iter(found.values()))


@contextmanager
def capture_hidden_states(model: nn.Module, layout: FeatureLayout):
    """Hook `model` and yield a dict {boundary: [B,T,C]}, refilled by every forward: the layout's boundaries and the teacher, boundary L.

        with capture_hidden_states(model, layout) as captures:
            model(tokens)
            features = layout.pack(captures)

    Eager only: raises ValueError on a compiled module. On exit the hooks are gone, and RuntimeError is raised if any boundary was not
    captured exactly once per forward.
    """
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ValueError(f"hooks on a compiled module capture nothing: {name or 'the model'} is compiled; pass the eager model")
    layers = decoder_layers(model, layout.num_layers)
    wanted = sorted({*layout.boundaries, layout.num_layers})
    captures, counts, forwards = {}, Counter(), 0

    def begin(module, args, kwargs):
        nonlocal forwards
        forwards += 1
        captures.clear()

    def keep(boundary: int, hidden: Tensor):
        if hidden.shape[-1] != layout.hidden_size:
            raise LayoutMismatch(f"boundary {boundary} is {hidden.shape[-1]} wide, the layout says hidden size {layout.hidden_size}")
        captures[boundary] = hidden.detach()
        counts[boundary] += 1

    def enter(boundary, module, args, kwargs):
        keep(boundary, args[0] if args else kwargs["hidden_states"])

    def leave(module, args, output):
        keep(layout.num_layers, output if isinstance(output, Tensor) else output[0])

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [layers[b].register_forward_pre_hook(partial(enter, b), with_kwargs=True) for b in wanted if b < layout.num_layers]
    hooks += [layers[-1].register_forward_hook(leave)]
    try:
        yield captures
    finally:
        for hook in hooks:
            hook.remove()
    wrong = {b: counts[b] for b in wanted if counts[b] != forwards}
    if wrong or not forwards:
        raise RuntimeError(f"each boundary must be captured exactly once per forward: {forwards} forwards of the model, "
                           f"captures by boundary {dict(counts)}; was the model compiled, or run through another module?")


# -----------------------------------------------------------------------------
# 8. Draft head
# One decoder layer that reads (hidden state, next token) and predicts the token after it. fuse() is for the target's features only, step()
# is the layer; the same two serve training, evaluation and serving. Needs: 1, 2, 3, 4.
# Official: eagle/model/cnets.py. The paper's figure has a second fully connected layer; code and checkpoints have none, nor do we.


class DraftLayer(nn.Module):
    """The official 'midlayer': attention reads [norm(embedding), norm(hidden)], 2C wide; the residual is the hidden state."""

    def __init__(self, config: DraftConfig, shard: Shard):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)      # of the hidden state
        self.self_attn = Attention(2 * config.hidden_size, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, shard)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, shard)

    def forward(self, embedding: Tensor, hidden: Tensor, rope: Rope, attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = (normed if self.norm_before_residual else hidden)
        x = x + self.self_attn(torch.cat([self.input_layernorm(embedding), normed], dim=-1), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftHead(nn.Module):
    """The EAGLE-3 draft head. Tensor names are the published checkpoints': fc, midlayer.*, norm, lm_head, d2t, t2d.

    draft_ids [Vd]: the target ids that the head can draft, ascending. The target's embedding is shared, not owned: attach() a target
    before use. A head whose hidden size is not the target's has an embedding of its own. With a shard this is a rank's part of the head,
    for serving; training has whole heads, and the ranks share the rows.
    """

    def __init__(self, config: DraftConfig, draft_ids: Tensor | None = None, shard: Shard = Shard()):
        super().__init__()
        self.config, self.shard = config, shard
        A, C, Ct = len(config.layout.boundaries), config.hidden_size, config.layout.hidden_size
        sizes = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size, "hidden_size": C,
                 "draft_vocab_size": config.draft_vocab_size, **({"vocab_size": config.vocab_size} if config.has_own_embedding else {})}
        check_split(shard, "the draft head", sizes, config.num_kv_heads)
        if config.has_own_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, C, shard)
        self.fc = ColumnParallelLinear(A * Ct, C, False, shard)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(Ct, config.rms_norm_eps) for _ in range(A))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(A * Ct, config.rms_norm_eps)
        self.midlayer = DraftLayer(config, shard)
        self.norm = RMSNorm(C, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(C, config.draft_vocab_size, False, shard)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))  # offsets: target id = i + d2t[i]
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))         # mask: this target id can be drafted
        self.register_buffer("rope_frequencies", config.rope.frequencies(config.head_dim), persistent=False)
        self.__dict__["target"] = None  # not a submodule: the head neither owns, moves nor saves the target
        if draft_ids is not None:
            self.set_draft_ids(draft_ids)

    def init_weights(self, seed: int) -> "DraftHead":
        """Random weights, N(0, 0.02), the same for the same seed; norms stay at one. The query heads begin near the keys that they share, so
        that every slot attends to itself first: a slot's token reaches the residual in no other way, and would else be one voice among T."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator))
        keys, queries = self.midlayer.self_attn.k_proj.weight.data, self.midlayer.self_attn.q_proj.weight.data  # [G*D,2C], [H*D,2C]
        keys.mul_(1.5)
        queries.unflatten(0, (self.config.num_kv_heads, -1, self.config.head_dim)).mul_(0.45).add_(keys.unflatten(0, (-1, 1, self.config.head_dim)))
        return self

    def set_draft_ids(self, draft_ids: Tensor) -> None:
        draft_ids = torch.as_tensor(draft_ids, dtype=torch.int64, device=self.d2t.device)
        ascending = len(draft_ids) == len(self.d2t) and bool((draft_ids[1:] > draft_ids[:-1]).all())
        if not ascending or draft_ids[0] < 0 or draft_ids[-1] >= len(self.t2d):
            raise ValueError(f"draft_ids must be {len(self.d2t)} strictly ascending target ids below {len(self.t2d)}")
        self.d2t.copy_(draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        self.t2d.zero_()[draft_ids] = True

    def attach(self, target: "Target | TargetEnds") -> "DraftHead":
        """Share the target's embedding. Raises LayoutMismatch or ValueError if the head was trained for another target."""
        config, layout = target.config, self.config.layout
        layout.require(FeatureLayout(layout.boundaries, config.hidden_size, config.num_layers), "the draft head's", "the target's")
        if config.vocab_size != self.config.vocab_size:
            raise ValueError(f"the head was trained for a vocabulary of {self.config.vocab_size}, the target has {config.vocab_size}")
        self.__dict__["target"] = target
        return self

    def draft_to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B,T,A*C] -> the head's input hidden states [B,T,C]. Never for the head's own hidden states."""
        features = features.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, features.chunk(len(self.fc_norm), -1))], dim=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return all_gather(self.fc(features), self.shard)

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, context) -> tuple[Tensor, Tensor]:
        """hidden [B,T,C] (fused features, or this method's own result), the tokens that follow them [B,T], slot positions [B,T].

        Returns (the hidden states to feed back, the normed ones that lm_head reads), [B,T,C] each.
        """
        embedding = self.embed_tokens(tokens) if self.config.has_own_embedding else self.target.embed_tokens(tokens).detach()  # that is frozen
        rope = Rope.at(positions, self.rope_frequencies, self.config.rope)
        hidden = self.midlayer(embedding.to(hidden.dtype), hidden, rope, partial(context.attend, 0))
        normed = self.norm(hidden)
        return normed if self.config.norm_output else hidden, normed

    def logits(self, normed: Tensor) -> Tensor:
        """step's second result [..., C] -> [..., Vd]."""
        return all_gather(self.lm_head(normed), self.shard)


def default_draft_vocab_size(vocab_size: int) -> int:
    """All of a small vocabulary, and of a larger one what keeps the head's lm_head small beside its layer."""
    return vocab_size if vocab_size <= 32000 else 8192 if vocab_size <= 65536 else 32000


def choose_draft_ids(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids by counts [V] (ties: the smaller id; unused ids fill up, smallest first), ascending: [size].

    size == V is the identity.
    """
    return counts.argsort(descending=True, stable=True)[:size].sort().values


# -----------------------------------------------------------------------------
# 9. Training-time test
# The head is trained as it is served: K steps on its own hidden states, each seeing what serving would show it (EAGLE-3, section 3.2).
# Everything stays unshifted; slot t at step i is given token t+1+i, guesses token t+2+i, and learns from the target's prediction at t+1+i.
#
#     tokens       x0 x1 x2 x3 x4 x5          slot 1, step 0: features f1, token x2, guesses x3; teacher: target at 2
#     slot 1       f1                         slot 1, step 1: own hidden,  token x3, guesses x4; teacher: target at 3
# Needs: 3, 4, 8.


def shift(x: Tensor, by: int) -> Tensor:
    """x [B,T,...] moved left by `by` positions, zeros (False) behind: shift(x, 1)[:, t] == x[:, t+1]. The only shift in this file."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], dim=1)


def assistant_spans(tokens: Tensor, loss_mask: Tensor, eos_token_ids) -> Tensor:
    """Number the assistant spans of each row: [B,T], 1, 2, ... inside a span, 0 outside.

    A span is a maximal run of True in loss_mask [B,T], cut after its first end-of-turn token.
    """
    starts = loss_mask & ~shift(loss_mask.flip(1), 1).flip(1)
    is_eos = torch.isin(tokens, torch.tensor(list(eos_token_ids), dtype=tokens.dtype, device=tokens.device)) & loss_mask
    eos_before = is_eos.cumsum(1) - is_eos.long()
    at_start = torch.where(starts, eos_before, 0).cummax(1).values  # how many had passed when the current run began
    return torch.where(loss_mask & (eos_before == at_start), starts.cumsum(1), 0)


def trained_slots(spans: Tensor, step: int) -> Tensor:
    """Which slots are trained at `step`: tokens t+1 .. t+2+step all lie in one span. [B,T] bool."""
    first, last = shift(spans, 1), shift(spans, 2 + step)
    return (first > 0) & (first == last)


class TTTAttention:
    """Attention of the unrolled head: step i's query at slot t sees step 0's keys at slots 0..t, and of each later step its own slot only.

    That is what serving's KV cache holds: true slots up to t, then the guesses of this very chain (paper, figure 6).
    """

    chunk = 512  # queries at once: longer rows are computed in parts, and again in the backward pass, so that no T x T tensor is kept

    def __init__(self):
        self.keys, self.values, self.slots = [], [], None

    def narrow(self, slots: Tensor) -> None:
        """From now on the queries are those of these slots only, [B,n]."""
        self.slots = slots

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B,n,H,D], [B,n,G,D], [B,n,G,D]
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return attention(q, k.transpose(1, 2), v.transpose(1, 2))
        if q.shape[1] <= self.chunk:
            return self._part(q, self.slots, self.keys, self.values)
        parts = zip(*(x.split(self.chunk, dim=1) for x in (q, self.slots, *self.keys[1:], *self.values[1:])))
        later = len(self.keys) - 1
        return torch.cat([checkpoint(self._part, part, slots, [self.keys[0], *own[:later]], [self.values[0], *own[later:]], use_reentrant=False)
                          for part, slots, *own in parts], dim=1)

    @staticmethod
    def _part(q: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The newest step's queries [B,n,H,D] at slots [B,n]; keys and values [B,T,G,D] of step 0, [B,n,G,D] of the later ones."""
        B, n, H, D = q.shape
        (first_k, *own_k), (first_v, *own_v) = keys, values
        T, G = first_k.shape[1:3]
        q = q.view(B, n, G, H // G, D)
        future = torch.arange(T, device=q.device) > slots[..., None]  # [B,n,T]
        row = q.permute(0, 2, 3, 1, 4).reshape(B, G, H // G * n, D) @ first_k.permute(0, 2, 3, 1)
        row = row.view(B, G, H // G, n, T).masked_fill(future[:, None, None], float("-inf"))
        own = torch.stack([torch.einsum("btgrd,btgd->bgrt", q, key) for key in own_k], dim=-1)
        scores = torch.cat([row, own], dim=-1).to(wide_dtype(q.dtype)) * D ** -0.5
        weights = scores.softmax(-1).to(first_v.dtype)
        out = (weights[..., :T].reshape(B, G, H // G * n, T) @ first_v.transpose(1, 2)).view(B, G, H // G, n, D)
        for i, value in enumerate(own_v):
            out = out + torch.einsum("bgrt,btgd->bgrtd", weights[..., T + i], value)
        return out.permute(0, 3, 1, 2, 4).reshape(B, n, H, D)


class TTTBatch(NamedTuple):
    """A batch ready for ttt_loss: no gradients, everything unshifted."""
    tokens: Tensor          # [B,T]
    spans: Tensor           # [B,T] assistant_spans
    trained: list[Tensor]   # [K] of [B,T] bool: trained_slots, from step 1 on thinned to the chain share; each within the one before
    features: Tensor        # [B,T,A*C]
    teacher_tokens: Tensor  # [B,T] the target's argmax over V at each position that a trained slot learns from (0 elsewhere)
    teacher_index: Tensor   # [B,T] that position's row in teacher_logits
    teacher_logits: Tensor  # [M,Vd] the target's logits over the draft vocabulary
    num_counted: Tensor     # [K] slots in the loss, by step: trained, and the target's argmax is in the draft vocabulary


@torch.no_grad()
def prepare_ttt(head: DraftHead, tokens: Tensor, loss_mask: Tensor, captures: dict[int | str, Tensor], ttt_steps: int,
                row_names: list[str] | None = None, chain_share: float = 1.0, seeds: list[int] | None = None) -> TTTBatch:
    """tokens and loss_mask [B,T] (right-padded, mask False there) and their captured hidden states -> a batch. The teacher is captures[L], or
    captures["normed"]: the same after the target's final norm, as some trainers store it. chain_share: of the slots, how many go on past step
    0, drawn by each row's seed; neighbouring slots teach nearly the same, so a part of them, and more rows instead, can be the better use of
    the time.

    Raises ValueError naming the rows in which no slot is trained, or whose hidden states are not finite.
    """
    names = row_names or [f"row {b} of the batch" for b in range(len(tokens))]
    for boundary, hidden in captures.items():
        bad = ~hidden.isfinite().flatten(1).all(1)
        if bad.any():
            raise ValueError(f"boundary {boundary} is not finite in {', '.join(names[b] for b in bad.nonzero().flatten())}")
    spans = assistant_spans(tokens, loss_mask, head.target.config.eos_token_ids)
    empty = ~trained_slots(spans, 0).any(1)
    if empty.any():
        raise ValueError(f"nothing is supervised in {', '.join(names[b] for b in empty.nonzero().flatten())}: a row needs an assistant "
                         "span of at least 2 tokens (is its loss_mask all false, or was the answer cut off?)")
    needed = (spans > 0) & (spans == shift(spans, 1))  # positions t+1+i that trained slots learn from
    needed[:, 0] = False
    teacher = captures["normed" if "normed" in captures else head.config.layout.num_layers][needed]  # [M,C]
    draft_ids = head.draft_to_target(torch.arange(len(head.d2t), device=tokens.device))
    found, draft_logits = [], []
    for part in teacher.split(512):  # [.,V] logits are large: a few at a time
        logits = head.target.logits(part, "normed" in captures)
        found.append(logits.max(-1).indices)  # argmax, a fifth of its time in bf16 on a CPU
        draft_logits.append(logits[:, draft_ids])
    teacher_tokens = torch.zeros_like(tokens).masked_scatter(needed, torch.cat(found))
    index = (needed.flatten().cumsum(0) - 1).view_as(needed).clamp(min=0)
    in_vocabulary = head.t2d[teacher_tokens]
    drawn = torch.ones_like(spans, dtype=torch.bool)
    if chain_share < 1:
        uniform = [torch.rand(tokens.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        drawn = torch.stack(uniform).to(tokens.device) < chain_share
    trained = [trained_slots(spans, i) & (drawn if i else True) for i in range(ttt_steps)]
    counted = [int((slots & shift(in_vocabulary, 1 + i)).sum()) for i, slots in enumerate(trained)]
    return TTTBatch(tokens, spans, trained, head.config.layout.pack(captures), teacher_tokens, index, torch.cat(draft_logits), torch.tensor(counted))


def ttt_weights(ttt_steps: int, num_counted: Tensor) -> Tensor:
    """What each counted slot weighs: 0.8^i / (number of step i's counted slots); 0 for a step that has none. [K]"""
    return torch.where(num_counted > 0, 0.8 ** torch.arange(ttt_steps, dtype=torch.float64) / num_counted.clamp(min=1), 0.0)


@dataclass
class TTTStats:
    """Sums over batches. Rates come out by division, so two of these can be added."""
    loss_sums: Tensor     # [K] summed losses of the counted slots
    num_counted: Tensor   # [K]
    num_trained: Tensor   # [K] slots in the accuracy: trained, whether or not the draft vocabulary has the token
    num_correct: Tensor   # [K]
    emitted: int          # simulated serving
    rounds: int

    @classmethod
    def zeros(cls, ttt_steps: int) -> "TTTStats":
        count = torch.zeros(ttt_steps, dtype=torch.int64)
        return cls(count.double(), count, count, count, 0, 0)

    def summed(self, shard: Shard) -> "TTTStats":
        """Over all ranks."""
        K, values = len(self.loss_sums), [getattr(self, f.name) for f in fields(self)]
        total = all_reduce(torch.cat([torch.as_tensor(value).double().flatten() for value in values]), shard)
        return TTTStats(total[:K], *total[K:4 * K].long().chunk(3), *total[4 * K:].long().tolist())

    def __add__(self, other: "TTTStats") -> "TTTStats":
        return TTTStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def loss(self) -> float:
        return ttt_weights(len(self.loss_sums), self.num_counted).mul(self.loss_sums).sum().item()

    @property
    def accuracy(self) -> list[float]:
        """By step, unconditional, over the full vocabulary: a token that the head cannot draft counts as wrong."""
        return (self.num_correct / self.num_trained.clamp(min=1)).tolist()

    @property
    def simulated_acceptance_length(self) -> float | None:
        """None where nothing could be simulated: no rounds, or a chain share below 1."""
        return self.emitted / self.rounds if self.rounds else None


def simulate_serving(correct: Tensor, tokens: Tensor, spans: Tensor, eos_token_ids) -> tuple[int, int]:
    """(tokens emitted, rounds) if serving drafted K tokens a round along these rows; correct [B,T,K]: slot t's guess at step i is right.

    Comparable with serving only on rows that the target wrote itself at temperature 0. Left out, as in serving: the prefill's token, and a
    last round that the row's end cut short (a span that does not end in an end-of-turn token).
    """
    runs = correct.long().cumprod(-1).sum(-1).tolist()  # [B,T] right guesses in a row
    emitted = rounds = 0
    for row_runs, row_tokens, row_spans in zip(runs, tokens.tolist(), spans.tolist()):
        a = 0
        while a < len(row_spans):
            if row_spans[a] == 0:
                a += 1
                continue
            end = a
            while end + 1 < len(row_spans) and row_spans[end + 1] == row_spans[a]:
                end += 1
            t = max(a - 1, 0)  # a row that starts with its span: the first token needs no features, so serving begins at slot 0
            while t + 2 <= end:
                left = end - t - 1
                would_emit = row_runs[t] + 1
                if would_emit <= left or row_tokens[end] in eos_token_ids:
                    emitted, rounds = emitted + min(would_emit, left), rounds + 1
                t += would_emit
            a = end + 1
    return emitted, rounds


class SlotLoss(torch.autograd.Function):
    """Soft cross-entropy of the head's logits against the target's, summed with a weight per slot.

    The gradients are made on the way, `at_once` slots at a time, while their logits are there: no logits are kept, and none made twice.
    """
    at_once = 256

    @staticmethod
    def forward(ctx, normed: Tensor, lm_head: Tensor, weights: Tensor, teacher_logits: Tensor, teacher_index: Tensor, learn: bool):
        """normed [n,C], lm_head [Vd,C], weights [n], teacher_logits [M,Vd], teacher_index [n], learn: whether there is to be a backward ->
        weighted sum, losses [n], guesses [n] (draft ids)."""
        wide = wide_dtype(normed.dtype)
        losses, guesses, product_dtype = [], [], F.linear(normed[:0], lm_head).dtype  # autocast's, if it is on
        if learn:
            normed_grad, head_grad, cast = torch.empty_like(normed), torch.zeros_like(lm_head, dtype=wide), lm_head.to(product_dtype)
        for start in range(0, len(normed), SlotLoss.at_once):
            part = slice(start, start + SlotLoss.at_once)
            logits = F.linear(normed[part], lm_head)
            log_q = logits.to(wide).log_softmax(-1)
            p = teacher_logits[teacher_index[part]].to(wide).softmax(-1)
            guesses.append(logits.max(-1).indices)
            losses.append(-(p * log_q).sum(-1))
            if learn:
                grad = log_q.exp_().sub_(p).mul_(weights[part, None].to(wide)).to(product_dtype)
                normed_grad[part] = grad @ cast
                head_grad += grad.T @ normed[part].to(product_dtype)
        if learn:
            ctx.save_for_backward(normed_grad, head_grad)
        losses, guesses = torch.cat(losses), torch.cat(guesses)
        ctx.mark_non_differentiable(losses, guesses)
        return (losses * weights).sum(), losses, guesses

    @staticmethod
    def backward(ctx, grad, *_):
        normed_grad, head_grad = ctx.saved_tensors
        return grad * normed_grad, grad * head_grad, None, None, None, None


def unroll(head: DraftHead, features: Tensor, tokens: Tensor, chain_slots: Tensor, ttt_steps: int) -> list[Tensor]:
    """features [B,T,A*C], tokens [B,T] -> what lm_head reads at every step: at every slot for step 0, [B,T,C], since later steps see its
    keys; at chain_slots [B,n] for the later ones, [B,n,C]."""
    B, T = tokens.shape
    slots, context = torch.arange(T, device=tokens.device)[None].expand(B, T), TTTAttention()
    hidden, outputs = head.fuse(features), []
    for i in range(ttt_steps):
        if i == 1:
            slots, hidden = chain_slots, gather_nodes(hidden, chain_slots)
            context.narrow(slots)
        hidden, normed = head.step(hidden, shift(tokens, 1 + i).gather(1, slots), slots + i, context)
        outputs.append(normed)
    return outputs


def ttt_loss(head: DraftHead, batch: TTTBatch, num_counted: Tensor | None = None) -> tuple[Tensor, TTTStats]:
    """The loss to back-propagate, sum over steps of 0.8^i x (soft cross-entropy summed over counted slots / their number), and statistics.

    num_counted [K]: the counts over everything that shares this optimizer step (ranks, accumulated batches); default: this batch's own.
    Gradients flow through all steps' hidden states, keys and values, as in the official code. K is len(batch.num_counted).
    """
    if head.shard.size > 1 and torch.is_grad_enabled():
        raise ValueError("a split head cannot be trained: training has whole heads, and the ranks share the rows")
    K = len(batch.num_counted)
    B, T = batch.tokens.shape
    weights = ttt_weights(K, batch.num_counted if num_counted is None else num_counted)
    in_vocabulary = head.t2d[batch.teacher_tokens]
    trained = batch.trained
    chains = trained[min(1, K - 1)]
    longest = max(1, int(chains.sum(1).max()))
    chain_slots = (~chains).long().argsort(dim=1, stable=True)[:, :longest]  # [B,n] the slots in `chains`, then others, which stay untrained
    outputs, counted, slot_weights, teacher_index = [], [], [], []
    for i, normed in enumerate(unroll(head, batch.features, batch.tokens, chain_slots, K)):
        outputs.append(normed[trained[i].gather(1, chain_slots) if i else trained[i]])
        counted.append(shift(in_vocabulary, 1 + i)[trained[i]])
        slot_weights.append(counted[i] * weights[i].to(batch.tokens.device))
        teacher_index.append(shift(batch.teacher_index, 1 + i)[trained[i]])
    sizes = [len(x) for x in outputs]
    lm_head = all_gather(head.lm_head.weight.T, head.shard).T
    loss, losses, guesses = SlotLoss.apply(torch.cat(outputs), lm_head, torch.cat(slot_weights), batch.teacher_logits,
                                           torch.cat(teacher_index), torch.is_grad_enabled())
    correct, sums = torch.zeros(B, T, K, dtype=torch.bool, device=batch.tokens.device), []
    for i, (found, at_slots) in enumerate(zip(head.draft_to_target(guesses).split(sizes), losses.split(sizes))):
        right = found == shift(batch.teacher_tokens, 1 + i)[trained[i]]
        correct[..., i] = torch.zeros_like(trained[i]).masked_scatter(trained[i], right)
        sums.append(at_slots[counted[i]].sum())
    everywhere = torch.equal(chains, trained_slots(batch.spans, min(1, K - 1)))  # a thinned batch cannot say what serving would get
    emitted, rounds = simulate_serving(correct, batch.tokens, batch.spans, head.target.config.eos_token_ids) if everywhere else (0, 0)
    return loss, TTTStats(torch.stack(sums).double().cpu(), batch.num_counted, torch.tensor(sizes), correct.sum((0, 1)).cpu(), emitted, rounds)


# -----------------------------------------------------------------------------
# 10. Sampling
# One rule for every temperature: the target's token is argmax(processed log-probabilities + noise(seed, position, token)). The noise is a
# stateless function, so it does not matter when, where or beside whom a position is computed: sampled speculation gives, token for token,
# the text that sampled plain decoding gives with the same seed, whatever the draft. Needs: 3.
# Gumbel coupling: Daliri, Musco, Suresh, arXiv 2408.07978; several drafts: Rowan, Phan, Khisti, arXiv 2506.05632. Sharing the noise with
# the draft is sound because a guess is accepted if and only if it equals the target's token, never by comparing probabilities.


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen: temperature, then top-k, top-p and min-p (each on what the one before left). Off by default."""
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0            # keep the k most likely (0: all)
    top_p: float = 1.0        # keep the most likely that together reach p
    min_p: float = 0.0        # keep those at least min_p times as likely as the most likely
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"sampling needs temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1: got {self}")
        if not -2**63 <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits: got {self.seed}")

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class BatchSampling(NamedTuple):
    """The Sampling of each row, [B] tensors, and what there is to compute at all."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    is_greedy: bool
    truncates: bool
    width: int  # truncation looks at so many of the most likely tokens; 0: all, since a row truncates without a top-k

    @classmethod
    def of(cls, settings: list[Sampling], device) -> "BatchSampling":
        column = lambda name, dtype: torch.tensor([getattr(s, name) for s in settings], dtype=dtype, device=device)
        new = cls(column("temperature", torch.float64), column("top_k", torch.int64), column("top_p", torch.float64),
                  column("min_p", torch.float64), column("seed", torch.int64), True, False, 0)
        return new.with_settings(settings)

    def with_settings(self, settings: list[Sampling]) -> "BatchSampling":
        """The same tensors, where these are the rows that matter."""
        limits = [s.top_k for s in settings if s.truncates]
        return self._replace(is_greedy=all(s.temperature == 0 for s in settings), truncates=bool(limits),
                             width=max(limits) if limits and min(limits) > 0 else 0)

    def rows(self, start: int, stop: int) -> "BatchSampling":
        """Some rows, on the same memory."""
        return BatchSampling(*(x[start:stop] for x in self[:5]), *self[5:])

    def swap(self, a: int, b: int) -> None:
        for x in self[:5]:
            x[[a, b]] = x[[b, a]]

    def set(self, row: int, sampling: Sampling) -> None:
        for name, x in zip(self._fields, self[:5]):
            x[row] = getattr(sampling, name)


def mix_bits(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (products wrap around): every input bit flips about half of the output bits."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & (2**33 - 1))


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token): seeds [B], positions [B,N], token_ids [V] -> [B,N,V], fp64.

    fp64 because a uniform in fp32 rounds to 1 once in some hundred vocabularies, and gives an infinite junk token. Any shard of the
    vocabulary gets its own ids' noise without the others'.
    """
    stream = mix_bits(mix_bits(seeds)[:, None] + positions * -0x61C8864680B583EB)  # the odd constant nearest to 2^64 / golden ratio
    bits = mix_bits(stream[..., None] + token_ids * -0x61C8864680B583EB)
    uniform = (((bits >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52  # within (0, 1), both ends excluded
    return -(-uniform.log()).log()


def temper(logits: Tensor, sampling: BatchSampling) -> Tensor:
    """[B,N,V] logits / temperature in fp64; rows at temperature 0 keep their logits."""
    temperature = sampling.temperature[:, None, None]
    return logits.double() / torch.where(temperature > 0, temperature, 1.0)


def row_noise(positions: Tensor, token_ids: Tensor, sampling: BatchSampling) -> Tensor:
    """[B,N] positions -> [B,N,V] noise; none for rows at temperature 0."""
    return torch.where(sampling.temperature[:, None, None] > 0, gumbel_noise(sampling.seed, positions, token_ids), 0.0)


def truncate(scaled: Tensor, sampling: BatchSampling) -> Tensor:
    """Tempered logits [B,N,V], -inf where top-k, top-p or min-p cut. The most likely token always stays, and so does whatever is exactly
    as likely as the last one that stays."""
    top_k, top_p, min_p = (x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    ordered = scaled.topk(min(sampling.width or scaled.shape[-1], scaled.shape[-1])).values  # descending
    rank = torch.arange(ordered.shape[-1], device=scaled.device)
    keep = (top_k == 0) | (rank < top_k)
    probs = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
    keep = keep & ((probs.cumsum(-1) - probs < top_p) | (top_p == 1)) & (probs >= min_p * probs[..., :1]) | (rank == 0)
    least = ordered.masked_fill(~keep, float("inf")).amin(-1, keepdim=True)
    free = (top_k == 0) & (top_p == 1) & (min_p == 0)  # beside rows that truncate: keeps all, even beyond `width`
    return scaled.masked_fill((scaled < least) & ~free, float("-inf"))


def token_scores(logits: Tensor, positions: Tensor, sampling: BatchSampling, first: int = 0) -> Tensor:
    """What the target's choice is the argmax of, by token from id `first` on: [B,N,V]. positions [B,N]: of the token that is chosen, not of
    the one before it."""
    if sampling.is_greedy:
        return logits
    scaled = temper(logits, sampling)
    scaled = truncate(scaled, sampling) if sampling.truncates else scaled
    return scaled + row_noise(positions, first + torch.arange(logits.shape[-1], device=logits.device), sampling)


def choose_tokens(own_logits: Tensor, positions: Tensor, sampling: BatchSampling, shard: Shard = Shard()) -> tuple[Tensor, Tensor]:
    """The target's tokens [B,N] at these positions (of the tokens chosen), and their scores: not finite where the logits are not.
    own_logits [B,N,V / ranks]. The noise is known everywhere, so ranks exchange only their best; logits, where a row truncates."""
    if sampling.truncates:
        own_logits, shard = all_gather(own_logits, shard), Shard()
    first = shard.rank * own_logits.shape[-1]
    score, token = token_scores(own_logits, positions, sampling, first).max(-1)  # argmax, a fifth of its time in bf16 on a CPU
    if shard.size == 1:
        return token, score
    scores, tokens = all_gather(torch.stack([score.double(), (first + token).double()])[..., None], shard)  # [B,N,ranks] each
    winner = scores.max(-1, keepdim=True).indices  # ties: the first rank, as within one rank the first token
    return tokens.gather(-1, winner)[..., 0].long(), scores.gather(-1, winner)[..., 0]


# -----------------------------------------------------------------------------
# 11. Tree and acceptance
# The guesses of one round. A chain is the tree with topk 1. `parents` is the only representation: depths, mask and paths follow from it,
# on the device. Needs: 2, 4, 10.


class DraftTree(NamedTuple):
    """N nodes a row; node 0 is the root (its own parent), and every parent stands before its children."""
    tokens: Tensor   # [B,N] target ids
    parents: Tensor  # [B,N]


def ancestor_mask(parents: Tensor) -> Tensor:
    """[B,N] -> [B,N,N] bool: node i sees node j if j is i or an ancestor of i. parents [0,0,0,1] -> rows 1000, 1100, 1010, 1101."""
    N = parents.shape[1]
    nodes = torch.arange(N, device=parents.device)
    reach = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).float()
    for _ in range((N - 1).bit_length()):  # each squaring doubles the generations that are covered
        reach = (reach @ reach).clamp(max=1)
    return reach > 0


def best_first(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores [B,M] -> [B,count]; ties go to the lower index, which is the shallower node."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def draft_scores(logits: Tensor, positions: Tensor, sampling: BatchSampling, target_ids: Tensor) -> Tensor:
    """What ranks a node's children, [B,n,Vd] (fp32 at least): the draft's log-probabilities; for rows with a temperature, tempered and
    with the noise that the target's own choice at that position [B,n] will have, which is what makes a guess likely to be right."""
    if sampling.is_greedy:
        return logits.to(wide_dtype(logits.dtype)).log_softmax(-1)
    return temper(logits, sampling).log_softmax(-1) + row_noise(positions, target_ids, sampling)


def grow_tree(step, target_ids: Tensor, root: Tensor, hidden: Tensor, logits: Tensor, lengths: Tensor, spec: SpecConfig,
              sampling: BatchSampling) -> DraftTree:
    """EAGLE-2's dynamic tree: expand the topk best nodes level by level, then keep the best num_draft_tokens - 1 of all candidates.

    root [B]: newest tokens; hidden [B,C], logits [B,Vd]: the head's at the last true slot; lengths [B]: true slots in the head's cache.
    step(hidden [B,k,C], tokens [B,k], positions [B,k], block [B,k,W], offset) runs the head on one level and returns its hidden states
    [B,k,C] and logits [B,k,Vd]. target_ids [Vd]: what each draft id stands for.

    A node's score is its path's sum of edges, each at most 0, so a parent never scores below its child and the kept nodes form a tree.
    An edge is the draft's log-probability or, for rows with a temperature, the log-softmax of the children's draft_scores among them.
    """
    B, k, device = len(root), spec.topk, root.device

    def children(logits: Tensor, base: Tensor, depth: int) -> tuple[Tensor, Tensor]:  # [B,n,Vd], [B,n] -> tokens and scores [B,n*k]
        positions = (lengths + depth)[:, None].expand(base.shape)
        best, draft_ids = draft_scores(logits, positions, sampling, target_ids).topk(k)
        edges = best
        if not sampling.is_greedy:
            edges = torch.where(sampling.temperature[:, None, None] > 0, best.log_softmax(-1), best)
        return target_ids[draft_ids].flatten(1), (base[..., None] + edges).flatten(1)

    tokens, scores = children(logits[:, None], torch.zeros(B, 1, device=device), 1)
    all_tokens, all_scores, all_parents = [root[:, None], tokens], [scores], [root.new_zeros(B, 1 + k)]  # numbered as they are made
    frontier = torch.arange(1, k + 1, device=device).expand(B, k)  # their numbers
    hidden, width = hidden[:, None].expand(-1, k, -1), (spec.num_steps - 1) * k
    block = torch.zeros(B, k, width, dtype=torch.bool, device=device)  # which earlier levels' nodes each frontier node descends from
    for level in range(1, spec.num_steps):
        offset = torch.tensor((level - 1) * k, device=device)
        block = block | (torch.arange(width, device=device) == (offset + torch.arange(k, device=device))[:, None])  # and itself
        hidden, logits = step(hidden, tokens, (lengths + level - 1)[:, None].expand(B, k), block, offset)
        new_tokens, new_scores = children(logits, scores, level + 1)
        first = 1 + sum(s.shape[1] for s in all_scores)
        all_tokens.append(new_tokens)
        all_scores.append(new_scores)
        all_parents.append(frontier.repeat_interleave(k, dim=1))
        best = best_first(new_scores, k)
        frontier, tokens, scores = first + best, new_tokens.gather(1, best), new_scores.gather(1, best)
        hidden, block = gather_nodes(hidden, best // k), gather_nodes(block, best // k)
    kept = best_first(torch.cat(all_scores, 1), spec.num_draft_tokens - 1).sort(dim=1).values + 1
    kept = torch.cat([torch.zeros_like(kept[:, :1]), kept], dim=1)  # [B,N], the root first
    made = torch.cat(all_tokens, 1)
    renumbered = torch.zeros_like(made).scatter(1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept))
    return DraftTree(made.gather(1, kept), renumbered.gather(1, torch.cat(all_parents, 1).gather(1, kept)))


class Accepted(NamedTuple):
    path: Tensor          # [B,P] accepted nodes from the root down; behind num_accepted the last one repeats
    num_accepted: Tensor  # [B] drafted nodes on the path, the root not counted
    tokens: Tensor        # [B,P] what is emitted: the accepted guesses, then the bonus token at num_accepted


def accept(tree: DraftTree, target_tokens: Tensor, mask: Tensor, max_depth: int) -> Accepted:
    """target_tokens [B,N]: what the target chooses after each node, mask [B,N,N]: the tree's ancestor_mask -> the longest path that the
    target agrees with (P = max_depth + 1). A guess is right if it is the token that the target chooses at its parent; nothing else decides,
    so the text is the target's own, whatever the draft."""
    if max_depth == 0:  # a plain step: only the root
        return Accepted(torch.zeros_like(target_tokens), torch.zeros_like(target_tokens[:, 0]), target_tokens)
    agrees = tree.tokens == target_tokens.gather(1, tree.parents)
    agrees[:, 0] = True  # the root was emitted already
    on_path = ~(mask & ~agrees[:, None]).any(-1)
    depth = mask.sum(-1) - 1
    last = torch.where(on_path, depth, -1).argmax(1)
    rows = torch.arange(len(last), device=last.device)
    num_accepted = depth[rows, last]
    steps = torch.arange(max_depth + 1, device=last.device)[None, :, None]
    at_depth = mask[rows, last][:, None] & (depth[:, None] == steps)  # [B,P,N]
    path = torch.where(at_depth.any(-1), at_depth.int().argmax(-1), last[:, None])
    return Accepted(path, num_accepted, target_tokens.gather(1, path))


# -----------------------------------------------------------------------------
# 12. Round
# Draft, verify, accept, commit: one function over tensors that stay where they are. A round without a shape is a plain step: its tree is
# the root alone. The loop around it is the Engine's. Needs: 2, 3, 4, 6, 8, 10, 11.


@dataclass
class DecodeState:
    """What B rows carry from round to round, written in place. A row's root, its newest token, is in neither cache. Its newest slots (features
    at t, token t+1) wait here until the head drafts: the one place where the head meets true features, behind drafted rounds and plain ones."""
    cache: KVCache               # the target's: lengths tokens
    draft_cache: KVCache | None  # the head's: lengths - waiting slots
    lengths: Tensor              # [B]
    root: Tensor                 # [B]
    active: Tensor               # [B] 1, or 0 for a row that computes along and is not to change
    features: Tensor             # [B,W,A*C] of the slots that wait, left-aligned
    following: Tensor            # [B,W] the token after each
    waiting: Tensor              # [B] how many wait
    sampling: BatchSampling      # of tensors [B]

    def rows(self, start: int, stop: int) -> "DecodeState":
        """Some rows, on the same memory."""
        return DecodeState(*(x and x.rows(start, stop) if isinstance(x, KVCache | BatchSampling | None) else x[start:stop]
                             for x in vars(self).values()))

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for x in vars(self).values():
            if isinstance(x, KVCache | BatchSampling):
                x.swap(a, b)
            elif x is not None:
                x[[a, b]] = x[[b, a]]


class Steps:
    """The forwards of a round: tensors in, tensors out, every shape fixed but the number of columns. columns: arange over those of the caches
    that are in use, see CacheContext."""

    def __init__(self, target: Target, head: DraftHead | None):
        self.target, self.head, self.shard = target, head, target.shard
        self.boundaries = head.config.layout.boundaries if head else ()
        self.target_ids = head.draft_to_target(torch.arange(len(head.d2t), device=head.d2t.device)) if head else None

    def read(self, cache: KVCache, tokens: Tensor, positions: Tensor, lengths: Tensor, columns: Tensor, mask: Tensor | None = None):
        """tokens, positions [B,N], mask [B,N,N] (None: each sees those before it) -> last hidden states [B,N,C], features [B,N,A*C]."""
        out = self.target(tokens, CacheContext(cache, lengths, tokens.shape[1], columns, mask), positions, self.boundaries)
        return out.last, self.head.config.layout.pack(out.captures) if self.head else out.last[..., :0]

    def verify(self, cache: KVCache, tokens: Tensor, positions: Tensor, lengths: Tensor, columns: Tensor, mask: Tensor):
        """A tree, or the root alone -> this rank's logits [B,N,V / ranks], features [B,N,A*C]."""
        last, features = self.read(cache, tokens, positions, lengths, columns, mask)
        return self.target.lm_head(self.target.norm(last)), features

    def level(self, cache: KVCache, hidden: Tensor, tokens: Tensor, positions: Tensor, lengths: Tensor, columns: Tensor, block: Tensor,
              offset: Tensor):
        """One level of the tree, see grow_tree -> hidden states [B,k,C], logits [B,k,Vd]."""
        context = CacheContext(cache, lengths, tokens.shape[1], columns, block, offset)
        hidden, normed = self.head.step(hidden, tokens, positions, context)
        return hidden, self.head.logits(normed)

    def extend(self, cache: KVCache, features: Tensor, following: Tensor, count: Tensor, known: Tensor, columns: Tensor):
        """True slots behind the `known` [B] ones: features [B,T,A*C] and the tokens that follow them [B,T], of which the first count [B] are
        meant -> the head's hidden state [B,C] and logits [B,Vd] at the last of these."""
        T = following.shape[1]
        positions = known[:, None] + torch.arange(T, device=known.device)
        hidden, normed = self.head.step(self.head.fuse(features), following, positions, CacheContext(cache, known, T, columns))
        last = count.clamp(min=1)[:, None] - 1
        return gather_nodes(hidden, last)[:, 0], self.head.logits(gather_nodes(normed, last))[:, 0]

    def compiled(self) -> "Steps":
        """The same, each compiled for any number of columns. Choosing, accepting and the tree's bookkeeping stay eager: small, and the same for
        every kind of sampling.

        On CUDA the graphs are recorded (not run so far: no GPU was at hand); what outlives a call is cloned, as recording asks.
        """
        torch._dynamo.config.recompile_limit = 64  # beyond the limit the compiler would fall back to eager in silence
        # Graphs belong to these modules alone, which never change, so the checks of some hundred modules a call are left out.
        compile_one = partial(torch.compile, fullgraph=True, isolate_recompiles=True,
                              options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe})
        if self.target.norm.weight.is_cuda:
            graphed = partial(torch.compile, fullgraph=True, mode="reduce-overhead")
            compile_one = lambda f: (lambda *args, run=graphed(f): tuple(x.clone() for x in run(*args)))
        steps = Steps(self.target, self.head)
        for name in ("verify", "level", "extend") if self.head else ("verify",):
            setattr(steps, name, compile_one(getattr(self, name)))
        return steps


def read_waiting(steps: Steps, s: DecodeState, width: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Feed the head the slots that wait, at most `width` a row -> its hidden state [B,C] and logits [B,Vd] at the last."""
    found = steps.extend(s.draft_cache, s.features[:, :width], s.following[:, :width], s.waiting, s.lengths - s.waiting, columns)
    s.waiting.zero_()
    return found


class RoundResult(NamedTuple):
    tokens: Tensor          # [B,P] the accepted guesses, then the bonus token
    num_accepted: Tensor    # [B] emitted are tokens[b, :num_accepted[b] + 1]
    is_finite: Tensor       # [B] all that chose them was finite
    is_clean: Tensor        # [B] and so were all other guesses' scores
    head_is_finite: Tensor  # [B] and the head's logits
    path: Tensor            # [B,P] see Accepted
    own_logits: Tensor      # [B,N,V / ranks]


def speculative_round(steps: Steps, s: DecodeState, shape: SpecConfig | None, width: int, columns: Tensor, grow=grow_tree, accept=accept,
                      mark=lambda: None) -> RoundResult:
    """One round of all rows. width: the head reads the slots that wait, at most so many a row (0: not now, and then nothing is drafted);
    grow, accept: see the functions of that name; mark is called before, between and after drafting and the rest. What ranks decide is rank
    0's: kernels may round a near-tie another way elsewhere."""
    mark()
    # draft: behind the slots of the rounds before, which the head reads now
    tree, head_is_finite = DraftTree(s.root[:, None], torch.zeros_like(s.root)[:, None]), torch.ones_like(s.root)
    if width:
        hidden, logits = read_waiting(steps, s, width, columns)
    if shape:
        level = lambda hidden, tokens, positions, block, offset: steps.level(
            s.draft_cache, hidden, tokens, positions, s.lengths, columns, block, offset)
        tree = grow(level, steps.target_ids, s.root, hidden, logits, s.lengths, shape, s.sampling)
        tree, head_is_finite = DraftTree(*broadcast(torch.stack(tree), steps.shard)), logits.amax(-1).isfinite()
    mark()
    # verify: one target forward over all nodes
    mask = ancestor_mask(tree.parents)
    positions = s.lengths[:, None] + mask.sum(-1) - 1
    own_logits, features = steps.verify(s.cache, tree.tokens, positions, s.lengths, columns, mask)
    target_tokens, scores = choose_tokens(own_logits, positions + 1, s.sampling, steps.shard)
    # accept: the longest path that the target would have written itself
    path, num_accepted, tokens = accept(tree, target_tokens, mask, shape.num_steps if shape else 0)
    finite = scores.isfinite()
    counts = torch.stack([num_accepted, finite.gather(1, path).all(1), finite.all(1)], dim=1)
    decided = broadcast(torch.cat([path, tokens, counts], dim=1), steps.shard)
    path, tokens, (num_accepted, is_finite, is_clean) = *decided[:, :-3].chunk(2, dim=1), decided[:, -3:].unbind(1)
    # commit: the path becomes the prefix, its slots wait for the head, the bonus token is the new root
    if shape and shape.topk > 1:  # a chain's path lies dense already
        s.cache.keep(s.lengths, path)
    if steps.head:
        rows, at = torch.arange(len(path), device=path.device)[:, None], torch.arange(path.shape[1], device=path.device)
        s.features[rows, s.waiting[:, None] + at], s.following[rows, s.waiting[:, None] + at] = gather_nodes(features, path), tokens
        s.waiting += (num_accepted + 1) * s.active
    s.lengths += (num_accepted + 1) * s.active
    s.root.copy_(tokens.gather(1, num_accepted[:, None])[:, 0])
    mark()
    return RoundResult(tokens, num_accepted, is_finite, is_clean, head_is_finite, path, own_logits)


# -----------------------------------------------------------------------------
# 13. Statistics and controller
# What rounds gave and took, and what to draft next: no more than pays. Needs: 2.


class Stopwatch:
    """Marks along a round, in ms. On a GPU they are events, read behind the round's one transfer: timing adds no synchronisation."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        return [a.elapsed_time(b) if self.cuda else (b - a) * 1000 for a, b in zip(self.marks, self.marks[1:])]


@dataclass
class SpecStats:
    """What rounds emitted. Left out: the prefill and its token, and a last round that max_new_tokens cut short."""
    rounds: int = 0
    emitted: int = 0
    accepted_at: Counter = field(default_factory=Counter)  # depth (0-based) -> rounds in which that guess was accepted

    def add(self, emitted: int, accepted: int) -> None:
        self.rounds, self.emitted = self.rounds + 1, self.emitted + emitted
        self.accepted_at.update(range(accepted))

    def __add__(self, other: "SpecStats") -> "SpecStats":
        return SpecStats(self.rounds + other.rounds, self.emitted + other.emitted, self.accepted_at + other.accepted_at)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target forward, the bonus token included; None before the first round."""
        return self.emitted / self.rounds if self.rounds else None

    def per_position_acceptance(self, num_steps: int) -> list[float]:
        """The share of rounds in which the guess at each depth was accepted (unconditional)."""
        return [self.accepted_at[depth] / max(self.rounds, 1) for depth in range(num_steps)]


AUTO_SHAPES = (SpecConfig(3, 1, 4), SpecConfig(5, 2, 8))  # what a loop that chooses for itself chooses from, besides not drafting


class Controller:
    """Chooses each round's shape: the one with the most expected tokens per millisecond, not drafting (None) included.

    It knows only what the loop measured: of each shape's last rounds the median time, and the mean number of tokens. Every shape is tried
    `tries` times at first. Later the others are probed in turn, one round each, at intervals that double up to `longest` while that
    changes nothing, and again at once when a probe did better than the best: a head that never pays costs next to nothing, and one that
    begins to pay is found.
    """
    tries, shortest, longest, memory = 3, 32, 256, 16

    def __init__(self, shapes: tuple[SpecConfig, ...]):
        self.shapes = (None, *shapes)
        self.ms = {shape: deque(maxlen=self.memory) for shape in self.shapes}
        self.tokens = {shape: deque(maxlen=self.memory) for shape in self.shapes}  # per row and round
        self.since_probe, self.interval, self.turn = 0, self.shortest, 0

    def median_ms(self, shape: SpecConfig | None) -> float:
        return sorted(self.ms[shape])[len(self.ms[shape]) // 2]

    def rate(self, shape: SpecConfig | None) -> float:
        """Expected tokens per row and ms."""
        return sum(self.tokens[shape]) / len(self.tokens[shape]) / self.median_ms(shape)

    def untried(self) -> list[SpecConfig | None]:
        return [shape for shape in self.shapes if len(self.ms[shape]) < self.tries]

    def best(self) -> SpecConfig | None:
        return max(self.shapes, key=self.rate)

    def choose(self) -> SpecConfig | None:
        untried = self.untried()
        if untried:
            return untried[0]
        best = self.best()
        if self.since_probe < self.interval:
            return best
        others = [shape for shape in self.shapes if shape != best]
        return others[self.turn % len(others)]

    def record(self, shape: SpecConfig | None, ms: float, tokens: float) -> None:
        """One round of `shape` took ms and emitted `tokens` a row."""
        is_probe = not self.untried() and shape != self.best()
        to_beat = self.rate(self.best()) if is_probe else 0.0
        self.ms[shape].append(ms)
        self.tokens[shape].append(tokens)
        self.since_probe += 1
        if not is_probe:
            return
        if tokens / self.median_ms(shape) <= to_beat:
            self.since_probe, self.interval, self.turn = 0, min(2 * self.interval, self.longest), self.turn + 1
        elif self.best() == shape:
            self.since_probe, self.interval = 0, self.shortest


class RoundTime(NamedTuple):
    """What one round took, in ms, and gave."""
    shape: SpecConfig | None
    draft: float
    verify: float
    host: float
    rows: int    # requests that decoded
    tokens: int  # of all of them: the accepted guesses, and one for each

    @property
    def ms(self) -> float:
        return self.draft + self.verify + self.host


# -----------------------------------------------------------------------------
# 14. Engine
# Several requests at once over fixed rows: queue, prompts in chunks, and what of a round's tokens is emitted. No arithmetic. Needs: 2, 3, 4, 6, 8, 10, 11, 12, 13.


@dataclass(eq=False)
class Request:
    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset
    sampling: Sampling
    logprobs: int | None = None                      # how many of the most likely tokens to report beside each one
    token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)  # by output token, see token_logprobs
    output: list[int] = field(default_factory=list)  # emitted tokens, a final end-of-turn token included
    finish_reason: str | None = None                 # stop | length | cancelled | error
    reused: int = 0                                  # prompt tokens that a row held already
    stats: SpecStats = field(default_factory=SpecStats)  # of the rounds that drafted
    plain_steps: int = 0                                 # rounds that did not, though there is a head

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def emit(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first end-of-turn token or the length limit, exactly; returns those that were emitted."""
        tokens = tokens[:self.max_new_tokens - len(self.output)]
        stop = next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)
        tokens = tokens if stop is None else tokens[:stop + 1]
        self.output += tokens
        self.finish_reason = "stop" if stop is not None else "length" if len(self.output) == self.max_new_tokens else None
        return tokens


@dataclass
class BatchRow:
    """Python's side of a row of the DecodeState."""
    request: Request | None = None
    read: int = 0                                           # prompt tokens in the caches
    turn: int = 0                                           # prompts are read first come, first served
    cached_tokens: list[int] = field(default_factory=list)  # of an idle row: what its caches, the head's too, still hold

    @property
    def decodes(self) -> bool:
        return self.request is not None and self.read == len(self.request.prompt)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def token_logprobs(own_logits: Tensor, tokens: Tensor, count: int, shard: Shard) -> list[list[tuple[float, list[tuple[int, float]]]]]:
    """The target's log-probabilities (at temperature 1) of tokens [B,P], each with the `count` most likely tokens and theirs."""
    logprobs = all_gather(own_logits, shard).to(wide_dtype(own_logits.dtype)).log_softmax(-1)
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    rivals = [[list(zip(*pair)) for pair in zip(*row)] for row in zip(best.indices.tolist(), best.values.tolist())]
    return [list(zip(*row)) for row in zip(logprobs.gather(-1, tokens[..., None])[..., 0].tolist(), rivals)]


class Engine:
    """Decodes up to max_batch requests at once, speculating if it has a head.

        engine = Engine(target, head, SpecConfig(4, 1, 5), max_batch=4, max_length=2048)
        request = engine.submit([1, 2, 3], max_new_tokens=100)
        while engine.busy:
            for request, tokens in engine.step(): ...

    max_length bounds prompt + new tokens of a request. With a tuple of SpecConfigs (AUTO_SHAPES) a Controller chooses one of them, or not
    to draft, round by round. Prompts are read in chunks between rounds, so that a long one holds up nobody; a request that begins as a
    finished one did takes over what that left in its row. A round computes all rows, or with one_alone the first where no other decodes.
    margin: the cache's columns behind max_length, at least; attention over as many columns rounds alike, so engines whose texts are compared
    have the same. grow, accept: other policies than grow_tree's and accept's. Raises ValueError for a head without a spec, or attached to
    another target.
    """
    patience = 32  # plain rounds that the head may lie behind

    def __init__(self, target: Target, head: DraftHead | None = None, spec: SpecConfig | tuple[SpecConfig, ...] | None = None,
                 max_batch: int = 1, max_length: int = 2048, prefill_chunk: int = 512, one_alone: bool = True, margin: int = 0,
                 grow=grow_tree, accept=accept):
        if (head is None) != (spec is None):
            raise ValueError("an Engine needs a draft head and a SpecConfig, or neither")
        if head is not None and head.target is not target:
            raise ValueError("the head must be attached to this Engine's target: head.attach(target)")
        shapes = spec if isinstance(spec, tuple) else (spec,) if spec else ()
        if head is not None and any(shape.topk > head.config.draft_vocab_size for shape in shapes):
            raise ValueError(f"topk must not exceed the draft vocabulary of {head.config.draft_vocab_size}: got {', '.join(map(str, shapes))}")
        if max_length > target.config.max_position_embeddings:
            raise ValueError(f"max_length must be within the target's context of {target.config.max_position_embeddings} tokens: got {max_length}")
        for module in (target, head) if head else (target,):
            pack(module)
        self.target, self.head, self.shard, self.shapes, self.is_auto = target, head, target.shard, shapes, isinstance(spec, tuple)
        self.policies, self.steps, self.is_compiled = {"grow": grow, "accept": accept}, Steps(target, head), False
        self.hot = self.steps  # compile() replaces them
        self.max_batch, self.max_length, self.prefill_chunk = max_batch, max_length, prefill_chunk
        self.sizes = sorted({1, max_batch}) if one_alone else [max_batch]  # rows that a round may compute
        self.newest = max((shape.num_steps + 1 for shape in shapes), default=1)  # slots that wait behind a round
        self.room = self.patience + self.newest if head else 0                   # and behind plain rounds, too
        # What may be written behind a row's length: the verified nodes, and in the head's cache waiting slots and the levels of the tree.
        self.margin = max([self.room, self.patience, margin] + [max(s.num_draft_tokens, (s.num_steps - 1) * s.topk) for s in shapes])
        config, like, width = target.config, target.norm.weight, head.config.layout.width if head else 0
        self.device, columns = like.device, max_length + self.margin
        cache = KVCache(config.num_layers, max_batch, self.shard.count(config.cached[0]), columns, config.cached[1], like.dtype, self.device,
                        config.cached[2])
        draft_cache = head and KVCache(1, max_batch, self.shard.count(head.config.num_kv_heads), columns, head.config.head_dim,
                                       head.norm.weight.dtype, self.device)
        integers = partial(torch.zeros, dtype=torch.int64, device=self.device)
        # A row that does not decode computes along, and writes behind max_length.
        self.state = DecodeState(cache, draft_cache, integers(max_batch) + max_length, integers(max_batch), integers(max_batch),
                                 torch.zeros(max_batch, self.room, width, dtype=like.dtype, device=self.device), integers(max_batch, self.room),
                                 integers(max_batch), BatchSampling.of([Sampling()] * max_batch, self.device))
        self.views = {size: self.state.rows(0, size) for size in self.sizes}
        self.columns, self.plain_rounds = torch.arange(columns, device=self.device), 0  # since the head read what waits
        self.rows, self.waiting, self.turns = [BatchRow() for _ in range(max_batch)], deque(), itertools.count()
        self.reset_measurements()

    def reset_measurements(self) -> None:
        """Forget what was measured so far: a warm-up, say."""
        self.rounds: deque[RoundTime] = deque(maxlen=100_000)  # a server runs for months
        self.controllers = {size: Controller(self.shapes) for size in self.sizes} if self.is_auto else None

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(row.request is not None for row in self.rows)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, prompt: list[int], max_new_tokens: int, eos_token_ids=None, sampling: Sampling = Sampling(),
               logprobs: int | None = None) -> Request:
        """Queue a request; eos_token_ids: default the target's, () to never stop; logprobs: fill Request.token_logprobs, with so many rivals
        of each token. Raises ValueError for what cannot be served."""
        vocab_size = self.target.config.vocab_size
        if not prompt or max_new_tokens < 1:
            raise ValueError("a request needs at least one prompt token and max_new_tokens of at least 1: "
                             f"got {len(prompt)} and {max_new_tokens}")
        if len(prompt) + max_new_tokens > self.max_length:
            raise ValueError(f"prompt and new tokens must fit max_length={self.max_length}: got {len(prompt)} + {max_new_tokens}")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt ids must be within 0..{vocab_size - 1}: got {min(prompt)}..{max(prompt)}")
        eos = self.target.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.waiting.append(Request(list(prompt), max_new_tokens, frozenset(eos), sampling, logprobs))
        return self.waiting[-1]

    def cancel(self, request: Request) -> None:
        """End a request where it stands; what it has emitted stays."""
        if request.finish_reason is None:
            request.finish_reason = "cancelled"
            if request in self.waiting:
                self.waiting.remove(request)
            for index, row in enumerate(self.rows):
                if row.request is request:
                    self._free(index)

    @torch.no_grad()
    def step(self, shape: SpecConfig | None | str = "choose") -> list[tuple[Request, list[int]]]:
        """Admit waiting requests into free rows, read prompts until prefill_chunk tokens were read, then run one round (of a given shape;
        None drafts nothing) for those that decode; returns what each got."""
        events, budget = [], self.prefill_chunk
        while budget > 0 and (index := self._admit()) is not None:
            request, before = self.rows[index].request, self.rows[index].read
            new = self._prefill(index)
            budget -= min(self.prefill_chunk, len(request.prompt) - before)
            events += [(request, new)] if new or request.finish_reason else []
        size = self._rows_to_compute()
        if size:
            if shape == "choose":
                shape = self.controllers[size].choose() if self.controllers else self.shapes[0] if self.shapes else None
            events += self._round(self._agree(shape), size)
        return events

    def _admit(self) -> int | None:
        """Give waiting requests the free rows, each the one that holds most of its beginning already; returns the row that reads next."""
        while self.waiting and self.running < self.max_batch:
            request = self.waiting.popleft()
            shared = [-1 if row.request else common_prefix(row.cached_tokens, request.prompt) for row in self.rows]
            index = max(range(self.max_batch), key=lambda i: (shared[i], -len(self.rows[i].cached_tokens)))
            # The last shared token is read again: its slot knows another token to follow, and the target's logits are needed.
            request.reused = max(0, shared[index] - 1)
            self.rows[index] = BatchRow(request, request.reused, next(self.turns))
        reading = [i for i, row in enumerate(self.rows) if row.request and not row.decodes]
        return min(reading, key=lambda i: self.rows[i].turn, default=None)

    def _rows_to_compute(self) -> int:
        """How many rows the round computes; 0 if none decodes. One that decodes alone is moved to the first row, if that is free."""
        decoding = [i for i, row in enumerate(self.rows) if row.decodes]
        if len(decoding) != 1 or self.sizes[0] > 1 or self.rows[0].request not in (None, self.rows[decoding[0]].request):
            return self.max_batch if decoding else 0
        if decoding[0]:
            self.state.swap(0, decoding[0])
            self.rows[0], self.rows[decoding[0]] = self.rows[decoding[0]], self.rows[0]
        return 1

    def _agree(self, shape: SpecConfig | None) -> SpecConfig | None:
        """Rank 0's shape: each rank's clock may have chosen another. Raises RuntimeError for ranks that were not given the same requests."""
        choices = (None, *self.shapes)
        ours = [choices.index(shape), len(self.waiting), *(len(row.request.tokens) if row.request else 0 for row in self.rows)]
        index, *state = broadcast(torch.tensor(ours), self.shard).tolist()
        if state != ours[1:]:
            raise RuntimeError(f"rank {self.shard.rank} was not given the requests that rank 0 has: every rank must submit and cancel the same ones, "
                               "between the same steps")
        return choices[index]

    def _clear(self, index: int, start: int, caches=None) -> None:
        """Zero a row's cache columns from `start` on: a masked NaN is still NaN x 0 = NaN for whoever comes next."""
        for cache in caches or filter(None, (self.state.cache, self.state.draft_cache)):
            for cached in (*cache.keys, *cache.values):
                cached[index, :, start:] = 0

    def _free(self, index: int) -> None:
        row, s = self.rows[index], self.state.rows(index, index + 1)
        if row.request.finish_reason == "error":
            cached_tokens = []
            self._clear(index, 0)
            s.features.zero_()
        else:  # the root is not in the caches, and the head has not read what waits
            cached_tokens = row.request.tokens[:len(row.request.tokens) - 1 - int(s.waiting)] if row.decodes else row.request.prompt[:row.read]
        self.rows[index] = BatchRow(cached_tokens=cached_tokens)
        s.active[0], s.waiting[0], s.lengths[0] = 0, 0, self.max_length

    def _prefill(self, index: int) -> list[int]:
        """Read the next chunk of a row's prompt, eagerly (every length is another shape); the last one emits the first token, and returns it."""
        row, s = self.rows[index], self.state.rows(index, index + 1)
        request, start = row.request, row.read
        tokens = torch.tensor([request.prompt[start:start + self.prefill_chunk]], device=self.device)  # [1,T]
        end = row.read = start + tokens.shape[1]
        known, columns, positions = torch.tensor([start], device=self.device), self.columns[:end], self.columns[None, start:end]
        last, features = self.steps.read(s.cache, tokens, positions, known, columns)
        following = torch.tensor([request.prompt[end:end + 1]], device=self.device)  # behind this chunk: the next prompt token
        is_finite, is_last = last.isfinite().all().long().view(1, 1), end == len(request.prompt)
        if is_last:
            own_logits = self.target.lm_head(self.target.norm(last[:, -1:]))
            following, score = choose_tokens(own_logits, positions[:, -1:] + 1, BatchSampling.of([request.sampling], self.device), self.shard)
            is_finite = is_finite * score.isfinite()
        following, is_finite = broadcast(torch.cat([following, is_finite]), self.shard).split(1)
        if self.head:  # the prompt's last slot waits, as a round's do
            shifted, count = torch.cat([tokens[:, 1:], following], dim=1), tokens.shape[1] - is_last
            if count:
                self.steps.extend(s.draft_cache, features[:, :count], shifted[:, :count], known * 0 + count, known, columns)
            s.features[:, 0], s.following[:, 0] = features[:, -1], shifted[:, -1]
        if not is_finite:
            request.finish_reason = "error"
            self._free(index)
        if not is_last or not is_finite:
            return []
        self._clear(index, self.max_length)  # what it wrote there while it did not decode
        s.lengths[0], s.root[0], s.active[0], s.waiting[0] = end, following[0, 0], 1, int(self.head is not None)
        s.sampling.set(0, request.sampling)
        if request.logprobs is not None:
            request.token_logprobs += token_logprobs(own_logits, following, request.logprobs, self.shard)[0]
        return self._emit(index, [int(following)])

    def _emit(self, index: int, tokens: list[int]) -> list[int]:
        request = self.rows[index].request
        new = request.emit(tokens)
        if request.finish_reason:
            self._free(index)
        return new

    def _columns(self) -> Tensor:
        """The cache columns that this round reads: those in use. Marked as of any length for the compiler; on CUDA, where every length
        would be another recorded graph, in steps of 256."""
        reach = max(len(row.request.tokens) for row in self.rows if row.decodes) - 1 + self.margin
        if self.columns.is_cuda:
            reach = min(-(-reach // 256) * 256, len(self.columns))
        columns = self.columns[:reach]
        if self.is_compiled:
            torch._dynamo.mark_dynamic(columns, 0)
        return columns

    def _round(self, shape: SpecConfig | None, size: int) -> list[tuple[Request, list[int]]]:
        """A round of the first `size` rows, then one small transfer that tells Python what was emitted."""
        watch, columns, s = Stopwatch(self.device), self._columns(), self.views[size]
        decoding = {index: row.request for index, row in enumerate(self.rows[:size]) if row.decodes}
        s.sampling = s.sampling.with_settings([request.sampling for request in decoding.values()])
        is_due = shape is not None or self.plain_rounds == self.patience - 1  # then there is no more room to wait
        width = 0 if not (self.head and is_due) else self.room if self.plain_rounds else self.newest
        result = speculative_round(self.hot, s, shape, width, columns, **self.policies, mark=watch.mark)
        self.plain_rounds = 0 if shape else 1 if width else self.plain_rounds + 1
        self.newest = shape.num_steps + 1 if shape else self.newest
        told = torch.stack([result.num_accepted, result.is_finite, result.is_clean, result.head_is_finite], dim=1)
        told = torch.cat([told, result.tokens], dim=1).tolist()  # the one transfer
        begun, events = time.perf_counter(), []
        rivals = max((request.logprobs for request in decoding.values() if request.logprobs is not None), default=None)
        logprobs = [] if rivals is None else token_logprobs(gather_nodes(result.own_logits, result.path), result.tokens, rivals, self.shard)
        for index, request in decoding.items():
            accepted, is_finite, is_clean, head_is_finite, *tokens = told[index]
            known = len(request.tokens) - 1
            if not head_is_finite:
                warnings.warn("the draft head's hidden states are not finite: its guesses are noise (the text is right all the same)")
                self._clear(index, known, [s.draft_cache])
            if not is_clean:  # of a guess that was not accepted, say
                self._clear(index, known + accepted + 1)
            if is_finite:
                new = self._emit(index, tokens[:accepted + 1])
            else:  # this request alone fails
                request.finish_reason, new = "error", []
                self._free(index)
            if request.logprobs is not None:
                request.token_logprobs += [(own, likely[:request.logprobs]) for own, likely in logprobs[index][:len(new)]]
            if shape is None and self.head:
                request.plain_steps += 1
            elif is_finite and (len(new) == accepted + 1 or request.finish_reason == "stop"):
                request.stats.add(len(new), min(accepted, len(new)))
            events.append((request, new))
        done = RoundTime(shape, *watch.laps(), (time.perf_counter() - begun) * 1000, len(decoding), sum(1 + told[i][0] for i in decoding))
        self.rounds.append(done)
        if self.controllers:
            self.controllers[size].record(shape, done.ms, done.tokens / len(decoding))
        return events

    def compile(self) -> "Engine":
        """Compile the steps of a round and run each once, so that nothing is compiled while requests wait. The eager ones stay the oracle."""
        self.hot, self.is_compiled = self.steps.compiled(), True
        chunk, self.prefill_chunk = self.prefill_chunk, max(self.prefill_chunk, self.max_batch)  # so that all of them decode at once
        shapes = self.shapes or (None,)
        if self.is_auto:  # behind plain rounds the head reads more slots
            shapes = (shapes[0], None, *shapes)
        for size in self.sizes:
            for shape in shapes:
                for _ in range(size):
                    self.submit([0], min(2, self.max_length - 1), ())  # ends with its first round, however much of it is accepted
                self.step(shape)
        for row in self.rows:
            row.cached_tokens = []
        self.prefill_chunk = chunk
        self.reset_measurements()  # of the compiler's seconds
        return self


def run_requests(engine: "Engine", prompts: list[list[int]], max_new_tokens: int, eos_token_ids=None,
                 sampling: Sampling = Sampling()) -> list[Request]:
    """Submit all prompts and step to the end. Raises ValueError if a request failed on non-finite logits."""
    requests = [engine.submit(prompt, max_new_tokens, eos_token_ids, sampling) for prompt in prompts]
    while engine.busy:
        engine.step()
    failed = [i for i, request in enumerate(requests) if request.finish_reason == "error"]
    if failed:
        raise ValueError(f"the target's logits were not finite for prompts {failed}: check its weights and dtype "
                         "(fp16 overflows where bf16 does not)")
    return requests


def speculative_generate(target: Target, head: DraftHead | None, prompts: list[list[int]], spec: SpecConfig | None, max_new_tokens: int,
                         eos_token_ids=None, sampling: Sampling = Sampling(), max_batch: int | None = None) -> list[Request]:
    """Decode token-id prompts, max_batch at a time (default: all); each Request carries its text and SpecStats."""
    longest = max(map(len, prompts)) + max_new_tokens
    engine = Engine(target, head, spec, max_batch=max_batch or len(prompts), max_length=longest)
    return run_requests(engine, prompts, max_new_tokens, eos_token_ids, sampling)


def generate(target: Target, prompts: list[list[int]], max_new_tokens: int, eos_token_ids=None, sampling: Sampling = Sampling(),
             max_batch: int | None = None) -> list[Request]:
    """Plain decoding: the text that speculative_generate must equal."""
    return speculative_generate(target, None, prompts, None, max_new_tokens, eos_token_ids, sampling, max_batch)


@torch.no_grad()
def first_divergence(target: Target, prompt: list[int], ours: list[int], theirs: list[int],
                     sampling: Sampling = Sampling()) -> tuple[int, float] | None:
    """Where two continuations part, and how far apart the two tokens' scores (logits, or tempered and noisy ones) are there; None: equal.

    A tiny gap is a rounding tie: one token and several tokens a forward go through different kernels. A large one is a fault.
    """
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if index is None:
        return None if len(ours) == len(theirs) else (min(len(ours), len(theirs)), float("inf"))
    tokens = torch.tensor([prompt + ours[:index]], device=target.norm.weight.device)
    position = torch.tensor([[tokens.shape[1]]], device=tokens.device)
    logits = target.logits(target(tokens).last[:, -1:])
    scores = token_scores(logits.double(), position, BatchSampling.of([sampling], tokens.device))[0, 0]
    return index, abs((scores[ours[index]] - scores[theirs[index]]).item())


# -----------------------------------------------------------------------------
# 15. Checkpoints
# Strict both ways; only tensors are ever unpickled; every file is written under a temporary name and renamed, so one that exists is whole.
# Other systems number layers and name tensors in their own ways: load_draft reads them all, or says why not. Needs: 1, 2, 3, 4, 5, 6, 8.


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def temporary_name(path: Path) -> Path:
    """Another one for every writer: several processes may write the same file."""
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")


def write_text(path: Path, text: str) -> None:
    temporary = temporary_name(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    temporary = temporary_name(path)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt", **metadata})
    except SafetensorError as error:  # a full disk, say
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from None
    os.replace(temporary, path)


def open_tensors(path: Path):
    """A lazily read safetensors file, or a .bin file; ValueError where it is torn."""
    from safetensors import SafetensorError, safe_open
    if path.suffix == ".bin":
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)  # tensors, and nothing that could be executed
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:  # torch.load raises all of these
            raise ValueError(f"{path} cannot be read, or holds more than tensors: {str(error).splitlines()[0]}") from None
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ValueError(f"{path} holds no dict of tensors")
        return SimpleNamespace(keys=tensors.keys, get_slice=tensors.__getitem__, metadata=dict)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


class TensorFolder:
    """The tensors of a checkpoint folder, read one by one: model.safetensors, a sharded index or (whole) pytorch_model.bin. A text and
    vision model's text part has its own names, the rest is left out; quantised weights (see read_quantization) look like plain ones."""
    PARTS = re.compile(r"(?<=\.)weight_(packed|scale|scale_inv|shape)$")  # what a quantised weight is stored as

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder (it must hold config.json and model.safetensors)")
        found = (name for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin") if (folder / name).exists())
        names = [next(found, "model.safetensors")]
        if names[0].endswith(".json"):
            names = sorted(set(config_value(read_json(folder / names[0]), "weight_map", str(folder / names[0])).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}")
        self.folder, self.files, self.metadata = folder, {}, {}
        for name in names:
            file = open_tensors(folder / name)
            self.files.update({stored.removeprefix("language_model."): (file, stored) for stored in file.keys()
                               if not stored.startswith(("vision_tower.", "mm_projector."))})
            self.metadata.update(file.metadata() or {})

    def __contains__(self, name: str) -> bool:
        return name in self.files or f"{name}_packed" in self.files

    def _stored(self, name: str):
        if name not in self.files:
            raise ValueError(f"{self.folder} lacks {name}")
        file, stored = self.files[name]
        return file.get_slice(stored)

    def shape(self, name: str) -> list[int]:
        if name not in self.files:
            rows, words = self._stored(f"{name}_packed").get_shape()
            return [rows, 8 * words]
        stored = self._stored(name)
        return list(stored.shape) if isinstance(stored, Tensor) else stored.get_shape()

    def tensor(self, name: str, split: Split | None = None) -> Tensor:
        """The whole tensor, or one rank's part of it: no more is read."""
        index = lambda name: ... if split is None else (slice(None),) * split.dim + (split.among(self.shape(name)[split.dim]),)
        part = lambda name: self._stored(name)[index(name)]
        if name not in self.files:
            return unpack_int4(part(f"{name}_packed").view(torch.uint8), part(f"{name}_scale"))
        if f"{name}_scale_inv" not in self.files:
            tensor = part(name)
            if f"{name}_scale" in self.files or tensor.is_floating_point() and tensor.dtype.itemsize == 1:
                raise ValueError(f"{self.folder}: {name} is {tensor.dtype} without {name}_scale_inv: weights quantised so are not supported")
            return tensor
        scale, blocks = self.tensor(f"{name}_scale_inv"), [torch.arange(n) // 128 for n in self.shape(name)]  # one scale for 128 x 128 values
        if split:
            blocks[split.dim] = blocks[split.dim][split.part]
        return part(name).float() * scale.float()[blocks[0]][:, blocks[1]]

    def rows(self, name: str, start: int, count: int) -> Tensor:
        return self._stored(name)[start:start + count]


def load_strictly(module: nn.Module, folder: TensorFolder, stored_names: dict[str, str | list[str]], dtype: torch.dtype, device, ignore=()) -> None:
    """Fill `module` (built on the meta device) from {our name: stored name, or those of what is stacked in it}; of what is split over ranks
    only this one's part is read. Parameters become dtype, buffers keep theirs. ValueError lists what is missing, unexpected or misshapen."""
    short = lambda names: ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    wanted = {name for stored in stored_names.values() for name in ([stored] if isinstance(stored, str) else stored)}
    missing, plain = {name for name in wanted if name not in folder}, partial(folder.PARTS.sub, "weight")
    expected = set(map(plain, wanted))
    unexpected = {name for name in folder.files if plain(name) not in expected and not re.search("|".join(ignore) or "$^", name)}
    if missing or unexpected:
        raise ValueError(f"{folder.folder}: the weights do not fit the config: " + "; ".join(
            f"{what} {short(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names))
    own, loaded, parameters = module.state_dict(), {}, dict(module.named_parameters())
    for name, stored in stored_names.items():
        is_stacked, is_packed = isinstance(stored, list), own[name].dtype == torch.uint8  # int32 words of eight values, held as bytes of two
        split, shape = getattr(module.get_submodule(name.rpartition(".")[0]), "split", None), list(own[name].shape)[is_stacked:]
        split = split if split and split.dim < len(shape) else None  # a row-parallel bias is not split
        if split:
            shape[split.dim] = shape[split.dim] * split.whole // (split.part.stop - split.part.start)
        shape = [*shape[:-1], shape[-1] // 4] if is_packed else shape
        tensors = []
        for one in stored if is_stacked else [stored]:
            if folder.shape(one) != shape:
                raise ValueError(f"{folder.folder}: {one} is {folder.shape(one)}, the config says {shape}")
            tensor = folder.tensor(one, split)
            tensor = tensor.view(torch.uint8) if is_packed else tensor
            kept = tensor.dtype if tensor.is_floating_point() else own[name].dtype
            tensors.append(tensor.to(device, dtype if name in parameters else kept))
        loaded[name] = torch.stack(tensors) if is_stacked else tensors[0]
    for name, layer in module.named_modules():
        if isinstance(layer, RowParallelLinear) and layer.bias is not None and layer.shard.rank > 0:
            loaded[f"{name}.bias"].zero_()
    module.load_state_dict(loaded, strict=False, assign=True)  # strict was checked above; a tied lm_head has no entry of its own
    module.requires_grad_(False)


def torch_device(name: str) -> str:
    """The name, if such a device is here: cpu, cuda, cuda:1. With several ranks cuda is each one's own."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device must be cpu, cuda or cuda:N: got {name!r}")
    if kind == "cuda" and not index and dist.is_initialized():
        index = os.environ["LOCAL_RANK"]
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {kind}:{index or 0} is not here: this machine has {torch.cuda.device_count()} CUDA devices")
    return f"{kind}:{index}" if index else kind


def torch_dtype(name: str) -> torch.dtype:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    if name not in dtypes:
        raise ValueError(f"dtype must be one of {', '.join(dtypes)}: got {name!r}")
    return dtypes[name]


def choose_dtype(stored: str, device: str, job: str, shard: Shard = Shard()) -> str:
    """The dtype to compute in: as stored, but float32 for a bfloat16 that is clearly slower in what the job does on this CPU, which its flags
    don't tell (bf16 products may be emulated, or as fast as fp32's but from memory half the bytes): measured, for some 50 ms. job: "decoding"
    (one row, times more weights than the caches hold) or "training" (large products). All ranks get rank 0's choice. Prints what it found."""
    if stored != "bfloat16" or not device.startswith("cpu"):
        return stored
    size, rows, count = (2048, 1, 16) if job == "decoding" else (1024, 256, 2)
    weights = {"bfloat16": torch.ones(count, size, size, dtype=torch.bfloat16), "float32": torch.ones(count // 2, size, size)}  # as many bytes
    found = {name: [] for name in weights}
    for _ in range(4):  # the first warms up
        for name, matrices in weights.items():
            x, begun = torch.ones(rows, size, dtype=matrices.dtype), time.perf_counter()
            for matrix in matrices:
                F.linear(x, matrix)
            found[name].append(1000 * (time.perf_counter() - begun) / len(matrices))
    ms = {name: min(times[1:]) for name, times in found.items()}
    chosen, ms = share(("float32" if ms["bfloat16"] > 1.1 * ms["float32"] else "bfloat16", ms), shard)
    print(f"{chosen} (measured: a product of {rows} x {size} by {size} x {size} takes {ms['bfloat16']:.2f} ms in bfloat16, "
          f"{ms['float32']:.2f} in float32; --dtype overrides)")
    return chosen


def read_target_config(folder: str | Path) -> TargetConfig:
    """config.json and generation_config.json of a Hugging Face folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder (a target is a Hugging Face folder with config.json and model.safetensors)")
    generation = folder / "generation_config.json"
    return TargetConfig.from_json(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")


def target_fingerprint(tensors: TensorFolder, config: TargetConfig) -> dict:
    """What identifies a target: sizes, a hash over slices of its embedding, final norm and lm_head, and one over its tokenizer's files."""
    folder, half, weights, tokenizer = tensors.folder, config.vocab_size // 2, hashlib.sha256(), hashlib.sha256()
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        if name in tensors.files:
            for start in (0, half) if tensors.shape(name)[0] > half else (0,):
                weights.update(bytes(tensors.rows(name, start, 4).contiguous().view(torch.uint8).flatten().tolist()))
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    for file in files:
        tokenizer.update(file.read_bytes())
    sizes = {key: getattr(config, key) for key in ("architecture", "hidden_size", "num_layers", "vocab_size")}
    return {**sizes, "weights": weights.hexdigest()[:16], "tokenizer": tokenizer.hexdigest()[:16] if files else None}


def require_same_target(own: dict, other: dict, ours: str, theirs: str) -> None:
    """Other sizes or another tokenizer are a ValueError; the same with other weights (a fine-tune of the same base) is a warning."""
    for key in ("architecture", "hidden_size", "num_layers", "vocab_size", "tokenizer"):
        if own[key] != other[key] and None not in (own[key], other[key]):
            raise ValueError(f"{ours} was made with another target than {theirs}: {key} {own[key]} against {other[key]}. "
                             "Use the target that it was made with.")
    if own["weights"] != other["weights"]:
        warnings.warn(f"{ours} was made with other weights than {theirs} (a fine-tune of the same base?): expect fewer accepted tokens")


def expert_names(name: str, count: int) -> list[str]:
    """layers.3.mlp.experts.up_proj... -> as the experts are stored, one by one."""
    before, _, behind = name.partition(".experts.")
    return [f"model.{before}.experts.{expert}.{behind}" for expert in range(count)]


def checkpoint_names(target: Target) -> dict[str, str | list[str]]:
    """Our name -> Hugging Face's, or its names for what we hold in one."""
    return {name: expert_names(name, target.config.experts.num_experts) if ".mlp.experts." in name else
            name if name.startswith("lm_head.") else f"model.{name}" for name in target.state_dict()}


def load_target(folder: str | Path, dtype: str | None = None, device="cpu", shard: Shard = Shard(), with_layers: bool = True) -> Target:
    """A Hugging Face folder -> Target, or a rank's part of it, in dtype (default: as stored), without gradients. Raises ValueError /
    FileNotFoundError by name."""
    config, tensors = read_target_config(folder), TensorFolder(folder)
    with torch.device("meta"):
        target = Target(config if with_layers else replace(config, num_layers=0), shard)
    target.config = config
    for name, layer in target.named_modules():
        if isinstance(layer, ExpertLinear):  # what is stored decides, whatever the config says
            layer.set_packed(f"{expert_names(name, 1)[0]}.weight_packed" in tensors.files)
    names = checkpoint_names(target)
    unused = config.num_layers if with_layers else r"\d+"  # behind the last layer stands multi-token prediction
    ignore = [r"rotary_emb\.inv_freq$", rf"^model\.layers\.{unused}\."]
    if config.tie_word_embeddings:
        names.pop("lm_head.weight")
        ignore.append(r"^lm_head\.weight$")  # some writers store the tied copy
    load_strictly(target, tensors, names, torch_dtype(dtype or config.dtype), device, ignore)
    if config.tie_word_embeddings:
        target.lm_head.weight = target.embed_tokens.weight
    target.fingerprint = target_fingerprint(tensors, config)
    return target.to(device).eval()


def load_target_ends(folder: str | Path, dtype: str | None = None, device="cpu") -> TargetEnds:
    """Only the target's embedding, final norm and lm_head, for training on stored features: a few per cent of its weights."""
    target = load_target(folder, dtype, device, with_layers=False)
    return TargetEnds(target.config, target.embed_tokens, target.norm, target.lm_head, target.fingerprint)


def save_target(target: Target, folder: str | Path) -> None:
    """Write a Hugging Face folder that load_target and transformers read."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(target.norm.weight.dtype).removeprefix("torch.")
    config, names = replace(target.config, dtype=dtype).to_json(), checkpoint_names(target)
    tensors = {names[name]: tensor for name, tensor in target.state_dict().items()}
    if target.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    write_tensors(folder / "model.safetensors", tensors, {})
    write_text(folder / "config.json", json.dumps(config, indent=1))


# SGLang takes nested layer ids for 0-based layers whose output is meant, boundary id + 1; with these targets only where the first id is 1,
# and otherwise for boundaries (sglang #25454; before it, always id + 1)
SGLANG_BOUNDARY_IDS = ("Deepseek", "Kimi", "Glm4MoeLite")


def served_by(config: DraftConfig, target_architecture: str) -> tuple[str, list[int], str]:
    """(the architecture name to write, SGLang's layer ids, one line that says which servers load it). Where SGLang cannot read a head's
    boundaries it falls back to its default layers in silence, so a head that it cannot express gets a name that it refuses."""
    layout = config.layout
    verbatim = target_architecture.startswith(SGLANG_BOUNDARY_IDS) and layout.boundaries[0] != 2
    sglang_cannot = [f"boundary {b}" for b in layout.boundaries if b in (0, 1 if verbatim else 0, layout.num_layers)]
    sglang_cannot += [flag for flag in ("norm_before_fc", "norm_before_residual") if getattr(config, flag)]
    sglang_cannot += ["an embedding of its own"] if config.has_own_embedding else []
    since = [pull for flag, pull in (("norm_before_fc", "#38111"), ("fc_norm", "#46488"), ("norm_output", "#46488"))
             if getattr(config, flag)]
    vllm = "vLLM" + (f" (with {since[0]})" if since else "")
    if sglang_cannot:
        return "Eagle3LlamaForCausalLM", [], f"loads in {vllm}; SGLang refuses it, since it cannot serve {', '.join(sglang_cannot)}"
    ids = [b if verbatim else b - 1 for b in layout.boundaries]
    return "LlamaForCausalLMEagle3", ids, f"loads in SGLang ({'with #25454' if verbatim else '0.5.14 or newer'}) and {vllm}"


def save_draft(head: DraftHead, folder: str | Path, dtype: str | None = None) -> str:
    """Write the head's folder, as SGLang and vLLM read it, too; returns one line that says which of them will."""
    folder, config = Path(folder), head.config
    folder.mkdir(parents=True, exist_ok=True)
    architecture, sglang_ids, servers = served_by(config, head.target.config.architecture if head.target else "")
    stored = {  # vLLM reads the top-level ids, as boundaries; SGLang the nested ones
        "architectures": [architecture], "model_type": "llama", "hidden_act": "silu", **write_sizes(config), "num_hidden_layers": 1,
        "target_hidden_size": config.layout.hidden_size, "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bias": False,
        "torch_dtype": dtype or str(head.norm.weight.dtype).removeprefix("torch."), **config.rope.to_json(),
        **{flag: getattr(config, flag) for flag in DraftConfig.FLAGS},
        "eagle_aux_hidden_state_layer_ids": list(config.layout.boundaries),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": sglang_ids, "use_aux_hidden_state": True} if sglang_ids else None,
        "feature_layout": config.layout.to_dict(), "target_fingerprint": head.target.fingerprint if head.target else None}
    wanted = torch_dtype(stored["torch_dtype"])
    tensors = {name: tensor.to(wanted) if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()}
    write_tensors(folder / "model.safetensors", tensors, {"feature_layout": json.dumps(config.layout.to_dict())})
    write_text(folder / "config.json", json.dumps({key: value for key, value in stored.items() if value is not None}, indent=1))
    return servers


# What is known of other systems' heads. How their tensors' names begin, and ours:
TENSOR_NAMES = (("model.", ""), ("layers.0.", "midlayer."),
                ("aux_norm_low.", "fc_norm.0."), ("aux_norm_mid.", "fc_norm.1."), ("aux_norm_high.", "fc_norm.2."))
# Where config.json lists the layers whose hidden states a head reads (inside of what, the key), and what makes boundaries of them:
LAYER_IDS = ((None, "eagle_aux_hidden_state_layer_ids", 0),           # vLLM, speculators: boundaries
             (None, "aux_hidden_states_layer_ids", 1),                # AngelSlim: the layers whose output is meant
             ("eagle_config", "eagle_aux_hidden_state_layer_ids", 1))  # SpecForge, SGLang, ModelOpt: the same, in any order
# What else is nested (inside of what, the keys; None: all of them), in ascending order of precedence; what stands at the top level wins:
NESTED = (("transformer_layer_config", None), ("eagle_config", DraftConfig.FLAGS))  # speculators' sizes, ModelOpt's flags


def draft_tensor_names(tensors: TensorFolder) -> dict[str, str]:
    """{our name: stored name} for every tensor of a head's folder."""
    names = {}
    for stored in tensors.files:
        name = stored
        for theirs, ours in TENSOR_NAMES:
            name = re.sub(f"^{re.escape(theirs)}", ours, name)
        if names.setdefault(name, stored) != stored:
            raise ValueError(f"{tensors.folder} holds {name} twice: as {names[name]} and as {stored}")
    return names


def read_draft_ids(tensors: TensorFolder, names: dict[str, str], size: int, vocab_size: int) -> Tensor:
    """The target ids [Vd] that a head can draft: from d2t, which holds offsets, checked against the mask t2d where that is there. Raises
    ValueError where they are not sound, and where there is no t2d and d2t looks like absolute ids, or as if nobody had filled it in."""
    d2t, t2d = (tensors.tensor(names[name]).cpu() if name in names else None for name in ("d2t", "t2d"))
    rule = f"{tensors.folder}: d2t must hold {size} offsets (target id = i + d2t[i], strictly ascending, offsets within 0..{vocab_size - size})"
    if d2t is None and size < vocab_size:
        raise ValueError(f"{rule}: missing d2t, and nothing else says which {size} of {vocab_size} tokens the head drafts")
    d2t = torch.zeros(size, dtype=torch.int64) if d2t is None else d2t.long()
    if d2t.shape != (size,) or t2d is not None and t2d.shape != (vocab_size,):
        raise ValueError(f"{rule}, and t2d {vocab_size} flags: got {[list(x.shape) for x in (d2t, t2d) if x is not None]}")
    steps, ids, masked = d2t.diff(), torch.arange(size) + d2t, None if t2d is None else t2d.nonzero().flatten()
    is_ascending = bool((steps > 0).all())  # as absolute ids are
    if (steps < 0).any() or d2t[0] < 0 or d2t[-1] > vocab_size - size or masked is not None and torch.equal(masked, d2t):
        is_absolute = is_ascending and 0 <= d2t[0] and d2t[-1] < vocab_size
        raise ValueError(f"{rule}: it {'holds absolute ids; write d2t[i] - i' if is_absolute else 'does not'}")
    if masked is not None and not torch.equal(masked, ids):
        raise ValueError(f"{tensors.folder}: d2t and t2d contradict each other: t2d's true positions must be i + d2t[i]")
    if masked is None and size < vocab_size and (is_ascending or not d2t.any()):
        raise ValueError(f"{rule}: it is all zeros, or never has two equal neighbours, so it probably holds no map, or absolute ids; "
                         "if it is right, store t2d (the mask over the target's vocabulary), too")
    return ids


def layout_readings(config: dict, target: TargetConfig) -> dict[str, list[tuple[int, ...]]]:
    """{each place in a head's config.json that lists layer ids: the boundaries that they can mean, the likeliest first}. They can mean two
    things where the other reading gives exactly what everyone captures by default, where boundaries are out of order, and where SGLang's
    versions differ."""
    L, found = target.num_layers, {}
    for inside, key, plus in LAYER_IDS:
        ids, where = ((config.get(inside) or {}) if inside else config).get(key), f"{inside}'s {key}" if inside else key
        if not ids:
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids) or len(set(ids)) < len(ids):
            raise ValueError(f"config.json's {where} must be a list of different layer ids: got {ids!r}")
        read, other = (tuple(i + add for i in sorted(ids)) for add in (plus, 1 - plus))
        versions_differ = inside == "eagle_config" and target.architecture.startswith(SGLANG_BOUNDARY_IDS) and read[0] != 2
        both = versions_differ or other == (2, L // 2, L - 3) or not plus and ids != sorted(ids)
        found[where] = [b for b in ((read, other) if both else (read,)) if b[0] >= 0 and b[-1] <= L]
    return found


def read_layout(config: dict, metadata: dict, stated: FeatureLayout | None, target: TargetConfig, where: str) -> FeatureLayout:
    """The layout that a head carries, our feature_layout or else what its layer ids mean, or if it carries none the stated one; compared
    with every other place that states one. Raises LayoutMismatch where they differ, or where it takes --layers to tell."""
    own = [FeatureLayout.from_dict(x) for x in (config.get("feature_layout"), json.loads(metadata.get("feature_layout", "null"))) if x]
    if own and "eagle_aux_hidden_state_layer_ids" in config:
        own.append(replace(own[0], boundaries=tuple(config["eagle_aux_hidden_state_layer_ids"])))
    for other in own[1:]:
        own[0].require(other, f"{where}/config.json's", "the one in its weight file, or its eagle_aux_hidden_state_layer_ids")
    readings = {} if own else layout_readings(config, target)
    possible = list(dict.fromkeys(b for found in readings.values() for b in found))
    agreed = [b for b in possible if all(b in found for found in readings.values())]
    layouts = own[:1] or [FeatureLayout(b, target.hidden_size, target.num_layers) for b in agreed or possible]
    if not own and len(agreed) != 1 and (stated is None or layouts and stated not in layouts):
        text = lambda found: " or ".join(",".join(map(str, b)) for b in found) or "nothing here"
        says = "; ".join(f"{key} can mean {text(found)}" for key, found in readings.items()) or "it lists no layer ids"
        usual = layouts or [FeatureLayout.default(target.hidden_size, target.num_layers)]
        raise LayoutMismatch(
            f"{where} does not say for certain which hidden states it was trained on ({says}), and no default is assumed: state them with "
            "--layers (boundaries: 0 is the embedding, b the output of decoder layer b-1 counted from 0), such as --layers "
            f"{', or '.join(layout.flag for layout in usual)}; or let examples/probe.py find out")
    layout = layouts[0] if own or len(agreed) == 1 else stated
    layout.require(stated or layout, f"the draft head's ({where})", "the one stated with --layers")
    return layout


def read_draft_config(folder: str | Path, target: TargetConfig, stated: FeatureLayout | None = None, metadata: dict = {}) -> DraftConfig:
    """A head's config.json, whichever system wrote it; metadata: its weight file's. ValueError for what is no EAGLE-3 head."""
    top = read_json(Path(folder) / "config.json")
    config = {"rms_norm_eps": 1e-6, **({"norm_before_residual": True} if "speculators_config" in top else {})}  # as vLLM reads it
    for inside, keys in NESTED:
        config.update({key: value for key, value in (top.get(inside) or {}).items() if keys is None or key in keys})
    config.update({key: value for key, value in top.items() if value is not None})
    layout = read_layout(config, metadata, stated, target, str(folder))
    for key, only in (("num_hidden_layers", 1), ("hidden_act", "silu"), ("target_hidden_size", layout.hidden_size)):
        if config.get(key, only) != only:
            raise ValueError(f"a head for this target must have {key} {only}: its config.json says {config[key]}")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ValueError("the head reads only the target's last hidden state (use_aux_hidden_state is false): that is not supported")
    sizes, flags = read_sizes(config), {flag: bool(config.get(flag, False)) for flag in DraftConfig.FLAGS}
    drafted = config.get("draft_vocab_size", sizes["vocab_size"])
    return DraftConfig(layout, draft_vocab_size=drafted, rope=RopeConfig.from_json(config), **sizes, **flags)


def load_draft(folder: str | Path, target: Target | TargetEnds, stated_layout: FeatureLayout | None = None,
               dtype: str | None = None) -> DraftHead:
    """A head's folder, ours or another system's -> a DraftHead attached to `target`, split as that is, in dtype (default: the target's),
    without gradients.

    Raises LayoutMismatch or ValueError if it was trained on other features, for another target or tokenizer, or is not whole.
    """
    tensors, stored = TensorFolder(folder), read_json(Path(folder) / "config.json")
    config = read_draft_config(folder, target.config, stated_layout, tensors.metadata)
    if stored.get("target_fingerprint") and target.fingerprint:
        require_same_target(stored["target_fingerprint"], target.fingerprint, f"the draft head {folder}", "the one that is loaded")
    if stored.get("architectures") == ["LlamaForCausalLM"] and config.rope.theta != 10000:
        warnings.warn(f"{folder} says rope base {config.rope.theta:g}, but the official trainer always uses 10000: examples/probe.py "
                      "tries both")
    weight, names = target.norm.weight, draft_tensor_names(tensors)
    with torch.device("meta"):
        head = DraftHead(config, shard=getattr(target, "shard", Shard()))
    own = {name for name in head.state_dict() if name not in ("d2t", "t2d")}  # read below; a copy of the target's embedding is compared
    load_strictly(head, tensors, {name: names.get(name, name) for name in own}, torch_dtype(dtype) if dtype else weight.dtype, weight.device,
                  (r"(^|\.)(d2t|t2d|embed_tokens\.weight)$", r"rotary_emb\.inv_freq$"))
    head.d2t, head.t2d = (torch.empty(x.shape, dtype=x.dtype, device=weight.device) for x in (head.d2t, head.t2d))
    head.set_draft_ids(read_draft_ids(tensors, names, config.draft_vocab_size, config.vocab_size))
    if "embed_tokens.weight" in names and not config.has_own_embedding:  # it must be the target's, but for rounding to either's dtype
        own, name = target.embed_tokens.weight, names["embed_tokens.weight"]
        theirs = tensors.tensor(name, getattr(target.embed_tokens, "split", None)).to(own.device)
        narrow = min(own.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
        if own.shape != theirs.shape or not torch.allclose(own.to(narrow), theirs.to(narrow), rtol=0, atol=1e-6):
            raise ValueError(f"{folder}: {name} differs from the target's embedding (another target, or trained along?): here a head shares "
                             "the target's, so this one cannot be served")
    broken = [name for name, parameter in head.named_parameters() if not parameter.isfinite().all()]
    if broken:
        raise ValueError(f"{folder}: {', '.join(broken)} is not finite (in {weight.dtype}): the head cannot guess")
    return head.to(weight.device).attach(target).eval()


# -----------------------------------------------------------------------------
# 16. Text
# Token ids are first-class everywhere above. Text needs a tokenizer: the well-kept libraries, imported where used, or plain bytes (the
# demo's target). Needs: 15.


def require_package(name: str):
    try:
        return __import__(name)
    except ImportError:
        raise ValueError(f"this needs the package {name}: pip install {name}") from None


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 is the end of a text. For the demo's target; tokenizer_config.json says \"ByteTokenizer\"."""
    vocab_size, eos_id, has_chat_template = 257, 256, False

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class KimiText:
    """tiktoken.model of the Kimi family through the tiktoken library, with the split pattern and the 256 special ids of its own
    tokenization_kimi.py."""
    SPECIAL = 256
    PATTERN = "|".join((
        r"[\p{Han}]+",
        *(r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" + upper + r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" + lower
          + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for upper, lower in ("*+", "+*")),
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
    LONG = re.compile(r"\S{25000}(?=\S)|\s{25000}(?=\s)")  # cut here, or the library's pattern matching overflows

    def __init__(self, file: Path, config: dict):
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in file.read_bytes().splitlines() if line)}
        self.first = len(ranks)
        added = {int(id): token for id, token in config.get("added_tokens_decoder", {}).items()}
        special = {added.get(id, {}).get("content", f"<|reserved_token_{id}|>"): id for id in range(self.first, self.first + self.SPECIAL)}
        self.shown = {*range(self.first), *(id for id in special.values() if not added.get(id, {}).get("special", True))}  # </think>, say
        self.encoding = require_package("tiktoken").Encoding(file.name, pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        cuts = [0, *(match.end() for match in self.LONG.finditer(text)), len(text)]
        return [id for a, b in zip(cuts, cuts[1:]) for id in self.encoding.encode(text[a:b], allowed_special="all")]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode([id for id in ids if id in self.shown])


class JsonText:
    """tokenizer.json through the tokenizers library."""

    def __init__(self, file: Path, config: dict):
        try:
            self.tokenizer = require_package("tokenizers").Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class Tokenizer:
    """Text and ids through one of the libraries above, and the chat template through jinja2 (imported when first needed)."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        file, library = next(((folder / name, library) for name, library in (("tokenizer.json", JsonText), ("tiktoken.model", KimiText))
                              if (folder / name).exists()), (None, None))
        if file is None:
            raise FileNotFoundError(f"{folder} has no tokenizer.json or tiktoken.model: text needs one (token ids do not: --prompt-ids, rows of "
                                    "input_ids)")
        self.text = library(file, config)
        source = config.get("chat_template")
        if (folder / "chat_template.jinja").exists():
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t["name"] == "default"), None)
        self.has_chat_template = source is not None
        if source is not None:
            self.jinja2 = require_package("jinja2")
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
            environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
            environment.globals.update(raise_exception=self._raise, strftime_now=time.strftime)
            try:
                self.template = environment.from_string(source)
            except self.jinja2.TemplateError as error:
                raise ValueError(f"{folder}: the chat template cannot be read: {error}") from None
            text = lambda token: token["content"] if isinstance(token, dict) else token
            self.special = {name: text(config[name]) for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}

    @staticmethod
    def _raise(message: str):
        raise ValueError(f"the chat template refuses: {message}")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """add_special_tokens for text that starts a sequence outside a chat template: a leading BOS, where the tokenizer has one."""
        return self.text.encode(text, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        """Special tokens are left out."""
        return self.text.decode(ids)

    def chat(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """OpenAI messages -> the text that the model was trained on."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self.special)
        except self.jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from None


def load_tokenizer(folder: str | Path) -> "Tokenizer | ByteTokenizer":
    config = Path(folder) / "tokenizer_config.json"
    if config.exists() and read_json(config).get("tokenizer_class") == "ByteTokenizer":
        return ByteTokenizer()
    return Tokenizer(folder)


class TextStream:
    """Text of a growing list of tokens, holding back characters that are not whole yet."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.shown = tokenizer, [], ""

    def push(self, ids: list[int], final: bool = False) -> str:
        self.ids += ids
        text = self.tokenizer.decode(self.ids)
        if not final and text.endswith("\ufffd"):  # a character whose bytes are still coming
            return ""
        new, self.shown = text[len(self.shown):], text
        return new


# -----------------------------------------------------------------------------
# 17. Training rows
# A row is token ids and a mask of the tokens that the target is to have written. Five common formats become rows here. Needs: 9.


@dataclass
class Row:
    """Takes lists as well as tensors: a token takes 4 bytes, and its mask 1, since there may be a billion."""
    tokens: Tensor     # [T] int32
    loss_mask: Tensor  # [T] bool
    name: str          # file:line
    hidden: dict[str, Tensor] = field(default_factory=dict)  # stored features: "h.2" -> [T,C], unshifted
    skipped: str | None = None                               # why those were not stored

    def __post_init__(self):
        self.tokens = torch.as_tensor(self.tokens, dtype=torch.int32)
        self.loss_mask = torch.as_tensor(self.loss_mask, dtype=torch.bool)


ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}  # ShareGPT's


def record_messages(record: dict) -> list[dict] | None:
    """OpenAI messages, ShareGPT conversations, MT-bench turns (all asked by the user) or a prompt -> messages; None: none of these."""
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m and "content" in m for m in messages):
            raise ValueError("messages must be a list of objects with role and content")
        return messages
    if "conversations" in record:
        unknown = {turn["from"] for turn in record["conversations"]} - set(ROLES)
        if unknown:
            raise ValueError(f"unknown speaker {sorted(unknown)[0]!r}")
        return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
    asked = record["turns"] if "turns" in record else [record["prompt"]] if "prompt" in record else None
    return asked and [{"role": "user", "content": text} for text in asked]


def render_chat(messages: list[dict], tokenizer) -> tuple[list[int], list[bool]]:
    """Messages -> (tokens, mask of the assistant's tokens). Each answer is encoded apart from its prompt, as serving encodes it."""
    if not tokenizer.has_chat_template:
        raise ValueError("the target's tokenizer has no chat template")
    while messages and messages[0]["role"] == "assistant":  # ShareGPT's parts of a split conversation: nothing asked for this answer
        messages = messages[1:]
    tokens, mask, text = [], [], ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = tokenizer.chat(messages[:i], True), tokenizer.chat(messages[:i + 1], False)
        if not before.startswith(text) or not after.startswith(before):
            raise ValueError("the chat template does not render this conversation turn by turn")
        for piece, supervised in ((before[len(text):], False), (after[len(before):], True)):
            ids = tokenizer.encode(piece)
            tokens, mask = tokens + ids, mask + [supervised] * len(ids)
        text = after
    if not tokens:
        raise ValueError("no assistant message")
    return tokens, mask


def record_ids(record: dict) -> list[int]:
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError("input_ids must be a list of integers")
    return ids


def encode_record(record: dict, tokenizer) -> tuple[list[int], list[bool]]:
    """One JSON record in any of the formats -> (tokens, loss mask). Raises ValueError saying why it cannot be used."""
    if "input_ids" in record:
        tokens = record_ids(record)
        mask = record.get("loss_mask", [True] * len(tokens))
        if not isinstance(mask, list) or len(mask) != len(tokens) or any(m not in (0, 1) for m in mask):
            raise ValueError("loss_mask must be a list of 0 and 1 as long as input_ids")
        return tokens, [bool(m) for m in mask]
    if "messages" in record or "conversations" in record:
        return render_chat(record_messages(record), tokenizer)
    if "prompt" in record and "completion" in record:
        prompt, completion = tokenizer.encode(record["prompt"], add_special_tokens=True), tokenizer.encode(record["completion"])
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)
    if "text" in record:
        tokens = tokenizer.encode(record["text"], add_special_tokens=True)
        return tokens, [True] * len(tokens)
    raise ValueError("no messages, conversations, prompt + completion, text or input_ids")


def read_records(path: str | Path):
    """Yield (name, record or None where the line is not a JSON object) for each line of a JSONL file that is not empty."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line.decode("utf-8-sig"))
                except ValueError:  # not JSON, or not UTF-8
                    record = None
                yield f"{path.name}:{number}", record if isinstance(record, dict) else None


MALFORMED = (ValueError, KeyError, TypeError, AttributeError)  # what a record raises that is not as it should be


def why_skipped(error: Exception) -> str:
    return "skipped: " + (str(error) if isinstance(error, ValueError) else f"malformed ({type(error).__name__}: {error})")


def needs_tokenizer(record: dict) -> bool:
    """Whether it holds text that this file can use; a missing package or file is then no fault of the record."""
    return "input_ids" not in record and not record.keys().isdisjoint(("messages", "conversations", "turns", "prompt", "text"))


def read_rows(paths, tokenizer, max_length: int, eos_token_ids, vocab_size: int,
              limit: int | None = None) -> tuple[list[Row], Counter, dict[str, str]]:
    """All usable rows of JSONL files, in order; how many were skipped or cut and why; and the first name for each reason.

    tokenizer: a function that returns it, called at the first row of text (rows of input_ids need none). limit: enough rows.
    """
    rows, report, first = [], Counter(), {}
    for path in paths:
        for name, record in tqdm(read_records(path), desc="rows", unit="row", leave=False):
            if limit is not None and len(rows) == limit:
                break
            loaded = tokenizer() if record and needs_tokenizer(record) else None
            try:
                if record is None:
                    raise ValueError("not a JSON object in UTF-8")
                tokens, mask = encode_record(record, loaded)
                if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                    raise ValueError(f"token ids beyond the target's vocabulary of {vocab_size}")
                reason = "cut at --max-length" if len(tokens) > max_length else None
                row = Row(tokens[:max_length], mask[:max_length], name)
                if not trained_slots(assistant_spans(row.tokens[None], row.loss_mask[None], eos_token_ids), 0).any():
                    raise ValueError("nothing supervised" + (" before --max-length" if reason else ""))
                rows.append(row)
            except MALFORMED as error:
                reason = why_skipped(error)
            if reason:
                report[reason] += 1
                first.setdefault(reason, name)
    if not rows:
        raise ValueError(f"no usable row in {', '.join(map(str, paths))}: {'; '.join(report) or 'the file is empty'}")
    return rows, report, first


def token_counts(rows: list[Row], vocab_size: int) -> Tensor:
    """How often each token id is supervised: [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        counts += torch.bincount(row.tokens[row.loss_mask], minlength=vocab_size)
    return counts


def epoch_batches(lengths: list[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch's batches of row indices: shuffled by seed and epoch, similar lengths together (little padding), batches shuffled again.

    A pure function, so that a resumed run, and training from stored features, meet the rows in the same order.
    """
    order, window, batches = random.Random(f"{seed}/{epoch}"), batch_size * 64, []
    rows = list(range(len(lengths)))
    order.shuffle(rows)
    for start in range(0, len(rows), window):
        near = sorted(rows[start:start + window], key=lambda r: lengths[r])
        batches += [near[i:i + batch_size] for i in range(0, len(near), batch_size)]
    order.shuffle(batches)
    return batches


def collate(rows: list[Row], device="cpu") -> tuple[Tensor, Tensor]:
    """Rows -> (tokens [B,T] int64, loss_mask [B,T]), right-padded with 0 and False."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return pad([row.tokens.long() for row in rows]).to(device), pad([row.loss_mask for row in rows]).to(device)


def encode_prompt(record: dict, tokenizer, raw: bool = False) -> list[int]:
    """A prompt to serve, from a record with MT-bench `turns` (the first), `messages`, `prompt` or `input_ids`; raw: no chat template."""
    if "input_ids" in record:
        return record_ids(record)
    messages = record_messages(record)
    if not messages:
        raise ValueError("a prompt needs turns, messages, prompt or input_ids")
    messages = messages[:1] if "turns" in record and "messages" not in record else messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode("\n".join(message["content"] for message in messages), add_special_tokens=True)
    return tokenizer.encode(tokenizer.chat(messages, True))


class Conversation:
    """A record whose answers the target writes anew, turn by turn; `rows` are what it saw and wrote, as (tokens, loss mask).

    One row holds all turns as long as the chat template renders what was said as it was said; a template that drops the thoughts of earlier
    turns, say, makes another row. Raises ValueError for a record that asks nothing.
    """

    def __init__(self, record: dict, tokenizer, index: int = 0, name: str = ""):
        self.tokenizer, self.index, self.name, self.messages, self.rows = tokenizer, index, name, [], []
        self.turns: list[list] = []  # messages before each answer (or token ids, where the record is token ids)
        if "input_ids" in record:
            tokens, mask = encode_record(record, tokenizer)
            self.turns = [tokens[:mask.index(True)] if "loss_mask" in record and True in mask else tokens]
            if not self.turns[0]:
                raise ValueError("nothing comes before the first answer")
            return
        messages = record_messages(record)
        if messages is None:
            raise ValueError("no messages, conversations, turns, prompt or input_ids")
        for is_answer, group in itertools.groupby(messages, lambda message: message["role"] == "assistant"):
            if not is_answer:
                self.turns.append(list(group))
        if not self.turns:
            raise ValueError("nobody asks anything")

    def next_prompt(self) -> list[int] | None:
        """The token ids to answer next; None: the conversation is over."""
        if not self.turns:
            return None
        turn = self.turns.pop(0)
        if not isinstance(turn[0], dict):
            return turn
        self.messages += turn
        return encode_prompt({"messages": self.messages}, self.tokenizer)

    def answer(self, prompt: list[int], output: list[int], is_whole: bool) -> None:
        """Take the target's answer to next_prompt(); one that was cut off ends the conversation."""
        mask = []
        if self.rows and prompt[:len(self.rows[-1][0])] == self.rows[-1][0]:
            mask = self.rows.pop()[1]
        self.rows.append((prompt + output, mask + [False] * (len(prompt) - len(mask)) + [True] * len(output)))
        if self.messages:
            self.messages.append({"role": "assistant", "content": self.tokenizer.decode(output)})
        if not is_whole:
            self.turns = []

    def lines(self, made: str) -> str:
        """The rows as JSON lines; the last has the messages too, for whoever reads text. See finished_conversations."""
        rows = [{"index": self.index, "source": self.name, "made": made, "rows_left": len(self.rows) - 1 - n, "input_ids": tokens,
                 "loss_mask": [int(m) for m in mask]} for n, (tokens, mask) in enumerate(self.rows)]
        if self.messages:
            rows[-1]["messages"] = self.messages
        return "".join(json.dumps(row) + "\n" for row in rows)


def finished_conversations(path: Path, made: str) -> set[int]:
    """Which records (their indices) have all their rows in `path`, made with the same settings; what was being written when a run ended is cut
    off. Raises ValueError for a file made with other settings, or by something else."""
    done, at, whole = set(), 0, 0
    if path.exists():
        with path.open("rb+") as file:
            for line in file:
                try:
                    row, at = json.loads(line), at + len(line)
                except ValueError:
                    if line.endswith(b"\n") or not line.startswith(b'{"index": '[:len(line)]):
                        raise ValueError(f"{path} is not a file that --regenerate wrote: choose another name") from None
                    break
                if not isinstance(row, dict) or row.get("made") != made:
                    raise ValueError(f"{path} was made with other settings (target, --data, sampling, limits, seed or number of processes): choose "
                                     "another name")
                if line.endswith(b"\n") and row["rows_left"] == 0:
                    done.add(row["index"])
                    whole = at
            file.truncate(whole)
    return done


# -----------------------------------------------------------------------------
# 18. Stored features
# Hidden states on disk, for training without the target: one file a row, one tensor a boundary, by name; the layout and the target stand in
# the manifest and in every file. A row that exists is whole, so an interrupted extraction goes on with what is missing, and several
# processes share the rows without talking. Needs: 1, 6, 15, 17.


def held_out_count(num_rows: int) -> int:
    """The last 1 % of the rows are held out where no other rows are named. Raises ValueError for a single row."""
    if num_rows < 2:
        raise ValueError("one row cannot be both trained on and held out: add rows, or give --held-out FILE")
    return max(1, num_rows // 100)


def rows_hash(rows: list[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.tokens.long().numpy().tobytes() + row.loss_mask.numpy().tobytes())
    return digest.hexdigest()[:16]


class FeatureFolder:
    """Features on disk: manifest.json, rows.safetensors (lengths [n], and counts [V]: how often each token is supervised, held-out rows left
    out) and rows_0-2000/data_0.safetensors, ...: input_ids [T] int32, loss_mask [T] bool, and h.b [T,C] for each boundary b of the layout and
    for the teacher, h.L.

    Raises FileNotFoundError without a manifest.
    """
    group = 2000

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "manifest.json").is_file():
            raise FileNotFoundError(f"{folder} has no manifest.json: it is no folder of features (train.py --extract makes one, "
                                    "examples/convert_features.py makes one of another trainer's rows)")
        self.manifest = read_json(self.folder / "manifest.json")
        value = partial(config_value, self.manifest, where=str(self.folder / "manifest.json"))
        self.layout = FeatureLayout.from_dict(value("feature_layout"))
        self.fingerprint, self.dtype, self.num_rows, self.teacher = (value(key) for key in ("target_fingerprint", "dtype", "rows", "teacher"))
        rows = open_tensors(self.folder / "rows.safetensors")
        self.lengths, self.counts = rows.get_tensor("lengths").tolist(), rows.get_tensor("counts")

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in each file: the layout's boundaries and the teacher."""
        return tuple(dict.fromkeys((*self.layout.names, self.teacher)))

    @classmethod
    def create(cls, folder: str | Path, layout: FeatureLayout, target: Target, rows: list[Row],
               teacher: str | None = None) -> "FeatureFolder":
        """Begin a folder, or go on with one: LayoutMismatch or ValueError if it was begun for another layout, target, dtype or other
        rows. teacher: h.L (the default), or h.L.normed where all that is known is what the final norm made of it."""
        folder, dtype = Path(folder), str(target.norm.weight.dtype).removeprefix("torch.")
        wanted = {"feature_layout": layout.to_dict(), "target_fingerprint": target.fingerprint, "dtype": dtype, "rows": len(rows),
                  "rows_hash": rows_hash(rows), "group": cls.group, "teacher": teacher or f"h.{layout.num_layers}"}
        if (folder / "manifest.json").exists():
            own = cls(folder)
            own.layout.require(layout, f"the features in {folder}", "the asked one")
            for key, value in wanted.items():
                if own.manifest.get(key) != value:
                    raise ValueError(f"{folder} was begun with another {key} ({own.manifest.get(key)}, now {value}): "
                                     "extract into another folder")
            return own
        if folder.exists() and any(not path.name.startswith(("manifest.json", "rows.safetensors")) for path in folder.iterdir()):
            raise ValueError(f"{folder} holds something else than features: extract into a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        counts = token_counts(rows[:-held_out_count(len(rows))], target.config.vocab_size)
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int32)
        write_tensors(folder / "rows.safetensors", {"lengths": lengths, "counts": counts}, {})
        write_text(folder / "manifest.json", json.dumps(wanted, indent=1))  # last: a folder that has one is begun
        return cls(folder)

    def path(self, index: int) -> Path:
        start = index // self.group * self.group
        return self.folder / f"rows_{start}-{start + self.group}" / f"data_{index}.safetensors"

    def write(self, index: int, row: Row, hidden: dict[str, Tensor]) -> str | None:
        """Store one row, with hidden {"h.2": [T,C], ...}. A row with a value that is not finite is stored without its hidden states; returns
        why."""
        bad = [name for name, x in hidden.items() if not x.isfinite().all()]
        skipped = f"{bad[0]} is not finite" if bad else None
        metadata = {"feature_layout": json.dumps(self.layout.to_dict()), "weights": self.fingerprint["weights"], "row": str(index),
                    **({"skipped": skipped} if skipped else {})}
        path = self.path(index)
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, {"input_ids": row.tokens, "loss_mask": row.loss_mask, **({} if skipped else hidden)}, metadata)
        return skipped

    def read(self, index: int, names: tuple[str, ...] | None = None) -> Row:
        """A row with these tensors (default: all). Raises ValueError naming the file if it is torn, foreign, misshapen or not finite."""
        path = self.path(index)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: extraction did not finish; run the same train.py --extract again")
        file = open_tensors(path)
        metadata, stored = file.metadata() or {}, set(file.keys())
        if metadata.get("weights") != self.fingerprint["weights"] or metadata.get("row") != str(index):
            raise ValueError(f"{path} does not belong here: it is row {metadata.get('row')} of a target {metadata.get('weights')}, the manifest "
                             f"says {self.fingerprint['weights']}")
        self.layout.require(FeatureLayout.from_dict(json.loads(metadata["feature_layout"])), f"the manifest in {self.folder}", str(path))
        tokens, loss_mask = file.get_tensor("input_ids"), file.get_tensor("loss_mask")
        if "skipped" in metadata:
            return Row(tokens, loss_mask, path.name, {}, metadata["skipped"])
        absent = set(names or self.names) - stored
        if absent:
            raise LayoutMismatch(f"{path} does not hold {', '.join(sorted(absent))}; it holds {', '.join(sorted(stored))}")
        hidden = {name: file.get_tensor(name) for name in names or self.names}
        for name, tensor in {"loss_mask": loss_mask[:, None], **hidden}.items():
            width = 1 if name == "loss_mask" else self.layout.hidden_size
            if list(tensor.shape) != [len(tokens), width]:
                raise ValueError(f"{path}: {name} is {list(tensor.shape)}, expected {[len(tokens), width]}")
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: {name} is not finite")
        return Row(tokens, loss_mask, path.name, hidden)

    def missing(self) -> list[int]:
        """Rows that are not there yet."""
        present = {path.name for start in range(0, self.num_rows, self.group) for path in self.path(start).parent.glob("data_*.safetensors")}
        return [index for index in range(self.num_rows) if f"data_{index}.safetensors" not in present]

    def row_bytes(self, num_tokens: int) -> int:
        """Disk that so many tokens take."""
        return num_tokens * (len(self.names) * self.layout.hidden_size * torch_dtype(self.dtype).itemsize + 5)


# -----------------------------------------------------------------------------
# 19. Wiring check
# Tells features that are not what they are said to be: stored hidden states are compared with all that the target computes for the same
# tokens. (What a head without a layout was trained on: examples/probe.py.) Needs: 6.

MATCH = 0.9  # similarity from which on two blocks are the same boundary; neighbouring boundaries of real models lie well below


def similarity(a: Tensor, b: Tensor) -> float:
    """1 - the median over tokens of |a - b| / max(|a|, |b|): 1 for equal [T,C], about 0.99 after rounding to bf16, 0 or less for strangers.
    Unlike a cosine it also sees a norm that was applied or left out."""
    a, b = a.double(), b.double()
    return 1 - ((a - b).norm(dim=-1) / torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp(min=1e-12)).median().item()


@torch.no_grad()
def all_boundaries(target: Target, tokens: Tensor) -> dict[str, Tensor]:
    """tokens [T] -> {"h.0": [T,C], ..., "h.L", "h.L.normed"}."""
    L = target.config.num_layers
    captures = target(tokens[None].to(target.norm.weight.device), boundaries=tuple(range(L + 1))).captures
    return {**{f"h.{b}": hidden[0] for b, hidden in captures.items()}, f"h.{L}.normed": target.norm(captures[L])[0]}


class BlockMatch(NamedTuple):
    """What a stored block is: the most similar of all boundaries, over some rows."""
    claimed: str
    best: str
    similarity: float
    runner_up: str
    runner_up_similarity: float
    shift: int  # the stored rows lie this many tokens to the right of the computed ones

    def __str__(self) -> str:
        moved = f", moved by {self.shift:+d} token" if self.shift else ""
        return (f"{self.claimed} is {self.best}{moved} ({self.similarity:.3f}; then {self.runner_up}, {self.runner_up_similarity:.3f})"
                if self.similarity >= MATCH else
                f"{self.claimed} is no boundary of this target (nearest {self.best}{moved}, {self.similarity:.3f}; then {self.runner_up}, "
                f"{self.runner_up_similarity:.3f})")


def identify_blocks(rows: list[tuple[Tensor, dict[str, Tensor]]], target: Target) -> list[BlockMatch]:
    """rows: (tokens [T], {claimed name: [T,C]}) -> what each block is."""
    totals = {name: Counter() for name in rows[0][1]}
    for tokens, blocks in rows:
        candidates = all_boundaries(target, tokens)
        for name, block in blocks.items():
            for other, hidden in candidates.items():
                for by in (0, 1, -1):
                    ours, theirs = block[max(by, 0):len(block) + min(by, 0)], hidden[max(-by, 0):len(hidden) + min(-by, 0)]
                    totals[name][other, by] += similarity(ours.to(hidden.device), theirs) / len(rows)
    matches = []
    for name, found in totals.items():
        (best, by), first = found.most_common(1)[0]
        (other, _), second = next(entry for entry in found.most_common() if entry[0][0] != best)
        matches.append(BlockMatch(name, best, first, other, second, by))
    return matches


def explain_blocks(claimed: tuple[int, ...], found: tuple[int, ...]) -> str:
    """One name for how two lists of boundaries differ."""
    if sorted(claimed) == sorted(found):
        return "swapped blocks"
    if len(claimed) == len(found) and len({b - a for a, b in zip(claimed, found)}) == 1 and abs(found[0] - claimed[0]) == 1:
        return "off by one"
    return "other boundaries"


def wiring_fault(matches: list[BlockMatch], other_weights: bool) -> tuple[str, str] | None:
    """(cause, what would fix it) if stored blocks are not what their names say; None if they are."""
    wrong = [m for m in matches if m.best != m.claimed or m.similarity < MATCH or m.shift]
    if not wrong:
        return None
    boundary = lambda name: int(name.split(".")[1])
    features = matches[:-1]  # the teacher stands last
    if all(m.shift for m in wrong) and len({m.shift for m in wrong}) == 1:
        return "rows shifted by one token", (f"the stored hidden states lie {wrong[0].shift:+d} token off their input_ids: extract again, "
                                             "unshifted")
    if all(m.similarity < MATCH for m in wrong):
        if other_weights or all(m.best == m.claimed for m in wrong):
            return "other target weights", ("the features were made with other weights: serve the target that they were made with, or extract "
                                            "and train anew")
        return "foreign features", "the stored hidden states are no boundary of this target: wrong target, tokenizer or rows; extract again"
    if wrong == [matches[-1]]:
        return "teacher and norm", f"the stored teacher {wrong[0].claimed} is {wrong[0].best}: extract again"
    claimed, found = (tuple(boundary(getattr(m, key)) for m in features) for key in ("claimed", "best"))
    text = lambda boundaries: ",".join(map(str, boundaries))
    return explain_blocks(claimed, found), (f"the stored features are boundaries {text(found)}, not {text(claimed)}: extract again, or train and "
                                            f"serve with --layers {text(sorted(found))}, in that order")


# -----------------------------------------------------------------------------
# 20. Scripts
# What train.py and serve.py share. Needs: 3, 16.


def is_first_failure() -> bool:
    """Of ranks that end for one reason, one says so."""
    if not dist.is_initialized():
        return int(os.environ.get("RANK", 0)) == 0
    try:
        return dist.distributed_c10d._get_default_store().add("eagle3 failures", 1) == 1
    except RuntimeError:  # whoever kept the store is gone
        return False


def require_at_least(args, least: int, *names: str) -> None:
    """ValueError by its flag for an option that is given and smaller."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}: got {getattr(args, name)}")


def model_folder(name: str, with_weights: bool = True) -> str:
    """The folder of that name or, for owner/name where there is none, the Hugging Face hub's repository, downloaded. Raises ValueError."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    try:
        patterns = ["*.json", "*.model", "*.txt", "*.jinja"] + (["*.safetensors", "pytorch_model.bin"] if with_weights else [])
        return require_package("huggingface_hub").snapshot_download(name, allow_patterns=patterns)
    except (ValueError, OSError) as error:  # the hub's errors are OSErrors
        raise ValueError(f"{name} is no folder here, nor could it be had from the Hugging Face hub: {str(error).splitlines()[0]}") from None


def run_script(name: str, run) -> None:
    """Both scripts: meet the other ranks and run(shard). Rank 0 prints the summary as the last line, one JSON object; a verdict other than ok
    ends with exit code 1. A user's mistake, an interrupt or a lost rank ends all ranks, with one line and exit code 2, 130 (143 for SIGTERM)
    and 3."""
    def terminate(*_):
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, terminate)
    code, message = 0, None
    try:
        shard = join_ranks()
        if shard.rank:  # rank 0 speaks for all
            sys.stdout = sys.stderr = open(os.devnull, "w")
        summary = run(shard)
        wait_for_all(shard)
        code = 0 if summary.get("verdict", "ok") == "ok" else 1
        print(json.dumps(summary))
    except (ValueError, OSError) as error:
        code, message = 2, str(error)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except SystemExit as error:
        code, message = error.code, "terminated" if error.code == 143 else None
    except Exception as error:
        lost = "RANK" in os.environ and (isinstance(error, dist.DistError) or "gloo" in str(error).lower())
        code, message = ((3, f"rank {os.environ['RANK']} lost another rank: it was killed, or ran out of memory ({error})") if lost
                         else (1, traceback.format_exc()))
    if message and is_first_failure():
        print(f"{name}: {message}", file=sys.__stderr__)
    sys.stdout.flush()
    if dist.is_initialized():
        os._exit(code)  # a collective that waits for a rank that is gone would keep the process
    sys.exit(code)
