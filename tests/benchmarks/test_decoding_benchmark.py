"""benchmarks/decoding.py: the depths of both stacks, and the table."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decoding as benchmark  # noqa: E402

SIZES = "--dim 64 --vocabulary 60 --sentences 3 --length 5 --beam 2 --rounds 1".split()


@pytest.mark.parametrize("flags, depths", [
    ([], (6, 6)), (["--layers", "2"], (2, 2)), (["--layers", "2", "--encoder-layers", "4"], (4, 2)),
    (["--encoder-layers", "3", "--decoder-layers", "1"], (3, 1)),
])  # fmt: skip
@pytest.mark.parametrize("system", ["stock", "ours", "merged", "prenorm", "dlcl"])
def test_each_stack_has_its_depth(system, flags, depths):
    options = benchmark.read_arguments([*SIZES, *flags])
    dictionary = benchmark.make_dictionary(options.vocabulary)
    stock, built = benchmark.build_stock(options, dictionary)
    model = benchmark.build(system, stock, built, dictionary)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == depths
    if system in ("prenorm", "dlcl"):
        assert model.encoder.layers[0].normalize_before
        assert type(model.encoder.aggregator).__name__ == {"prenorm": "Residual", "dlcl": "Dlcl"}[system]


def test_the_table_of_a_deep_encoder(capsys):
    benchmark.main([*SIZES, "--encoder-layers", "3", "--decoder-layers", "1", "--systems", "stock", "ours", "dlcl"])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row for row in table if row and row[0] in ("stock", "ours", "dlcl")}
    assert len(rows) == 3 and all(float(row[1]) > 0 for row in rows.values())
    assert rows["ours"][-1] == "100.0%", "stock and ours have the same weights, and the same hypotheses"
