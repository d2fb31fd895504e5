# MIT License, see LICENSE.
"""Another trainer's stored hidden states become a folder of features that train.py --features reads.

    python examples/convert_features.py THEIRS --target DIR --out FEATURES [--layers 2,15,27]

Rows of SpecForge, speculators (the lists of 0.3 and 0.4, too), AngelSlim and ModelOpt say nothing about their layers.
So the first ones are compared with every hidden state that the target computes for the same tokens, and each column
block gets the name of what it is; a block that is none of them ends the conversion. --layers states what is expected.
"""
import argparse
import gzip
import io
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eagle3


class ForeignRow(NamedTuple):
    tokens: Tensor         # [T]
    loss_mask: Tensor      # [T]; all True where the file has none
    blocks: list[
        Tensor
    ]  # the column blocks of its features, [T,C] each: which boundaries they are, the file does not say
    last: Tensor           # [T,C] the last hidden state: before the final norm (speculators) or after it (the others)


def foreign_files(folder: Path) -> list[Path]:
    """The rows below a folder, in the order of their numbers."""
    patterns = ("data_*.pt", "data_*.ckpt", "data_*.ckpt.gz", "hs_*.safetensors", "*.pt")
    numbers = lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)]
    return sorted(
        {path for pattern in patterns for path in folder.rglob(pattern)}, key=lambda path: (numbers(path), path.name)
    )


def load(path: Path) -> dict:
    """What a file holds, if that is tensors only; else ValueError."""
    if path.suffix == ".safetensors":
        file = eagle3.open_tensors(path)
        return {name: file.get_tensor(name) for name in file.keys()}
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data = torch.load(io.BytesIO(stream.read()), map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
    ) as error:  # torch.load raises all of these
        raise ValueError(f"{path} cannot be read, or holds more than tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a dict of tensors")
    return data


def read_foreign(path: Path) -> ForeignRow:
    """A row of SpecForge (input_ids, loss_mask, aux_hidden_state [1,T,3C], hidden_state [1,T,C]), speculators
    (token_ids, hidden_states [T,n,C], or a list of [T,C], the last one the teacher), AngelSlim (input_ids [1,T],
    hidden_states [1,T,3C], target_hiddens [1,T,C]) or ModelOpt (input_ids, aux_hidden_states [T,3C], hidden_states
    [T,C]). Raises ValueError naming the file."""
    data = load(path)
    flat = lambda x: x.flatten(0, -2) if x.dim() > 2 else x  # [1,T,C] -> [T,C]
    tokens = data.get("input_ids", data.get("token_ids"))
    pairs = (
        ("aux_hidden_state", "hidden_state"),
        ("aux_hidden_states", "hidden_states"),
        ("hidden_states", "target_hiddens"),
    )
    blocks, last = [], None
    found = [pair for pair in pairs if all(key in data for key in pair)]
    if found:
        wide, last = (flat(data[key]) for key in found[0])
        blocks = list(wide.split(last.shape[-1], dim=-1))
    elif isinstance(data.get("hidden_states"), (list, Tensor)):  # speculators
        hidden = data["hidden_states"]
        *blocks, last = [flat(x) for x in (hidden if isinstance(hidden, list) else hidden.unbind(-2))]
    if not isinstance(tokens, Tensor) or not isinstance(last, Tensor) or not blocks:
        raise ValueError(
            f"{path} is a row of no trainer that is known here: it holds {', '.join(sorted(map(str, data)))}"
        )
    tokens, mask = tokens.flatten().long(), data.get("loss_mask")
    loss_mask = mask.flatten().bool() if isinstance(mask, Tensor) else torch.ones_like(tokens, dtype=torch.bool)
    shapes = {tuple(x.shape) for x in (*blocks, last)}
    if shapes != {(len(tokens), last.shape[-1])} or len(loss_mask) != len(tokens):
        raise ValueError(
            f"{path} contradicts itself: {len(tokens)} tokens, {len(loss_mask)} in loss_mask, hidden states "
            f"{sorted(shapes)}"
        )
    if not all(x.isfinite().all() for x in (*blocks, last)):
        raise ValueError(f"{path}: hidden states are not finite")
    return ForeignRow(tokens, loss_mask, blocks, last)


def name_blocks(rows: list[ForeignRow], target: eagle3.Target) -> tuple[list[str], str]:
    """The boundary names of the column blocks, and of the last hidden state."""
    blocks = [
        (
            row.tokens[:256],
            {**{f"block {n}": block[:256] for n, block in enumerate(row.blocks)}, "the last state": row.last[:256]},
        )
        for row in rows
    ]
    matches = eagle3.identify_blocks(blocks, target)
    for match in matches:
        print(f"  {match}")
    if any(match.similarity < eagle3.MATCH or match.shift for match in matches):
        raise ValueError("not converted: a block is no boundary of this target, or its rows are shifted")
    *names, teacher = [match.best for match in matches]
    return names, teacher


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("theirs", help="the folder that another trainer wrote")
    parser.add_argument("--target", required=True, help="the target's Hugging Face folder")
    parser.add_argument("--out", required=True, help="the folder of features to write")
    parser.add_argument("--layers", help="the boundaries that are expected, such as 2,15,27")
    args = parser.parse_args(argv)
    files = foreign_files(Path(args.theirs))
    if not files:
        raise ValueError(
            f"{args.theirs} holds no rows (looked for data_*.pt, data_*.ckpt, data_*.ckpt.gz, hs_*.safetensors, *.pt)"
        )
    first = [read_foreign(file) for file in files[:4]]
    dtype = str(first[0].last.dtype).removeprefix(
        "torch."
    )  # the comparison in theirs: rounding sends tokens to other experts
    target = eagle3.load_target(args.target, dtype)
    config = target.config
    if first[0].last.shape[1] != config.hidden_size:
        raise ValueError(
            f"these features are {first[0].last.shape[1]} wide, the target's hidden size is {config.hidden_size}: name "
            "the target that they were made with"
        )
    names, teacher = name_blocks(first, target)
    boundaries = [int(name.split(".")[1]) for name in names]
    layout = eagle3.FeatureLayout(tuple(boundaries), config.hidden_size, config.num_layers)
    if args.layers:
        stated = eagle3.FeatureLayout.parse(args.layers, config.hidden_size, config.num_layers)
        layout.require(stated, "what the columns are", "the one stated with --layers")
    bar = partial(tqdm, unit="row")
    rows = []
    for file in bar(files, desc="reading"):
        row = read_foreign(file)
        if len(row.blocks) != len(names) or row.last.shape[1] != config.hidden_size:
            raise ValueError(
                f"{file} holds {len(row.blocks)} blocks of {row.last.shape[1]}, {layout} means {len(names)} of "
                f"{config.hidden_size}"
            )
        rows.append(eagle3.Row(row.tokens, row.loss_mask, str(file)))
    folder = eagle3.FeatureFolder.create(args.out, layout, target, rows, teacher)
    missing = folder.missing()
    for index in bar(missing, desc="writing"):
        row = read_foreign(files[index])
        folder.write(index, rows[index], {**dict(zip(names, row.blocks)), teacher: row.last})
    print(
        f"{len(files)} rows: {layout}, teacher {teacher}; train with: train.py --features {args.out} "
        f"--target {args.target} --out HEAD"
    )
    return {"out": args.out, "rows": len(files), "written": len(missing), "layers": layout.flag, "teacher": teacher}


if __name__ == "__main__":
    eagle3.run_script("convert_features.py", lambda shard: main())
