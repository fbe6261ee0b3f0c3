"""Models to export."""

import json

import pytest

from tests.helpers.commands import run, train_command
from tests.helpers.exports import write_model
from tests.helpers.models import make_dictionary


@pytest.fixture
def make(tmp_path):
    """make(name, **flags): a model with random norms and biases, and the folder with its parts.

    The source has 30 entries and the target 38; "swap": the other way round; "one": both have the target's.
    """

    def make(name, swap=False, one=False, **flags):
        source, target = make_dictionary(30), make_dictionary(38)
        both = (target, source) if swap else (source, target)
        both = (target, target) if one or "share_all_embeddings" in flags else both
        return write_model(tmp_path, name, both, **flags), tmp_path

    return make


@pytest.fixture(scope="session")
def plain(trained, tmp_path_factory):
    """A recipe's folder as `trained`, of a model that all formats support."""
    exp = tmp_path_factory.mktemp("plain")
    for name in ("data-bin", "text"):
        (exp / name).symlink_to(trained / name)
    flags = ["--source-lang", "en", "--target-lang", "de", "--max-source-positions", "24", "--max-update", "240"]
    flags += ["--no-epoch-checkpoints", "--disable-validation", "--lr", "5e-3"]
    run(*train_command(exp / "data-bin", exp / "checkpoints", *flags, arch="transformer_prenorm_2l2l_tiny"))
    (exp / "RESULT.json").write_text(json.dumps({"beam": 3, "lenpen": 0.8}))
    return exp
