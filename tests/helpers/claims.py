"""What the tests of ``examples/claims`` share."""


def record(label, **seeds):
    """A trained system: figures of each seed by ``s1=...``."""
    found = {int(name[1:]): {"source_gain": 2.0, **figures} for name, figures in seeds.items()}
    return {"label": label, "done": list(found), "seeds": found, "failed": {}, "folders": {}}


def scored(label, *scores):
    return record(label, **{f"s{seed}": {"bleu": score, "valid_loss": 5.0} for seed, score in enumerate(scores, 1)})
