"""``--criterion fused_label_smoothed_cross_entropy``: losses, logs and gradients are fairseq's."""

import types

import pytest
import torch
from fairseq.criterions import label_smoothed_cross_entropy as stock
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder

from fairseq_deep.plugin.training import criterion as own
from fairseq_deep.plugin.training import cross_entropy
from tests.reference import naive_cross_entropy

WORDS = 11


@pytest.fixture(params=[1, 3 * WORDS, 2**20], ids=["row by row", "three rows", "at once"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNKS, "cpu", request.param)


class Decoder(FairseqDecoder):
    """Says how its scores become probabilities."""


class Model(torch.nn.Module):
    """Scores are a linear layer of features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.decoder = Decoder(Dictionary())
        self.output = torch.nn.Linear(6, WORDS, dtype=torch.float64)

    def forward(self, features):
        return self.output(features), None

    def get_targets(self, sample, net_output):
        return sample["target"]

    def get_normalized_probs(self, net_output, log_probs):
        scores = net_output[0]
        return torch.log_softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))


def sample(dtype=torch.float64):
    """Three sentences of five words, with padding on both sides."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(4, WORDS, (3, 5), generator=generator)
    target[0, 3:] = target[2, :1] = 1
    features = 3 * torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)
    return {"net_input": {"features": features.to(dtype)}, "target": target, "ntokens": int(target.ne(1).sum())}


def built(module, sentence_avg=False, smoothing=0.1, **options):
    task = types.SimpleNamespace(target_dictionary=types.SimpleNamespace(pad=lambda: 1))
    return module.LabelSmoothedCrossEntropyCriterion(task, sentence_avg, smoothing, **options)


def computed(module, batch, reduce=True, dtype=torch.float64, scale=1.0, **options):
    """Loss, size, logs and gradients of features and weights."""
    model = Model().to(dtype)
    features = batch["net_input"]["features"].clone().requires_grad_()
    batch = {**batch, "net_input": {"features": features}}
    loss, size, logs = built(module, **options)(model, batch, reduce=reduce)
    (loss.sum() * scale).backward()
    return loss, size, logs, [features.grad, model.output.weight.grad, model.output.bias.grad]


@pytest.mark.parametrize("options", [
    {}, {"smoothing": 0.0}, {"sentence_avg": True}, {"ignore_prefix_size": 2}, {"report_accuracy": True},
    {"report_accuracy": True, "ignore_prefix_size": 1}, {"reduce": False}, {"scale": 128.0},
], ids=str)  # fmt: skip
def test_it_is_fairseqs(options, chunks):
    loss, size, logs, grads = computed(own, sample(), **options)
    expected = computed(stock, sample(), **options)
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=1e-12)
    assert size == expected[1] and logs.keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(logs[name], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_it_is_the_equation(smoothing, chunks):
    batch = sample()
    scores = Model()(**batch["net_input"])[0].detach().flatten(0, 1)
    one, two = (scores.clone().requires_grad_() for _ in range(2))
    expected = naive_cross_entropy.summed(one, batch["target"].flatten(), smoothing, padding=1)
    found = own.SmoothedCrossEntropy.apply(two * 1, batch["target"].flatten(), smoothing, 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(loss, of)[0] for loss, of in ((found[0], two), (expected[0], one))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 4.0)], ids=str)
def test_it_is_no_less_exact_than_fairseqs(dtype, scale, chunks):
    """In half precision only the scores and their gradient are."""
    exact = computed(own, sample())
    found, other = (computed(module, sample(dtype), dtype=dtype, scale=scale) for module in (own, stock))
    assert found[0].dtype == other[0].dtype == torch.float32
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(found[0], other[0], rtol=1e-6, atol=1e-6)
    for one, two, right in zip(found[3], other[3], exact[3]):
        assert one.dtype == two.dtype == dtype
        torch.testing.assert_close(one.double() / scale, right, rtol=bound, atol=bound * float(right.abs().max()))


def test_the_gradient_is_where_the_scores_were():
    scores = torch.randn(4, WORDS, requires_grad=True) * 1
    target = torch.tensor([4, 5, 1, 6])
    scores.retain_grad()
    loss, _ = own.SmoothedCrossEntropy.apply(scores, target, 0.1, 1)
    before = scores.detach().clone()
    assert torch.equal(scores.detach(), before)
    loss.backward(retain_graph=True)
    assert not torch.equal(scores.detach(), before) and not scores.detach()[2].any()
    torch.testing.assert_close(scores.grad, scores.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scores_that_somebody_needs_are_an_error_not_a_wrong_gradient():
    features = torch.randn(4, WORDS, requires_grad=True)
    loss, _ = own.SmoothedCrossEntropy.apply(torch.tanh(features), torch.tensor([4, 5, 1, 6]), 0.1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["adaptive_softmax", "get_normalized_probs_scriptable"])
def test_a_model_that_returns_no_scores_is_left_to_fairseqs(name, monkeypatch):
    expected = computed(stock, sample())
    changed = type("Changed", (FairseqDecoder,), {name: property(lambda self: print, lambda self, value: None)})
    monkeypatch.setitem(globals(), "Decoder", changed)
    monkeypatch.setattr(own.SmoothedCrossEntropy, "apply", None)
    torch.testing.assert_close(computed(own, sample())[3], expected[3], rtol=0, atol=0)
