"""``--criterion fused_label_smoothed_cross_entropy``, also with ``--rdrop-alpha``: losses, logs and gradients."""

import math
import types

import pytest
import torch
from fairseq import metrics
from fairseq.criterions import label_smoothed_cross_entropy as stock
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training import criterion as own
from fairseq_deep.plugin.training import cross_entropy
from fairseq_deep.plugin.training.rdrop import RDropLoss

WORDS, PAD = 11, 1
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LOW = pytest.mark.parametrize("dtype, scale", [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 4.0)],
                              ids=str)  # fmt: skip


@pytest.fixture(params=[1, 3 * WORDS, 2**20], ids=["row by row", "three rows", "at once"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNKS, "cpu", request.param)


class Decoder(FairseqDecoder):
    """Says how its scores become probabilities."""


class Model(torch.nn.Module):
    """Scores are a linear layer of features with dropout, whose masks are as fairseq's models draw them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.decoder, self.sizes = Decoder(Dictionary()), []
        self.dropout, self.output = torch.nn.Dropout(dropout), torch.nn.Linear(6, WORDS, dtype=torch.float64)

    def forward(self, features, kept=None):
        self.sizes.append((len(features), kept))
        return self.output(self.dropout(features)), None

    def get_targets(self, sample, net_output):
        return sample["target"]

    def get_normalized_probs(self, net_output, log_probs):
        scores = net_output[0]
        return torch.log_softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))


def sample(dtype=torch.float64):
    """Three sentences of five words, with padding on both sides."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(4, WORDS, (3, 5), generator=generator)
    target[0, 3:] = target[2, :1] = PAD
    features = 3 * torch.randn(3, 5, 6, generator=generator, dtype=torch.float64).to(dtype)
    net_input = {"features": features, "kept": "as it is"}
    return {"net_input": net_input, "target": target, "ntokens": int(target.ne(PAD).sum())}


def built(module, sentence_avg=False, label_smoothing=0.1, **options):
    task = types.SimpleNamespace(target_dictionary=types.SimpleNamespace(pad=lambda: PAD))
    return module.LabelSmoothedCrossEntropyCriterion(task, sentence_avg, label_smoothing, **options)


def computed(module, batch=None, model=None, reduce=True, scale=1.0, **options):
    """Loss, size, logs and gradients of features and weights."""
    batch, model = batch or sample(), model or Model()
    model.to(batch["net_input"]["features"].dtype).zero_grad()
    features = batch["net_input"]["features"].clone().requires_grad_()
    batch = {**batch, "net_input": {**batch["net_input"], "features": features}}
    loss, size, logs = built(module, **options)(model, batch, reduce=reduce)
    (loss.sum() * scale).backward()
    assert torch.equal(batch["target"], sample()["target"]), "it is the caller's"
    return loss.detach(), size, logs, [features.grad, model.output.weight.grad.clone(), model.output.bias.grad.clone()]


@pytest.mark.parametrize("options", [
    {}, {"label_smoothing": 0.0}, {"label_smoothing": 0.5}, {"sentence_avg": True}, {"ignore_prefix_size": 2},
    {"report_accuracy": True}, {"report_accuracy": True, "ignore_prefix_size": 1}, {"reduce": False}, {"scale": 128.0},
], ids=str)  # fmt: skip
def test_it_is_fairseqs(options, chunks):
    loss, size, logs, grads = computed(own, **options)
    expected = computed(stock, **options)
    assert size == expected[1] and logs.keys() == expected[2].keys()
    torch.testing.assert_close((loss, logs, grads), (expected[0], expected[2], expected[3]), **EXACT)


def test_the_gradient_is_written_where_the_scores_were():
    """Scores that somebody else needs are an error, not a wrong gradient."""
    target = torch.tensor([4, 5, PAD, 6])
    scores = torch.randn(4, WORDS, requires_grad=True) * 1
    scores.retain_grad()
    before = scores.detach().clone()
    loss, _ = own.SmoothedCrossEntropy.apply(scores, target, 0.1, PAD)
    assert torch.equal(scores.detach(), before)
    loss.backward(retain_graph=True)
    assert not torch.equal(scores.detach(), before) and not scores.detach()[2].any()
    torch.testing.assert_close(scores.grad, scores.detach())
    needed, _ = own.SmoothedCrossEntropy.apply(torch.tanh(torch.randn(4, WORDS, requires_grad=True)), target, 0.1, PAD)
    for again in (loss, needed):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()


@pytest.mark.parametrize("name", ["adaptive_softmax", "get_normalized_probs_scriptable"])
def test_a_model_that_returns_no_scores_has_fairseqs_criterion(name, monkeypatch):
    expected = computed(stock)
    changed = type("Changed", (FairseqDecoder,), {name: property(lambda self: print, lambda self, value: None)})
    monkeypatch.setitem(globals(), "Decoder", changed)
    monkeypatch.setattr(own.SmoothedCrossEntropy, "apply", None)
    torch.testing.assert_close(computed(own)[3], expected[3], rtol=0, atol=0)


def two_passes(dtype=torch.float64):
    """Scores of two passes over 7 positions, two of them padding."""
    generator = torch.Generator().manual_seed(2)
    first, second = (2 * torch.randn(7, WORDS, generator=generator, dtype=torch.float64) for _ in range(2))
    target = torch.randint(4, WORDS, (7,), generator=generator)
    target[2] = target[6] = PAD
    return first.to(dtype), second.to(dtype), target


def naive_rdrop(first, second, target, smoothing, alpha):
    """R-Drop (Liang et al., 2021, Eqs. 2 to 4; the divergence in both directions, halved), with fairseq's losses.

    The loss, the negative log likelihood of both passes, and the mean divergence, summed over positions.
    """
    p, q = (torch.log_softmax(scores, -1) for scores in (first, second))
    losses, likelihoods = zip(*(stock.label_smoothed_nll_loss(logs, target, smoothing, PAD) for logs in (p, q)))
    mean = ((p.exp() - q.exp()) * (p - q))[target != PAD].sum() / 2
    return sum(losses) + alpha * mean, sum(likelihoods), mean


@pytest.mark.parametrize("smoothing, alpha", [(0.0, 1.0), (0.1, 5.0), (0.1, 0.0)])
def test_rdrop_is_the_equation(smoothing, alpha, chunks):
    *passes, target = two_passes()
    naive, found = ([scores.clone().requires_grad_() for scores in passes] for _ in range(2))
    expected = naive_rdrop(*naive, target, smoothing, alpha)
    actual = RDropLoss.apply(torch.cat(found), torch.cat([target, target]), smoothing, PAD, alpha)
    torch.testing.assert_close(actual, expected, **EXACT)
    wanted = torch.autograd.grad(expected[0] * 3, naive)
    torch.testing.assert_close(torch.autograd.grad(actual[0] * 3, found), wanted, rtol=1e-11, atol=1e-12)
    assert not wanted[0][2].any()


@LOW
def test_only_scores_and_gradients_are_rounded(dtype, scale, chunks):
    """In half precision; for R-Drop and, with a factor of 0, for two plain losses."""
    *passes, target = two_passes(dtype)
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for alpha in (0.0, 5.0):
        exact, found = ([scores.to(kind).requires_grad_() for scores in passes] for kind in (torch.float64, dtype))
        expected = naive_rdrop(*exact, target, 0.1, alpha)
        both, targets = torch.cat(found), torch.cat([target, target])
        loss = RDropLoss.apply(both, targets, 0.1, PAD, alpha) if alpha else (
            own.SmoothedCrossEntropy.apply(both, targets, 0.1, PAD))  # fmt: skip
        assert {value.dtype for value in loss} == {torch.float32}
        torch.testing.assert_close(loss[0].double(), expected[0], rtol=1e-5, atol=1e-5)
        pairs = zip(torch.autograd.grad(loss[0] * scale, found), torch.autograd.grad(expected[0], exact))
        for one, right in pairs:
            assert one.dtype == dtype
            torch.testing.assert_close(one.double() / scale, right, rtol=bound, atol=bound * float(right.abs().max()))


@pytest.mark.parametrize("more", [{}, {"sentence_avg": True, "report_accuracy": True}], ids=str)
def test_rdrop_with_dropout_is_the_equation_of_two_masks(more):
    """A sentence counts once, and accuracy is that of the first pass."""
    model = Model(0.3).train()
    torch.manual_seed(4)
    loss, size, logs, grads = computed(own, model=model, rdrop_alpha=5.0, ignore_prefix_size=1, **more)
    assert model.sizes == [(6, "as it is")] and size == (3 if more else sample()["ntokens"])
    batch = sample()
    batch["target"][:, :1] = PAD
    torch.manual_seed(4)
    scores = model(torch.cat([batch["net_input"]["features"]] * 2))[0].flatten(0, 1)
    expected = naive_rdrop(scores[:15], scores[15:], batch["target"].flatten(), 0.1, 5.0)
    assert expected[2] > 0.1
    torch.testing.assert_close((loss, logs["rdrop_kl"]), (expected[0].detach(), expected[2].detach()))
    torch.testing.assert_close(logs["nll_loss"], expected[1].detach() / 2)
    words = batch["target"].flatten().ne(PAD)
    correct = scores[:15].argmax(1).eq(batch["target"].flatten())[words]
    assert not more or (logs["n_correct"], logs["total"]) == (int(correct.sum()), int(words.sum()))
    torch.testing.assert_close(grads[1], torch.autograd.grad(expected[0], model.output.weight)[0])


def test_validation_with_rdrop_has_the_ordinary_loss():
    model = Model(0.3).eval()
    loss, _, logs, _ = computed(own, model=model, rdrop_alpha=5.0)
    torch.testing.assert_close(loss, computed(stock, model=model)[0])
    assert "rdrop_kl" not in logs and model.sizes[0][0] == 3


def test_rdrop_logs_a_mean_per_token_in_bits():
    logs = [{"loss": 8.0, "nll_loss": 4.0, "ntokens": size, "sample_size": size, "rdrop_kl": kl}
            for size, kl in ((3, 2.0), (5, 4.0))]  # fmt: skip
    for entries, expected in ((logs, 6 / 8 / math.log(2)), ([{**logs[0], "rdrop_kl": 0}], 0)):
        with metrics.aggregate() as found:
            own.LabelSmoothedCrossEntropyCriterion.reduce_metrics(entries)
        assert found["rdrop_kl"].avg == pytest.approx(expected)


def test_rdrop_rejects_a_negative_weight_and_an_adaptive_softmax():
    for alpha in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="--rdrop-alpha must be a number of at least 0, not"):
            built(own, rdrop_alpha=alpha)
    model = Model(0.1).train()
    model.decoder.adaptive_softmax = print
    with pytest.raises(UsageError, match="--rdrop-alpha requires a model that returns scores: omit it"):
        computed(own, model=model, rdrop_alpha=1.0)
