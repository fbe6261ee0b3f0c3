"""A model that all formats support."""

import json

import pytest

from tests.helpers.commands import run, train_command


@pytest.fixture(scope="session")
def plain(trained, tmp_path_factory):
    """A recipe's folder as `trained`, of a plain model."""
    exp = tmp_path_factory.mktemp("plain")
    for name in ("data-bin", "text"):
        (exp / name).symlink_to(trained / name)
    flags = ["--source-lang", "en", "--target-lang", "de", "--max-source-positions", "24", "--max-update", "240"]
    flags += ["--no-epoch-checkpoints", "--disable-validation", "--lr", "5e-3"]
    run(*train_command(exp / "data-bin", exp / "checkpoints", *flags, arch="transformer_prenorm_2l2l_tiny"))
    (exp / "RESULT.json").write_text(json.dumps({"beam": 3, "lenpen": 0.8}))
    return exp
