"""What the tests of ``examples/claims`` share."""

import importlib
from pathlib import Path

CLAIMS = "fairseq_deep.recipes.claims"
ROOT = Path(__file__).resolve().parents[1]


def modules():
    """The modules of the command by name."""
    names = {name: name for name in ("definitions", "scales", "judge", "page", "speed", "fit")}
    yield {name: importlib.import_module(f"{CLAIMS}.{module}" if module[0] != "." else "fairseq_deep.recipes.children")
           for name, module in {**names, "claims": "driver", "children": ".children"}.items()}  # fmt: skip


def record(label, **seeds):
    """A trained system: figures of each seed by ``s1=...``."""
    found = {int(name[1:]): {"source_gain": 2.0, **figures} for name, figures in seeds.items()}
    return {"label": label, "done": list(found), "seeds": found, "failed": {}, "folders": {}}


def scored(label, *scores):
    return record(label, **{f"s{seed}": {"bleu": score, "valid_loss": 5.0} for seed, score in enumerate(scores, 1)})
