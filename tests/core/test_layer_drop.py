"""LayerDrop: plain stacks skip what fairseq skips, and DLCL gives the weight of a skipped layer to the entry below."""

import pytest
import torch

from fairseq_deep.core.layers import LayerContext, LayerDrop
from tests.helpers.models import fairseq_transformer, make_batch, tiny_flags
from tests.helpers.tensors import assert_same, shake
from tests.reference.naive_aggregators import combine
from tests.reference.naive_parts import norm as function

RATES = {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}


def measure(model, batch, seed):
    """Output and gradients of a training step whose skipped layers *seed* draws."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model.train()(*batch)[0]
    (output * torch.linspace(-1, 1, output.size(-1))).sum().backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_plain_stack_and_dlcl_of_the_newest_entry_skip_the_layers_that_fairseq_skips(seed, build, dictionary):
    flags = {**tiny_flags("transformer_prenorm_6l"), **RATES, "share_all_embeddings": True}
    theirs = fairseq_transformer(dictionary, "prenorm", **flags)
    batch = make_batch(dictionary, (5, 5, 5), (6, 6, 6))
    expected, gradients = measure(theirs, batch, seed)
    skipped = sum(gradients[f"encoder.layers.{number}.fc1.weight"] is None for number in range(6))
    assert 0 < skipped < 6
    for choice in ({}, {"layer_agg": "dlcl", "dlcl_init": "last", "dlcl_no_norm": True}):
        model = build("transformer_prenorm_6l", **flags, **choice)
        model.load_state_dict(theirs.state_dict(), strict=not choice)
        output, found = measure(model, batch, seed)
        torch.testing.assert_close(output, expected)
        for name in gradients.keys() & found.keys():  # fairseq's encoder layers carry weights that no one uses
            torch.testing.assert_close(found[name], gradients[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"normalize": True, "weight_type": "vector"}], ids="-".join)
def test_dlcl_with_skipped_layers_follows_its_definition(norm, options, build, monkeypatch):
    """The entry of a skipped layer is the one below, after its norm; with and without gradients."""
    name = "transformer_dlcl_6l" if norm == "prenorm" else "transformer_dlcl_postnorm_6l"
    flags = {f"dlcl_{option}": value for option, value in options.items()}
    encoder = build(name, encoder_layerdrop=0.5, **flags).double().train().encoder
    aggregator, layers = shake(encoder.aggregator), encoder.layers
    runs = [False, True, True, False, False, True]
    monkeypatch.setattr(LayerDrop, "forward", lambda self: list(runs))
    start = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    read = {"window": options.get("window"), "normalize": options.get("normalize", False)}
    plain, own = ([function(each) for each in (None, *norms)] for norms in ([None] * 6, aggregator.layer_norms))
    # in pre-norm, norms are applied to entries once, where these arise
    above, below = (plain, own) if norm == "prenorm" else (own, plain)

    def naive():
        entries, given = [start], (aggregator.weight.view(7, 7, -1), above, norm == "prenorm")
        for number, (layer, runs_now) in enumerate(zip(layers, runs), start=1):
            entry = layer(combine(entries, *given, **read), LayerContext())[0] if runs_now else entries[-1]
            entries.append(below[number](entry) if runs_now else entry)
        return combine(entries, *given, **read)

    def ours():
        return aggregator.finish(encoder.run_layers(start, LayerContext())[1])

    expected = naive()
    assert_same(ours(), expected, [start, *aggregator.parameters(), *layers.parameters()], unused=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(), expected)
