# MIT License, see LICENSE.
"""The specification of eagle3.py, in its own section order, with oracles instead of recorded outputs.

    pip install torch==2.13.0
    pip install -r requirements.txt pytest 'transformers>=5' tokenizers tiktoken jinja2 matplotlib
    pip install openai hypothesis pytest-xdist
    python -m pytest -q -n 2 test_eagle3.py             4:30 on two cores with AVX-512, nothing downloaded
    python -m pytest -q test_eagle3.py -m "not slow"    a first answer, after 1:10

EAGLE3_SMOLLM2=DIR also compares with transformers on SmolLM2-135M-Instruct, and EAGLE3_MTBENCH=FILE.jsonl names its prompts.
"""
import ast
import base64
import contextlib
import http.client
import io
import json
import math
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import eagle3
import serve
import train
from eagle3 import (CacheContext, DraftConfig, DraftHead, DraftTree, Engine, FeatureLayout, KVCache, LayoutMismatch, RopeConfig, Row, Sampling,
                    SpecConfig, Target, TargetConfig, TargetEnds, TTTAttention, accept, ancestor_mask, assistant_spans, capture_hidden_states, generate,
                    load_draft, load_target, prepare_ttt, save_draft, save_target, speculative_generate, trained_slots, ttt_loss)
from examples import convert_features, minimal, plan, plot, probe, transformers_target

HERE = Path(__file__).parent
torch.set_num_threads(1)  # tiny models: threads would only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # the scripts that the tests start, too
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
slow = pytest.mark.slow  # more than some two seconds; -m "not slow" answers first
CHAIN, TREE = SpecConfig(4, 1, 5), SpecConfig(4, 3, 10)


def spec_name(spec):
    return f"{spec.num_steps}-{spec.topk}-{spec.num_draft_tokens}"


def assert_close(name, ours, theirs, tolerance):
    gap = (ours - theirs).abs().max().item()
    assert ours.shape == theirs.shape and gap <= tolerance, f"{name}: shapes {list(ours.shape)}, {list(theirs.shape)}, largest difference {gap:.3g}"


def target_config(**changes) -> TargetConfig:
    """A tiny Llama: 8 layers, 4 query and 2 KV heads."""
    base = dict(architecture="LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8,
                vocab_size=64, rms_norm_eps=1e-5, rope=RopeConfig(10000.0), max_position_embeddings=512, tie_word_embeddings=False,
                qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, eos_token_ids=(2,), dtype="float64")
    return TargetConfig(**{**base, **changes})


def random_target(seed=0, dtype=torch.float64, **changes) -> Target:
    """Weights large enough that greedy text wanders."""
    generator = torch.Generator().manual_seed(seed)
    target = Target(target_config(**changes))
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.35, generator=generator)
    return target.to(dtype).requires_grad_(False)


def random_head(target: Target, seed=1, draft_ids=None, boundaries=None, **flags) -> DraftHead:
    config = target.config
    layout = FeatureLayout(boundaries or (2, 4, 5), config.hidden_size, config.num_layers)
    ids = torch.arange(config.vocab_size) if draft_ids is None else draft_ids
    head = DraftHead(DraftConfig.for_target(config, layout, len(ids), **flags), ids).init_weights(seed)
    for parameter in head.parameters():  # livelier than the training initialisation, so that every path matters
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 7)) * 0.2)
    return head.to(target.norm.weight.dtype).attach(target)


def random_prompts(lengths, vocab_size=64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def ttt_batch(head, target, rows, ttt_steps):
    tokens, mask = eagle3.collate(rows)
    layout = head.config.layout
    captures = target(tokens, boundaries=(*layout.boundaries, layout.num_layers)).captures
    return prepare_ttt(head, tokens, mask, captures, ttt_steps, [row.name for row in rows])


def fit(head, batch, accuracy, most=600):
    """Overfit the head to a handful of rows until it guesses so many of them right at every step, on whatever machine."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(most):
        loss, stats = ttt_loss(head, batch)
        if min(stats.accuracy) >= accuracy:
            return head.requires_grad_(False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"after {most} steps the head still guesses {stats.accuracy} of the rows, not {accuracy}: training does not teach")


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def trained_head(target):
    """A head overfitted to the target's own greedy text, so that drafts are accepted, and sometimes not."""
    prompts = random_prompts([5, 9, 13, 7, 6, 11])
    rows = [Row(r.prompt + r.output, [False] * len(r.prompt) + [True] * len(r.output), "row") for r in generate(target, prompts, 40, eos_token_ids=())]
    head = DraftHead(DraftConfig.for_target(target.config, FeatureLayout((2, 4, 5), 32, 8), 64), torch.arange(64)).init_weights(0).double().attach(target)
    return fit(head, ttt_batch(head, target, rows, 4), 0.6)


# -----------------------------------------------------------------------------
# The file itself


def test_contents_match_the_banners():
    source = (HERE / "eagle3.py").read_text()
    contents = re.findall(r"^ +(\d+)\. (.+?)(?:  +.*)?$", ast.get_docstring(ast.parse(source)).split("Contents")[1], re.M)
    banners = re.findall(r"^# -{77}\n# (\d+)\. (.+)$", source, re.M)
    assert contents == banners and contents, f"Contents and banners differ:\n{contents}\n{banners}"


def test_nothing_is_used_above_its_definition():
    tree = ast.parse((HERE / "eagle3.py").read_text())
    line = {n.name: n.lineno for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    late = [(n.id, n.lineno) for top in tree.body for n in ast.walk(top) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and line.get(n.id, 0) > top.end_lineno]
    assert not late, f"used above their definition: {late}"


def test_a_banner_says_what_its_section_needs_of_the_others():
    """Names that a section's code refers to, and that another section defines: what has to be copied along."""
    source = (HERE / "eagle3.py").read_text()
    banners = re.findall(r"^# -{77}\n# (\d+)\. .+\n((?:#.*\n)+)", source, re.M)
    lines = [source[:match.start()].count("\n") for match in re.finditer(r"^# -{77}\n# \d+\. ", source, re.M)]
    section_of = lambda node: sum(line < node.lineno for line in lines)
    top = [node for node in ast.parse(source).body if section_of(node)]
    names = lambda node, kind: {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}
    home = {}
    for node in top:
        defined = {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else names(node, ast.Store)
        home.update(dict.fromkeys(defined, section_of(node)))
    used = {int(number): set() for number, _ in banners}
    for node in top:
        own = names(node, ast.Store) | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        used[section_of(node)] |= {home[name] for name in names(node, ast.Load) - own if name in home}
    for number, text in banners:
        says = re.search(r"Needs:? ([^.]+)\.\n", text)[1]
        others = sorted(used[int(number)] - {int(number)})
        assert says == (", ".join(map(str, others)) or "nothing"), f"section {number} says {says}, and uses {others}"


def test_a_star_import_brings_the_public_names_and_nothing_else():
    brought = {}
    exec("from eagle3 import *", brought)
    assert set(brought) - {"__builtins__"} == set(eagle3.__all__)


# -----------------------------------------------------------------------------
# 1. Feature layout


def test_a_layout_prints_parses_and_stores_itself():
    layout = FeatureLayout.parse("embed,3,31", 64, 61)
    assert str(layout) == "cat([embed, h.3, h.31])" and layout.names == ("h.0", "h.3", "h.31") and layout.width == 192
    assert FeatureLayout.parse(layout.flag, 64, 61) == FeatureLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize("boundaries", [(3, 3, 5), (5, 3), (), (-1, 2), (2, 62)])
def test_boundaries_that_are_not_strictly_ascending_within_the_target_are_refused(boundaries):
    with pytest.raises(ValueError, match="strictly ascending"):
        FeatureLayout(boundaries, 64, 61)


def test_the_default_layout_is_2_half_and_third_last_and_needs_seven_layers():
    assert FeatureLayout.default(64, 32).boundaries == (2, 16, 29) and FeatureLayout.default(64, 7).boundaries == (2, 3, 4)
    with pytest.raises(ValueError, match="at least 7 layers"):
        FeatureLayout.default(64, 6)


def test_layouts_of_equal_width_that_differ_are_told_apart_block_by_block():
    head, server = FeatureLayout((0, 3, 31), 64, 61), FeatureLayout((3, 31, 59), 64, 61)
    with pytest.raises(LayoutMismatch) as error:
        head.require(server, "the draft head's", "the server's")
    for part in ("cat([embed, h.3, h.31])", "cat([h.3, h.31, h.59])", "block 0 is embed against h.3", "both are 192 wide", "--layers embed,3,31"):
        assert part in str(error.value)
    with pytest.raises(LayoutMismatch, match="block 2 is h.31 against nothing"):
        head.require(FeatureLayout((0, 3), 64, 61), "a", "b")
    with pytest.raises(LayoutMismatch, match="61 layers"):
        head.require(FeatureLayout((0, 3, 31), 64, 60), "a", "b")
    head.require(FeatureLayout((0, 3, 31), 64, 61), "a", "b")


def test_features_are_packed_by_name_and_a_missing_boundary_is_named():
    layout = FeatureLayout((0, 3), 2, 8)
    packed = layout.pack({3: torch.full((1, 1, 2), 3.0), 5: torch.ones(1, 1, 2), 0: torch.zeros(1, 1, 2)})
    assert packed.flatten().tolist() == [0, 0, 3, 3]
    with pytest.raises(LayoutMismatch, match=r"\[3\]"):
        layout.pack({0: torch.zeros(1, 1, 2)})
    layout.require_stored({"h.0", "h.3", "h.8", "input_ids"}, "features/")
    with pytest.raises(LayoutMismatch, match="does not hold h.3"):
        layout.require_stored({"h.0", "h.4"}, "features/")


# -----------------------------------------------------------------------------
# 2. Configs

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("config, expected", [
    ({}, RopeConfig(10000.0)),
    ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(5e5, "linear", 2.0)),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}, RopeConfig(5e5, "linear", 2.0)),
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
])
def test_rope_is_read_in_both_spellings(config, expected):
    assert RopeConfig.from_json(config) == expected == RopeConfig.from_json(expected.to_json())


@pytest.mark.parametrize("config, message", [
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "takes.*original_max_position_embeddings"),
    ({"rope_scaling": {"rope_type": "linear"}}, "takes"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "contradicts itself"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, "contradicts itself"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
])
def test_a_rope_that_is_unknown_or_contradictory_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_json(config)


@pytest.mark.parametrize("change, message", [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"), ({"hidden_act": "gelu"}, "'gelu'"), ({"use_sliding_window": True}, "sliding"),
    ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"), ({"num_hidden_layers": None}, "num_hidden_layers"), ({"num_key_value_heads": 3}, "multiple"),
])
def test_a_target_that_is_not_implemented_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_json({**target_config().to_json(), **change})


def test_end_of_turn_tokens_are_the_union_of_both_config_files():
    config = {**target_config().to_json(), "eos_token_id": 7}
    assert TargetConfig.from_json(config, {"eos_token_id": [9, 7]}).eos_token_ids == (7, 9)
    assert TargetConfig.from_json({**config, "eos_token_id": None}).eos_token_ids == ()


def test_the_incidents_flags_are_refused_and_the_message_names_the_ways_out():
    with pytest.raises(ValueError) as error:
        SpecConfig(num_steps=1, topk=1, num_draft_tokens=16)
    for way in ("--num-draft-tokens 2", "--num-steps 15", "--draft-topk 15"):
        assert way in str(error.value)


def test_a_spec_that_cannot_be_is_refused():
    assert SpecConfig(3, 2, 11).ceiling == 4 and SpecConfig(8, 4, 3).ceiling == 3
    with pytest.raises(ValueError, match="at most 10"):  # 2 + 2 * 2^2
        SpecConfig(3, 2, 12)
    for bad in ((0, 1, 1), (1, 0, 2), (1, 1, 1), (-1, 1, 2), (2, 1, 2)):
        with pytest.raises(ValueError):
            SpecConfig(*bad)


# -----------------------------------------------------------------------------
# 3. Parallel


SPLIT_TARGETS = {  # 8 heads: over 8 ranks each has one
    "llama": dict(num_layers=2, num_heads=8, num_kv_heads=8, tie_word_embeddings=True),
    "qwen3 with fewer KV heads than ranks": dict(architecture="Qwen3ForCausalLM", num_layers=2, num_heads=8, num_kv_heads=2, qk_norm=True),
    "biases everywhere": dict(num_layers=2, num_heads=8, num_kv_heads=4, qkv_bias=True, o_bias=True, mlp_bias=True)}
SPLIT_ROUNDS = ((1, Sampling(), "chain"), (3, Sampling(0.9, seed=3), "tree"), (3, Sampling(1.1, top_k=20, top_p=0.9, seed=4), "chain"),
                (2, Sampling(0.8, seed=5), "none"))


def be_rank(rank, count, port, output, function, *args):
    """In a process of its own: the environment that torchrun gives, and the script's own way of starting and ending."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr, sys.__stderr__ = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2, 2))
    eagle3.run_script("test_eagle3.py", lambda shard: function(shard, *args) or {})


def run_ranks(count, function, *args, check=0):
    """function(shard, *args) in so many real processes, as under torchrun, but torch is imported once for all of them. Returns rank 0's last line."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_eagle3"])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(count)]
        ranks = [context.Process(target=be_rank, args=(rank, count, port, outputs[rank], function, *args))
                 for port in [free_port()] for rank in range(count)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(600)
            rank.kill()
        texts = [output.read_text() for output in outputs]
    assert [rank.exitcode for rank in ranks] == [check] * count, ([rank.exitcode for rank in ranks], *(text[-3000:] for text in texts))
    return texts[0].splitlines()[-1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def torchrun(count, *command, launch=("--standalone",)):
    return [sys.executable, "-m", "torch.distributed.run", *launch, f"--nproc-per-node={count}", *map(str, command)]


def variant_pair(folder, name, boundaries=(1, 2), **changes):
    """Write a target and its head, biases included."""
    folder.mkdir(exist_ok=True)
    if name in FAMILIES:
        FAMILIES[name](folder / "target")
        target = load_target(folder / "target", "float64")
        save_draft(random_head(target, draft_ids=torch.arange(0, 64, 2), boundaries=(0, 2), num_kv_heads=8), folder / "head")
        return
    target = random_target(**{"intermediate_size": 64, **SPLIT_TARGETS[name], **changes})
    for parameter in target.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    save_target(target, folder / "target")
    save_draft(random_head(target, draft_ids=torch.arange(0, 64, 2), boundaries=boundaries, fc_norm=True), folder / "head")


def test_what_cannot_be_split_is_refused_with_the_numbers_of_ranks_that_would_do():
    with pytest.raises(ValueError, match="over 2 ranks.*num_attention_heads 9, .*use 1 or 3 or 9 ranks"):
        Target(target_config(num_heads=9, num_kv_heads=3, head_dim=4, intermediate_size=36, vocab_size=72), eagle3.Shard(0, 2))
    target = random_target()
    with pytest.raises(ValueError, match="draft head.*over 4 ranks.*draft_vocab_size 30"):
        DraftHead(DraftConfig.for_target(target.config, FeatureLayout((2, 4, 5), 32, 8), 30), shard=eagle3.Shard(0, 4))
    with pytest.raises(ValueError, match="split head cannot be trained"):
        head = DraftHead(DraftConfig.for_target(target.config, FeatureLayout((2, 4, 5), 32, 8), 64), torch.arange(64), eagle3.Shard(0, 2)).attach(target)
        ttt_loss(head, None)


def decode_in_turns(target, head) -> list:
    """Chains and trees, greedy, sampled and truncated, alone and in batches."""
    found = []
    for batch, sampling, shape in SPLIT_ROUNDS:
        spec = {"chain": CHAIN, "tree": TREE, "none": None}[shape]
        requests = speculative_generate(target, head if spec else None, random_prompts([5, 9, 13])[:batch + 1], spec, 5,
                                        sampling=sampling, max_batch=batch)
        found.append([(r.output, r.stats.emitted, r.stats.rounds) for r in requests])
    return found


def equal_one_rank(shard, folder):
    """In each rank: its part of the model, against what the whole one gave."""
    elements = lambda module: sum(p.numel() for p in module.parameters())
    for files in folder.iterdir():
        expected = torch.load(files / "expected.pt")
        target = load_target(files / "target", "float64", shard=shard)
        with torch.no_grad():
            out = target(torch.tensor(random_prompts([30, 30])), boundaries=(0, 1, 2))
            for name, ours in {"logits": target.logits(out.last), **out.captures}.items():
                assert_close(f"{files.name}: {name}", ours, expected[name], 1e-10)
        assert decode_in_turns(target, load_draft(files / "head", target)) == expected["texts"], files.name
        norms = sum(p.numel() for name, p in target.named_parameters() if "norm" in name or p.dim() == 1 or "_a_proj" in name or "mlp.gate." in name)
        kv = sum(p.numel() for name, p in target.named_parameters() if "k_proj" in name or "v_proj" in name)
        read = eagle3.all_reduce(torch.tensor(float(elements(target))), shard).item()
        copies = max(1, shard.size // target.config.num_kv_heads) - 1  # of each KV head, besides the first
        assert read <= expected["elements"] + shard.size * (norms + kv * copies / (copies + 1)), "all ranks together read everything once"


@slow
@pytest.mark.parametrize("ranks, names", [(2, [*SPLIT_TARGETS, "deepseek-groups"]), (4, ["biases everywhere", "qwen3-moe"]),
                                          (8, ["qwen3 with fewer KV heads than ranks", "kimi-int4"])])
def test_ranks_equal_one_rank_in_logits_captures_texts_and_drafts(ranks, names, tmp_path):
    for name in names:
        variant_pair(files := tmp_path / name.replace(" ", "_"), name)
        target = load_target(files / "target", "float64")
        with torch.no_grad():
            out = target(torch.tensor(random_prompts([30, 30])), boundaries=(0, 1, 2))
        texts = decode_in_turns(target, load_draft(files / "head", target))
        prompts = random_prompts([5, 9, 13])
        plain = [generate(target, prompts[:batch + 1], 5, sampling=sampling) for batch, sampling, _ in SPLIT_ROUNDS]
        assert [[r[0] for r in found] for found in texts] == [[r.output for r in found] for found in plain], "exact"
        torch.save({"logits": target.logits(out.last), **out.captures, "texts": texts, "elements": sum(p.numel() for p in target.parameters())},
                   files / "expected.pt")
    run_ranks(ranks, equal_one_rank, tmp_path)


def collectives_of(rounds: int, L: int, spec: SpecConfig | None) -> int:
    """The README's count."""
    forward = 1 + 2 * L                                        # embedding; attention and MLP of each layer
    drafted = 4 * (spec.num_steps - 1) + 1 + 5 if spec else 0  # a level: embedding, attention, MLP, logits; the tree; the accepted slots: fc, and a level
    return rounds * (forward + drafted + 3)                    # the shape, the best tokens, what was accepted


def given_during(step) -> list[int]:
    """How many values this rank gave to each collective while `step` ran, in compiled code, too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    return [math.prod(event.input_shapes[0]) for event in seen.events() if event.name.startswith("gloo:")]


def engine_under_ranks(shard, folder):
    target = load_target(folder / "target", shard=shard)
    head, config = load_draft(folder / "head", target), target.config
    whole = load_target(folder / "target")
    prompts = random_prompts([5, 9])
    for compiled, spec in ((False, None), (False, CHAIN), (False, TREE), (True, CHAIN)):
        engine = Engine(target, head if spec else None, spec, max_batch=2, max_length=64, one_alone=False)
        if compiled:
            engine.compile()
        requests = [engine.submit(prompt, 20, ()) for prompt in prompts]
        engine.step()
        given, N = given_during(engine.step), spec.num_draft_tokens if spec else 1
        assert len(given) == collectives_of(1, config.num_layers, spec), (compiled, spec, given)
        verified = 2 * N * (1 + 2 * config.num_layers) * config.hidden_size
        assert sum(given) > verified and (spec or sum(given) - verified <= 2 * (2 * 2 + 3 * 2 + 4)), (given, verified)
        while engine.busy:
            engine.step()
        assert [r.output for r in requests] == [r.output for r in generate(whole, prompts, 20, ())], (compiled, spec)
    auto = Engine(target, head, (SpecConfig(2, 1, 3), TREE), max_batch=2, max_length=96)
    for controller in auto.controllers.values():  # each rank has its own clock
        controller.record = lambda shape, ms, tokens, record=controller.record: record(shape, ms * (1 + shard.rank * (shape is None)), tokens)
    requests = [auto.submit(prompt, 60, (), Sampling(0.7, seed=n)) for n, prompt in enumerate(prompts)]
    auto.step()
    auto.cancel(requests[0])
    while auto.busy:
        auto.step()
    assert requests[0].finish_reason == "cancelled" and requests[1].output == generate(whole, prompts[1:], 60, (), Sampling(0.7, seed=1))[0].output
    lying = Engine(target, head, CHAIN, max_length=64)
    for request in [[1, 2, 3]] + [[4, 5]] * shard.rank:
        lying.submit(request, 8)
    if shard.rank:
        with pytest.raises(RuntimeError, match="rank 1 was not given the requests that rank 0 has"):
            lying.step()
    else:
        lying._prefill(lying._admit())
        lying._agree(CHAIN)
    return {}


@slow
def test_a_rounds_collectives_are_those_of_the_readme_and_no_clock_or_cancel_parts_the_ranks(tmp_path):
    variant_pair(tmp_path, "llama", boundaries=(0, 1), tie_word_embeddings=False, num_layers=1)
    run_ranks(2, engine_under_ranks, tmp_path)


def fail_on_rank_1(shard):
    if shard.rank == 1:
        raise ValueError("this row is bad")
    eagle3.wait_for_all(shard)


def die_on_rank_1(shard):
    if shard.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    eagle3.wait_for_all(shard)


@slow
@pytest.mark.parametrize("how, message", [("fail_on_rank_1", "test_eagle3.py: this row is bad"), ("die_on_rank_1", "lost another rank: it was killed")])
def test_a_rank_that_fails_or_dies_ends_all_with_one_line(how, message):
    result = subprocess.run(torchrun(2, HERE / "test_eagle3.py", how), capture_output=True, text=True, timeout=600)
    assert result.returncode
    ours = [line for line in result.stderr.splitlines() if line.startswith("test_eagle3.py: ")]
    assert len(ours) == 1 and message in ours[0], result.stderr


# -----------------------------------------------------------------------------
# 4. Transformer pieces


def test_chunks_behind_a_cache_equal_one_whole_forward_with_rows_of_different_lengths(target):
    rows = random_prompts([20, 13])
    whole = [target(torch.tensor([row])).last[0] for row in rows]
    cache = KVCache(8, 2, 2, 32, 8, torch.float64)
    lengths = torch.zeros(2, dtype=torch.int64)
    for sizes in ((7, 5), (1, 1), (12, 7)):  # new tokens by row; the shorter row is padded, and goes on from its own length
        T = max(sizes)
        starts = lengths.tolist()
        tokens = torch.tensor([(row[s:s + n] + [0] * T)[:T] for row, s, n in zip(rows, starts, sizes)])
        positions = lengths[:, None] + torch.arange(T)
        out = target(tokens, CacheContext(cache, lengths, T, torch.arange(max(starts) + T)), positions).last
        for b, (s, n) in enumerate(zip(starts, sizes)):
            assert_close(f"row {b}", out[b, :n], whole[b][s:s + n], 1e-12)
        lengths = lengths + torch.tensor(sizes)


def test_a_tree_behind_a_cache_equals_each_root_to_leaf_path_run_alone(target):
    prompts = random_prompts([6, 11])
    parents = torch.tensor([[0, 0, 0, 1, 1, 3], [0, 0, 1, 2, 0, 4]])
    tokens = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(3))
    cache, lengths = KVCache(8, 2, 2, 32, 8, torch.float64), torch.tensor([6, 11])
    for b, prompt in enumerate(prompts):
        target(torch.tensor([prompt]), CacheContext(cache.rows(b, b + 1), torch.zeros(1, dtype=torch.int64), len(prompt), torch.arange(len(prompt))))
    mask = ancestor_mask(parents)
    out = target(tokens, CacheContext(cache, lengths, 6, torch.arange(17), mask), lengths[:, None] + mask.sum(-1) - 1).last
    for b, prompt in enumerate(prompts):
        for node in range(6):
            path = [i for i in range(6) if mask[b, node, i]]
            alone = target(torch.tensor([prompt + tokens[b, path].tolist()])).last[0, -1]
            assert_close(f"row {b} node {node}", out[b, node], alone, 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_packed_layers_compute_what_the_plain_ones_do_biases_included_and_are_packed_anew_when_weights_change(dtype, tolerance):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU cannot pack bf16")
    target = random_target(dtype=torch.float32, qkv_bias=True)
    for layer in target.layers:
        layer.self_attn.k_proj.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    for parameter in target.parameters():  # not the rope frequencies
        parameter.data = parameter.data.to(dtype)
    tokens, used = torch.tensor(random_prompts([9, 9])), []
    run = lambda: target.logits(target(tokens).last)
    plain, handles = run(), set(eagle3.PACKED)
    eagle3.pack(target)
    mine = set(eagle3.PACKED) - handles
    assert len(mine) == 8 * 4 + 1, "q, k, v joined, gate and up joined, o, down; lm_head"
    with torch.no_grad():
        real, eagle3.run_packed = eagle3.run_packed, lambda *args: (used.append(1), real(*args))[1]
        try:
            assert_close("packed", run(), plain, tolerance)
            assert len(used) == len(mine), "every product must be a packed one"
            target.layers[3].mlp.up_proj.weight.mul_(-1.5)
            eagle3.pack(target)
            assert_close("packed anew", run(), run_with_gradients(run), tolerance)
            assert (run() - plain).abs().max() > 10 * tolerance
        finally:
            eagle3.run_packed = real
    del target, layer, run
    assert not mine & set(eagle3.PACKED), "packed weights must go with their layers"


def run_with_gradients(run):
    """With gradients enabled nothing packed is used."""
    with torch.enable_grad():
        return run()


# -----------------------------------------------------------------------------
# 6. Target


def make_transformers_model(folder, family, seed=0, **changes):
    """A random transformers model, saved as Hugging Face does; norms and biases are random, too, so that none can be forgotten."""
    import transformers
    base = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=512, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    config = getattr(transformers, f"{family}Config")(**{**base, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.3).add_(1.0 if "norm" in name else 0.0)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder, max_shard_size="40KB" if seed % 2 else "5GB")
    return model


VARIANTS = {
    "llama": ("Llama", dict()),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})),
    "llama-llama3": ("Llama", dict(rope_parameters={**LLAMA3, "rope_theta": 5e5}, rms_norm_eps=1e-6)),
    "llama-biases-head_dim": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=16, num_key_value_heads=4)),
    "qwen2": ("Qwen2", dict(num_key_value_heads=1)),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3": ("Qwen3", dict(head_dim=24)),
    "qwen3-tied": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True, num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=3)
DEEPSEEK = dict(**EXPERTS, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, kv_lora_rank=16,
                q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=12, routed_scaling_factor=2.827, rope_parameters={
                    **YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0})
VARIANTS.update({
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
    "qwen3-yarn-attention_factor": ("Qwen3", dict(head_dim=32, rope_parameters={**YARN, "attention_factor": 0.7, "beta_fast": 8.0, "truncate": False})),
    "qwen3-moe": ("Qwen3Moe", dict(**EXPERTS, head_dim=16, num_experts=8, norm_topk_prob=True)),
    "qwen3-moe-some-dense-not-normalised": ("Qwen3Moe", dict(**EXPERTS, head_dim=16, num_experts=8, mlp_only_layers=[2], decoder_sparse_step=2)),
    "kimi": ("DeepseekV3", DEEPSEEK),
    "kimi-equal-betas-biases": ("DeepseekV3", {**DEEPSEEK, "attention_bias": True, "rope_parameters": {**DEEPSEEK["rope_parameters"], "beta_fast": 1.0}}),
    "deepseek-groups-no-yarn": ("DeepseekV3", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 3, "n_shared_experts": 2, "norm_topk_prob": False,
                                               "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek-no-q_lora-unequal-mscales": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": {**DEEPSEEK["rope_parameters"], "mscale": 0.7}}),
})


def write_kimi(folder, hidden=64, layers=3, experts=8, chosen=3, intermediate=256, heads=8, vocab=64, latent=(48, 32, 16, 16, 16), context=512, seed=0, dense=1):
    """A random checkpoint with the names, dtypes, prefixes, eyes and shards of Kimi-K2.5's: 4-bit experts, all else in bf16. With a vocabulary
    of 512 it reads bytes, and has a tokenizer and a chat template."""
    from safetensors.torch import save_file
    folder, generator = Path(folder), torch.Generator().manual_seed(int(seed))
    folder.mkdir(parents=True, exist_ok=True)
    end = 1
    if vocab == 512:
        end, special = 257, ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
        (folder / "tiktoken.model").write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "added_tokens_decoder": {str(256 + i): {"content": name} for i, name in enumerate(special)}, "eos_token": "[EOS]", "chat_template":
            "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"}))
    q_rank, rank, nope, rope, width = latent
    text = dict(architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads, q_lora_rank=q_rank, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=width,
                intermediate_size=2 * intermediate, first_k_dense_replace=dense, moe_layer_freq=1, n_routed_experts=experts, n_shared_experts=1,
                num_experts_per_tok=chosen, moe_intermediate_size=intermediate, n_group=1, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid",
                norm_topk_prob=True, routed_scaling_factor=2.827, rms_norm_eps=1e-5, rope_theta=50000.0, hidden_act="silu", vocab_size=vocab,
                max_position_embeddings=context, attention_bias=False, tie_word_embeddings=False, num_nextn_predict_layers=0, eos_token_id=end,
                rope_scaling=dict(type="yarn", factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
                quantization_config=dict(format="pack-quantized", quant_method="compressed-tensors", ignore=["lm_head", "re:.*self_attn.*"], config_groups=dict(
                    group_0=dict(targets=["Linear"], weights=dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)))))
    (folder / "config.json").write_text(json.dumps(dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text,
                                                        vision_config={}, torch_dtype="bfloat16", eos_token_id=end)))
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=end + 1)))
    normal = lambda *shape, std=None: torch.randn(shape, generator=generator).mul(std or 2 * shape[-1] ** -0.5).bfloat16()
    norm = lambda size: (1 + 0.2 * torch.randn(size, generator=generator)).bfloat16()

    def mlp(prefix, size, packed=False):
        found = {}
        for name, (out, into) in dict(gate_proj=(size, hidden), up_proj=(size, hidden), down_proj=(hidden, size)).items():
            if packed:
                found[f"{prefix}.{name}.weight_packed"] = torch.randint(-2**31, 2**31, (out, into // 8), generator=generator, dtype=torch.int32)
                found[f"{prefix}.{name}.weight_scale"] = (into ** -0.5 * (0.2 + 0.4 * torch.rand(out, into // 32, generator=generator))).bfloat16()
                found[f"{prefix}.{name}.weight_shape"] = torch.tensor([out, into])
            else:
                found[f"{prefix}.{name}.weight"] = normal(out, into)
        return found

    shards = [{"language_model.model.embed_tokens.weight": normal(vocab, hidden, std=1.0), "vision_tower.patch_embed.proj.weight": normal(8, 8),
               "mm_projector.proj.0.weight": normal(8, 8)}]
    for layer in range(layers):
        name = f"language_model.model.layers.{layer}"
        attention = dict(q_a_proj=(q_rank, hidden), q_b_proj=(heads * (nope + rope), q_rank), kv_a_proj_with_mqa=(rank + rope, hidden),
                         kv_b_proj=(heads * (nope + width), rank), o_proj=(hidden, heads * width))
        shard = {f"{name}.self_attn.{key}.weight": normal(*shape) for key, shape in attention.items()}
        shard |= {f"{name}.self_attn.q_a_layernorm.weight": norm(q_rank), f"{name}.self_attn.kv_a_layernorm.weight": norm(rank),
                  f"{name}.input_layernorm.weight": norm(hidden), f"{name}.post_attention_layernorm.weight": norm(hidden)}
        if layer < dense:
            shard |= mlp(f"{name}.mlp", 2 * intermediate)
        else:
            shard |= {f"{name}.mlp.gate.weight": normal(experts, hidden), **mlp(f"{name}.mlp.shared_experts", intermediate),
                      f"{name}.mlp.gate.e_score_correction_bias": 0.1 * torch.randn(experts, generator=generator)}
            for expert in range(experts):
                shard |= mlp(f"{name}.mlp.experts.{expert}", intermediate, packed=True)
        shards.append(shard)
    shards.append({"language_model.model.norm.weight": norm(hidden), "language_model.lm_head.weight": normal(vocab, hidden)})
    files = {f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors": shard for i, shard in enumerate(shards)}
    for file, shard in files.items():
        save_file({key: tensor.contiguous() for key, tensor in shard.items()}, folder / file)
    index = {key: file for file, shard in files.items() for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=index)))


EIGHT = dict(num_hidden_layers=3, num_attention_heads=8)
FAMILIES = {  # one of each kind that splits over 8 ranks
    "qwen3-moe": lambda folder: make_transformers_model(folder, *VARIANTS["qwen3-moe"][:1], **{**VARIANTS["qwen3-moe"][1], **EIGHT}),
    "deepseek-groups": lambda folder: make_transformers_model(folder, "DeepseekV3", **{
        **VARIANTS["deepseek-groups-no-yarn"][1], **EIGHT, "num_key_value_heads": 8, "first_k_dense_replace": 1}),
    "kimi-int4": write_kimi}


@pytest.mark.parametrize("index, variant", list(enumerate(VARIANTS)), ids=list(VARIANTS))
def test_a_target_equals_transformers_in_logits_every_boundary_and_greedy_text(tmp_path, index, variant):
    family, changes = VARIANTS[variant]
    model = make_transformers_model(tmp_path, family, seed=index, **changes)
    assert (index % 2 == 0) != (tmp_path / "model.safetensors.index.json").exists(), "odd seeds are sharded"
    if "rope_parameters" in changes:  # the older spelling must read the same
        config = json.loads((tmp_path / "config.json").read_text())
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
        assert TargetConfig.from_json(config).rope == eagle3.read_target_config(tmp_path).rope
    target = load_target(tmp_path, "float32")
    tokens = torch.tensor(random_prompts([40, 40], seed=index))
    out = target(tokens, boundaries=tuple(range(9)))
    last_state = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, a, o: last_state.append(o if torch.is_tensor(o) else o[0]))
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True)
    hook.remove()
    # Experts grow these random streams to 100, of which fp32 loses 8e-6, theirs and ours alike (against fp64).
    tolerance = lambda x: 2e-5 * x.abs().max().item() if target.config.experts else 1e-4
    for b in range(8):
        assert_close(f"boundary {b}", out.captures[b], theirs.hidden_states[b], tolerance(theirs.hidden_states[b]))
    assert_close("boundary L is before the norm", out.captures[8], last_state[0], tolerance(last_state[0]))
    assert_close("their last is after it", target.norm(out.captures[8]), theirs.hidden_states[8], tolerance(theirs.hidden_states[8]))
    assert_close("logits", target.logits(out.last), theirs.logits, 2 * tolerance(theirs.logits))
    for prompt in random_prompts([3, 17, 30], seed=index + 50):
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):].tolist()
        ours, = generate(target, [prompt], 24)
        parted = eagle3.first_divergence(target, prompt, ours.output, text)
        assert parted is None or print(f"tie of {parted[1]:.2g}") or parted[1] < (1e-3 if target.config.experts else 1e-4), f"greedy text differs: {parted}"


def test_a_targets_ends_that_do_not_fit_its_config_are_named(target, tmp_path):
    save_target(target, tmp_path)
    assert torch.equal(eagle3.load_target_ends(tmp_path).lm_head.weight, target.lm_head.weight)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 65}))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[64, 32\], the config says \[65, 32\]"):
        eagle3.load_target_ends(tmp_path)


def test_four_bit_words_are_unpacked_as_the_format_says_bit_by_bit():
    packed = torch.randint(-2**31, 2**31, (3, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(3, 2).bfloat16()
    expected = torch.empty(3, 64, dtype=torch.bfloat16)
    for row in range(3):
        for column in range(64):
            word = packed[row, column // 8].item() % 2**32
            expected[row, column] = torch.tensor((word // 16 ** (column % 8)) % 16 - 8).bfloat16() * scale[row, column // 32]
    assert torch.equal(eagle3.unpack_int4(packed.view(torch.uint8), scale), expected)


def test_a_kimi_checkpoint_equals_transformers_on_its_dequantised_weights_experts_packed_or_not(tmp_path):
    """Names, prefix, eyes, both end-of-turn tokens and 4-bit experts; then the same weights plain, and in fp8 blocks."""
    import transformers
    from safetensors.torch import load_file, save_file
    write_kimi(tmp_path / "kimi")
    target = load_target(tmp_path / "kimi", "float32")
    assert target.config.eos_token_ids == (1, 2) and target.config.quantization == "int4" and target.config.cached == (1, 48, 0)
    packed = [layer for layer in target.modules() if isinstance(layer, eagle3.ExpertLinear)]
    assert len(packed) == 6 and all(layer.is_packed and layer.weight is None for layer in packed)
    tensors = {}
    for file in sorted((tmp_path / "kimi").glob("*.safetensors")):
        tensors |= {key.removeprefix("language_model."): value for key, value in load_file(file).items() if key.startswith("language_model.")}
    plain = {key: value for key, value in tensors.items() if not re.search("weight_(packed|scale|shape)$", key)}
    for key in [key for key in tensors if key.endswith("_packed")]:
        plain[key.removesuffix("_packed")] = eagle3.unpack_int4(tensors[key].view(torch.uint8), tensors[key.replace("_packed", "_scale")])
    text = json.loads((tmp_path / "kimi" / "config.json").read_text())["text_config"]
    text = {key: value for key, value in text.items() if key != "quantization_config"} | {"model_type": "deepseek_v3", "torch_dtype": "bfloat16"}

    def write(name, found, config=text):
        (tmp_path / name).mkdir()
        save_file(found, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    model = transformers.AutoModelForCausalLM.from_pretrained(write("plain", plain), dtype=torch.float32).eval()
    tokens = torch.tensor(random_prompts([40, 40]))
    with torch.no_grad():
        expected = model(tokens).logits
        for ours in (target, load_target(tmp_path / "plain", "float32")):
            assert_close("logits", ours.logits(ours(tokens).last), expected, 2e-5 * expected.abs().max().item())
            few = ours.logits(ours(tokens[:1, :4]).last)  # few enough pairs for the batched product
            assert_close("logits of few tokens", few, expected[:1, :4], 2e-5 * expected.abs().max().item())

    blocks, exact = {}, {}
    for key, value in plain.items():
        blocks[key] = exact[key] = value
        if re.search("(_proj|_mqa).weight$", key):
            scale = 0.01 + torch.rand([-(-n // 128) for n in value.shape], generator=torch.Generator().manual_seed(len(key)))
            blocks[key] = (value.float() / 4).to(torch.float8_e4m3fn)
            blocks[f"{key}_scale_inv"] = scale
            exact[key] = torch.empty(value.shape, dtype=torch.float32)
            for i in range(value.shape[0]):
                for j in range(0, value.shape[1], 128):
                    exact[key][i, j:j + 128] = blocks[key][i, j:j + 128].float() * scale[i // 128, j // 128]
    write("fp8", blocks, {**text, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    loaded, whole = load_target(tmp_path / "fp8", "float32").state_dict(), load_target(write("exact", exact), "float32").state_dict()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    part = load_target(tmp_path / "fp8", "float32", shard=eagle3.Shard(3, 4)).layers[1]
    assert torch.equal(part.mlp.experts.down_proj.weight, whole["layers.1.mlp.experts.down_proj.weight"][:, :, 192:])
    assert torch.equal(part.self_attn.kv_b_proj.weight, whole["layers.1.self_attn.kv_b_proj.weight"][192:])
    for name, broken, message in (("unscaled", {k: v for k, v in blocks.items() if "1.self_attn.o_proj.weight_scale" not in k}, "o_proj.weight_scale_inv"),
                                  ("other", {k.replace("_scale_inv", "_scale"): v for k, v in blocks.items()}, "quantised so are not supported")):
        with pytest.raises(ValueError, match=message):
            load_target(write(name, broken), "float32")


@pytest.mark.parametrize("change, message", [
    ({"text_config": {"hidden_act": "gelu"}}, "'gelu'"), ({"text_config": {"num_experts_per_tok": 9}}, "so many experts"), ({"text_config": {"n_group": 3}}, "experts"),
    ({"text_config": {"qk_rope_head_dim": 7}}, "even"), ({"text_config": {"scoring_func": "softmax"}}, "scoring_func 'softmax'"),
    ({"text_config": {"rope_interleave": False}}, "rope_interleave"), ({"text_config": {"kv_lora_rank": None}}, "kv_lora_rank"),
    ({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}, "gptq"),
])
def test_a_kimi_config_that_is_not_implemented_is_refused_by_name(change, message, tmp_path):
    write_kimi(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = TargetConfig.from_json(config)
    assert TargetConfig.from_json({**config, "text_config": {**config["text_config"], "torch_dtype": None}}) == read, "what is null there stands outside"
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_json({**config, "text_config": {**config["text_config"], **change["text_config"]}})


@slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_speculation_is_exact_for_every_family_greedy_and_sampled_chain_and_tree(family, tmp_path):
    FAMILIES[family](tmp_path)
    target = load_target(tmp_path, "float64")
    head = random_head(target, boundaries=(0, 2))
    prompts = random_prompts([5, 9, 13])
    for sampling in (Sampling(), Sampling(0.9, seed=3, top_p=0.95)):
        plain = [r.output for r in generate(target, prompts, 20, sampling=sampling)]
        for spec in (CHAIN, TREE):
            for batch in (1, 3):
                assert [r.output for r in speculative_generate(target, head, prompts, spec, 20, sampling=sampling, max_batch=batch)] == plain


@slow
def test_compiled_decoding_of_latent_attention_and_packed_experts_equals_eager(tmp_path, monkeypatch):
    """Plain steps and the verification of a chain. The head has no latent attention: its functions stay eager here."""
    write_kimi(tmp_path, layers=1, dense=0)
    target = load_target(tmp_path, "float32")
    head, prompts = random_head(target, boundaries=(0, 1)), random_prompts([5, 9])
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled(f, **how) if f.__name__ == "_run_target" else f)
    engine = Engine(target, head, (SpecConfig(2, 1, 3),), max_batch=1, max_length=64).compile()
    for prompt, eager in zip(prompts, generate(target, prompts, 12)):
        request = engine.submit(prompt, 12)
        while engine.busy:
            engine.step(engine.shapes[0] if len(request.output) % 2 else None)
        parted = eagle3.first_divergence(target, prompt, request.output, eager.output)
        assert parted is None or parted[1] < 1e-3, f"differs from eager decoding: {parted}"


@pytest.mark.skipif("EAGLE3_SMOLLM2" not in os.environ, reason="set EAGLE3_SMOLLM2 to a folder with SmolLM2-135M-Instruct (not downloaded by tests)")
def test_greedy_text_of_smollm2_equals_transformers_on_ten_prompts():
    import transformers
    folder = Path(os.environ["EAGLE3_SMOLLM2"])
    prompts = [record for _, record in eagle3.read_records(os.environ["EAGLE3_MTBENCH"])][:10] if "EAGLE3_MTBENCH" in os.environ else [
        {"prompt": f"Tell me {what}."} for what in ("a joke", "about the sea", "why leaves fall", "who Euler was", "how bread is made", "what rust is",
                                                    "a story", "the first ten primes", "about Paris", "how tides work")]
    target, tokenizer = load_target(folder, "float32"), eagle3.load_tokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for record in prompts:
        prompt = eagle3.encode_prompt(record, tokenizer)
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt):].tolist()
        parted = eagle3.first_divergence(target, prompt, generate(target, [prompt], 64)[0].output, text)
        assert parted is None or print(f"tie of {parted[1]:.2g}") or parted[1] < 1e-4, f"greedy text differs: {parted}"


# -----------------------------------------------------------------------------
# 7. Hidden-state hooks


def test_hooked_captures_equal_native_ones_bitwise_and_include_the_teacher(target):
    layout, tokens = FeatureLayout((0, 3, 8), 32, 8), torch.tensor(random_prompts([12, 12]))
    native = target(tokens, boundaries=(0, 3, 8))
    with capture_hidden_states(target, layout) as captures:
        target(tokens)
        assert set(captures) == {0, 3, 8} and all(torch.equal(captures[b], native.captures[b]) for b in captures)
        target(tokens[:, :5])
        assert captures[3].shape[1] == 5, "every forward refills the dict"


def test_hooks_are_gone_after_an_exception_and_after_normal_exit(target):
    layout = FeatureLayout((2, 4, 5), 32, 8)
    with pytest.raises(KeyError, match="mine"):
        with capture_hidden_states(target, layout):
            raise KeyError("mine")
    with capture_hidden_states(target, layout):
        target(torch.tensor([[1, 2]]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


def test_hooks_on_a_compiled_module_or_a_forward_that_bypasses_them_raise():
    target, layout = random_target(), FeatureLayout((2, 4, 5), 32, 8)
    with pytest.raises(RuntimeError, match="exactly once per forward"):
        with capture_hidden_states(target, layout):
            pass
    with pytest.raises(RuntimeError, match="exactly once per forward"):
        with capture_hidden_states(target, layout):
            target.forward(torch.tensor([[1, 2]]))  # not through __call__: the model's own hook does not see it
    with pytest.raises(ValueError, match="exactly one list of 9 decoder layers"):
        with capture_hidden_states(target, FeatureLayout((2, 4, 5), 32, 9)):
            pass
    target.layers[3].compile(backend="eager")
    with pytest.raises(ValueError, match="layers.3 is compiled"):
        with capture_hidden_states(target, layout):
            pass
    with pytest.raises(ValueError, match="compiled"):
        with capture_hidden_states(torch.compile(random_target(), backend="eager"), layout):
            pass


def test_a_head_trains_on_a_transformers_model_as_on_our_own_target(tmp_path):
    model = make_transformers_model(tmp_path, "Llama")
    target = load_target(tmp_path, "float32")
    ends = TargetEnds(target.config, model.model.embed_tokens, model.model.norm, model.lm_head)
    head = random_head(target)
    row = Row(random_prompts([30])[0], [False] * 9 + [True] * 21, "row")
    ours = ttt_loss(head, ttt_batch(head, target, [row], 3))[0]
    head.attach(ends)
    tokens, mask = eagle3.collate([row])
    with capture_hidden_states(model, head.config.layout) as captures, torch.no_grad():
        model(tokens)
    theirs = ttt_loss(head, prepare_ttt(head, tokens, mask, captures, 3))[0]
    theirs.backward()
    assert_close("loss", ours, theirs, 1e-4)
    assert head.fc.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters()), "the target is frozen"


# -----------------------------------------------------------------------------
# 8. Draft head


def reference_rms(head, x, name):
    return x / (x.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt() * head.get_parameter(f"{name}.weight")


def reference_fuse(head, features):
    """The published formulas, written apart from eagle3.py (official cnets.py; EAGLE-3.1's and speculators' flags): [T,A*C] -> [T,C]."""
    if head.config.fc_norm:
        parts = features.split(head.config.layout.hidden_size, -1)
        features = torch.cat([reference_rms(head, part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
    if head.config.norm_before_fc:
        features = reference_rms(head, features, "input_norm")
    return features @ head.fc.weight.T


def reference_layer(head, g, tokens):
    """Hidden states [T,C] and the tokens that follow them [T] -> what is fed back [T,C], and logits [T,Vd]."""
    c, w = head.config, dict(head.named_parameters())
    rms = lambda x, name: reference_rms(head, x, name)
    e = rms(head.target.embed_tokens.weight[tokens], "midlayer.input_layernorm")
    n = rms(g, "midlayer.hidden_norm")
    x, T, d = torch.cat([e, n], -1), len(tokens), c.head_dim
    angle = torch.arange(T)[:, None] / c.rope.theta ** (torch.arange(0, d, 2).float() / d)
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(x.dtype), torch.cat([angle.sin()] * 2, -1).to(x.dtype)
    turn = lambda y: y * cos + torch.cat([-y[:, d // 2:], y[:, :d // 2]], -1) * sin
    q, k, v = ((x @ w[f"midlayer.self_attn.{p}_proj.weight"].T).view(T, -1, d) for p in "qkv")
    out = []
    for h in range(c.num_heads):
        g_h = h // (c.num_heads // c.num_kv_heads)
        score = turn(q[:, h]) @ turn(k[:, g_h]).T / d ** 0.5
        score = score.masked_fill(torch.triu(torch.ones(T, T), 1) > 0, float("-inf"))
        out.append(score.softmax(-1) @ v[:, g_h])
    h1 = (n if c.norm_before_residual else g) + torch.cat(out, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    m = rms(h1, "midlayer.post_attention_layernorm")
    h2 = h1 + (F.silu(m @ w["midlayer.mlp.gate_proj.weight"].T) * (m @ w["midlayer.mlp.up_proj.weight"].T)) @ w["midlayer.mlp.down_proj.weight"].T
    normed = rms(h2, "norm")
    return (normed if c.norm_output else h2), normed @ w["lm_head.weight"].T


TRAINED_FLAGS = [{flag: True for flag in (*before_fc, *others)} for before_fc in ((), ("fc_norm",), ("norm_before_fc",))
                 for others in ((), ("norm_before_residual",), ("norm_output",), ("norm_before_residual", "norm_output"))]


@pytest.mark.parametrize("flags", TRAINED_FLAGS, ids=lambda f: "+".join(f) or "official")
def test_the_head_equals_a_separately_written_reference_over_several_steps_for_every_flag(target, flags):
    """In each slot's chain, as served: true slots up to it, then the head's own hidden states."""
    head, K, T = random_head(target, **flags), 3, 8
    features, tokens = torch.randn(1, T, 96, dtype=torch.float64), torch.tensor(random_prompts([T]))
    steps = eagle3.unroll(head, features, tokens, torch.arange(T)[None], K)
    for slot in range(T - K):
        hidden = reference_fuse(head, features[0, :slot + 1])
        for i in range(K):
            fed_back, logits = reference_layer(head, hidden, tokens[0, 1:slot + 2 + i])
            assert_close(f"slot {slot}, step {i}", head.logits(steps[i][0, slot]), logits[-1], 1e-6)  # rope angles are fp32
            hidden = torch.cat([hidden, fed_back[-1:]])


def test_a_head_of_another_hidden_size_has_its_own_embedding_and_is_trained_saved_and_served(target, tmp_path):
    changes = DraftConfig.parse_changes("hidden_size=24,num_attention_heads=3,num_key_value_heads=1,head_dim=16,rope_theta=5e5,norm_output=true")
    head = random_head(target, draft_ids=torch.arange(0, 64, 2), **changes)
    assert head.config.rope == RopeConfig(5e5) and head.config.norm_output and head.embed_tokens.weight.shape == (64, 24)
    prompts = random_prompts([5, 9])
    rows = [Row(r.prompt + r.output, [False] * len(r.prompt) + [True] * len(r.output), "row") for r in generate(target, prompts, 12, eos_token_ids=())]
    loss, _ = ttt_loss(head, ttt_batch(head, target, rows, 3))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert "SGLang refuses" in save_draft(head, tmp_path) and json.loads((tmp_path / "config.json").read_text())["target_hidden_size"] == 32
    loaded = load_draft(tmp_path, target)
    plain = [r.output for r in generate(target, prompts, 12)]
    for ours in (head, loaded):
        with torch.no_grad():
            assert [r.output for r in speculative_generate(target, ours, prompts, TREE, 12)] == plain
    assert_close("the head, saved and loaded", next(iter(loaded.state_dict().values())), next(iter(head.state_dict().values())), 0)
    for bad in ("heads=3", "head_dim=x", "fc_norm=1"):
        with pytest.raises(ValueError, match="name=value"):
            DraftConfig.parse_changes(bad)
    for bad in ("head_dim=7", "num_key_value_heads=0", "intermediate_size=-1", "rope_theta=0", "rms_norm_eps=nan"):
        with pytest.raises(ValueError, match="above 0"):
            random_head(target, **DraftConfig.parse_changes(bad))


def test_the_slots_of_a_new_head_attend_to_themselves_first():
    target = random_target(dtype=torch.float32, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32)
    layout = FeatureLayout((2, 4, 5), 256, 8)
    head = DraftHead(DraftConfig.for_target(target.config, layout, 64), torch.arange(64)).init_weights(0).attach(target)
    tokens, own = torch.tensor(random_prompts([12, 12])), []

    class Watch(eagle3.RowContext):
        def attend(self, layer, q, k, v, scale=None):
            scores = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (k.shape[2], -1)), k) * q.shape[-1] ** -0.5
            future = torch.ones(12, 12, dtype=torch.bool).triu(1)
            own.append(scores.masked_fill(future, float("-inf")).softmax(-1).diagonal(dim1=-2, dim2=-1))
            return super().attend(layer, q, k, v, scale)

    with torch.no_grad():
        features = layout.pack(target(tokens, boundaries=layout.boundaries).captures)
        head.step(head.fuse(features), tokens, torch.arange(12).expand(2, -1), Watch())
    assert (own[0].mean((0, 1, 2)) > 2 / torch.arange(1, 13))[3:].all()  # weight on the own slot, by slot: alike would be 1 / (t + 1)


def test_d2t_is_an_offset_and_t2d_a_mask(target):
    head = random_head(target, draft_ids=torch.tensor([3, 4, 10, 63]))
    assert head.d2t.tolist() == [3, 3, 8, 60] and head.t2d.nonzero().flatten().tolist() == [3, 4, 10, 63]
    assert head.draft_to_target(torch.tensor([[0, 3], [2, 1]])).tolist() == [[3, 63], [10, 4]]
    for bad in ([3, 3, 4, 5], [4, 3, 5, 6], [0, 1, 2, 64], [1, 2, 3]):
        with pytest.raises(ValueError, match="strictly ascending"):
            head.set_draft_ids(torch.tensor(bad))


def test_the_draft_vocabulary_is_the_most_frequent_tokens_filled_up_with_the_smallest_unused():
    counts = torch.zeros(20, dtype=torch.int64)
    counts[[15, 9, 17]] = torch.tensor([5, 7, 5])
    assert eagle3.choose_draft_ids(counts, 2).tolist() == [9, 15]
    assert eagle3.choose_draft_ids(counts, 6).tolist() == [0, 1, 2, 9, 15, 17]
    assert eagle3.choose_draft_ids(counts, 20).tolist() == list(range(20))


def test_a_head_is_not_attached_to_a_target_of_other_sizes(target):
    head = random_head(target)
    for change, error, message in (({"num_layers": 9}, LayoutMismatch, "9 layers"), ({"hidden_size": 16}, LayoutMismatch, "hidden size 16"),
                                   ({"vocab_size": 65}, ValueError, "vocabulary of 64")):
        with pytest.raises(error, match=message):
            head.attach(random_target(**change))


# -----------------------------------------------------------------------------
# 9. Training-time test


def test_spans_are_runs_of_the_mask_cut_after_their_first_end_of_turn_token():
    tokens = torch.tensor([[9, 9, 5, 2, 8, 9, 6, 7, 2, 2], [5, 5, 5, 5, 5, 5, 5, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1, 1, 0, 0, 0]]).bool()
    assert assistant_spans(tokens, mask, (2,)).tolist() == [[0, 0, 1, 1, 0, 0, 2, 2, 2, 0], [1, 1, 1, 0, 0, 2, 2, 0, 0, 0]]
    assert assistant_spans(tokens, mask, ()).tolist()[0] == [0, 0, 1, 1, 1, 0, 2, 2, 2, 2]


def test_a_slot_is_trained_while_the_tokens_it_is_given_and_guesses_lie_in_one_span():
    spans = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 2, 2]])  # answers at 3..6 and 8..9
    assert trained_slots(spans, 0).nonzero()[:, 1].tolist() == [2, 3, 4, 7]  # starts at the slot before the answer
    assert trained_slots(spans, 1).nonzero()[:, 1].tolist() == [2, 3]
    assert trained_slots(spans, 2).nonzero()[:, 1].tolist() == [2]
    assert trained_slots(spans, 3).nonzero()[:, 1].tolist() == []


@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "fc_norm": True}], ids=["official", "eagle-3.1"])
def test_the_training_time_test_equals_a_sequential_rollout_with_a_kv_cache_gradients_included(target, flags):
    """For each trained slot apart: true slots up to it in a cache, then its own guesses one by one, exactly as serving drafts."""
    K, draft_ids = 7, torch.arange(0, 64, 2)
    head = random_head(target, draft_ids=draft_ids, **flags)
    rows = [Row(random_prompts([18], seed=8)[0], [False] * 5 + [True] * 13, "a"), Row(random_prompts([12], seed=9)[0], [True] * 12, "b")]
    batch = ttt_batch(head, target, rows, K)
    loss, stats = ttt_loss(head, batch)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    sums, counted, trained, correct = [0.0] * K, [0] * K, [0] * K, [0] * K
    for b, row in enumerate(rows):
        n, spans = len(row.tokens), batch.spans[b].tolist()
        tokens = row.tokens.long()[None]
        teacher = target.logits(target(tokens).last)[0]
        features = head.config.layout.pack(target(tokens, boundaries=(2, 4, 5)).captures)
        for t in range(n - 2):
            if spans[t + 1] == 0:
                continue
            context = _GrowingCache()
            hidden, normed = head.step(head.fuse(features[:, :t + 1]), tokens[:, 1:t + 2], torch.arange(t + 1)[None], context)
            hidden, normed = hidden[:, -1:], normed[:, -1:]
            for i in range(K):
                if t + 2 + i >= n or spans[t + 2 + i] != spans[t + 1]:
                    break
                if i:
                    hidden, normed = head.step(hidden, tokens[:, t + 1 + i:t + 2 + i], torch.tensor([[t + i]]), context)
                logits, goal = head.lm_head(normed)[0, 0], teacher[t + 1 + i]
                trained[i] += 1
                correct[i] += int(draft_ids[logits.argmax()] == goal.argmax())
                if goal.argmax() % 2 == 0:
                    counted[i] += 1
                    sums[i] = sums[i] - (goal[draft_ids].softmax(-1) * logits.log_softmax(-1)).sum()
    expected = sum(0.8 ** i * sums[i] / counted[i] for i in range(K) if counted[i])
    expected.backward()
    assert stats.num_counted.tolist() == counted and stats.num_trained.tolist() == trained and stats.num_correct.tolist() == correct
    assert min(counted) > 0, "the test must reach all 7 steps"
    assert_close("loss", loss, expected, 1e-10)
    for name, parameter in head.named_parameters():
        assert_close(f"gradient of {name}", ours[name], parameter.grad, 1e-9)


def test_long_rows_computed_in_parts_give_the_same_loss_and_gradients(target, monkeypatch):
    rows = [Row(random_prompts([41], seed=8)[0], [False] * 5 + [True] * 36, "a"), Row(random_prompts([30], seed=9)[0], [True] * 30, "b")]
    results = []
    for chunk, slots in ((512, 1024), (7, 9)):
        monkeypatch.setattr(TTTAttention, "chunk", chunk)
        monkeypatch.setattr(eagle3.SlotLoss, "at_once", slots)
        head = random_head(target)
        loss, stats = ttt_loss(head, ttt_batch(head, target, rows, 5))
        loss.backward()
        results.append((loss, stats, [parameter.grad for parameter in head.parameters()]))
    (loss, stats, gradients), (parts_loss, parts_stats, parts_gradients) = results
    assert_close("loss", parts_loss, loss, 1e-12)
    assert stats.accuracy == parts_stats.accuracy
    for a, b in zip(gradients, parts_gradients):
        assert_close("gradient", b, a, 1e-11)


def test_a_share_of_the_chains_teaches_what_the_same_chains_teach_among_all(target):
    head = random_head(target)
    rows = [Row(random_prompts([90], seed=8)[0], [False] * 5 + [True] * 85, "a"), Row(random_prompts([70], seed=9)[0], [True] * 70, "b")]
    tokens, mask = eagle3.collate(rows)
    captures = target(tokens, boundaries=(2, 4, 5, 8)).captures
    full, part = (prepare_ttt(head, tokens, mask, captures, 5, chain_share=share, seeds=[3, 4, 5][:len(tokens)]) for share in (1.0, 0.4))
    assert torch.equal(full.trained[0], part.trained[0]), "step 0 is trained everywhere"
    share = part.trained[1].sum() / full.trained[1].sum()
    assert 0.25 < share < 0.55 and all((b <= a).all() for a, b in zip(part.trained, part.trained[1:])), share
    rest = part._replace(trained=[full.trained[0], *(a & ~b for a, b in zip(full.trained[1:], part.trained[1:]))])
    whole, some, others = (ttt_loss(head, batch)[1] for batch in (full, part, rest))
    assert_close("losses", some.loss_sums[1:] + others.loss_sums[1:], whole.loss_sums[1:], 1e-9)
    assert torch.equal(some.num_correct[1:] + others.num_correct[1:], whole.num_correct[1:]) and torch.equal(some.num_trained[1:], part_sizes(part)[1:])
    assert some.simulated_acceptance_length is None and whole.simulated_acceptance_length >= 1
    counts, gradients = torch.ones(5), []
    for batch in (full, part, rest):  # the summed gradients of a share and the rest, step 0 counted once
        head.zero_grad()
        steps = ttt_loss(head, batch, counts)[0] - ttt_loss(head, batch._replace(trained=batch.trained[:1], num_counted=batch.num_counted[:1]), counts[:1])[0]
        steps.backward()
        gradients.append([parameter.grad.clone() for parameter in head.parameters()])
    for whole_gradient, some_gradient, rest_gradient in zip(*gradients):
        assert_close("gradient", some_gradient + rest_gradient, whole_gradient, 1e-9)
    again = prepare_ttt(head, tokens, mask, captures, 5, chain_share=0.4, seeds=[6, 7, 8][:len(tokens)])
    assert not torch.equal(again.trained[1], part.trained[1]), "another seed draws others"


def test_the_loss_and_its_gradients_under_bf16_autocast_are_those_of_fp32_but_for_rounding():
    target = random_target(dtype=torch.float32)
    head = random_head(target, draft_ids=torch.arange(0, 64, 2))
    batch = ttt_batch(head, target, [Row(random_prompts([60], seed=8)[0], [False] * 5 + [True] * 55, "a")], 5)
    found = []
    for enabled in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, _ = ttt_loss(head, batch)
        loss.backward()
        found.append((loss.item(), {name: parameter.grad.clone() for name, parameter in head.named_parameters()}))
    (loss, exact), (rounded_loss, rounded) = found
    assert rounded_loss == pytest.approx(loss, rel=0.01) and rounded_loss != loss
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32 and F.cosine_similarity(rounded[name].flatten(), gradient.flatten(), dim=0) > 0.99, name


def part_sizes(batch):
    return torch.stack([slots.sum() for slots in batch.trained])


class _GrowingCache:
    """The plainest context: append keys, see everything before (with gradients, unlike KVCache)."""

    def __init__(self):
        self.keys, self.values = None, None

    def attend(self, layer, q, k, v):
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        self.values = v if self.values is None else torch.cat([self.values, v], 1)
        T, S = q.shape[1], self.keys.shape[1]
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        return F.scaled_dot_product_attention(q.transpose(1, 2), self.keys.transpose(1, 2), self.values.transpose(1, 2), visible, enable_gqa=True).transpose(1, 2)


def test_accumulated_batches_with_common_counts_equal_one_batch(target):
    head = random_head(target)
    rows = [Row(random_prompts([n], seed=n)[0], [False] * 4 + [True] * (n - 4), f"row {n}") for n in (9, 14, 14, 20)]
    whole, _ = ttt_loss(head, ttt_batch(head, target, rows, 5))
    parts = [ttt_batch(head, target, rows[:1], 5), ttt_batch(head, target, rows[1:], 5)]
    counts = sum(part.num_counted for part in parts)
    results = [ttt_loss(head, part, counts) for part in parts]
    assert_close("loss", sum(loss for loss, _ in results), whole, 1e-12)
    assert abs((results[0][1] + results[1][1]).loss - whole.item()) < 1e-12


def test_a_step_without_slots_is_left_out_and_a_short_answer_still_trains(target):
    head = random_head(target)
    loss, stats = ttt_loss(head, ttt_batch(head, target, [Row([5, 6, 7, 8, 9], [False, False, False, True, True], "short")], 7))
    assert stats.num_trained.tolist() == [1, 0, 0, 0, 0, 0, 0] and loss.isfinite() and loss > 0
    assert_close("loss", loss, stats.loss_sums[0], 1e-12)


def test_rows_with_nothing_supervised_or_not_finite_are_an_error_that_names_them(target):
    head = random_head(target)
    good = Row([5, 6, 7, 8], [False, True, True, True], "data.jsonl:1")
    for tokens, mask in (([5, 6, 7], [False] * 3), ([5, 6, 7], [False, False, True]), ([5, 2, 7], [False, True, True])):
        with pytest.raises(ValueError, match="nothing is supervised in data.jsonl:2"):
            ttt_batch(head, target, [good, Row(tokens, mask, "data.jsonl:2")], 3)
    tokens, mask = eagle3.collate([good, good])
    captures = dict(target(tokens, boundaries=(2, 4, 5, 8)).captures)
    captures[4] = captures[4].clone()
    captures[4][1, 2, 7] = float("nan")
    with pytest.raises(ValueError, match="boundary 4 is not finite in row 1"):
        prepare_ttt(head, tokens, mask, captures, 3)


def test_simulated_serving_walks_a_row_as_serving_would():
    """Answer at 2..7; runs of right guesses by slot: the walk starts at slot 1 with token 2 known."""
    spans, tokens = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]), torch.tensor([[5, 5, 5, 5, 5, 5, 5, 2]])
    runs = torch.tensor([[0, 1, 3, 2, 3, 3, 0, 0]])  # slot 1: 1 right, emits tokens 3, 4 -> slot 3: 2 right, emits 5, 6, 7 -> at the end
    correct = torch.arange(3) < runs[..., None]
    assert eagle3.simulate_serving(correct, tokens, spans, (2,)) == (5, 2)
    runs[0, 3] = 1  # slot 3 now emits 5, 6 -> slot 5 is left with token 7 only: right or wrong, one token
    assert eagle3.simulate_serving(torch.arange(3) < runs[..., None], tokens, spans, (2,)) == (5, 3)
    assert eagle3.simulate_serving(torch.arange(3) < runs[..., None], tokens, spans, ()) == (4, 2), "a cut row's last round is left out"


@pytest.mark.parametrize("eos", [(), (2, 9, 17, 33)], ids=["no-eos", "eos"])
def test_simulated_and_served_acceptance_length_are_equal_on_rows_that_the_target_wrote(target, trained_head, eos):
    """The identity behind the wiring check: same text, same head, so the same rounds, to the last token (fp64)."""
    prompts = random_prompts([5, 9, 13, 30, 2, 21, 8, 16], seed=77) + random_prompts([5, 9, 13, 7])
    served = speculative_generate(target, trained_head, prompts, CHAIN, 40, eos_token_ids=eos)
    rows = [Row(r.prompt + r.output, [False] * len(r.prompt) + [True] * len(r.output), "row") for r in served if len(r.output) > 1]
    target_config_with_eos = replace(target.config, eos_token_ids=eos)
    trained_head.attach(TargetEnds(target_config_with_eos, target.embed_tokens, target.norm, target.lm_head))
    try:
        _, stats = ttt_loss(trained_head, ttt_batch(trained_head, target, rows, 4))
    finally:
        trained_head.attach(target)
    total = sum((r.stats for r in served), eagle3.SpecStats())
    assert (stats.emitted, stats.rounds) == (total.emitted, total.rounds) and total.acceptance_length > 1.1


# -----------------------------------------------------------------------------
# 10. Sampling


def chi_square_odds(counts, probs) -> float:
    """The probability of a chi-square at least this large if the counts came from probs (regularised upper incomplete gamma)."""
    expected = probs / probs.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(probs) - 1) / 2, dtype=torch.float64), statistic / 2).item()


@pytest.mark.parametrize("varies", ["seed", "position"])
def test_the_noise_makes_the_argmax_follow_the_softmax_over_seeds_and_over_positions(varies):
    """20,000 draws against the exact probabilities; false-alarm odds 1e-4 each, and pairs of neighbouring draws must be independent."""
    probs = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01], dtype=torch.float64)
    n, ids = 20000, torch.tensor([0, 1, 2, 777, 49151, 163839])
    seeds, positions = (torch.arange(n), torch.full((n, 1), 7)) if varies == "seed" else (torch.tensor([3]), torch.arange(n)[None])
    drawn = (probs.log() + eagle3.gumbel_noise(seeds, positions, ids)).argmax(-1).flatten()
    assert chi_square_odds(torch.bincount(drawn, minlength=6).double(), probs) > 1e-4
    pairs = drawn[:-1:2] * 6 + drawn[1::2]
    keep = (probs[:, None] * probs).flatten() > 0.002  # cells with an expectation of 20 and more
    assert chi_square_odds(torch.bincount(pairs, minlength=36)[keep].double(), (probs[:, None] * probs).flatten()[keep]) > 1e-4


def test_the_noise_is_standard_gumbel_over_tokens_and_the_same_for_any_shard_of_the_vocabulary():
    noise = eagle3.gumbel_noise(torch.tensor([5, -9]), torch.tensor([[0, 1], [10**6, 3]]), torch.arange(50000))
    assert noise.shape == (2, 2, 50000) and noise.isfinite().all() and noise.dtype == torch.float64
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.var() - torch.pi**2 / 6) < 0.05
    uniform = (-(-noise[0, 0]).exp()).exp()
    assert chi_square_odds(torch.histc(uniform, 50, 0, 1), torch.ones(50)) > 1e-4
    assert torch.equal(noise[..., 20000:30000], eagle3.gumbel_noise(torch.tensor([5, -9]), torch.tensor([[0, 1], [10**6, 3]]), torch.arange(20000, 30000)))
    flat = noise.flatten(0, 1)
    assert (torch.corrcoef(flat) - torch.eye(4)).abs().max() < 0.02, "streams of other seeds and positions must be unrelated"


@pytest.mark.parametrize("width", [0, 5], ids=["all tokens looked at", "the top-k looked at"])
def test_top_k_top_p_and_min_p_keep_what_a_plain_loop_keeps(width):
    generator = torch.Generator().manual_seed(1)
    settings = [dict(temperature=t, top_k=k, top_p=p, min_p=m) for t in (0.5, 1.3) for k in (0, 1, 5) for p in (1.0, 0.7) for m in (0.0, 0.2)]
    if width:  # every row that truncates has a top-k; beside them rows that do not truncate
        settings = [setting for setting in settings if setting["top_k"] or setting["top_p"] == 1 and setting["min_p"] == 0]
    sampling = eagle3.BatchSampling.of([Sampling(**setting) for setting in settings], "cpu")
    assert sampling.width == width
    logits = torch.randn(len(settings), 3, 30, generator=generator) * 2
    out = eagle3.truncate(eagle3.temper(logits, sampling), sampling)
    for b, setting in enumerate(settings):
        for n in range(3):
            scaled = logits[b, n].double() / setting["temperature"]
            order = scaled.argsort(descending=True).tolist()[:setting["top_k"] or None]
            probs = scaled[order].softmax(-1).tolist()
            kept, total = set(), 0.0
            for token, prob in zip(order, probs):
                if total < setting["top_p"] and prob >= setting["min_p"] * probs[0]:
                    kept.add(token)
                total += prob
            assert set(out[b, n].isfinite().nonzero().flatten().tolist()) == kept | {order[0]}
            assert torch.equal(out[b, n][list(kept)], scaled[list(kept)])


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(top_k=-1), dict(top_p=0), dict(top_p=1.1), dict(min_p=2), dict(seed=2**63)], ids=str)
def test_sampling_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError):
        Sampling(**bad)


SAMPLINGS = [Sampling(0.6, seed=1), Sampling(1.0, seed=2), Sampling(1.5, seed=3), Sampling(1.0, top_k=5, seed=4), Sampling(1.0, top_p=0.8, seed=5),
             Sampling(1.5, min_p=0.1, seed=6), Sampling(0.6, top_k=20, top_p=0.95, min_p=0.01, seed=-7), Sampling()]


@slow
@pytest.mark.parametrize("spec", [SpecConfig(4, 1, 5), SpecConfig(4, 3, 10), SpecConfig(2, 4, 9)], ids=spec_name)
@pytest.mark.parametrize("eos", [(), (2, 9, 17, 33, 41)], ids=["no-eos", "eos"])
def test_the_same_seed_gives_the_same_text_with_and_without_speculation_alone_and_in_any_batch(target, trained_head, eos, spec):
    """Strict in fp64: eight requests with other settings each, plain and alone, then all at once, then three slots for eight."""
    prompts = random_prompts([5, 9, 13, 7, 30, 2, 11, 6])
    plain = [generate(target, [prompt], 30, eos, sampling)[0].output for prompt, sampling in zip(prompts, SAMPLINGS)]
    for max_batch in (1, 3, 8):
        engine = Engine(target, trained_head, spec, max_batch=max_batch, max_length=80)
        requests = [engine.submit(prompt, 30, eos, sampling) for prompt, sampling in zip(prompts, SAMPLINGS)]
        while engine.busy:
            engine.step()
        assert [r.output for r in requests] == plain
    other, = generate(target, prompts[1:2], 30, eos, replace(SAMPLINGS[1], seed=99))
    assert other.output != plain[1], "another seed is another text"


@slow
@pytest.mark.parametrize("spec", [None, SpecConfig(3, 1, 4), SpecConfig(3, 2, 8)], ids=["plain", "chain", "tree"])
def test_sampled_text_of_three_tokens_follows_the_exactly_enumerated_distribution(spec):
    """All 216 texts' probabilities from the target against 3,000 seeds through the engine; false-alarm odds 1e-4."""
    target, prompt, sampling = random_target(num_layers=1, vocab_size=6, eos_token_ids=()), [3, 4], Sampling(temperature=1.5, top_p=0.95)
    head, batch = random_head(target, boundaries=(0, 1)) if spec else None, eagle3.BatchSampling.of([sampling], "cpu")
    exact = torch.ones(1, dtype=torch.float64)
    texts = torch.zeros(1, 0, dtype=torch.int64)
    for _ in range(3):
        rows = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], 1)
        probs = torch.stack([eagle3.truncate(eagle3.temper(target.logits(target(row[None]).last[:, -1:]), batch), batch)[0, 0].softmax(-1) for row in rows])
        exact = (exact[:, None] * probs).flatten()
        texts = torch.cat([texts.repeat_interleave(6, 0), torch.arange(6).repeat(len(texts))[:, None]], 1)
    engine = Engine(target, head, spec, max_batch=100, max_length=5)
    requests = [engine.submit(prompt, 3, (), replace(sampling, seed=seed)) for seed in range(3000)]
    while engine.busy:
        engine.step()
    counts = torch.bincount(torch.tensor([r.output[0] * 36 + r.output[1] * 6 + r.output[2] for r in requests]), minlength=216).double()
    assert counts[exact == 0].sum() == 0, "a token that top-p cut was sampled"
    common = exact * 3000 >= 5
    rare_counts, rare = counts[~common].sum()[None], exact[~common].sum()[None]
    assert chi_square_odds(torch.cat([counts[common], rare_counts]), torch.cat([exact[common], rare])) > 1e-4


# -----------------------------------------------------------------------------
# 11. Tree and acceptance


def test_the_ancestor_mask_is_the_literal_one():
    mask = ancestor_mask(torch.tensor([[0, 0, 0, 1, 1, 3], [0, 0, 1, 2, 3, 4]])).int().tolist()
    assert mask[0] == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 1]]
    assert mask[1] == torch.ones(6, 6).tril().int().tolist(), "a chain is causal"


@pytest.mark.parametrize("spec", [CHAIN, TREE, SpecConfig(3, 2, 11), SpecConfig(1, 5, 4), SpecConfig(5, 2, 4)], ids=spec_name)
def test_a_grown_tree_is_the_best_of_an_exhaustive_search_run_path_by_path(target, spec):
    """Oracle: expand level by level in Python, each path run alone through the head with plain causal attention; keep the best nodes."""
    head, prompts = random_head(target, draft_ids=torch.arange(1, 64, 2)), random_prompts([7, 12])
    engine = Engine(target, head, spec, max_batch=2, max_length=64)
    for prompt in prompts:
        engine.submit(prompt, 20, eos_token_ids=())
    with torch.no_grad():
        for _ in range(2):
            engine._prefill(engine._admit())
        drafted = []
        keep = lambda *args: drafted.append(eagle3.grow_tree(*args)) or drafted[0]
        roots = engine.state.root.tolist()
        eagle3.speculative_round(engine.steps, engine.state, spec, 1, engine.columns[:12 + engine.margin], grow=keep)
        tree, = drafted
    for b, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        features = head.config.layout.pack(target(tokens, boundaries=(2, 4, 5)).captures)
        root = roots[b]

        def log_probs(path):
            context = _GrowingCache()
            following = torch.tensor([prompt[1:] + [root]])
            hidden, normed = head.step(head.fuse(features), following, torch.arange(len(prompt))[None], context)
            hidden, normed = hidden[:, -1:], normed[:, -1:]
            for i, token in enumerate(path):
                hidden, normed = head.step(hidden, torch.tensor([[token]]), torch.tensor([[len(prompt) + i]]), context)
            return head.lm_head(normed)[0, 0].log_softmax(-1)

        frontier, found = [((), 0.0)], []
        for _ in range(spec.num_steps):
            level = []
            for path, score in frontier:
                edges, ids = log_probs(path).topk(spec.topk)
                level += [((*path, int(2 * i + 1)), score + edge.item()) for edge, i in zip(edges, ids)]
            found += level
            frontier = sorted(level, key=lambda node: -node[1])[:spec.topk]
        best = {path for path, _ in sorted(found, key=lambda node: -node[1])[:spec.num_draft_tokens - 1]}
        mask = ancestor_mask(tree.parents)[b]
        grown = {tuple(tree.tokens[b, [i for i in range(1, len(mask)) if mask[n, i]]].tolist()) for n in range(1, len(mask))}
        assert grown == best and tree.tokens[b, 0] == root
        assert (tree.parents[b, 1:] < torch.arange(1, spec.num_draft_tokens)).all(), "parents stand before their children"


def test_accept_takes_the_longest_path_that_the_target_agrees_with():
    """Against a walk in Python, on random trees whose siblings differ."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        N = int(torch.randint(2, 9, (1,), generator=generator))
        parents = torch.tensor([[0] + [int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, N)]])
        tokens, target_tokens = torch.zeros(1, N, dtype=torch.int64), torch.randint(0, 3, (1, N), generator=generator)
        for n in range(1, N):
            taken = {int(tokens[0, m]) for m in range(1, n) if parents[0, m] == parents[0, n]}
            tokens[0, n] = next(x for x in [*torch.randperm(3, generator=generator).tolist(), *range(3, 20)] if x not in taken)
        node, path = 0, [0]
        while True:
            child = [n for n in range(1, N) if parents[0, n] == node and tokens[0, n] == target_tokens[0, node]]
            if not child:
                break
            node = child[0]
            path.append(node)
        accepted = accept(DraftTree(tokens, parents), target_tokens, ancestor_mask(parents), max_depth=8)
        count = int(accepted.num_accepted)
        assert count == len(path) - 1 and accepted.path[0, :count + 1].tolist() == path and (accepted.path[0, count:] == node).all()
        assert accepted.tokens[0, :count + 1].tolist() == [*tokens[0, path[1:]].tolist(), int(target_tokens[0, node])]


# -----------------------------------------------------------------------------
# 14. Engine


@pytest.mark.parametrize("spec", [CHAIN, TREE, SpecConfig(1, 1, 2), SpecConfig(2, 4, 9)], ids=spec_name)
@pytest.mark.parametrize("eos", [(), (2, 9, 17, 33, 41)], ids=["no-eos", "eos"])
@pytest.mark.parametrize("which", ["random", "trained"])
def test_speculative_greedy_text_equals_plain_greedy_text_alone_and_in_a_batch(target, trained_head, which, eos, spec):
    head = trained_head if which == "trained" else random_head(target, draft_ids=torch.arange(0, 64, 3))
    prompts = random_prompts([5, 9, 13, 7]) + random_prompts([1, 33, 2], seed=6)
    plain = generate(target, prompts, 40, eos_token_ids=eos)
    alone = [generate(target, [prompt], 40, eos_token_ids=eos)[0] for prompt in prompts]
    fast = speculative_generate(target, head, prompts, spec, 40, eos_token_ids=eos)
    some = speculative_generate(target, head, prompts, spec, 40, eos_token_ids=eos, max_batch=3)  # requests join as others leave
    for a, b, c, d in zip(plain, alone, fast, some):
        assert a.output == b.output == c.output == d.output and a.finish_reason == b.finish_reason == c.finish_reason == d.finish_reason
        assert (a.finish_reason == "stop") == (a.output[-1] in eos) and (a.finish_reason == "length") <= (len(a.output) == 40)
    assert not eos or any(r.finish_reason == "stop" for r in plain), "the test must see an end-of-turn token"
    total = sum((r.stats for r in fast), eagle3.SpecStats())
    assert total.acceptance_length <= spec.ceiling and (which == "random" or total.acceptance_length > 1.1)


def test_every_max_new_tokens_ends_at_exactly_that_token(target, trained_head):
    prompt = random_prompts([5])[0]
    whole = generate(target, [prompt], 24, eos_token_ids=())[0].output
    for n in range(1, 25):
        for spec in (CHAIN, TREE):
            request, = speculative_generate(target, trained_head, [prompt], spec, n, eos_token_ids=())
            assert request.output == whole[:n] and request.finish_reason == "length"


@slow
def test_fp32_speculation_differs_from_plain_decoding_at_most_in_ties(trained_head):
    target = random_target(dtype=torch.float32)
    head = DraftHead(trained_head.config, torch.arange(64))
    head.load_state_dict(trained_head.state_dict())
    head.attach(target)
    prompts = random_prompts([5, 9, 13, 7, 30, 2, 19, 24], seed=31)
    for spec in (CHAIN, TREE):
        for prompt, plain, fast in zip(prompts, generate(target, prompts, 60, ()), speculative_generate(target, head, prompts, spec, 60, ())):
            parted = eagle3.first_divergence(target, prompt, plain.output, fast.output)
            assert parted is None or print(f"tie of {parted[1]:.2g}") or parted[1] < 1e-4


def test_first_divergence_reports_the_gap_between_the_two_tokens(target):
    prompt = [5, 6, 7]
    logits = target.logits(target(torch.tensor([prompt])).last[0, -1])
    best, second = logits.topk(2).indices.tolist()
    index, gap = eagle3.first_divergence(target, prompt, [best, 1], [second, 1])
    assert index == 0 and abs(gap - (logits[best] - logits[second]).item()) < 1e-9
    assert eagle3.first_divergence(target, prompt, [1, 2], [1, 2]) is None and eagle3.first_divergence(target, prompt, [1], [1, 2])[1] == float("inf")


@torch.no_grad()
def heads_read(engine):
    """The head's hidden states and logits behind all true slots; its cache then holds them."""
    return eagle3.read_waiting(engine.steps, engine.state, engine.room, engine.columns)


def both_caches(engine):
    return [x for cache in (engine.state.cache, engine.state.draft_cache) for x in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=spec_name)
def test_caches_after_any_rounds_equal_a_fresh_prefill_of_the_same_tokens(target, trained_head, spec):
    prompts = random_prompts([5, 9, 13, 7])
    engine = Engine(target, trained_head, spec, max_batch=4, max_length=64)
    requests = [engine.submit(prompt, 40, eos_token_ids=()) for prompt in prompts]
    for _ in range(6):
        engine.step()
    heads_read(engine)
    for slot, request in enumerate(requests):
        tokens = request.prompt + request.output
        n = int(engine.state.lengths[slot])
        assert n == len(tokens) - 1 and int(engine.state.root[slot]) == tokens[-1]
        fresh = Engine(target, trained_head, spec, max_batch=1, max_length=64)
        fresh.submit(tokens[:-1], 2, eos_token_ids=())
        with torch.no_grad():
            fresh._prefill(fresh._admit())
        heads_read(fresh)
        for ours, theirs in zip(both_caches(engine), both_caches(fresh)):
            assert_close("KV", ours[slot, :, :n], theirs[0, :, :n], 1e-11)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=spec_name)
def test_a_perfect_draft_reaches_the_ceiling_and_a_hostile_one_gets_exactly_one(target, spec):
    prompts = random_prompts([5, 9])
    texts = [r.output for r in generate(target, prompts, 60, eos_token_ids=())]
    head = random_head(target)
    for right, expected in ((True, spec.ceiling), (False, 1)):
        def scripted(*_):
            """A chain of the true next tokens (or of wrong ones) as nodes 1..num_steps, the other nodes as wrong siblings of the first."""
            rows = []
            for request, text in zip(requests, texts):
                ahead = (text + [0] * 16)[len(request.output):len(request.output) + spec.num_steps]
                chain = [token if right else (token + 1) % 64 for token in ahead]
                rows.append([request.output[-1], *chain, *[(ahead[0] + 2 + i) % 64 for i in range(spec.num_draft_tokens - 1 - len(chain))]])
            parents = [0, *range(spec.num_steps), *[0] * (spec.num_draft_tokens - 1 - spec.num_steps)]
            return DraftTree(torch.tensor(rows), torch.tensor([parents] * 2))

        engine = Engine(target, head, spec, max_batch=2, max_length=80, grow=scripted)
        requests = [engine.submit(prompt, 60, eos_token_ids=()) for prompt in prompts]
        while engine.busy:
            engine.step()
        for request, text in zip(requests, texts):
            assert request.output == text and request.stats.acceptance_length == expected
            assert request.stats.per_position_acceptance(spec.num_steps) == [float(right)] * spec.num_steps


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_prefill_in_chunks_of_any_size_gives_the_same_text_and_the_same_rounds(target, trained_head, chunk):
    prompts, results = random_prompts([5, 23]), []
    for size in (chunk, 512):
        engine = Engine(target, trained_head, CHAIN, max_batch=2, max_length=64, prefill_chunk=size)
        results.append([(r.output, r.stats.rounds) for r in eagle3.run_requests(engine, prompts, 30, ())])
    assert results[0] == results[1]


def test_a_cancelled_request_stops_where_it_is_and_the_others_do_not_notice(target, trained_head):
    prompts = random_prompts([5, 9, 13, 7])
    expected = [r.output for r in generate(target, prompts, 40, eos_token_ids=())]
    engine = Engine(target, trained_head, CHAIN, max_batch=2, max_length=64)
    requests = [engine.submit(prompt, 40, eos_token_ids=()) for prompt in prompts]
    engine.step()
    engine.step()
    engine.cancel(requests[0])
    engine.cancel(requests[3])  # still waiting
    kept = list(requests[0].output)
    while engine.busy:
        engine.step()
    assert requests[0].output == kept == expected[0][:len(kept)] and len(kept) < 40 and requests[3].output == []
    assert [r.finish_reason for r in requests] == ["cancelled", "length", "length", "cancelled"]
    assert [r.output for r in requests[1:3]] == expected[1:3]


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=spec_name)
def test_a_request_that_fills_max_length_ends_while_another_goes_on(target, spec):
    """A last block that is accepted beyond the limit must not carry the idle slot's writes out of its cache."""
    prompts = random_prompts([30, 3])
    texts = [r.output for r in generate(target, prompts, 40, eos_token_ids=())]
    def scripted(step, target_ids, roots, *_):
        rows = [[r.output[-1] if r else 0, *([*texts[i], *[0] * 9][len(r.output):][:4] if r else [0] * 4), *range(50, 50 + spec.num_draft_tokens - 5)]
                for i, r in ((texts_of[row.request], row.request) if row.request else (0, None) for row in engine.rows[:len(roots)])]
        return DraftTree(torch.tensor(rows), torch.tensor([[0, 0, 1, 2, 3, *[0] * (spec.num_draft_tokens - 5)]] * len(roots)))

    engine = Engine(target, random_head(target), spec, max_batch=2, max_length=32, grow=scripted)
    requests = [engine.submit(prompt, n, eos_token_ids=()) for prompt, n in zip(prompts, (2, 29))]
    texts_of = dict(zip(requests, (0, 1)))
    while engine.busy:
        engine.step()
    assert [r.output for r in requests] == [texts[0][:2], texts[1][:29]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4)], ids=["greedy", "sampled"])
def test_any_sequence_of_shapes_gives_the_same_text_and_the_head_catches_up_with_plain_steps(target, trained_head, sampling):
    """Requests of different lengths join and leave while rounds draft a chain, a tree or nothing, in random order and in long plain runs."""
    prompts, order = random_prompts([5, 9, 13, 7, 30, 2]), torch.Generator().manual_seed(4)
    expected = [r.output for r in generate(target, prompts, 60, (), sampling)]
    engine = Engine(target, trained_head, (CHAIN, TREE), max_batch=3, max_length=100)
    requests = [engine.submit(prompt, 60, (), sampling) for prompt in prompts]
    rounds = 0
    while engine.busy:
        shape = (None, CHAIN, TREE)[int(torch.randint(0, 3, (1,), generator=order))] if rounds % 60 < 25 else None
        engine.step(shape)
        rounds += 1
        if rounds in (12, 41, 77):  # in the middle of short and of long plain runs
            _, logits = heads_read(engine)
            for slot, row in enumerate(engine.rows):
                if row.request:
                    tokens = row.request.tokens
                    fresh = Engine(target, trained_head, CHAIN, max_length=100)
                    fresh.submit(tokens[:-1], 2, (), sampling)
                    with torch.no_grad():
                        fresh._prefill(fresh._admit())
                    assert_close("head logits", logits[slot], heads_read(fresh)[1][0], 1e-9)
                    for ours, theirs in zip(both_caches(engine), both_caches(fresh)):
                        assert_close("KV", ours[slot, :, :len(tokens) - 1], theirs[0, :, :len(tokens) - 1], 1e-11)
    assert [r.output for r in requests] == expected and rounds > 77
    assert all(r.plain_steps and r.stats.rounds for r in requests)


def test_the_controller_takes_what_pays_and_hardly_ever_drafts_when_nothing_does():
    """Against scripted costs: a round of the chain takes 1.3 plain steps, of the tree 1.8."""
    cost, length = {None: 10.0, CHAIN: 13.0, TREE: 18.0}, {None: 1.0, CHAIN: 1.0, TREE: 1.0}
    controller = eagle3.Controller((CHAIN, TREE))

    def run(rounds):
        chosen = []
        for _ in range(rounds):
            chosen.append(controller.choose())
            controller.record(chosen[-1], cost[chosen[-1]], length[chosen[-1]])
        return Counter(chosen)

    chosen = run(1000)  # nothing is ever accepted
    extra = sum((cost[shape] - 10) * count for shape, count in chosen.items()) / 10000
    assert chosen[None] > 980 and extra < 0.008, f"{chosen}: {100 * extra:.1f} % lost"
    length.update({CHAIN: 1.6, TREE: 1.7})  # the chain begins to pay: 1.6 / 13 > 1 / 10 > 1.7 / 18
    run(8000)
    assert run(1000)[CHAIN] > 900
    length.update({TREE: 3.5, CHAIN: 1.1})
    run(8000)
    assert run(1000)[TREE] > 900
    length.update({TREE: 1.0, CHAIN: 1.0})
    assert run(1000)[None] > 900


def test_a_random_head_under_auto_costs_a_few_forwards_per_hundred_tokens(target):
    engine = Engine(target, random_head(target, draft_ids=torch.tensor([3, 4, 5])), eagle3.AUTO_SHAPES, max_length=400)
    controller = engine.controllers[1]
    controller.record = lambda shape, ms, tokens, record=controller.record: record(shape, 10.0 if shape is None else 16.0, tokens)
    calls = Counter()
    for name in ("level", "extend"):
        setattr(engine.steps, name, lambda *args, name=name, run=getattr(engine.steps, name): (calls.update([name]), run(*args))[1])
    request, = eagle3.run_requests(engine, random_prompts([5]), 390, ())
    assert sum(calls.values()) < 390 * 0.16, calls  # 12 of these are catching up in blocks, 1 pass for 32 tokens
    assert request.stats.rounds < 12 and request.plain_steps > 370  # 6 to begin with, then a probe at ever longer intervals


@slow
def test_compiled_decoding_gives_the_eager_text_and_compiles_nothing_after_warm_up():
    """Chain and none under one engine, greedy, sampled and truncated, at lengths that warm-up never saw; fp64, so strictly equal."""
    target = random_target(num_layers=1)
    head = random_head(target, boundaries=(0, 1))
    prompts = random_prompts([3, 40, 20, 7])
    engine = Engine(target, head, (SpecConfig(2, 2, 4),), max_batch=2, max_length=128, one_alone=False).compile()  # one row: the next test
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for sampling in (Sampling(), Sampling(0.8, seed=1), Sampling(1.2, top_k=9, top_p=0.9, seed=2)):
        requests = [engine.submit(prompt, 50, (), sampling) for prompt in prompts]
        rounds = 0
        while engine.busy:
            engine.step(engine.shapes[0] if rounds % 30 < 9 else None)
            rounds += 1
        assert [r.output for r in requests] == [r.output for r in generate(target, prompts, 50, (), sampling)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "something was compiled while requests waited"


@slow
def test_compiled_engines_of_equal_shapes_do_not_share_graphs_and_fp32_is_packed():
    """Weights are constants of neither graph nor guard, so two targets must not meet in the compiler's cache."""
    engines = []
    for seed in (0, 1):
        target = random_target(seed, torch.float32, num_layers=1)
        head = random_head(target, seed, boundaries=(0, 1))
        engines.append((target, Engine(target, head, SpecConfig(1, 1, 2), max_length=64).compile()))
    for target, engine in engines:
        prompts = random_prompts([5])
        assert target.layers[0].mlp.gate_proj.packed is not None
        spoken, = eagle3.run_requests(engine, prompts, 20, ())
        wanted, = generate(target, prompts, 20, ())
        parted = eagle3.first_divergence(target, prompts[0], wanted.output, spoken.output)
        assert parted is None or parted[1] < 1e-4, parted


@pytest.mark.parametrize("max_length", [2, 3, 64])
def test_warm_up_runs_every_shape_once_whatever_is_accepted_and_however_short_the_engine(target, trained_head, monkeypatch, max_length):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # what is compiled does not matter here
    everything = lambda tree, tokens, mask, depth: eagle3.Accepted(torch.arange(depth + 1)[None], torch.tensor([depth]), tokens[:, :depth + 1])
    engine = Engine(target, trained_head, (CHAIN, TREE), max_length=max_length, accept=everything)
    seen, run = [], engine._round
    engine._round = lambda shape, size: (seen.append(shape), run(shape, size))[1]
    engine.compile()
    assert seen == ([CHAIN, None, CHAIN, TREE] if max_length > 2 else []) and not engine.busy  # 1 + 1 tokens never need a round
    assert engine.controllers[1].untried() == [None, CHAIN, TREE], "warm-up must not count as measurement"


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_request_takes_over_the_beginning_that_a_finished_one_left_in_its_slot(target, trained_head, shape):
    """Turns of a conversation, an unrelated request between them, and one that shares only the first tokens."""
    first, other = random_prompts([20, 17])
    engine = Engine(target, trained_head, (CHAIN, TREE), max_batch=2, max_length=120)

    def run(prompt):
        request = engine.submit(prompt, 12, ())
        while engine.busy:
            engine.step(shape)
        expected, = generate(target, [prompt], 12, ())
        assert request.output == expected.output
        return request

    one = run(first)
    assert one.reused == 0 and run(other).reused == 0
    second = run(first + one.output + [5, 6, 7])
    waiting = {None: 12, CHAIN: CHAIN.num_steps + 1, TREE: TREE.num_steps + 1}[shape]  # slots, at most, that the head had not read
    assert len(first) + 11 - waiting - 1 <= second.reused < len(first) + 11, "all but the last shared token, as far as the head knows them"
    assert run(second.prompt[:9] + [1] + other[:5]).reused == 8
    again = run(other)
    assert 0 < again.reused < len(other), "at least one prompt token is read again, for its logits"
    fresh = Engine(target, trained_head, (CHAIN, TREE), max_batch=2, max_length=120)
    alone = fresh.submit(second.prompt, 12, ())
    while fresh.busy:
        fresh.step(shape)
    assert (alone.stats, alone.output) == (second.stats, second.output), "the head drafts as after a cold start"
    cancelled = engine.submit(random_prompts([60], seed=9)[0], 12, ())
    engine.prefill_chunk = 16
    with torch.no_grad():
        engine._prefill(engine._admit())
    engine.cancel(cancelled)
    assert run(cancelled.prompt).reused == 15, "what was read before the cancel"


def test_a_long_prompt_is_read_between_the_rounds_of_the_others(target, trained_head):
    engine = Engine(target, trained_head, CHAIN, max_batch=2, max_length=120, prefill_chunk=8)
    quick, slow = engine.submit(random_prompts([5])[0], 30, ()), engine.submit(random_prompts([60])[0], 5, ())
    got = []
    while engine.busy:
        engine.step()
        got.append((len(quick.output), len(slow.output)))
    reading = [a for a, b in got if b == 0 and a]
    assert len(reading) >= 7 and all(later > sooner for sooner, later in zip(reading, reading[1:])), got
    assert [r.output for r in (quick, slow)] == [generate(target, [r.prompt], r.max_new_tokens, ())[0].output for r in (quick, slow)]


def test_a_round_computes_one_row_where_one_decodes_or_all(target, trained_head):
    """Requests end one after the other, the first ones first, so that the last one is moved."""
    prompts, widths = random_prompts([5, 9, 13, 4, 6, 7]), []
    engine = Engine(target, trained_head, (CHAIN, TREE), max_batch=6, max_length=80)
    run = engine.steps.verify
    engine.steps.verify = lambda cache, tokens, *rest: (widths.append(len(tokens)), run(cache, tokens, *rest))[1]
    requests = [engine.submit(prompt, n, ()) for prompt, n in zip(prompts, (6, 9, 12, 20, 24, 50))]
    rounds = 0
    while engine.busy:
        engine.step((None, CHAIN, TREE)[rounds // 3 % 3])
        rounds += 1
    assert [r.output for r in requests] == [generate(target, [p], len(r.output), ())[0].output for p, r in zip(prompts, requests)]
    assert widths == sorted(widths, reverse=True) and sorted(set(widths)) == [1, 6]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=2)], ids=["greedy", "sampled"])
def test_logprobs_are_the_targets_own_at_every_token_whatever_was_drafted(target, trained_head, sampling):
    prompts = random_prompts([5, 9])
    for spec in (CHAIN, TREE):
        engine = Engine(target, trained_head, spec, max_batch=2, max_length=60)
        requests = [engine.submit(prompt, 20, (), sampling, logprobs=k) for prompt, k in zip(prompts, (3, 0))]
        while engine.busy:
            engine.step()
        for request, k in zip(requests, (3, 0)):
            tokens = torch.tensor([request.prompt + request.output])
            expected = target.logits(target(tokens).last)[0, len(request.prompt) - 1:-1].log_softmax(-1)
            assert len(request.token_logprobs) == 20
            for (own, rivals), token, row in zip(request.token_logprobs, request.output, expected):
                assert abs(own - row[token].item()) < 1e-9 and [i for i, _ in rivals] == row.topk(k).indices.tolist()
                assert all(abs(value - row[i].item()) < 1e-9 for i, value in rivals)


def test_what_an_engine_cannot_serve_is_refused_before_any_work(target):
    head = random_head(target)
    with pytest.raises(ValueError, match="or neither"):
        Engine(target, head)
    with pytest.raises(ValueError, match="attached"):
        Engine(random_target(), head, CHAIN)
    with pytest.raises(ValueError, match="context of 512"):
        Engine(target, max_length=513)
    with pytest.raises(ValueError, match="draft vocabulary"):
        Engine(target, random_head(target, draft_ids=torch.tensor([1, 2])), TREE)
    engine = Engine(target, max_length=16)
    for prompt, count, message in (([], 4, "at least one"), ([1], 0, "at least"), ([1] * 13, 4, "fit max_length=16"), ([64], 4, "within 0..63"), ([-1], 4, "within")):
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, count)


def test_logits_that_are_not_finite_fail_their_own_request_only():
    target = random_target()
    target.embed_tokens.weight[60] = float("nan")  # a token that poisons whoever has it in the prompt
    head = random_head(target)
    engine = Engine(target, head, CHAIN, max_batch=2, max_length=64)
    bad, good = engine.submit([5] * 30 + [60, 7], 20, ()), engine.submit([5, 6, 7], 20, ())
    while engine.busy:
        engine.step()
    assert bad.finish_reason == "error" and bad.output == []
    assert good.finish_reason == "length" and len(good.output) == 20
    after = engine.submit([5, 6, 7], 20, ())  # whoever gets the slot next must not inherit a NaN from its cache
    beside = engine.submit([9] * 40, 20, ())
    while engine.busy:
        engine.step()
    assert after.output == good.output and beside.finish_reason == "length"
    with pytest.raises(ValueError, match=r"not finite for prompts \[1\]"):
        generate(target, [[5, 6], [60, 6]], 4)


# -----------------------------------------------------------------------------
# 15. Checkpoints


@pytest.fixture
def saved(tmp_path):
    """A saved target and a saved head for it."""
    target = random_target(dtype=torch.float32)
    save_target(target, tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    target = load_target(tmp_path / "target")
    head = random_head(target, draft_ids=torch.arange(0, 64, 2))
    save_draft(head, tmp_path / "draft")
    return tmp_path, target, head


def edit_json(path, **changes):
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def drop_metadata(path):
    """As other tools write it."""
    from safetensors.torch import load_file, save_file
    save_file(load_file(path), path)


def edit_tensors(path, change):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def test_a_target_and_a_head_come_back_as_they_were_saved(saved):
    folder, target, head = saved
    loaded = load_draft(folder / "draft", target)
    assert loaded.config == head.config and all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), head.state_dict().values()))
    prompts = random_prompts([4, 8])
    assert [r.output for r in speculative_generate(target, loaded, prompts, CHAIN, 20)] == [r.output for r in generate(target, prompts, 20)]
    assert not any(parameter.requires_grad for parameter in (*loaded.parameters(), *target.parameters()))
    assert load_draft(folder / "draft", load_target(folder / "target", "bfloat16")).fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("flags, boundaries, architecture, servers", [
    ({}, (2, 4, 5), "LlamaForCausalLMEagle3", "SGLang"), ({"fc_norm": True, "norm_output": True}, (2, 4, 5), "LlamaForCausalLMEagle3", "SGLang"),
    ({}, (0, 3, 5), "Eagle3LlamaForCausalLM", "boundary 0"), ({}, (2, 4, 8), "Eagle3LlamaForCausalLM", "boundary 8"),
    ({"norm_before_residual": True}, (2, 4, 5), "Eagle3LlamaForCausalLM", "norm_before_residual")])
def test_a_saved_head_says_who_can_serve_it_and_carries_everything(saved, flags, boundaries, architecture, servers):
    folder, target, _ = saved
    head = random_head(target, boundaries=boundaries, draft_ids=torch.arange(0, 64, 2), **flags)
    assert servers in save_draft(head, folder / "other")
    config = json.loads((folder / "other" / "config.json").read_text())
    assert config["architectures"] == [architecture] and config["eagle_aux_hidden_state_layer_ids"] == list(boundaries)
    nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    assert nested == ([b - 1 for b in boundaries] if architecture == "LlamaForCausalLMEagle3" else None)
    assert all(config[flag] == flags.get(flag, False) for flag in DraftConfig.FLAGS) and config["draft_vocab_size"] == 32
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    names = set(eagle3.TensorFolder(folder / "other").files)
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert load_draft(folder / "other", target).config == head.config


def test_the_incident_is_refused_a_head_on_embed_3_31_is_not_served_3_31_59(tmp_path):
    target = random_target(num_layers=61, hidden_size=16, intermediate_size=16, dtype=torch.float32)
    head = random_head(target, boundaries=(0, 3, 31))
    save_draft(head, tmp_path)
    with pytest.raises(LayoutMismatch) as error:
        load_draft(tmp_path, target, FeatureLayout.parse("3,31,59", 16, 61))
    for part in ("cat([embed, h.3, h.31])", "cat([h.3, h.31, h.59])", "nothing else would notice", "--layers embed,3,31"):
        assert part in str(error.value)
    assert load_draft(tmp_path, target, FeatureLayout.parse("embed,3,31", 16, 61)).config.layout == head.config.layout


def test_a_head_without_a_layout_needs_it_stated_and_one_that_contradicts_itself_is_refused(saved):
    folder, target, head = saved
    edit_json(folder / "draft" / "config.json", eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    with pytest.raises(LayoutMismatch, match="eagle_aux_hidden_state_layer_ids"):
        load_draft(folder / "draft", target)
    edit_json(folder / "draft" / "config.json", eagle_aux_hidden_state_layer_ids=[2, 4, 5], feature_layout=FeatureLayout((2, 3, 5), 32, 8).to_dict())
    with pytest.raises(LayoutMismatch, match="weight file"):
        load_draft(folder / "draft", target)
    edit_json(folder / "draft" / "config.json", feature_layout=...)
    assert load_draft(folder / "draft", target).config == head.config, "the weight file carries it, too"
    shifted = FeatureLayout((3, 5, 6), 32, 8)  # one off, as the servers' conventions differ
    with pytest.raises(LayoutMismatch, match="the one stated with --layers"):
        load_draft(folder / "draft", target, shifted)
    drop_metadata(folder / "draft" / "model.safetensors")
    with pytest.raises(LayoutMismatch, match="the one stated with --layers"):
        load_draft(folder / "draft", target, shifted)
    assert load_draft(folder / "draft", target).config == head.config, "what is left are layer ids of two kinds, which agree"
    edit_json(folder / "draft" / "config.json", eagle_aux_hidden_state_layer_ids=..., eagle_config=...)
    with pytest.raises(LayoutMismatch, match="state them with --layers .* such as --layers 2,4,5; or let examples/probe.py"):
        load_draft(folder / "draft", target)
    assert load_draft(folder / "draft", target, head.config.layout).config == head.config


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight"), (lambda t: t.pop("d2t"), "missing d2t"),
    (lambda t: t.update(extra=torch.ones(1)), "unexpected extra"), (lambda t: t.update({"fc.weight": torch.ones(32, 95)}), r"fc.weight is \[32, 95\]"),
    (lambda t: t.update(d2t=torch.arange(0, 64, 2)), "absolute ids"), (lambda t: t.update(d2t=torch.zeros(32, dtype=torch.int64)), "contradict"),
    (lambda t: t.update(t2d=torch.arange(64) >= 32), "contradict"),
    (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight is not finite")])
def test_a_head_whose_tensors_are_not_sound_is_refused_by_name(saved, change, message):
    folder, target, _ = saved
    edit_tensors(folder / "draft" / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        load_draft(folder / "draft", target)


def write_foreign_head(folder, system, head):
    """The same head as another system writes it: its file, names, shapes and keys."""
    from safetensors.torch import save_file
    c, B = head.config, list(head.config.layout.boundaries)
    tensors, outputs = {name: tensor.clone() for name, tensor in head.state_dict().items()}, [b - 1 for b in B]
    layer = {"model_type": "llama", "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
             "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "num_hidden_layers": 1,
             "hidden_act": "silu", "rms_norm_eps": c.rms_norm_eps, "max_position_embeddings": 512, "vocab_size": c.vocab_size}
    plain = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "head_dim": c.head_dim, "draft_vocab_size": c.draft_vocab_size,
             "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
    nested = lambda ids, **more: {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, **more}}
    rename = lambda theirs, ours: {(theirs + name.removeprefix(ours) if name.startswith(ours) else name): t for name, t in tensors.items()}
    flags = {flag: getattr(c, flag) for flag in DraftConfig.FLAGS}
    if system == "SafeAILab":
        config = {**layer, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": c.draft_vocab_size, "pad_token_id": 0}
    elif system == "SpecForge":
        config = {**plain, **nested(outputs)}
    elif system == "SGLang":  # EAGLE-3.1 under SGLang's names
        config = {**plain, **nested(outputs), "fc_norm": True, "norm_output": True}
        for i, which in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{which}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
        tensors = {f"model.{name}": t for name, t in tensors.items()}
    elif system == "AngelSlim":
        config = {**plain, "architectures": ["Eagle3LlamaForCausalLM"], "aux_hidden_states_layer_ids": outputs}
        tensors["embed_tokens.weight"] = head.target.embed_tokens.weight.clone()
    elif system == "ModelOpt":
        config = {**plain, **nested([outputs[0], *outputs[:0:-1]], use_input_layernorm_in_first_layer=True, use_last_layernorm=True)}
        tensors.pop("t2d")
    elif system in ("speculators", "vLLM"):
        config = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": c.draft_vocab_size,
                  "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]}},
                  "transformer_layer_config": {**layer, "head_dim": c.head_dim,
                                               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
                  **flags, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": B, "tie_word_embeddings": False}
        tensors = {**rename("layers.0.", "midlayer."), "embed_tokens.weight": head.target.embed_tokens.weight.clone()}
        if c.draft_vocab_size == c.vocab_size:
            tensors.pop("d2t"), tensors.pop("t2d")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if system == "SafeAILab":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


SOME_IDS = torch.tensor([*range(5, 20), *range(30, 44), 50, 62, 63])  # as real maps are: runs of neighbours, and gaps
FOREIGN_HEADS = {  # system: the flags that it trains
    "SafeAILab": {}, "SpecForge": {}, "SGLang": {"fc_norm": True, "norm_output": True}, "AngelSlim": {}, "ModelOpt": {},
    "speculators": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "vLLM": {"fc_norm": True, "norm_output": True}}


def foreign_head(folder, system, boundaries=(2, 4, 5), dtype=torch.float32, **changes):
    target = random_target(dtype=dtype, **changes)
    head = random_head(target, draft_ids=None if system == "vLLM" else SOME_IDS, boundaries=boundaries, **FOREIGN_HEADS[system])
    write_foreign_head(folder, system, head)
    return target, head


@pytest.mark.parametrize("boundaries", [(2, 4, 5), (1, 3, 7), (3, 5, 6)], ids=str)
@pytest.mark.parametrize("system", FOREIGN_HEADS)
def test_a_head_of_any_system_loads_as_the_same_head_saved_by_us(tmp_path, system, boundaries):
    target, head = foreign_head(tmp_path / "theirs", system, boundaries)
    save_draft(head, tmp_path / "ours")
    either = "can mean 3,5,6 or 2,4,5.* such as --layers 3,5,6, or 2,4,5" if boundaries == (3, 5, 6) else None  # ids: the default's
    message = {"SafeAILab": "lists no layer ids.*--layers 2,4,5", "speculators": None, "vLLM": None}.get(system, either)
    stated = None
    if message:
        stated = head.config.layout
        with pytest.raises(LayoutMismatch, match=message):
            load_draft(tmp_path / "theirs", target)
    theirs, ours = load_draft(tmp_path / "theirs", target, stated), load_draft(tmp_path / "ours", target)
    assert replace(theirs.config, max_position_embeddings=512) == ours.config
    assert theirs.d2t.tolist() == ours.d2t.tolist() and torch.equal(theirs.t2d, ours.t2d)
    features, tokens = torch.randn(1, 9, 96), torch.tensor(random_prompts([9]))
    logits = [h.logits(h.step(h.fuse(features), tokens, torch.arange(9)[None], TTTAttention())[1]) for h in (theirs, ours)]
    assert torch.equal(*logits)
    save_target(target, tmp_path / "target")
    in_bf16 = load_draft(tmp_path / "theirs", load_target(tmp_path / "target", "bfloat16"), stated)
    assert in_bf16.fc.weight.dtype == torch.bfloat16, "and the embedding inside is the target's, but for rounding"


def with_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def with_tensors(change):
    return lambda folder: edit_tensors(folder / "model.safetensors", change)


def nested_ids(ids, **more):
    return with_config(eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, **more})


FOREIGN_TRAPS = {  # (system, what is wrong with its folder, what the refusal says)
    "the map holds absolute ids, no mask": ("ModelOpt", with_tensors(lambda t: t.update(d2t=SOME_IDS)), "absolute ids"),
    "absolute ids, with a mask": ("SpecForge", with_tensors(lambda t: t.update(d2t=SOME_IDS)), "it holds absolute ids"),
    "absolute ids low enough to be offsets": ("ModelOpt", with_tensors(lambda t: t.update(d2t=torch.arange(32))), "probably"),
    "a map that nobody filled in": ("ModelOpt", with_tensors(lambda t: t.update(d2t=torch.zeros(32, dtype=torch.int64))), "all zeros"),
    "a map past the vocabulary": ("ModelOpt", with_tensors(lambda t: t["d2t"][-1:].fill_(33)), "within 0..32"),
    "a mask of another map": ("SpecForge", with_tensors(lambda t: t["t2d"].logical_not_()), "contradict"),
    "no map": ("SpecForge", with_tensors(lambda t: t.pop("d2t")), "missing d2t"),
    "no map and no mask": ("speculators", with_tensors(lambda t: (t.pop("d2t"), t.pop("t2d"))), "missing d2t"),
    "no lm_head": ("ModelOpt", with_tensors(lambda t: t.pop("lm_head.weight")), "missing lm_head.weight"),
    "an embedding trained along": ("vLLM", with_tensors(lambda t: t["embed_tokens.weight"][40].add_(0.01)), "differs from the target's"),
    "a second layer": ("SpecForge", with_config(num_hidden_layers=2), "num_hidden_layers 1"),
    "a norm that the config hides": ("speculators", with_config(norm_before_fc=False), "unexpected input_norm.weight"),
    "both norms before fc": ("speculators", with_config(fc_norm=True), "exclude each other"),
    "a tensor twice": ("SpecForge", with_tensors(lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()})), "norm.weight twice"),
    "only the last hidden state": ("ModelOpt", nested_ids([1, 3, 4], use_aux_hidden_state=False), "use_aux_hidden_state is false"),
    "another width of target": ("SpecForge", with_config(target_hidden_size=64), "target_hidden_size 32"),
    "layers of no target": ("SpecForge", nested_ids([1, 3, 8]), "nothing here"),
    "an id twice": ("SpecForge", nested_ids([1, 3, 3]), "different layer ids"),
    "ids that are no numbers": ("AngelSlim", with_config(aux_hidden_states_layer_ids=["a"]), "different layer ids"),
    "four ids for three blocks": ("speculators", with_config(eagle_aux_hidden_state_layer_ids=[2, 4, 5, 8]), r"is \[32, 96\]|is \[96\]"),
    "a layout in a run's file only": ("SpecForge", with_config(eagle_config=...), "lists no layer ids"),
    "the trainer's ids at the top level": ("vLLM", with_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "1,3,4 or 2,4,5"),
    "boundaries nested": ("SpecForge", nested_ids([2, 4, 5]), "3,5,6 or 2,4,5"),
    "boundaries out of order": ("vLLM", with_config(eagle_aux_hidden_state_layer_ids=[5, 2, 3]), "2,3,5 or 3,4,6"),
    "two kinds of ids that disagree": ("SpecForge", with_config(eagle_aux_hidden_state_layer_ids=[2, 5, 6]), "--layers 2,5,6, or 2,4,5"),
    "rotary scaling unknown here": ("SpecForge", with_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
    "more than tensors": ("SafeAILab", lambda folder: torch.save({"fc": Path("x")}, folder / "pytorch_model.bin"), "more than tensors")}


@pytest.mark.parametrize("trap", FOREIGN_TRAPS)
def test_another_systems_head_that_is_not_certain_or_not_sound_is_refused_with_the_reason(tmp_path, trap):
    system, change, message = FOREIGN_TRAPS[trap]
    target, _ = foreign_head(tmp_path / "theirs", system)
    change(tmp_path / "theirs")
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path / "theirs", target)


def test_what_other_systems_leave_out_or_say_twice_is_read_as_they_mean_it(tmp_path):
    target, head = foreign_head(tmp_path / "theirs", "SpecForge")
    with_config(eagle_aux_hidden_state_layer_ids=[2, 4, 5])(tmp_path / "theirs")
    assert load_draft(tmp_path / "theirs", target).config.layout == head.config.layout, "two kinds of ids that agree"
    with pytest.raises(LayoutMismatch, match="--layers"):
        load_draft(tmp_path / "theirs", target, FeatureLayout((3, 5, 6), 32, 8))
    with_config(rope_theta=1e6, architectures=["LlamaForCausalLM"])(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="always uses 10000: examples/probe.py"):
        load_draft(tmp_path / "theirs", target)
    target, head = foreign_head(tmp_path / "speculators", "speculators")
    with_config(norm_before_residual=...)(tmp_path / "speculators")
    assert load_draft(tmp_path / "speculators", target).config.norm_before_residual, "vLLM's default in a speculators config"
    with_config(eagle_config={"norm_before_fc": True}, norm_before_fc=..., norm_before_residual=True)(tmp_path / "speculators")
    assert load_draft(tmp_path / "speculators", target).config == head.config, "a flag inside eagle_config"
    target, head = foreign_head(tmp_path / "full", "vLLM")
    assert load_draft(tmp_path / "full", target).t2d.all(), "the whole vocabulary needs no map"
    with_config(draft_vocab_size=...)(tmp_path / "full")
    assert load_draft(tmp_path / "full", target).config.draft_vocab_size == 64


# How the servers read a config's layer ids, written down apart from eagle3.py: (facts: SGLang with #25454; vLLM's eagle3)


def boundaries_in_sglang(config, architecture):
    if config["architectures"] != ["LlamaForCausalLMEagle3"]:
        return None  # it knows no such model
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    if architecture in ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM"):
        return [i + 1 for i in ids] if ids[0] == 1 else ids
    return [i + 1 for i in ids]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"])
@pytest.mark.parametrize("boundaries", [(2, 4, 5), (1, 4, 5), (3, 5, 6), (0, 3, 5), (2, 4, 8), (4,)], ids=str)
def test_the_servers_read_the_boundaries_that_were_saved_or_refuse_the_head(tmp_path, architecture, boundaries):
    target = random_target(dtype=torch.float32)
    head = random_head(target, boundaries=boundaries)
    target.config = replace(target.config, architecture=architecture)  # the rule looks at nothing else
    servers = save_draft(head, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(boundaries), "vLLM: boundaries as they are"
    read = boundaries_in_sglang(config, architecture)
    unspeakable = 0 in boundaries or 8 in boundaries or boundaries[0] == 1 and architecture != "LlamaForCausalLM"
    assert read == (None if unspeakable else list(boundaries)), "SGLang: the same, or nothing"
    assert ("SGLang refuses" in servers) == unspeakable
    assert ("#25454" in servers) == (architecture != "LlamaForCausalLM" and boundaries[0] > 2)
    edit_json(tmp_path / "head" / "config.json", feature_layout=...)  # as another system's reader of our folder sees it
    drop_metadata(tmp_path / "head" / "model.safetensors")
    assert load_draft(tmp_path / "head", target).config.layout.boundaries == boundaries


@pytest.mark.parametrize("ids, readings", [([1, 3, 4], "2,4,5"), ([2, 30, 58], "3,31,59 or 2,30,58"), ([2, 3, 5], "3,4,6 or 2,3,5")])
def test_nested_ids_of_a_kimi_or_deepseek_head_are_not_guessed_at(ids, readings):
    """[2, 30, 58] is in the wild: boundaries to one trainer, one lower to another, and SGLang has read it both ways (#25454)."""
    config = replace(target_config(num_layers=61), architecture="DeepseekV3ForCausalLM")
    (found,) = eagle3.layout_readings({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, config).values()
    assert " or ".join(",".join(map(str, b)) for b in found) == readings


def test_a_hub_name_is_a_folder_downloaded_and_what_fails_is_one_line(saved, tmp_path, monkeypatch):
    folder, wanted = saved[0], []

    class Hub:

        def snapshot_download(name, allow_patterns):
            if name != "owner/head":
                raise OSError(f"404: {name}")
            wanted.append(allow_patterns)
            return str(folder / "draft")
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    args = serve.parse_args(["--target", str(folder / "target"), "--draft", "owner/head", "--prompt", "x"])
    assert args.target == str(folder / "target") and args.draft == str(folder / "draft")
    assert eagle3.model_folder("owner/head", with_weights=False) == str(folder / "draft")
    assert ["*.safetensors" in patterns for patterns in wanted] == [True, False]
    (folder / "owner" / "head").mkdir(parents=True)
    assert eagle3.model_folder("owner/head") == "owner/head", "a folder that is there goes before"
    assert all(eagle3.model_folder(name) == name for name in ("nowhere", "/no/where", "a/b/c"))
    with pytest.raises(ValueError, match="owner/other is no folder here, nor .*404"):
        eagle3.model_folder("owner/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        train.main(argv=["--target", "owner/other", "--data", "x.jsonl", "--out", "out"])


def test_a_target_folder_that_is_not_whole_is_refused_by_name(saved):
    folder = saved[0] / "target"
    edit_tensors(folder / "model.safetensors", lambda t: t.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match="missing model.layers.3.mlp.up_proj.weight"):
        load_target(folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_target(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks model.safetensors"):
        load_target(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_target(folder)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        load_target(folder / "nowhere")


def test_another_tokenizer_or_size_is_an_error_and_a_fine_tune_a_warning(saved):
    folder, target, head = saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(folder / "draft", target)
    shutil.copytree(folder / "target", folder / "tuned")
    edit_tensors(folder / "tuned" / "model.safetensors", lambda t: t["lm_head.weight"].add_(0.01))
    with pytest.warns(UserWarning, match="fine-tune"):
        load_draft(folder / "draft", load_target(folder / "tuned"))
    (folder / "tuned" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match="tokenizer"):
        load_draft(folder / "draft", load_target(folder / "tuned"))


# -----------------------------------------------------------------------------
# 16. Text


CHAT_TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A byte-level tokenizer.json with a chat template, written with the tokenizers library."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|end|>"}}))
    return folder


def test_streamed_text_holds_back_characters_that_are_not_whole(tokenizer_folder):
    for tokenizer in (eagle3.ByteTokenizer(), eagle3.load_tokenizer(tokenizer_folder)):
        ids, stream = tokenizer.encode("né → 漢"), eagle3.TextStream(tokenizer)
        pieces = [stream.push([i]) for i in ids]
        assert "".join(pieces) == "né → 漢" and all("\ufffd" not in piece for piece in pieces)
        cut = eagle3.TextStream(tokenizer)  # "n" and half of "é"
        assert cut.push(ids[:2]) == "" and cut.push([], final=True) == "n\ufffd", "at the end what is left is shown"


def test_a_missing_tokenizer_or_package_is_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        eagle3.load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="pip install tokenizers"):
        eagle3.load_tokenizer(tmp_path)


def test_kimis_tokenizer_splits_and_merges_as_its_own_pattern_says(tmp_path):
    """Against the same pattern in another library, and merges done one by one."""
    import regex
    merges = ["th", "the", " the", "in", "ing", "ll", "He", "Hell", "Hello", "你", "好", "12", "123", " w", "\n\n"]
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {token: 256 + i for i, token in enumerate(dict.fromkeys(t for text in merges for t in (text.encode()[:2], text.encode())
                                                                     if t not in ranks))}
    (tmp_path / "tiktoken.model").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    first = len(ranks)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(first + 3): {"content": "<|im_end|>"}, str(first + 4): {
        "content": "</think>", "special": False}}, "chat_template":
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "eos_token": "<|im_end|>"}))
    tokenizer = eagle3.load_tokenizer(tmp_path)
    pieces = regex.compile(eagle3.KimiText.PATTERN, regex.V1)

    def slow(text):
        found = []
        for piece in pieces.findall(text):
            parts = [bytes([b]) for b in piece.encode()]
            while True:
                rank, i = min(((ranks.get(a + b, 1e9), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))), default=(1e9, 0))
                if rank == 1e9:
                    break
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            found += [ranks[part] for part in parts]
        return found

    for text in ("Hello the world, I'LL sing 12345 你好hello\n\n  x", "\u00e9t\u00e9 you're   ok\t1", "a" * 30001, " " * 60000 + "b", ""):
        assert tokenizer.encode(text) == slow(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the<|im_end|>") == [*slow("the"), first + 3] and tokenizer.decode([*slow("the"), first + 3]) == "the"
    assert tokenizer.decode([*slow("the"), first + 4, first + 5]) == "the</think>", "only what the config calls special is left out"
    assert eagle3.encode_prompt({"messages": [{"role": "user", "content": "Hello"}]}, tokenizer) == [*slow("Hello"), first + 3]


# -----------------------------------------------------------------------------
# 17. Training rows


def test_the_chat_mask_covers_each_answer_with_its_end_of_turn_token(tokenizer_folder):
    tokenizer = eagle3.load_tokenizer(tokenizer_folder)
    sharegpt = {"conversations": [{"from": "gpt", "value": "lost"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"},
                                  {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "unanswered"}]}
    openai = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "a"},
                           {"role": "assistant", "content": "b"}]}
    tokens, mask = eagle3.encode_record(sharegpt, tokenizer)
    assert (tokens, mask) == eagle3.encode_record(openai, tokenizer)
    assert tokenizer.text.tokenizer.decode(tokens, skip_special_tokens=False) == "<|user|>hi<|end|>\n<|assistant|>yo<|end|>\n<|user|>a<|end|>\n<|assistant|>b<|end|>\n"
    assert tokenizer.text.tokenizer.decode([t for t, m in zip(tokens, mask) if m], skip_special_tokens=False) == "yo<|end|>\nb<|end|>\n"
    end = tokenizer.text.tokenizer.token_to_id("<|end|>")
    spans = assistant_spans(torch.tensor([tokens]), torch.tensor([mask]), (end,))[0]
    assert tokenizer.text.tokenizer.decode([t for t, s in zip(tokens, spans) if s], skip_special_tokens=False) == "yo<|end|>b<|end|>"


def test_a_conversation_answered_anew_is_one_row_while_the_template_keeps_what_was_said(tokenizer_folder):
    tokenizer = eagle3.load_tokenizer(tokenizer_folder)
    end = tokenizer.text.tokenizer.token_to_id("<|end|>")
    record = {"conversations": [{"from": "gpt", "value": "lost"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"},
                                {"from": "human", "value": "a"}, {"from": "gpt", "value": "older"}, {"from": "human", "value": "b"}]}
    written = [[*tokenizer.encode("new"), end], [*tokenizer.encode("newer"), end], tokenizer.encode("cut o")]

    def answer_all(conversation, edit=lambda ids: ids):
        for output in written:
            prompt = edit(conversation.next_prompt())
            conversation.answer(prompt, output, output[-1] == end)
        assert conversation.next_prompt() is None
        return conversation.rows

    (tokens, mask), = answer_all(eagle3.Conversation(record, tokenizer))
    show = lambda ids: tokenizer.text.tokenizer.decode(ids, skip_special_tokens=False)
    assert show(tokens) == ("<|user|>hi<|end|>\n<|assistant|>new<|end|>\n<|user|>a<|end|>\n<|assistant|>newer<|end|>\n"
                            "<|user|>b<|end|>\n<|assistant|>cut o")
    assert show([t for t, m in zip(tokens, mask) if m]) == "new<|end|>newer<|end|>cut o"
    forgetful = eagle3.Conversation(record, tokenizer, 7, "file:1")
    rows = answer_all(forgetful, lambda ids: ids[-9:])  # a template that drops what came before
    assert len(rows) == 3 and [sum(m for m in mask) for _, mask in rows] == [len(output) for output in written]
    lines = [json.loads(line) for line in forgetful.lines("m").splitlines()]
    assert [(line["index"], line["rows_left"]) for line in lines] == [(7, 2), (7, 1), (7, 0)] and lines[-1]["messages"][-1] == {"role": "assistant", "content": "cut o"}
    stopped = eagle3.Conversation(record, tokenizer)
    stopped.answer(stopped.next_prompt(), tokenizer.encode("cut"), False)
    assert stopped.next_prompt() is None, "an answer that was cut off ends the conversation"
    for bad, why in (({"messages": [{"role": "assistant", "content": "x"}]}, "nobody asks"), ({"text": "x"}, "no messages"),
                     ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "nothing comes before"), ({"input_ids": []}, "nothing comes before")):
        with pytest.raises(ValueError, match=why):
            eagle3.Conversation(bad, tokenizer)


def test_every_row_format_is_read_and_what_is_skipped_or_cut_is_counted_with_its_reason(tmp_path, tokenizer_folder):
    tokenizer, file = eagle3.load_tokenizer(tokenizer_folder), tmp_path / "rows.jsonl"
    records = [{"text": "plain text"}, {"prompt": "question", "completion": "an answer"}, {"input_ids": [1, 2, 3, 4]},
               {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}, {"input_ids": [1, 2], "loss_mask": [1]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
               {"other": 1}, {"text": "x" * 100}, {"input_ids": [1, 2, 9999]}, {"messages": [{"role": "user", "content": "no answer"}]}, {"messages": 5},
               {"conversations": [{"from": "martian", "value": "?"}]}, {"input_ids": [1] * 60, "loss_mask": [0] * 58 + [1, 1]},
               {"input_ids": "123"}, {"input_ids": [1.7, 2]}, {"input_ids": [1, 2, 3], "loss_mask": ["0", "1", "1"]}, {"messages": [{"role": "user"}, {"role": "assistant"}]}]
    lines = [json.dumps(r).encode() for r in records] + [b"", b"{broken", b"[1]", '{"text": "né"}'.encode("latin-1")]
    file.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n")
    rows, report, first = eagle3.read_rows([file], lambda: tokenizer, 50, (), 300)
    assert [row.name for row in rows] == [f"rows.jsonl:{n}" for n in (1, 2, 3, 4, 8)]
    assert rows[1].loss_mask.tolist() == [False] * 8 + [True] * 9 and rows[3].loss_mask.tolist() == [False, False, True, True] and len(rows[4].tokens) == 50
    expected = {"cut at --max-length": 1, "skipped: loss_mask must be a list of 0 and 1 as long as input_ids": 2, "skipped: nothing supervised": 1,
                "skipped: input_ids must be a list of integers": 2, "skipped: messages must be a list of objects with role and content": 2,
                "skipped: nothing supervised before --max-length": 1, "skipped: no messages, conversations, prompt + completion, text or input_ids": 1,
                "skipped: token ids beyond the target's vocabulary of 300": 1, "skipped: no assistant message": 1, "skipped: unknown speaker 'martian'": 1,
                "skipped: not a JSON object in UTF-8": 3}
    assert report == expected
    assert first["cut at --max-length"] == "rows.jsonl:8" and first["skipped: not a JSON object in UTF-8"] == "rows.jsonl:19"


def test_a_template_that_does_not_render_turn_by_turn_is_not_guessed_at(tokenizer_folder):
    tokenizer = eagle3.load_tokenizer(tokenizer_folder)
    tokenizer.chat = lambda messages, add: f"{len(messages)} messages" + messages[-1]["content"]
    with pytest.raises(ValueError, match="turn by turn"):
        eagle3.render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)


def test_an_epoch_holds_every_row_once_in_an_order_of_seed_and_epoch_with_little_padding():
    lengths = [int(x) for x in torch.randint(10, 500, (1001,), generator=torch.Generator().manual_seed(0))]
    batches = eagle3.epoch_batches(lengths, 8, seed=3, epoch=1)
    assert sorted(r for batch in batches for r in batch) == list(range(1001)) and batches == eagle3.epoch_batches(lengths, 8, 3, 1)
    assert batches != eagle3.epoch_batches(lengths, 8, 3, 2) != eagle3.epoch_batches(lengths, 8, 4, 2)
    padded = sum(max(lengths[r] for r in batch) * len(batch) for batch in batches)
    assert padded < 1.1 * sum(lengths)


def test_prompts_are_read_from_every_bench_format(tokenizer_folder):
    tokenizer = eagle3.load_tokenizer(tokenizer_folder)
    expected = tokenizer.encode("<|user|>hi<|end|>\n<|assistant|>")
    for record in ({"turns": ["hi", "more"]}, {"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}):
        assert eagle3.encode_prompt(record, tokenizer) == expected and eagle3.encode_prompt(record, tokenizer, raw=True) == tokenizer.encode("hi")
    assert eagle3.encode_prompt({"input_ids": [4, 5]}, None) == [4, 5]
    with pytest.raises(ValueError, match="needs turns"):
        eagle3.encode_prompt({"text": "hi"}, tokenizer)


# -----------------------------------------------------------------------------
# 18. Stored features


@pytest.fixture
def stored(tmp_path, target):
    """Six rows of a tiny target's hidden states on disk."""
    save_target(target, tmp_path / "target")
    target = load_target(tmp_path / "target")
    rows = [Row(tokens, [False] * 3 + [True] * (len(tokens) - 3), f"rows.jsonl:{i}") for i, tokens in enumerate(random_prompts([9, 12, 7, 20, 5, 11]))]
    folder = eagle3.FeatureFolder.create(tmp_path / "features", FeatureLayout((0, 3, 5), 32, 8), target, rows)
    for index, row in enumerate(rows):
        tokens, mask = eagle3.collate([row])
        captures = {f"h.{b}": hidden[0] for b, hidden in target(tokens, boundaries=(0, 3, 5, 8)).captures.items()}
        assert folder.write(index, row, captures) is None
    return folder, target, rows


def test_stored_features_come_back_by_name_and_the_folder_knows_what_is_missing(stored):
    folder, target, rows = stored
    again = eagle3.FeatureFolder(folder.folder)
    assert again.names == ("h.0", "h.3", "h.5", "h.8") and again.lengths == [9, 12, 7, 20, 5, 11] and again.missing() == []
    tokens, _ = eagle3.collate([rows[3]])
    captures = target(tokens, boundaries=(0, 3, 5, 8)).captures
    row = again.read(3)
    assert torch.equal(row.tokens, rows[3].tokens) and torch.equal(row.loss_mask, rows[3].loss_mask)
    assert all(torch.equal(row.hidden[f"h.{b}"], hidden[0]) for b, hidden in captures.items())
    assert list(again.read(3, ("h.3",)).hidden) == ["h.3"]
    again.path(4).unlink()
    again.path(1).with_name("data_1.safetensors.tmp").write_bytes(b"half")
    assert again.missing() == [4]
    with pytest.raises(FileNotFoundError, match="data_4.safetensors is not there"):
        again.read(4)
    used, whole = eagle3.load_target_ends(folder.folder.parent / "target"), target.logits(captures[8])
    assert torch.equal(used.logits(row.hidden["h.8"]), whole[0]) and used.fingerprint == target.fingerprint


def test_another_layout_target_or_row_in_the_same_folder_is_refused(stored):
    folder, target, rows = stored
    with pytest.raises(LayoutMismatch, match=r"cat\(\[embed, h.3, h.5\]\).*cat\(\[h.2, h.3, h.5\]\)"):
        eagle3.FeatureFolder.create(folder.folder, FeatureLayout((2, 3, 5), 32, 8), target, rows)
    with pytest.raises(ValueError, match="another rows_hash"):
        eagle3.FeatureFolder.create(folder.folder, folder.layout, target, [replace(rows[0], tokens=rows[0].tokens.flip(0)), *rows[1:]])
    target.fingerprint = {**target.fingerprint, "weights": "0" * 16}
    with pytest.raises(ValueError, match="another target_fingerprint"):
        eagle3.FeatureFolder.create(folder.folder, folder.layout, target, rows)
    (folder.folder.parent / "other").mkdir()
    (folder.folder.parent / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else"):
        eagle3.FeatureFolder.create(folder.folder.parent / "other", folder.layout, target, rows)
    with pytest.raises(FileNotFoundError, match="no manifest.json"):
        eagle3.FeatureFolder(folder.folder.parent / "other")


@pytest.mark.parametrize("damage, message", [
    ("torn", "not a whole safetensors file"), ("swapped with another row", "does not belong here: it is row 2"),
    ("not finite", "h.3 is not finite"), ("misshapen", r"h.5 is \[11, 32\], expected \[12, 32\]"), ("a boundary gone", "does not hold h.8"),
    ("another layout", "feature layouts differ")])
def test_a_stored_row_that_is_not_sound_is_refused_by_name(stored, damage, message):
    folder, _, _ = stored
    path = folder.path(1)
    tensors = {name: eagle3.open_tensors(path).get_tensor(name) for name in eagle3.open_tensors(path).keys()}
    metadata = eagle3.open_tensors(path).metadata()
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "swapped with another row":
        shutil.copy(folder.path(2), path)
    else:
        if damage == "not finite":
            tensors["h.3"][2, 5] = float("nan")
        elif damage == "misshapen":
            tensors["h.5"] = tensors["h.5"][:-1]
        elif damage == "a boundary gone":
            del tensors["h.8"]
        else:
            metadata["feature_layout"] = json.dumps(FeatureLayout((0, 2, 5), 32, 8).to_dict())
        eagle3.write_tensors(path, tensors, metadata)
    with pytest.raises(ValueError, match=message):
        folder.read(1)


def test_a_row_that_is_not_finite_is_kept_without_its_hidden_states_and_says_why(stored):
    folder, target, rows = stored
    tokens, mask = eagle3.collate([rows[2]])
    captures = {f"h.{b}": hidden[0].clone() for b, hidden in target(tokens, boundaries=(0, 3, 5, 8)).captures.items()}
    captures["h.5"][1, 1] = float("inf")
    assert folder.write(2, rows[2], captures) == "h.5 is not finite"
    row = folder.read(2)
    assert row.hidden == {} and row.skipped == "h.5 is not finite" and torch.equal(row.tokens, rows[2].tokens)


# -----------------------------------------------------------------------------
# 19. Wiring check


def teach(target, rows, boundaries):
    """A head that knows rows, as far ahead as --check and the probe look."""
    layout = FeatureLayout(boundaries, 32, 8)
    head = DraftHead(DraftConfig.for_target(target.config, layout, 64), torch.arange(64)).init_weights(0).to(target.norm.weight.dtype).attach(target)
    return fit(head, ttt_batch(head, target, rows, 4), 0.85)


@pytest.fixture(scope="module")
def wired(tmp_path_factory):
    """A target, ten rows that it wrote, their features with every other boundary stored, and a head trained on (2, 4, 5) of them."""
    folder = tmp_path_factory.mktemp("wired")
    save_target(random_target(dtype=torch.float32), folder / "target")
    (folder / "target" / "tokenizer.json").write_text("{}")  # only its hash matters here
    target = load_target(folder / "target")
    prompts = random_prompts([5, 9, 13, 7, 6, 11, 8, 10, 12, 5])
    rows = [Row(r.prompt + r.output, [False] * len(r.prompt) + [True] * len(r.output), "row") for r in generate(target, prompts, 30, ())]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row.tokens.tolist(), "loss_mask": list(map(int, row.loss_mask))}) + "\n" for row in rows))
    store_features(folder / "features", FeatureLayout((0, 2, 4, 5, 6), 32, 8), target, rows)
    save_draft(teach(target, rows, (2, 4, 5)), folder / "head")
    return folder


def store_features(folder, layout, target, rows, change=lambda captures: captures):
    stored = eagle3.FeatureFolder.create(folder, layout, target, rows)
    for index, row in enumerate(rows):
        tokens, mask = eagle3.collate([row])
        captures = {b: x[0] for b, x in target(tokens, boundaries=tuple(range(9))).captures.items()}
        changed = change(captures)
        stored.write(index, row, {f"h.{b}": changed[b].contiguous() for b in dict.fromkeys((*layout.boundaries, 8))})


def diagnosis(wired, tmp_path, head="head", on="features", target="target", *more):
    args = serve.parse_args(["--target", str(wired / target), "--draft", str(tmp_path / head if (tmp_path / head).exists() else wired / head),
                             "--check", str(tmp_path / on if (tmp_path / on).exists() else wired / on), "--dtype", "float32", *map(str, more)])
    found = serve.check(args)
    return found["verdict"], found["cause"], found["evidence"]


def strip_layout(source, into):
    """What other trainers write: the same tensors, and nothing that says which hidden states they want."""
    shutil.copytree(source, into)
    config = eagle3.read_json(into / "config.json")
    for key in ("feature_layout", "eagle_aux_hidden_state_layer_ids", "eagle_config"):
        config.pop(key, None)
    (into / "config.json").write_text(json.dumps(config))
    tensors = eagle3.TensorFolder(into)
    eagle3.write_tensors(into / "model.safetensors", {name: tensors.tensor(name).clone() for name in tensors.files}, {})


@slow
def test_check_finds_nothing_wrong_with_a_sound_head_and_the_script_ends_with_0(wired, tmp_path):
    verdict, cause, evidence = diagnosis(wired, tmp_path)
    assert (verdict, cause) == ("ok", None) and evidence["accuracy_as_served"][0] > 0.6
    assert evidence["accuracy_on_stored"] == evidence["accuracy_as_served"] and evidence["served"]["acceptance_length"] > 1.5
    result = run_here("serve.py", "--target", wired / "target", "--draft", wired / "head", "--check", wired / "rows.jsonl")
    assert json.loads(result.stdout.splitlines()[-1])["verdict"] == "ok"


def test_check_without_features_compares_as_served_and_names_what_finds_the_layout_of_a_head_that_does_not_say_it(wired, tmp_path):
    save_draft(teach(load_target(wired / "target"), wired_rows(wired), (0, 2, 4)), tmp_path / "carries")
    strip_layout(tmp_path / "carries", tmp_path / "stripped")
    pair = ("--target", wired / "target", "--dtype", "float32", "--check", wired / "rows.jsonl")
    wrong = run_here("serve.py", *pair, "--draft", tmp_path / "stripped", "--layers", "3,5,7", check=1)
    assert json.loads(wrong.stdout.splitlines()[-1])["verdict"] == "weak head" and "examples/probe.py" in wrong.stdout
    right = run_here("serve.py", *pair, "--draft", tmp_path / "stripped", "--layers", "0,2,4")
    assert json.loads(right.stdout.splitlines()[-1])["verdict"] == "ok"
    refused = run_here("serve.py", *pair, "--draft", tmp_path / "carries", "--layers", "3,5,7", check=1)
    summary = json.loads(refused.stdout.splitlines()[-1])
    assert (summary["verdict"], summary["cause"]) == ("wiring", "layout"), "a head that carries its layout is refused by it"


def wired_rows(wired):
    lines = map(json.loads, (wired / "rows.jsonl").read_text().splitlines())
    return [Row(line["input_ids"], list(map(bool, line["loss_mask"])), "row") for line in lines]


def moved(captures):
    return {b: hidden.roll(1, 0) for b, hidden in captures.items()}


@slow
@pytest.mark.parametrize("change, cause", [
    (lambda c: {**c, 2: c[5], 5: c[2]}, "swapped blocks"), (lambda c: {**c, 2: c[3], 4: c[5], 5: c[6]}, "off by one"),
    (lambda c: {**c, 2: c[0], 4: c[2], 5: c[4]}, "other boundaries"), (moved, "rows shifted by one token"),
    ("normed", "teacher and norm"), (lambda c: {b: torch.randn_like(x) for b, x in c.items()}, "foreign features")])
def test_check_and_inspect_name_the_fault_of_stored_features(wired, tmp_path, change, cause):
    target = load_target(wired / "target")
    rows = wired_rows(wired)
    change = (lambda c: {**c, 8: target.norm(c[8])}) if change == "normed" else change
    store_features(tmp_path / "features", FeatureLayout((2, 4, 5), 32, 8), target, rows, change)
    verdict, found, evidence = diagnosis(wired, tmp_path)
    assert (verdict, found) == ("wiring", cause), evidence["blocks"]
    result = run_here("train.py", "--inspect", tmp_path / "features", "--target", wired / "target", "--dtype", "float32")
    assert json.loads(result.stdout.splitlines()[-1])["cause"] == cause, result.stdout


@slow
def test_check_tells_other_weights_another_tokenizer_and_absolute_ids_in_d2t(wired, tmp_path):
    target = load_target(wired / "target")
    generator = torch.Generator().manual_seed(0)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    shutil.copytree(wired / "target", wired / "tuned", dirs_exist_ok=True)
    save_target(target, wired / "tuned")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert diagnosis(wired, tmp_path, "head", "features", "tuned")[:2] == ("wiring", "other target weights")
    shutil.copytree(wired / "target", wired / "retokenized", dirs_exist_ok=True)
    (wired / "retokenized" / "tokenizer.json").write_text("{ }")
    assert diagnosis(wired, tmp_path, "head", "rows.jsonl", "retokenized")[:2] == ("wiring", "another tokenizer")
    shutil.copytree(wired / "head", tmp_path / "absolute")
    tensors = eagle3.TensorFolder(tmp_path / "absolute")
    changed = {name: tensors.tensor(name).clone() for name in tensors.files}
    changed["d2t"] = torch.arange(64)
    eagle3.write_tensors(tmp_path / "absolute" / "model.safetensors", changed, tensors.metadata)
    assert diagnosis(wired, tmp_path, "absolute")[:2] == ("wiring", "draft vocabulary")


@slow
def test_check_calls_an_untrained_head_weak_and_an_overfitted_one_one_that_does_not_generalise(wired, tmp_path):
    target = load_target(wired / "target")
    save_draft(random_head(target), tmp_path / "untrained")
    assert diagnosis(wired, tmp_path, "untrained")[:2] == ("weak head", None)
    held_out = generate(target, random_prompts([6, 9, 7, 8], seed=77), 30, ())
    lines = [json.dumps({"input_ids": r.prompt + r.output, "loss_mask": [0] * len(r.prompt) + [1] * len(r.output)}) for r in held_out]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    verdict, cause, evidence = diagnosis(wired, tmp_path, "head", "features", "target", "--held-out", tmp_path / "held_out.jsonl")
    assert (verdict, cause) == ("does not generalise", None), evidence


def test_inspect_counts_what_is_missing_torn_there_twice_or_not_part_of_the_folder(wired, tmp_path):
    target = load_target(wired / "target")
    rows = [Row(tokens, [False] * 3 + [True] * (len(tokens) - 3), "row") for tokens in random_prompts([9, 12, 7, 20, 5, 11])]
    store_features(tmp_path / "features", FeatureLayout((2, 4, 5), 32, 8), target, [*rows, rows[1]])
    folder = eagle3.FeatureFolder(tmp_path / "features")
    folder.path(0).unlink()
    folder.path(3).write_bytes(folder.path(3).read_bytes()[:-50])
    shutil.copy(folder.path(2), folder.path(2).with_name("data_99.safetensors"))
    result = run_here("train.py", "--inspect", tmp_path / "features")
    summary = json.loads(result.stdout.splitlines()[-1])
    assert (summary["rows"], summary["missing"], summary["unsound"], summary["foreign"], summary["duplicates"]) == (7, 1, 1, 1, 1)
    assert summary["tokens"] == 12 + 7 + 5 + 11 + 12 and "rows_0-2000: 6 of 7 rows" in result.stdout
    assert all(f"data_{index}.safetensors" in result.stdout for index in (0, 3, 99))


# -----------------------------------------------------------------------------
# The scripts, as real processes


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A tiny target on disk and token-id rows for it."""
    folder = tmp_path_factory.mktemp("project")
    target = random_target(dtype=torch.float32)
    save_target(target, folder / "target")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 40, (60,), generator=generator).tolist()
    rows = [{"input_ids": row, "loss_mask": [0] * 4 + [1] * (len(row) - 4)} for row in random_prompts(lengths, seed=2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input_ids": row["input_ids"][:6]}) + "\n" for row in rows[:5]))
    return folder


def run_script(script, *args, check=0, cwd=None):
    result = subprocess.run([sys.executable, HERE / script, *map(str, args)], capture_output=True, text=True, cwd=cwd or HERE, timeout=600)
    assert result.returncode == check, f"{script} ended with {result.returncode}:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result


def run_here(script, *args, check=0):
    """run_script, but in this process, which has imported torch already: for what isn't about processes."""
    out, problem, code = io.StringIO(), "", 0
    with contextlib.redirect_stdout(out):
        try:
            summary = {"train.py": train, "serve.py": serve}[script].main(argv=list(map(str, args)))
            code = 0 if summary.get("verdict", "ok") == "ok" else 1
            print(json.dumps(summary))
        except (ValueError, OSError) as error:
            code, problem = 2, str(error)
    assert code == check, f"{script} would end with {code}:\n{out.getvalue()[-2000:]}\n{problem}"
    return SimpleNamespace(stdout=out.getvalue(), stderr=problem)


def run_example(module, *args) -> dict:
    return module.main(list(map(str, args)))


def train_args(project, out, steps, *more):
    return ("--target", project / "target", "--data", project / "rows.jsonl", "--out", out, "--steps", steps, "--dtype", "float32", "--ttt-steps", 3,
            "--batch-size", 4, "--accumulate", 2, "--lr", 0.003, "--save-every", 5, *more)


def kill_at(shard, name, nth, *args):
    """train.py, killed when it has written that file for the nth time and is about to put it in its place."""
    real, seen = os.replace, []

    def replace(old, new):
        if str(new).endswith(name) and seen.append(new) is None and len(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        real(old, new)

    os.replace = replace
    return train.main(shard, list(map(str, args)))


@slow
def test_a_killed_training_resumes_to_the_same_losses_and_weights_bit_for_bit(project, tmp_path):
    run_here("train.py", *train_args(project, tmp_path / "whole", 40, "--chain-share", 0.6))
    run_ranks(1, kill_at, "training.safetensors", 2, *train_args(project, tmp_path / "killed", 40, "--chain-share", 0.6), check=-signal.SIGKILL)
    assert (tmp_path / "killed" / "checkpoint" / "training.safetensors").exists()
    assert not (tmp_path / "killed" / "config.json").exists(), "a run that was killed must not look finished"
    refused = run_here("train.py", *train_args(project, tmp_path / "killed", 40), check=2)
    assert "--resume" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
    refused = run_here("train.py", *train_args(project, tmp_path / "killed", 40, "--seed", 5, "--resume"), check=2)
    assert "seed was 0, now 5" in refused.stderr
    resumed = run_here("train.py", *train_args(project, tmp_path / "killed", 40, "--chain-share", 0.6, "--resume"))
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "killed" / "metrics.jsonl").read_text()
    whole, killed = (eagle3.TensorFolder(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(whole.tensor(name), killed.tensor(name)) for name in whole.files) and set(whole.files) == set(killed.files)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 40 and lines[-1]["loss"] < lines[0]["loss"]
    summary = json.loads(resumed.stdout.splitlines()[-1])
    assert set(summary) == {"out", "steps", "rows", "rows_skipped", "tokens", "tok_s", "loss", "accuracy", "simulated_acceptance_length", "acceptance_length"}
    assert summary["acceptance_length"] == pytest.approx(summary["simulated_acceptance_length"], rel=0.03), "measured and predicted on the same answers"


def train_under_ranks(shard, *args):
    return train.main(shard, list(map(str, args)))


@slow
def test_stored_features_train_the_losses_of_online_training_after_a_killed_extraction_by_two_processes(project, tmp_path):
    features = tmp_path / "features"
    command = ["--target", project / "target", "--data", project / "rows.jsonl", "--dtype", "float32", "--batch-size", 1, "--extract"]
    layers = ("--layers", "embed,2,4,5")
    both = lambda out: json.loads(run_ranks(2, train_under_ranks, *command, out, *layers))
    run_ranks(1, kill_at, ".safetensors", 20, *command, features, *layers, check=-signal.SIGKILL)
    folder = eagle3.FeatureFolder(features)
    done = {index: folder.path(index).stat().st_mtime_ns for index in set(range(60)) - set(folder.missing())}
    assert 0 < len(done) < 60 and all(folder.read(index).hidden for index in done), "what exists after a kill is whole"
    refused = run_here("train.py", "--target", project / "target", "--features", features, "--out", tmp_path / "out", check=2)
    assert f"lacks {60 - len(done)} of 60 rows" in refused.stderr and not (tmp_path / "out").exists()
    assert both(features)["rows"] == 60 - len(done), "what was missing, over both ranks"
    assert folder.missing() == [] and all(folder.path(index).stat().st_mtime_ns == when for index, when in done.items())
    both(tmp_path / "at once")  # two may begin the same folder
    assert eagle3.FeatureFolder(tmp_path / "at once").missing() == []
    refused = run_here("train.py", *command, features, "--layers", "2,4,5", check=2)
    assert "feature layouts differ" in refused.stderr and "cat([embed, h.2, h.4, h.5])" in refused.stderr

    run_here("train.py", *train_args(project, tmp_path / "online", 12, "--layers", "2,4,5", "--chain-share", 0.6))
    stored = [x for x in train_args(project, tmp_path / "offline", 12, "--layers", "2,4,5", "--chain-share", 0.6) if x not in ("--data", project / "rows.jsonl")]
    run_here("train.py", *stored, "--features", features)
    online, offline = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("online", "offline"))
    assert len(online) == len(offline) == 12
    for a, b in zip(online, offline):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-4) and b["tokens"] == a["tokens"], (a, b)
    ours, theirs = (load_draft(tmp_path / name, load_target(project / "target")) for name in ("online", "offline"))
    assert torch.equal(ours.d2t, theirs.d2t), "the draft vocabulary is counted on the same rows"
    swap = {"2,4,5": "2,4,6", tmp_path / "offline": tmp_path / "wrong"}
    wrong = run_here("train.py", *[swap.get(x, x) for x in stored], "--features", features, check=2)
    assert "does not hold h.6" in wrong.stderr


@slow
def test_the_norms_of_eagle_3_1_and_speculators_are_trained_by_name_saved_and_served(project, tmp_path):
    run_here("train.py", *train_args(project, tmp_path / "head", 5, "--head", "norm_before_fc=true,norm_before_residual=true"))
    head = load_draft(tmp_path / "head", load_target(project / "target"))
    assert {flag for flag in DraftConfig.FLAGS if getattr(head.config, flag)} == {"norm_before_fc", "norm_before_residual"}
    assert not torch.equal(head.input_norm.weight, torch.ones_like(head.input_norm.weight)), "its norm learns"
    pair = ("--target", project / "target", "--draft", tmp_path / "head")
    served = run_here("serve.py", *pair, "--prompt-ids", "5,6", "--max-new-tokens", 8)
    assert [int(t) for t in served.stdout.splitlines()[-2].split()] == generate(load_target(project / "target"), [[5, 6]], 8)[0].output
    for flags, message in (((), "head was norm_before_fc=true"), (("--head", "fc_norm=true,norm_before_fc=true"), "exclude each other"),
                           (("--head", "norm=true"), "name=value")):
        assert message in run_here("train.py", *train_args(project, tmp_path / "head", 5, "--resume", *flags), check=2).stderr


def losses(out) -> list[list[float]]:
    return [[line["loss"], *line["accuracy"], line["tokens"]] for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())]


@slow
def test_ranks_train_to_the_losses_of_one_whether_the_target_is_split_or_not_and_resume_on_another_number(project, tmp_path):
    command = ["float64" if x == "float32" else x for x in train_args(project, tmp_path / "1", 12, "--chain-share", 0.6)]
    at = lambda out: [tmp_path / out if x == tmp_path / "1" else x for x in command]
    run_here("train.py", *at("1"))
    run_ranks(1, kill_at, "training.safetensors", 2, *at("killed"), check=-signal.SIGKILL)
    whole, split = json.loads(run_ranks(2, jobs_of_two, project, tmp_path, at("2"), at("split")))["trained"]
    run_ranks(3, train_under_ranks, *at("killed"), "--resume")  # 4 rows a forward: 2, 1 and 1
    expected = losses(tmp_path / "1")
    for out in ("2", "split", "killed"):
        assert torch.tensor(losses(tmp_path / out)).allclose(torch.tensor(expected), rtol=1e-9), (out, losses(tmp_path / out), expected)
    assert whole["acceptance_length"] == split["acceptance_length"] and whole["loss"] == pytest.approx(split["loss"], rel=1e-6)
    given = [json.loads(line)["input_ids"][:4] for line in (project / "rows.jsonl").read_text().splitlines()]
    own = {row["source"]: row["input_ids"] for row in map(json.loads, (tmp_path / "own.jsonl").read_text().splitlines())}
    assert own == {f"rows.jsonl:{n}": p + r.output for n, (p, r) in enumerate(zip(given, generate(load_target(project / "target"), given, 5)), 1)}
    folder = eagle3.FeatureFolder(tmp_path / "f")
    assert folder.missing() == [] and all(folder.read(i).hidden for i in range(60))


def jobs_of_two(shard, project, folder, whole, split):
    run = lambda *args: train_under_ranks(shard, *args)
    trained = [run(*whole), run(*split, "--split-target", "yes")]
    rows = ("--target", project / "target", "--data", project / "rows.jsonl", "--dtype", "float32", "--split-target", "yes")
    run(*rows, "--max-batch", 4, "--max-new-tokens", 5, "--no-compile", "--regenerate", folder / "own.jsonl")
    run(*rows, "--extract", folder / "f")
    return {"trained": trained}


@slow
def test_a_split_pair_answers_benches_and_checks_as_a_whole_one_does(project, tmp_path):
    variant_pair(tmp_path, "llama", boundaries=(0, 1))
    for name, most in (("prompts.jsonl", 3), ("rows.jsonl", 8)):
        (tmp_path / name).write_text("".join((project / name).read_text().splitlines(True)[:most]))
    alone, *_ = serve_three_ways(eagle3.Shard(), tmp_path)
    split, benched, checked = json.loads(run_ranks(2, serve_three_ways, tmp_path))["found"]
    assert alone == split and alone
    assert benched["identical"] == benched["prompts"] == 3
    assert checked["verdict"] == "weak head", checked


def serve_three_ways(shard, folder):
    """The text of one answer; the summaries of a bench and of a check."""
    def run(*args):
        pair = ("--target", folder / "target", "--draft", folder / "head", "--dtype", "float64")
        return serve.main(shard, list(map(str, (*pair, *args))))

    with contextlib.redirect_stdout(io.StringIO()) as said:
        run("--prompt-ids", "5,6,7", "--max-new-tokens", 12, "--num-steps", 3, "--draft-topk", 1, "--num-draft-tokens", 4)
    text = [line for line in said.getvalue().splitlines() if re.fullmatch(r"[\d ]+", line)]
    found = (text, run("--bench", folder / "prompts.jsonl", "--max-new-tokens", 8, "--no-compile", "--max-batch", 2),
             run("--check", folder / "rows.jsonl"))
    return found if shard.size == 1 else {"found": found}


@slow
def test_two_nodes_find_each_other_and_sigterm_ends_all_ranks(project, tmp_path):
    port = free_port()
    node = lambda rank, *command: subprocess.Popen(torchrun(1, *command, launch=("--nnodes=2", f"--node-rank={rank}", "--master-addr=localhost",
                                                   f"--master-port={port}")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = (HERE / "serve.py", "--target", project / "target", "--prompt-ids", "5,6,7", "--max-new-tokens", 5)
    first, second = (node(rank, *command) for rank in (0, 1))
    (out, problem), _ = first.communicate(timeout=600), second.communicate(timeout=600)
    assert first.returncode == second.returncode == 0 and json.loads(out.splitlines()[-1])["new_tokens"] == 5, problem
    process = subprocess.Popen(torchrun(2, HERE / "train.py", *train_args(project, tmp_path / "long", 100000)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    while not (tmp_path / "long" / "checkpoint" / "training.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, problem = process.communicate(timeout=600)
    assert process.returncode != 0 and problem.count("train.py: terminated") == 1, problem[-3000:]
    assert not list((tmp_path / "long").rglob("*.tmp")) or not (tmp_path / "long" / "config.json").exists()


# The server, as a real process, and the official client


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory, tokenizer_folder):
    """A tiny target with a tokenizer and a chat template, and a head."""
    folder = tmp_path_factory.mktemp("chat")
    target = random_target(vocab_size=264, eos_token_ids=(259,), dtype=torch.float32, max_position_embeddings=4096)
    save_target(target, folder / "target")
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder / "target")
    save_draft(random_head(target), folder / "head")
    return folder


class Served:
    """A server process, ready."""

    def __init__(self, folder, *args, ranks=1):
        command = (HERE / "serve.py", "--target", folder / "target", "--draft", folder / "head", "--dtype", "float64", "--port", 0, "--name", "tiny", *args)
        command = torchrun(ranks, *command) if ranks > 1 else [sys.executable, *map(str, command)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line.startswith("serving on "):
                self.url = line.split()[2]
                self.address = ("127.0.0.1", int(re.search(r":(\d+)/v1", self.url)[1]))
                return
        raise AssertionError("".join(seen) + self.process.stderr.read())

    def ask(self, path, body=None, headers=None):
        """(status, JSON or text)."""
        connection = http.client.HTTPConnection(*self.address, timeout=600)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers or {})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, json.loads(text) if response.headers["Content-Type"] == "application/json" else text

    def end(self) -> dict:
        self.process.terminate()
        out, problem = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, problem[-3000:]
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def served(chat_pair):
    server = Served(chat_pair, "--no-compile", "--max-length", 300, "--max-batch", 4, "--max-queue", 8)
    yield server
    server.end()


def chat_prompt(folder, text):
    return eagle3.encode_prompt({"prompt": text}, eagle3.load_tokenizer(folder / "target"))


@slow
def test_the_official_client_gets_the_targets_text_from_every_endpoint(served, chat_pair):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    target, tokenizer = load_target(chat_pair / "target", "float64"), eagle3.load_tokenizer(chat_pair / "target")
    assert [model.id for model in client.models.list().data] == ["tiny"]
    messages = [{"role": "user", "content": "Hello é"}]
    prompt = chat_prompt(chat_pair, "Hello é")
    expected = generate(target, [prompt], 40)[0].output
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=40)
    assert whole.choices[0].message.content == tokenizer.decode(expected) and whole.usage.completion_tokens == len(expected)
    assert whole.usage.prompt_tokens == len(prompt) and whole.choices[0].finish_reason == ("stop" if expected[-1] == 259 else "length")
    parts = list(client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_completion_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage and parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason and parts[0].choices[0].delta.role == "assistant"
    sampled = client.chat.completions.create(model="tiny", messages=messages, temperature=0.8, seed=5, n=3, max_tokens=12, logprobs=True, top_logprobs=2)
    for i, choice in enumerate(sampled.choices):
        request, = generate(target, [prompt], 12, sampling=Sampling(0.8, seed=5 + i))
        assert choice.message.content == tokenizer.decode(request.output) and len(choice.logprobs.content) == len(request.output)
        logits = target.logits(target(torch.tensor([prompt + request.output])).last)[0, len(prompt) - 1:-1].log_softmax(-1)
        for entry, token, row in zip(choice.logprobs.content, request.output, logits):
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-9) and entry.top_logprobs[0].logprob == pytest.approx(row.max().item(), abs=1e-9)
    ids = random_prompts([9, 5], vocab_size=250)
    several = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=8, logprobs=1, extra_body={"return_token_ids": True, "ignore_eos": True})
    assert [choice.token_ids for choice in several.choices] == [r.output for r in generate(target, ids, 8, ())]
    assert several.choices[1].logprobs.text_offset[0] == 0 and len(several.choices[1].logprobs.tokens) == 8
    streamed = list(client.completions.create(model="tiny", prompt=ids[0], temperature=0, max_tokens=30, logprobs=1, stop=["never"], stream=True, extra_body={"ignore_eos": True}))
    entries = [part.choices[0].logprobs for part in streamed]
    assert sum(len(entry.tokens) for entry in entries) == 30, "every token's, also of those that bring no whole character"
    words = [word for entry in entries for word in entry.tokens]
    assert [at for entry in entries for at in entry.text_offset] == [sum(map(len, words[:i])) for i in range(30)]
    for problem, kind in ((dict(model="other"), openai.NotFoundError), (dict(max_tokens=10**6), openai.BadRequestError), (dict(logit_bias={"5": 1}), openai.BadRequestError)):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{**dict(model="tiny", messages=messages), **problem})
        assert "error" in caught.value.response.json() and (list(problem)[0] in str(caught.value) or "maximum context length is 300" in str(caught.value))


@slow
def test_stop_strings_end_a_text_before_them_streamed_or_not_wherever_tokens_and_rounds_fall(served, chat_pair):
    target, tokenizer = load_target(chat_pair / "target", "float64"), eagle3.load_tokenizer(chat_pair / "target")
    text = tokenizer.decode(generate(target, [tokenizer.encode("abc")], 60, ())[0].output)
    whole = [text[i:i + 3] for i in range(8, 40) if "\ufffd" not in text[:i + 3] and text.find(text[i:i + 3]) == i][:4] or [text[:1]]
    for stop in whole:
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 60, "stop": [stop, "never there"], "ignore_eos": True}
        status, answer = served.ask("/v1/completions", body)
        assert status == 200 and answer["choices"][0]["text"] == text[:text.find(stop)] and answer["choices"][0]["finish_reason"] == "stop", (stop, answer)
        status, stream = served.ask("/v1/completions", {**body, "stream": True})
        events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
        assert "".join(e["choices"][0]["text"] for e in events) == text[:text.find(stop)] and stream.endswith("data: [DONE]\n\n")
        assert answer["usage"]["completion_tokens"] <= 60 and not any("\ufffd" in e["choices"][0]["text"] for e in events)


@slow
def test_health_metrics_and_info_say_what_runs(served):
    served.ask("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0})
    assert served.ask("/health") == (200, {"status": "ok"})
    status, metrics = served.ask("/metrics")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    named = lambda name: sum(float(v) for k, v in values.items() if k.startswith(name + "{"))
    assert status == 200 and named("vllm:generation_tokens_total") >= 20 and named("vllm:spec_decode_num_drafts_total") > 0
    info = served.ask("/server_info")[1]
    assert info["max_batch"] == 4 and info["features"] == "cat([h.2, h.4, h.5])" and info["ceiling"] == 6 and info["running"] == 0


@slow
def test_many_clients_at_once_each_get_their_solo_answer(served, chat_pair):
    target, prompts = load_target(chat_pair / "target", "float64"), random_prompts([5, 9, 13, 7, 30, 3, 21, 11], vocab_size=250)
    settings = [Sampling(0.9 * (i % 2), seed=i) for i in range(8)]
    expected = [generate(target, [p], 16, (), s)[0].output for p, s in zip(prompts, settings)]
    ask = lambda i: served.ask("/v1/completions", {"prompt": prompts[i], "max_tokens": 16, "temperature": settings[i].temperature, "seed": i,
                                                   "ignore_eos": True, "return_token_ids": True})[1]["choices"][0]["token_ids"]
    with ThreadPoolExecutor(8) as clients:
        for _ in range(3):
            assert list(clients.map(ask, range(8))) == expected


@slow
def test_a_full_queue_is_refused_and_clients_that_vanish_are_cancelled(served):
    long = json.dumps({"prompt": [5, 6], "max_tokens": 290, "ignore_eos": True, "stream": True}).encode()
    connections = []

    def post(body):
        connections.append(http.client.HTTPConnection(*served.address, timeout=600))
        connections[-1].request("POST", "/v1/completions", body)
        return connections[-1]

    def refusal_of(burst):
        """What the first that is refused hears; None if all were answered, since some ended meanwhile."""
        while burst:
            ready = select.select([connection.sock for connection in burst], [], [], 600)[0]
            for connection in [connection for connection in burst if connection.sock in ready]:
                burst.remove(connection)
                if (answer := connection.getresponse()).status == 429:
                    return answer.read()

    bursts = ([post(long) for _ in range(40)] for _ in range(100))  # 4 slots and a queue of 8
    refusal = next(refusal for burst in bursts if (refusal := refusal_of(burst)))
    assert "--max-queue 8" in json.loads(refusal)["error"]["message"]
    for connection in connections:
        connection.close()
    post(long.replace(b"true}", b"false}")).close()
    while (info := served.ask("/server_info")[1])["running"] + info["waiting"]:
        time.sleep(0.05)
    assert served.ask("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200


@slow
def test_junk_never_stops_the_server(served):
    """Thousands of bodies with wrong types in every field; torn requests; a NaN in one request's logits is another test's."""
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as some
    api = serve.Api(FakeLoop(), None, "tiny")
    junk = some.recursive(some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8), lambda x: some.lists(x, max_size=3) | some.dictionaries(
        some.text(max_size=5), x, max_size=3), max_leaves=6)
    names = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stream", "stream_options",
             "stop", "stop_token_ids", "logprobs", "top_logprobs", "ignore_eos", "return_token_ids", *serve.REFUSED)
    refused, kept = Counter(), []

    @hypothesis.settings(max_examples=3000, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(some.dictionaries(some.sampled_from(names), junk, max_size=4), some.booleans())
    def read(body, is_chat):
        body = body if is_chat else {"prompt": [1, 2], **body}
        try:
            jobs, _ = api.read(body, is_chat)
            kept.append(jobs)
        except serve.Refusal as refusal:
            refused[refusal.status] += 1
            json.dumps(refusal.json())
            if len(kept) % 40 == 0:
                assert served.ask("/v1/completions", body)[0] in (200, 400, 404, 429)

    read()
    assert refused[400] > 500 and kept
    for body in (b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"[" * 100000, b'{"prompt": [1], "max_tokens": 1' + b"0" * 5000 + b"}",
                 b'{"prompt": [1], "temperature": 1' + b"0" * 400 + b"}", json.dumps({"prompt": [[1]] * 100000, "n": 64}).encode()):
        status, answer = served.ask("/v1/completions", body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", body[:20]
    assert served.ask("/v1/completions", b"x" * (5 << 20))[0] == 413 and served.ask("/nowhere")[0] == 404 and served.ask("/v1/completions")[0] == 405
    assert served.ask("/v1/completions", {"prompt": [5], "max_tokens": 2, "temperature": 1e-310})[0] == 200
    for n in range(300):
        connection = socket.create_connection(served.address)
        if n % 3:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{" if n % 3 == 1 else b"\0\1junk\r\n\r\n")
        connection.close()
    assert served.ask("/health")[0] == 200 and served.ask("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200


class FakeLoop:
    """As much of the loop as reading a body needs."""
    max_queue = 60

    class engine:
        max_length, max_batch = 100, 4
        target = type("", (), {"config": target_config()})


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_under_load_finishes_what_was_accepted_on_any_number_of_ranks(chat_pair, ranks):
    server = Served(chat_pair, "--no-compile", "--max-length", 200, "--max-batch", 2, "--api-key", "secret", ranks=ranks)
    assert server.ask("/v1/models")[0] == 401 and server.ask("/health")[0] == 200
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    secret = {"Authorization": "Bearer secret"}
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(server.ask, "/v1/completions", body, secret) for _ in range(4)]
        seen = lambda info: info["running"] + info["waiting"] + sum(answer.done() for answer in answers)
        while seen(server.ask("/server_info", headers=secret)[1]) < 4:
            time.sleep(0.01)
        if ranks == 1:
            server.process.terminate()
            results = [answer.result() for answer in answers]
            statuses = [status for status, _ in results]
            assert set(statuses) <= {200, 503} and statuses.count(200) >= 2, statuses
        else:
            results = [answer.result() for answer in answers]
            server.process.terminate()
    expected, = generate(load_target(chat_pair / "target", "float64"), [[5, 6, 7]], 60, ())
    assert all(answer["choices"][0]["token_ids"] == expected.output for status, answer in results if status == 200)
    out, problem = server.process.communicate(timeout=600)
    assert (server.process.returncode == 0 or ranks > 1) and '"requests"' in out, problem[-2000:]


# -----------------------------------------------------------------------------
# The scripts again


@slow
def test_regenerated_rows_are_the_targets_own_greedy_answers_and_a_killed_run_goes_on_to_the_same_rows(project, tmp_path):
    target, out = load_target(project / "target"), tmp_path / "own.jsonl"
    command = ("--no-compile", "--target", project / "target", "--data", project / "rows.jsonl", "--dtype", "float32", "--max-batch", 4,
               "--max-new-tokens", 12, "--regenerate")
    summary = json.loads(run_here("train.py", *command, out).stdout.splitlines()[-1])
    made = {line["source"]: line for line in map(json.loads, out.read_text().splitlines())}
    given = [json.loads(line)["input_ids"][:4] for line in (project / "rows.jsonl").read_text().splitlines()]
    assert summary["conversations"] == len(made) == len(given) == 60 and summary["skipped"] == 0
    for n, (prompt, request) in enumerate(zip(given, generate(target, given, 12)), 1):
        row = made[f"rows.jsonl:{n}"]
        assert row["input_ids"] == prompt + request.output and row["loss_mask"] == [0] * 4 + [1] * len(request.output), n
    save_target(small := random_target(dtype=torch.float32, num_layers=1), tmp_path / "small")  # compiled, too: one layer does
    run_here("train.py", *command[1:2], tmp_path / "small", *command[3:], tmp_path / "small.jsonl", "--max-batch", 1)
    small_rows = {line["source"]: line["input_ids"] for line in map(json.loads, (tmp_path / "small.jsonl").read_text().splitlines())}
    assert small_rows == {f"rows.jsonl:{n}": p + r.output for n, (p, r) in enumerate(zip(given, generate(small, given, 12)), 1)}
    whole = out.read_bytes()
    out.write_bytes(whole[:len(whole) // 2])  # killed in the middle of a line
    assert json.loads(run_here("train.py", *command, out).stdout.splitlines()[-1])["conversations"] == 60
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    run_ranks(2, train_under_ranks, *command, tmp_path / "shared.jsonl")
    shared = [json.loads(line) for rank in (0, 1) for line in (tmp_path / f"shared.{rank}.jsonl").read_text().splitlines()]
    assert {row["source"]: row["input_ids"] for row in shared} == {name: row["input_ids"] for name, row in made.items()} and len(shared) == 60
    sampled = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, slots in zip(sampled, (4, 3)):
        run_here("train.py", *command, file, "--temperature", 1, "--max-batch", slots)
    a, b = ({row["source"]: row["input_ids"] for row in map(json.loads, file.read_text().splitlines())} for file in sampled)
    assert a == b and a != {name: row["input_ids"] for name, row in made.items()}, "a conversation's seed does not depend on the batch it is in"
    (tmp_path / "more").mkdir()
    more = [{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}, {"input_ids": []}, {"input_ids": [9, 999]}, {"input_ids": [9, 8, 7]}, {"other": 1}, 5]
    (tmp_path / "more" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    double = (*command[:-1], "--data", tmp_path / "more" / "rows.jsonl", "--regenerate", tmp_path / "double.jsonl")
    for _ in range(2):  # another file of the same name; and again, with nothing left to do
        summary = json.loads(run_here("train.py", *double).stdout.splitlines()[-1])
        assert summary["conversations"] == 61 and summary["skipped"] == 5
        rows = [json.loads(line) for line in (tmp_path / "double.jsonl").read_text().splitlines()]
        assert sorted(row["index"] for row in rows) == [*range(60), 63]
    refused = run_here("train.py", *command, out, "--top-p", 90, check=2)
    assert "top_p" in refused.stderr
    refused = run_here("train.py", *command, out, "--temperature", 1, check=2)
    assert "other settings" in refused.stderr and sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines()), "nothing is lost"
    (tmp_path / "notes.txt").write_text("do not touch")
    assert "not a file that --regenerate wrote" in run_here("train.py", *command, tmp_path / "notes.txt", check=2).stderr
    assert (tmp_path / "notes.txt").read_text() == "do not touch"
    trained = run_here("train.py", *[out if x == project / "rows.jsonl" else x for x in train_args(project, tmp_path / "head", 3)])
    usable = sum(sum(row["loss_mask"]) > 1 for row in made.values())
    assert json.loads(trained.stdout.splitlines()[-1])["rows"] == usable - 1 > 50, "all but those that say nothing, and one held out"


def extract_with(shard, patch, *args):
    """Where the disk is nearly full, or fills up: a file that cannot grow looks just so."""
    if patch == "little":
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))
    return train_under_ranks(shard, *args)


@slow
def test_extraction_says_what_disk_it_needs_and_a_full_disk_is_one_line_and_resumed_after(project, tmp_path):
    args = ["--target", project / "target", "--data", project / "rows.jsonl", "--extract", tmp_path / "features",
            "--layers", "2,4,5", "--dtype", "float32"]
    last = run_ranks(1, extract_with, "little", *args, check=2)
    assert last.startswith("test_eagle3.py: ") and "0.000 GB free" in last
    assert not list((tmp_path / "features").rglob("data_*"))
    assert "could not be written" in run_ranks(1, extract_with, "none", *args, check=2)
    folder = eagle3.FeatureFolder(tmp_path / "features")
    there = [index for index in range(60) if index not in folder.missing()]
    assert 0 < len(there) < 60 and all(folder.read(index).hidden for index in there) and not list((tmp_path / "features").rglob("*.tmp"))
    run_here("train.py", *args)
    assert folder.missing() == []


@slow
def test_serve_streams_and_benches_a_trained_head_and_refuses_the_wrong_layout(project, tmp_path):
    run_here("train.py", *train_args(project, tmp_path / "draft", 5, "--layers", "embed,3,5"))
    pair = ("--target", project / "target", "--draft", tmp_path / "draft")
    result = run_here("serve.py", *pair, "--prompt-ids", "5,6,7", "--max-new-tokens", 12)
    plain = run_here("serve.py", "--target", project / "target", "--prompt-ids", "5,6,7", "--max-new-tokens", 12)
    expected = generate(load_target(project / "target"), [[5, 6, 7]], 12)[0].output
    for output in (result.stdout, plain.stdout):
        assert [int(t) for t in output.splitlines()[-2].split()] == expected
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["new_tokens"] == len(expected) and summary["acceptance_length"] >= 1.0 and "cat([embed, h.3, h.5])" in result.stdout
    for batch, spec in ((1, (4, 1, 5)), (3, (3, 2, 8))):
        flags = ("--no-compile", "--num-steps", spec[0], "--draft-topk", spec[1], "--num-draft-tokens", spec[2])
        bench = run_here("serve.py", *pair, "--bench", project / "prompts.jsonl", "--max-new-tokens", 80, "--max-batch", batch, *flags)
        summary = json.loads(bench.stdout.splitlines()[-1])
        assert set(summary) == set("prompts new_tokens batch dtype device temperature seed spec plain_tok_s spec_tok_s speedup "
                                   "acceptance_length per_position_acceptance ceiling rounds_by_shape break_even identical ties by_category worst ms_plain ms_draft ms_verify ms_host "
                                   "shapes torch threads".split())
        assert summary["identical"] + summary["ties"] == summary["prompts"] == 5 and summary["spec"] == list(spec)
        assert 1 <= summary["acceptance_length"] <= summary["ceiling"] == spec[0] + 1
        name = spec_name(SpecConfig(*spec))
        assert list(summary["shapes"]) == [name] and summary["shapes"][name]["break_even"] == summary["break_even"] > 0
        row, = [line.split() for line in bench.stdout.splitlines() if line.startswith(f"  {name} ")]
        gains = [float(gain.removesuffix("x")) for gain in row[3:]]
        assert gains == pytest.approx([length / summary["break_even"] for length in serve.SPEED_AT], abs=0.011), "what each length would gain"
        assert summary["rounds_by_shape"]["none"] == 0 < sum(summary["rounds_by_shape"].values()), "the warm-up's rounds are not counted"
    sampled = ("--bench", project / "prompts.jsonl", "--max-new-tokens", 24, "--no-compile", "--temperature", 0.8, "--top-p", 0.9, "--seed", 3)
    summary = json.loads(run_here("serve.py", *pair, *sampled).stdout.splitlines()[-1])
    assert summary["spec"] == "auto" and summary["identical"] + summary["ties"] == 5 and (summary["temperature"], summary["seed"]) == (0.8, 3)
    few = run_here("serve.py", *pair, "--bench", project / "prompts.jsonl", "--limit", 1, "--max-new-tokens", 12, "--no-compile")
    summary = json.loads(few.stdout.splitlines()[-1])
    assert summary["acceptance_length"] is None and "too few rounds to tell" in few.stdout and "--num-steps 3" in few.stdout
    assert sum(summary["rounds_by_shape"].values()) <= 12 and summary["rounds_by_shape"]["3-1-4"] <= 3, "the timed rounds only"
    wrong = run_here("serve.py", *pair, "--prompt-ids", "5", "--layers", "2,4,5", check=2)
    assert "cat([embed, h.3, h.5])" in wrong.stderr and "cat([h.2, h.4, h.5])" in wrong.stderr and len(wrong.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("script, args, message", [
    ("serve.py", ("--prompt", "x", "--num-steps", 1, "--draft-topk", 1, "--num-draft-tokens", 16), "contradict each other"),
    ("serve.py", ("--prompt", "x", "--num-steps", 3), "go together"), ("serve.py", ("--prompt", "x", "--max-batch", 0), "at least 1"),
    ("serve.py", ("--prompt", "x", "--device", "gpu"), "cpu, cuda"), ("train.py", ("--resume",), "starts anew"),
    ("serve.py", ("--prompt", "x", "--bench", "y"), "give at most one of"), ("serve.py", (), "python train.py"),
    ("serve.py", ("--prompt", "x"), "python train.py"),
    ("serve.py", ("--target", "nowhere", "--prompt", "x"), "not a folder"), ("train.py", ("--target", "nowhere"), "one of --out"),
    ("train.py", ("--target", "nowhere", "--data", "none.jsonl", "--out", "out"), "not a folder")])
def test_a_users_mistake_is_one_line_and_nothing_is_made_before_it(tmp_path, monkeypatch, script, args, message):
    monkeypatch.chdir(tmp_path)
    problem = run_here(script, *args, check=2).stderr
    assert message in problem and len(problem.splitlines()) == 1 and not list(tmp_path.iterdir()), problem


@pytest.mark.parametrize("script", ["train.py", "serve.py"])
def test_a_script_says_a_users_mistake_in_its_own_name_and_ends_with_2(tmp_path, script):
    result = run_script(script, "--target", "nowhere", check=2, cwd=tmp_path)
    assert result.stderr.startswith(f"{script}: ") and len(result.stderr.splitlines()) == 1, result.stderr


def test_rows_that_cannot_be_used_end_the_run_with_their_reasons(project, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}\n{"text": "no tokenizer here"}\n')
    result = run_here("train.py", "--target", project / "target", "--data", tmp_path / "bad.jsonl", "--out", tmp_path / "out", check=2)
    assert "no tokenizer.json" in result.stderr
    (tmp_path / "bad.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}\n')
    result = run_here("train.py", "--target", project / "target", "--data", tmp_path / "bad.jsonl", "--out", tmp_path / "out", check=2)
    assert "no usable row" in result.stderr and "nothing supervised" in result.stderr


@slow
def test_the_demo_makes_a_target_trains_a_head_and_serves_it(tmp_path):
    """A shortened demo: the same path with fewer steps, rows and tokens."""
    code = ("import sys, train; train.DEMO_STEPS, train.DEMO_ROWS, train.DEMO_NEW_TOKENS = (3, 4), 24, 16; sys.argv = ['train.py']; "
            "import eagle3; eagle3.run_script('train.py', train.main)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HERE)}, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["out"] == "runs/demo/draft" and summary["acceptance_length"] >= 1.0 and 1 <= summary["tokens_per_pass"] <= 4
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/answers.jsonl").read_text().splitlines()]
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "runs/demo/prompts.jsonl").read_text().splitlines()]
    assert len(rows) == len(prompts) == 24 and summary["rows"] == 23, "trained on what the target wrote, but for a held-out row"
    target, head = (tmp_path / "runs/demo" / name for name in ("target", "draft"))
    assert all(row["input_ids"][:-16] == list(prompts[row["index"]].encode()) and sum(row["loss_mask"]) == 16 for row in rows)
    assert "times as fast as without the head" in result.stdout and load_draft(head, load_target(target)).config.hidden_size == 128
    served = run_script("serve.py", "--prompt", "import os", "--max-new-tokens", 24, "--temperature", 0.7, cwd=tmp_path)
    assert json.loads(served.stdout.splitlines()[-1])["new_tokens"] == 24


# -----------------------------------------------------------------------------
# Examples


@slow
def planned(shard, folder):
    """What the plan promises, against what is there."""
    promised = run_example(plan, folder / "target", "--draft", folder / "head", "--ranks", 2, "--max-length", 64, "--max-batch", 2, "--cpu")
    target = load_target(folder / "target", shard=shard)
    engine = Engine(target, load_draft(folder / "head", target), CHAIN, max_batch=2, max_length=64)
    engine.submit([1, 2, 3], 9, ())
    engine.step()
    size = lambda tensors: sum(x.numel() * x.element_size() for x in tensors)
    packed = lambda module: size(m.weight for m in module.modules() if m.__class__.__name__.endswith("Linear"))
    caches = size([*engine.state.cache.keys, *engine.state.cache.values]) * 64 / (64 + engine.margin)
    own = size([*engine.state.draft_cache.keys, *engine.state.draft_cache.values]) * 64 / (64 + engine.margin)
    for key, real in (("weights", size(target.parameters()) + packed(target)), ("kv", caches), ("head", size(engine.head.parameters()) + packed(engine.head) + own)):
        assert abs(promised[f"{key}_gb_per_rank"] - real / 1e9) <= 1e-4, (key, promised, real)
    plain = Engine(target, max_length=64)
    plain.submit([1, 2, 3], 9, ())
    plain.step()
    assert promised["collectives_per_token"] == len(given_during(plain.step))
    return {}


@slow
def test_the_plan_is_what_the_ranks_then_hold(tmp_path):
    variant_pair(tmp_path, "qwen3 with fewer KV heads than ranks", hidden_size=256, intermediate_size=1024, head_dim=64)
    run_ranks(2, planned, tmp_path)
    summary = run_example(plan, tmp_path / "target", "--layers", "1,2", "--memory", 0.001, "--bandwidth", 100)
    assert set(summary) == {"ranks", "weights_gb", "weights_gb_per_rank", "kv_gb_per_rank", "activations_gb_per_rank", "head_gb_per_rank",
                            "bytes_per_token_per_rank", "collectives_per_token", "floor_ms", "fits"} and summary["fits"] is False
    assert summary["floor_ms"] == pytest.approx(summary["bytes_per_token_per_rank"] / 1e8, abs=1e-4)


def probed(wired, tmp_path, head, *more):
    """On the prompts of the rows that the wired head was trained on."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input_ids": row.tokens[:row.loss_mask.tolist().index(True)].tolist()}) + "\n" for row in wired_rows(wired)))
    return run_example(probe, "--target", wired / "target", "--draft", head, "--prompts", file, "--limit", 10,
                       "--max-new-tokens", 30, "--dtype", "float32", *more)


@slow
@pytest.mark.parametrize("layers, keys", [
    ("2,4,5", {}), ("2,4,5", {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}), ("2,4,5", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
    ("2,4,5", {"eagle_aux_hidden_state_layer_ids": [5, 2, 4]}),
    ("3,5,6", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}), ("3,5,6", {})], ids=str)
def test_probe_finds_the_layout_of_a_head_whose_ids_were_stripped_shifted_or_reordered(wired, tmp_path, layers, keys):
    layout = FeatureLayout.parse(layers, 32, 8)
    if layers != "2,4,5":
        save_draft(teach(load_target(wired / "target"), wired_rows(wired), layout.boundaries), tmp_path / "head")
    source = wired / "head" if layers == "2,4,5" else tmp_path / "head"
    strip_layout(source, tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", **keys)
    found = probed(wired, tmp_path, tmp_path / "theirs", "--save", str(tmp_path / "saved"))
    assert (found["verdict"], found["layers"], found["rope_theta"]) == ("ok", layers, 10000), found
    target = load_target(wired / "target")
    saved, ours = load_draft(tmp_path / "saved", target), load_draft(source, target)
    assert saved.config == ours.config and all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), ours.state_dict().values()))


def test_probe_finds_the_rope_base_that_the_official_trainer_used_whatever_its_config_says(wired, tmp_path):
    strip_layout(wired / "head", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", rope_theta=100.0, rope_parameters=..., architectures=["LlamaForCausalLM"])
    target = load_target(wired / "target")
    head, rows = load_draft(wired / "head", target), [tuple(x[0] for x in eagle3.collate([row])) for row in wired_rows(wired)]
    right, wrong = probe.try_configs(head, rows, target, [head.config, replace(head.config, rope=RopeConfig(100.0))])
    assert right.config.rope.theta == 10000 and wrong.loss > 1.1 * right.loss, "a wide margin: 1.23 to 1.35 times in trainings of other lengths"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = probed(wired, tmp_path, tmp_path / "theirs")
    assert (found["verdict"], found["layers"], found["rope_theta"]) == ("ok", "2,4,5", 10000), found


def test_probe_finds_the_flag_that_readers_of_a_speculators_head_take_for_different_things_where_it_is_absent(wired, tmp_path):
    head = load_draft(wired / "head", load_target(wired / "target"))
    write_foreign_head(tmp_path / "theirs", "speculators", head)
    edit_json(tmp_path / "theirs" / "config.json", norm_before_residual=...)
    found = probed(wired, tmp_path, tmp_path / "theirs", "--save", str(tmp_path / "saved"))
    assert found["verdict"] == "ok" and not found["table"][0]["norm_before_residual"], found
    assert load_draft(tmp_path / "saved", head.target).config == head.config


@slow
def test_probe_says_when_it_cannot_tell_and_the_script_ends_with_1(wired, tmp_path):
    target = load_target(wired / "target")
    save_draft(random_head(target), tmp_path / "untrained")
    strip_layout(tmp_path / "untrained", tmp_path / "weak")
    found = probed(wired, tmp_path, tmp_path / "weak", "--save", str(tmp_path / "saved"))
    assert (found["verdict"], found["layers"], found["saved"]) == ("cannot tell", None, None) and not (tmp_path / "saved").exists()
    save_draft(teach(target, wired_rows(wired), (0, 3, 7)), tmp_path / "unusual")
    strip_layout(tmp_path / "unusual", tmp_path / "theirs")
    found = probed(wired, tmp_path, tmp_path / "theirs")
    assert (found["verdict"], found["better_boundaries"]) == ("cannot tell", [0, 3, 7]), "none of the candidates is what it was trained on"
    assert probed(wired, tmp_path, tmp_path / "theirs", "--layers", "embed,3,7")["layers"] == "embed,3,7", "unless that is named"
    result = run_script("examples/probe.py", "--target", wired / "target", "--draft", tmp_path / "weak", "--prompts",
                        tmp_path / "prompts.jsonl", "--dtype", "float32", check=1)
    assert json.loads(result.stdout.splitlines()[-1])["verdict"] == "cannot tell" and "the head guesses too little" in result.stdout


FOREIGN = {  # trainer: (file name, the dict that it writes, is its teacher after the norm)
    "SpecForge": ("rows_0-2000/data_{}.ckpt", lambda t, m, b, last, normed: {
        "input_ids": t, "loss_mask": m, "aux_hidden_state": torch.cat(b, -1)[None], "hidden_state": normed[None]}, True),
    "speculators": ("hs_{}.safetensors", lambda t, m, b, last, normed: {
        "token_ids": t, "loss_mask": m, "hidden_states": torch.stack([*b, last], 1)}, False),
    "speculators 0.3": ("data_{}.pt", lambda t, m, b, last, normed: {"input_ids": t, "loss_mask": m, "hidden_states": [*b, last]}, False),
    "AngelSlim": ("rows_0-5000/data_{}.ckpt", lambda t, m, b, last, normed: {
        "input_ids": t[None], "loss_mask": m[None], "hidden_states": torch.cat(b, -1)[None], "target_hiddens": normed[None]}, True),
    "ModelOpt": ("{}.pt", lambda t, m, b, last, normed: {
        "input_ids": t, "loss_mask": m, "aux_hidden_states": torch.cat(b, -1), "hidden_states": normed, "conversation_id": "x"}, True)}


@slow
@pytest.mark.parametrize("trainer", FOREIGN)
def test_other_trainers_files_are_identified_converted_and_trained_on(wired, tmp_path, trainer):
    """speculators 0.3 captured behind its layers: what it calls 2, 4, 5 is 3, 5, 6. Converting finds that."""
    from safetensors.torch import save_file
    name, make, is_normed = FOREIGN[trainer]
    boundaries = (3, 5, 6) if trainer == "speculators 0.3" else (2, 4, 5)
    target = load_target(wired / "target")
    for index, line in enumerate((wired / "rows.jsonl").read_text().splitlines()):
        record = json.loads(line)
        tokens, mask = torch.tensor(record["input_ids"]), torch.tensor(record["loss_mask"])
        captures = {b: x[0] for b, x in target(tokens[None], boundaries=tuple(range(9))).captures.items()}
        path = tmp_path / "foreign" / name.format(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = make(tokens, mask, [captures[b] for b in boundaries], captures[8], target.norm(captures[8]))
        save_file(data, path) if path.suffix == ".safetensors" else torch.save(data, path)
    command = (tmp_path / "foreign", "--target", wired / "target", "--out", tmp_path / "features")
    with pytest.raises(LayoutMismatch, match="what the columns are"):
        run_example(convert_features, *command, "--layers", "1,4,5")
    summary, teacher = run_example(convert_features, *command), "h.8.normed" if is_normed else "h.8"
    layers = ",".join(map(str, boundaries))
    assert (summary["layers"], summary["teacher"], summary["rows"], summary["written"]) == (layers, teacher, 10, 10)
    folder = eagle3.FeatureFolder(tmp_path / "features")
    assert folder.layout.boundaries == boundaries and folder.teacher == teacher
    folder.path(3).unlink()
    assert run_example(convert_features, *command)["written"] == 1, "it goes on with what is missing"
    options = ("--dtype", "float32", "--ttt-steps", 2, "--batch-size", 3, "--steps", 4, "--lr", 0.003)
    run_here("train.py", "--features", tmp_path / "features", "--target", wired / "target", "--out", tmp_path / "offline", *options)
    run_here("train.py", "--data", wired / "rows.jsonl", "--target", wired / "target", "--out", tmp_path / "online", "--layers",
               ",".join(map(str, boundaries)), *options)
    online, offline = ([json.loads(line)["loss"] for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("online", "offline"))
    assert offline == pytest.approx(online, rel=2e-4)


def test_hostile_and_broken_files_of_other_trainers_are_refused_by_name(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    good = {"input_ids": torch.arange(4), "loss_mask": torch.ones(4), "aux_hidden_state": torch.zeros(1, 4, 96), "hidden_state": torch.zeros(1, 4, 32)}
    for name, data, message in (
            ("data_0.pt", {"input_ids": Bomb()}, "cannot be read, or holds more than tensors"), ("data_1.pt", [1, 2], "holds a list"),
            ("data_2.pt", {"text": torch.zeros(1)}, "no trainer that is known"),
            ("data_3.pt", {**good, "hidden_state": torch.zeros(1, 3, 32)}, "contradicts itself"),
            ("data_4.pt", {**good, "hidden_state": torch.full((1, 4, 32), float("nan"))}, "not finite")):
        torch.save(data, tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            convert_features.read_foreign(tmp_path / name)
    torch.save(good, tmp_path / "data_5.pt")
    (tmp_path / "data_5.pt").write_bytes((tmp_path / "data_5.pt").read_bytes()[:-200])
    with pytest.raises(ValueError, match="data_5.pt cannot be read"):
        convert_features.read_foreign(tmp_path / "data_5.pt")
    assert not (tmp_path / "exploded").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no rows"):
        run_example(convert_features, tmp_path / "empty", "--target", "any", "--out", tmp_path / "out")
    with pytest.raises(ValueError, match="data_0.pt cannot be read"):
        run_example(convert_features, tmp_path, "--target", "any", "--out", tmp_path / "out")
    assert "examples/convert_features.py" in run_here("train.py", "--inspect", tmp_path, check=2).stderr


def test_the_minimal_file_trains_and_decodes_as_eagle3_does(tmp_path):
    model = make_transformers_model(tmp_path, "Llama").double()
    target, draft_ids = load_target(tmp_path, "float64"), torch.arange(0, 64, 2)
    head = random_head(target, draft_ids=draft_ids)
    small = minimal.DraftHead(model.config, (2, 4, 5), draft_ids).double()
    small.load_state_dict(head.state_dict())
    tokens, mask = torch.tensor(random_prompts([24, 24, 24])), torch.ones(3, 24, dtype=torch.bool)
    mask[1, :9] = False
    captures = target(tokens, boundaries=(2, 4, 5, 8)).captures
    ours, stats = ttt_loss(head, prepare_ttt(head, tokens, mask, captures, 3))
    theirs, accuracy = minimal.ttt_loss(small, model, tokens, mask, 3)
    ours.backward()
    theirs.backward()
    assert_close("loss", theirs, ours, 1e-6)  # transformers' norms compute in fp32
    assert accuracy == pytest.approx(stats.accuracy)
    for name, parameter in head.named_parameters():
        assert_close(name, small.get_parameter(name).grad, parameter.grad, 1e-6 * max(1, parameter.grad.abs().max().item()))
    head.requires_grad_(False)
    for prompt in random_prompts([3, 7, 5]):
        for steps, topk, nodes in ((4, 3, 10), (3, 1, 4), (1, 1, 2)):
            request, = speculative_generate(target, head, [prompt], SpecConfig(steps, topk, nodes), 40, ())
            text, length = minimal.decode(model, small, prompt, 40, steps, topk, nodes)
            assert text == request.output and length == pytest.approx(39 / request.stats.rounds), "the same drafts are accepted"


def test_a_head_for_a_transformers_model_is_trained_and_saved_by_the_example(tmp_path, chat_pair):
    make_transformers_model(tmp_path / "model", "Llama", vocab_size=264)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chat_pair / "target" / file, tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    args = (tmp_path / "model", tmp_path / "text.txt", "--out", tmp_path / "head", "--length", 32)
    first, last = (run_example(transformers_target, *args, "--steps", steps)["loss"] for steps in (1, 12))
    assert last < first and load_draft(tmp_path / "head", load_target(tmp_path / "model")).config.layout.boundaries == (2, 4, 5)
    with pytest.raises(ValueError, match="fewer than one row"):
        run_example(transformers_target, *args, "--length", 10**6)


def test_plots_are_drawn_from_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [{"loss": 5 - n / 10, "accuracy": [n / 20, n / 30], "simulated_acceptance_length": 1 + n / 10, "tokens": 1000 * n}
             for n in range(12)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_example(plot, tmp_path / "metrics.jsonl", tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")
    from matplotlib import pyplot
    loss, accuracy, length = pyplot.gcf().axes
    assert loss.lines[0].get_ydata().tolist() == [line["loss"] for line in lines]
    assert accuracy.lines[1].get_ydata().tolist() == [line["accuracy"][1] for line in lines]
    assert length.lines[0].get_xdata().tolist() == [line["tokens"] / 1e6 for line in lines]
    categories = {name: {"speedup": 1.5, "acceptance_length": None} for name in ("poetry", "prose")}
    summary = {"by_category": categories, "per_position_acceptance": [0.7, 0.4, None], "ms_plain": 9, "ms_draft": 3, "ms_verify": 8, "ms_host": 1}
    (tmp_path / "bench.txt").write_text("plain 9 tok/s\n" + json.dumps(summary) + "\n")
    run_example(plot, tmp_path / "bench.txt", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    speed, _, depths, parts = pyplot.gcf().axes
    assert [bar.get_width() for bar in speed.patches] == [1.5, 1.5] and [bar.get_height() for bar in depths.patches] == [0.7, 0.4, 0]
    assert [bar.get_width() for bar in parts.patches] == [9, 3, 8, 1]
    for measured, picture, message in (("bench.txt", "picture.doc", "must be a .png"), ("bench.txt", "nowhere/x.png", "must be a .png"),
                                       ("none", "x.png", "not there"), ("run.svg", "x.png", "holds neither")):
        with pytest.raises((ValueError, OSError), match=message):
            run_example(plot, tmp_path / measured, tmp_path / picture)


if __name__ == "__main__":  # one of the functions above, in each of torchrun's processes
    eagle3.run_script("test_eagle3.py", lambda shard: globals()[sys.argv[1]](shard) or {})
