"""``--rdrop-alpha``: the loss, its gradients and logs, and trainings with it."""

import json
import math
import re
import types

import pytest
import torch
from fairseq import metrics
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training import cross_entropy
from fairseq_deep.plugin.training.criterion import LabelSmoothedCrossEntropyCriterion
from fairseq_deep.plugin.training.rdrop import RDropLoss
from fairseq_deep.recipes.compare.systems import System, check
from tests.helpers.commands import EXACT, PACKAGE, losses, run, train_command
from tests.reference import naive_cross_entropy, naive_rdrop

WORDS, PAD = 11, 1


@pytest.fixture(params=[1, 3 * WORDS, 2**20], ids=["row by row", "three rows", "at once"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNKS, "cpu", request.param)


def scores_and_target(dtype=torch.float64):
    """Scores of two passes over 7 positions, two of them padding."""
    generator = torch.Generator().manual_seed(2)
    first, second = (2 * torch.randn(7, WORDS, generator=generator, dtype=torch.float64) for _ in range(2))
    target = torch.randint(4, WORDS, (7,), generator=generator)
    target[2] = target[6] = PAD
    return first.to(dtype), second.to(dtype), target


@pytest.mark.parametrize("smoothing, alpha", [(0.0, 1.0), (0.1, 5.0), (0.1, 0.0)])
def test_it_is_the_equation(smoothing, alpha, chunks):
    *passes, target = scores_and_target()
    naive, own = ([scores.clone().requires_grad_() for scores in passes] for _ in range(2))
    expected = naive_rdrop.summed(*naive, target, smoothing, PAD, alpha)
    found = RDropLoss.apply(torch.cat(own), torch.cat([target, target]), smoothing, PAD, alpha)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected[0] * 3, naive)
    torch.testing.assert_close(torch.autograd.grad(found[0] * 3, own), wanted, rtol=1e-11, atol=1e-12)
    assert not wanted[0][2].any()


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 4.0)], ids=str)
def test_in_lower_precision_only_scores_and_gradients_are_rounded(dtype, scale, chunks):
    *passes, target = scores_and_target(dtype)
    exact, own = ([scores.to(kind).requires_grad_() for scores in passes] for kind in (torch.float64, dtype))
    expected = naive_rdrop.summed(*exact, target, 0.1, PAD, 5.0)
    found = RDropLoss.apply(torch.cat(own), torch.cat([target, target]), 0.1, PAD, 5.0)
    assert {value.dtype for value in found} == {torch.float32}
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    pairs = zip(torch.autograd.grad(found[0] * scale, own), torch.autograd.grad(expected[0], exact))
    for gradient, right in pairs:
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double() / scale, right, rtol=bound, atol=bound)


class Model(torch.nn.Module):
    """A linear layer of features with dropout, whose masks are as fairseq's models draw them."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(1)
        self.decoder = type("Decoder", (FairseqDecoder,), {})(Dictionary())
        self.dropout, self.output = torch.nn.Dropout(dropout), torch.nn.Linear(6, WORDS, dtype=torch.float64)
        self.sizes = []

    def forward(self, features, kept=None):
        self.sizes.append((len(features), kept))
        return self.output(self.dropout(features)), None

    def get_targets(self, sample, net_output):
        return sample["target"]

    def get_normalized_probs(self, net_output, log_probs):
        return torch.log_softmax(net_output[0], -1)


def sample():
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(4, WORDS, (3, 5), generator=generator)
    target[0, 3:] = PAD
    features = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)
    return {"net_input": {"features": features, "kept": "as it is"}, "target": target, "ntokens": 13}


def criterion(alpha, **options):
    task = types.SimpleNamespace(target_dictionary=types.SimpleNamespace(pad=lambda: PAD))
    options = {"sentence_avg": False, "label_smoothing": 0.1, **options}
    return LabelSmoothedCrossEntropyCriterion(task, rdrop_alpha=alpha, **options)


def computed(model, alpha, **options):
    model.zero_grad()
    loss, size, logs = criterion(alpha, **options)(model, sample())
    loss.backward()
    return loss.detach(), size, logs, model.output.weight.grad.clone()


@pytest.mark.parametrize("options", [{}, {"sentence_avg": True}, {"ignore_prefix_size": 2}, {"report_accuracy": True}])
def test_without_dropout_it_is_twice_the_plain_loss(options):
    model = Model(0).train()
    loss, size, logs, grad = computed(model, 5.0, **options)
    plain, plain_size, plain_logs, plain_grad = computed(model, 0.0, **options)
    assert model.sizes == [(6, "as it is"), (3, "as it is")]
    torch.testing.assert_close((loss, grad), (2 * plain, 2 * plain_grad))
    assert size == plain_size and logs.pop("rdrop_kl") == 0
    torch.testing.assert_close(logs, {**plain_logs, "loss": 2 * plain_logs["loss"]})


def test_with_dropout_it_is_the_equation_of_two_masks():
    model = Model(0.3).train()
    torch.manual_seed(4)
    loss, _, logs, grad = computed(model, 5.0, ignore_prefix_size=1)
    batch = sample()
    batch["target"][:, :1] = PAD
    torch.manual_seed(4)
    scores = model(torch.cat([batch["net_input"]["features"]] * 2))[0].flatten(0, 1)
    expected = naive_rdrop.summed(scores[:15], scores[15:], batch["target"].flatten(), 0.1, PAD, 5.0)
    assert expected[2] > 0.1
    torch.testing.assert_close((loss, logs["rdrop_kl"]), (expected[0].detach(), expected[2].detach()))
    torch.testing.assert_close(logs["nll_loss"], expected[1].detach() / 2)
    torch.testing.assert_close(grad, torch.autograd.grad(expected[0], model.output.weight)[0])


def test_validation_has_the_ordinary_loss():
    model = Model(0.3).eval()
    loss, _, logs, _ = computed(model, 5.0)
    scores = model(**sample()["net_input"])[0].detach().flatten(0, 1)
    torch.testing.assert_close(loss, naive_cross_entropy.summed(scores, sample()["target"].flatten(), 0.1, PAD)[0])
    assert "rdrop_kl" not in logs and model.sizes[0][0] == 3


def test_what_is_logged_is_a_mean_per_token_in_bits():
    logs = [{"loss": 8.0, "nll_loss": 4.0, "ntokens": size, "sample_size": size, "rdrop_kl": kl}
            for size, kl in ((3, 2.0), (5, 4.0))]  # fmt: skip
    with metrics.aggregate() as found:
        LabelSmoothedCrossEntropyCriterion.reduce_metrics(logs)
    assert found["rdrop_kl"].avg == pytest.approx(6 / 8 / math.log(2))
    with metrics.aggregate() as found:
        LabelSmoothedCrossEntropyCriterion.reduce_metrics([{**each, "rdrop_kl": 0} for each in logs[:1]])
        assert "rdrop_kl" in found


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_rejected(alpha):
    with pytest.raises(UsageError, match="--rdrop-alpha must be a number of at least 0, not"):
        criterion(alpha)


def test_a_model_without_scores_is_rejected():
    model = Model(0.1).train()
    model.decoder.adaptive_softmax = print
    with pytest.raises(UsageError, match="--rdrop-alpha requires a model that returns scores: omit it"):
        criterion(1.0)(model, sample())


def with_rdrop(command, alpha="5"):
    command = list(command)
    command[command.index("--criterion") + 1] = "fused_label_smoothed_cross_entropy"
    return [*command, "--rdrop-alpha", alpha]


def entries(done, kind):
    return [json.loads(text) for text in re.findall(kind + r" \| (\{.*\})", done.stdout + done.stderr)]


@pytest.mark.parametrize("flags", [["--update-freq", "2"], ["--bf16"], ["--memory-efficient-fp16"]], ids=str)
def test_a_training_that_was_interrupted_goes_on_alike(flags, data, tmp_path):
    flags = [*flags, "--dropout", "0.2", "--disable-validation"]
    whole = run(*with_rdrop(train_command(data, tmp_path / "whole", *flags, "--max-update", "6")))
    start = losses(run(*with_rdrop(train_command(data, tmp_path / "parts", *flags, "--max-update", "3"))))
    rest = losses(run(*with_rdrop(train_command(data, tmp_path / "parts", *flags, "--max-update", "6"))))
    kept = {"rel": 0.02} if "--bf16" in flags else {"abs": 0}  # its checkpoints have weights in bf16
    assert {**start, **rest} == pytest.approx(losses(whole), **kept) and set(start) == {1, 2, 3}
    assert all(float(entry["rdrop_kl"]) > 0 for entry in entries(whole, "train_inner"))


@pytest.mark.parametrize("workers", [1, 2])
def test_without_dropout_it_trains_as_the_plain_criterion(workers, data, tmp_path):
    """Adam does not see a factor of all gradients."""
    flags = ["--max-update", "5", "--adam-eps", "1e-20", "--clip-norm", "0", "--no-save", *EXACT]
    flags += ["--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo"] if workers > 1 else []
    command = train_command(data, tmp_path, *flags)
    plain, found = (run(*words, processes=workers) for words in (command, with_rdrop(command)))
    for kind, name in (("train_inner", "nll_loss"), ("valid", "valid_loss")):
        expected = [float(entry[name]) for entry in entries(plain, kind)]
        assert expected and [float(entry[name]) for entry in entries(found, kind)] == pytest.approx(expected, abs=2e-3)
    assert losses(found) == pytest.approx({n: 2 * loss for n, loss in losses(plain).items()}, abs=4e-3)
    assert [entry["rdrop_kl"] for entry in entries(found, "train_inner")] == ["0"] * 5


def test_a_checkpoint_is_validated_by_fairseqs_own_command(data, tmp_path):
    run(*with_rdrop(train_command(data, tmp_path, "--max-update", "3", "--disable-validation")))
    words = [data, "--user-dir", PACKAGE, "--path", tmp_path / "checkpoint_last.pt", "--cpu", "--max-tokens", "400"]
    assert "rdrop_kl" not in run("fairseq-validate", *words).stdout


def test_a_system_of_a_comparison_may_have_it():
    shared = ["fairseq-train", "data", "--arch", "transformer_prenorm_2l2l_tiny", "--max-update", "100",
              "--optimizer", "adam", "--criterion", "fused_label_smoothed_cross_entropy"]  # fmt: skip
    check([System("x", "transformer_prenorm_2l2l_tiny", ["--rdrop-alpha", "1"])], shared, 0)
