"""The counts that ``tests/benchmarks/test_device_model.py`` holds against, by line of the source."""

import json
from pathlib import Path

import torch

from . import decoding, model, training
from .count import by_line
from .report import sync_lines

PATH = Path(__file__).parents[2] / "tests" / "data" / "device_counts.json"
SMALL = "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 64 --encoder-attention-heads 2".split()
SYSTEMS = {  # name: its flags; counts depend on depth alone, and not on width
    "prenorm": ("transformer_prenorm_6l", ()),
    "dlcl": ("transformer_dlcl_6l", ()),
    "lstm": ("transformer_lstm_6l", ()),
    "matt": ("transformer_matt_6l", ()),
    "average": ("transformer_prenorm_6l", ("--decoder-attn", "average")),
}
STEPS = ("training", "decoding")


def count(name, step):
    """The counter of a small model of that *name*, in fp16."""
    arch, flags = SYSTEMS[name]
    small = [*SMALL, "--decoder-attention-heads", "2"]
    args, dictionary = model.read_flags(arch, [*small, *flags]), model.make_dictionary(1000)
    built = model.build(args, dictionary, torch.float16)
    if step == "training":
        return training.count_step(built, dictionary, tokens=64, length=16)
    return decoding.count_step(built, dictionary, sentences=3, beam=4, position=5, length=9)


def lines(counter):
    """[file, function, text, kernels] of each line, in the order of files."""
    return sorted([*where, kernels] for where, kernels, *_ in by_line(counter.kernels))


def waits(counter):
    """[phase, file, text, how often] of each line that waits for the device; numbers of lines are left out."""
    return sorted([phase, line.rsplit(":", 1)[0], text, count] for phase, line, text, count in sync_lines(counter))


def write():
    """Write the counts of today, one line of the file for each of the source."""
    pinned = {"torch": torch.__version__.split("+")[0]}
    for name in SYSTEMS:
        for step in STEPS:
            counter = count(name, step)
            pinned[f"{name} {step}"] = {"lines": lines(counter), "waits": waits(counter)}
    PATH.write_text(_as_rows(pinned), encoding="utf-8")
    print(f"{PATH}: torch {pinned['torch']}, {len(pinned) - 1} counts")
    return 0


def _as_rows(pinned):
    parts = [f'"torch": {json.dumps(pinned["torch"])}']
    for name, counts in pinned.items():
        if name != "torch":
            rows = {kind: ",\n".join(map(json.dumps, values)) for kind, values in counts.items()}
            parts.append(f'"{name}": {{' + ", ".join(f'"{kind}": [\n{text}\n]' for kind, text in rows.items()) + "}")
    return "{" + ",\n".join(parts) + "}\n"


def read():
    return json.loads(PATH.read_text(encoding="utf-8"))
