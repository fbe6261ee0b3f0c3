"""LayerDrop: plain stacks skip what fairseq skips, and DLCL gives the weight of a skipped layer to the entry below."""

import argparse

import pytest
import torch

from fairseq_deep.core.layers import LayerDrop
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training import check_training
from tests.helpers.models import fairseq_transformer, make_batch, tiny_flags

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
@pytest.mark.parametrize("options", [{}, {"dlcl_window": 2}, {"dlcl_normalize": True, "dlcl_weight_type": "vector"}],
                         ids="-".join)  # fmt: skip
def test_dlcl_with_skipped_layers_follows_its_definition(norm, options, build, dictionary, monkeypatch):
    """Against sums over lists in which the entry of a skipped layer is the one below, with and without gradients."""
    name = "transformer_dlcl_6l" if norm == "prenorm" else "transformer_dlcl_postnorm_6l"
    model = build(name, encoder_layerdrop=0.5, **options).double().train()
    aggregator, layers = model.encoder.aggregator, model.encoder.layers
    with torch.no_grad():
        aggregator.weight.uniform_(-1, 1)
    runs = [False, True, True, False, False, True]
    monkeypatch.setattr(LayerDrop, "forward", lambda self: list(runs))
    start = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)

    def combine(entries, row):
        read = torch.zeros(7, dtype=torch.bool)
        read[max(0, row + 1 - aggregator.window) : row + 1] = True
        weight = aggregator.weight[row].view(7, -1)
        if aggregator.normalize:
            weight = torch.softmax(weight.masked_fill(~read.unsqueeze(1), float("-inf")), dim=0)
        x = sum(weight[k] * entries[k] for k in range(row + 1) if read[k])
        return x if norm == "prenorm" or row == 0 else aggregator.layer_norms[row - 1](x)

    def naive():
        entries = [start]
        for number, layer in enumerate(layers):
            x = combine(entries, number)
            entry = entries[-1]
            if runs[number]:
                entry = layer(x, None)
                if norm == "prenorm":
                    entry = aggregator.layer_norms[number](entry)
            entries.append(entry)
        return combine(entries, 6)

    def ours():
        return aggregator.finish(model.encoder.run_layers(start, None, False)[1])

    weights = [start, *aggregator.parameters(), *layers.parameters()]
    results = []
    for forward in (ours, naive):
        output = forward()
        gradients = torch.autograd.grad(output.square().sum(), weights, allow_unused=True)
        results.append((output, [torch.zeros(()) if g is None else g for g in gradients]))
    torch.testing.assert_close(results[0], results[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(), results[1][0])


def test_all_layers_run_in_evaluation(build, dictionary):
    batch = make_batch(dictionary)
    model, whole = (build("transformer_dlcl_6l", **flags) for flags in (RATES, {}))
    whole.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(*batch)[0], whole.eval()(*batch)[0])
    assert not torch.equal(measure(model, batch, 0)[0], measure(whole, batch, 0)[0])


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_rate_that_is_no_probability_is_rejected(side, rate):
    flags = {"ddp_backend": "pytorch_ddp", f"{side}_layerdrop": rate}
    with pytest.raises(UsageError, match=rf"--{side}-layerdrop {rate} must be in \[0, 1\)"):
        check_training(argparse.Namespace(**flags))
