"""What the tests of ``examples/claims`` share."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules():
    """The modules of the command by name; they find each other by their folders."""
    folders = [str(ROOT / "examples" / name) for name in ("claims", "compare", "common")]
    sys.path[:0] = folders
    names = ("definitions", "scales", "judge", "page", "speed", "fit", "children", "claims")
    yield {name: importlib.import_module(name) for name in names}
    for folder in folders:
        sys.path.remove(folder)


def record(label, **seeds):
    """A trained system: figures of each seed by ``s1=...``."""
    found = {int(name[1:]): {"source_gain": 2.0, **figures} for name, figures in seeds.items()}
    return {"label": label, "done": list(found), "seeds": found, "failed": {}, "folders": {}}


def scored(label, *scores):
    return record(label, **{f"s{seed}": {"bleu": score, "valid_loss": 5.0} for seed, score in enumerate(scores, 1)})
