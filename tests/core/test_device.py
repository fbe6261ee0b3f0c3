"""Every method on a device, in training, evaluation and decoding: nothing waits for it; numbers of kernels.

Tensors on ``meta`` stand for a GPU's. They have no values: `Kernels` counts conditions on them, and any other read or
mix of devices fails. ``benchmarks/gpu_check.py`` compares values on a real device. An operation of ATen counts as one
kernel, unless it is a view or a condition. Triton's kernels, which replace some of them on a GPU, do not run here.
"""

import pytest
import torch

from fairseq_deep.core.attention import DECODER_ATTENTIONS, multihead
from fairseq_deep.core.diagnostics import depth_record
from fairseq_deep.core.search import BeamSearch, SearchOptions
from tests.helpers.methods import METHODS, OPTIONS
from tests.helpers.models import PRENORM, make_batch
from tests.helpers.tensors import Kernels

# all methods; options at night
CASES = [*METHODS, *(pytest.param(case, marks=[pytest.mark.nightly]) for case in OPTIONS)]
# kernels of a forward and a backward pass, and of four steps of decoding after the encoder
LAUNCHES = {"layer_agg-residual": (454, 486), "layer_agg-dlcl": (512, 566), "layer_agg-lstm": (516, 549),
            "decoder_attn-merged": (390, 359), "decoder_attn-average": (428, 399)}  # fmt: skip
counts = torch.__version__.split("+")[0] == "2.13.0"  # another torch has other operations
MEANT = "if the change is meant, put the new count into LAUNCHES"
DROPOUTS = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}


@pytest.fixture
def make(build):
    """make(case): a model in fp16 on the device."""

    def make(case):
        name, flags = {**METHODS, **OPTIONS}[case]
        return build(name, **DROPOUTS, **flags).half().to("meta")

    return make


@pytest.fixture
def batch(dictionary):
    return [tensor.to("meta") for tensor in make_batch(dictionary)]


@pytest.mark.parametrize("case", CASES)
def test_training_asks_for_no_values_and_copies_nothing(case, make, batch):
    model, (source, lengths, target) = make(case).train(), batch
    aligns = DECODER_ATTENTIONS.get(model.decoder.stack.attention.name).full_context
    with Kernels() as before:
        for model.decoder.pads_right in (False, True):
            model(source, lengths, target)
        encoded = model.encoder(source, lengths, return_all_hiddens=True)
        model.decoder(target, encoded, full_context_alignment=aligns)
    with Kernels() as found:
        output = model(source, lengths, target)[0]
        assert output.is_meta and output.dtype == torch.float16
        output.float().square().mean().backward()
    assert before.asked == found.asked == found.copied == 0
    if counts and case in LAUNCHES:
        assert len(found.names) == LAUNCHES[case][0], MEANT
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.is_meta, key
        assert parameter.grad.dtype == parameter.dtype, key


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoding_asks_once_for_each_new_order(case, make, batch, monkeypatch):
    """Steps of two hypotheses per sentence, with attention that is fused as on a GPU; weights are asked for at last."""
    monkeypatch.setattr(multihead, "fuses_steps", lambda q: True)
    model, (source, lengths, target), state = make(case).eval(), batch, {}
    target = target.repeat_interleave(2, 0)[:, :4]
    with Kernels() as found:
        order = torch.arange(len(target), device="meta")
        encoder_out = model.encoder.reorder_encoder_out(model.encoder(source, lengths), order.div(2).long())
        for step in range(1, 5):
            if step > 1:
                order = order.clone()
                model.decoder.reorder_incremental_state_scripting(state, order)
                encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            model.decoder.need_attn = step == 4
            output, extra = model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)
            assert output.is_meta and output.dtype == torch.float16
    assert extra["attn"][0] is None or extra["attn"][0].is_meta
    assert found.asked == 4
    if counts and case in LAUNCHES:
        assert len(found.names) == LAUNCHES[case][1], MEANT


@torch.no_grad()
def test_a_search_waits_for_the_candidates_of_each_step(build, dictionary, batch, monkeypatch):
    """Whose values are made up: sentences end in the last of seven steps."""
    model, read = build(PRENORM).eval().to("meta"), []
    model.make_generation_fast_(need_attn=False)

    def cpu(x):
        read.append(x)
        return torch.full(x.shape, dictionary.eos() if len(read) > 3 * 6 else 0, dtype=x.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    with Kernels() as found:
        hypotheses = BeamSearch([model], SearchOptions(beam=3, max_len_b=9))(batch[0])
    assert [len(sentence) for sentence in hypotheses] == [3, 3, 3]
    assert len(read) == 3 * 7
    assert found.asked == 6 + 9, "one question for each order; the scores of hypotheses are on the CPU"


@pytest.mark.parametrize("case", METHODS)
def test_a_record_of_depth_is_one_transfer(case, build, monkeypatch):
    name, flags = METHODS[case]
    model, read, tolist = build(name, **flags), [], torch.Tensor.tolist
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x) or tolist(x))
    with Kernels() as found:
        depth_record(model)
    assert len(read) == 1 and found.asked == 0


def test_what_waits_for_the_device_is_noted_or_fails():
    x, y = torch.ones(2, 3, device="meta"), torch.ones(3)
    with Kernels() as found:
        assert bool(x.any()) and torch.equal(x, x) and y.to("meta").is_meta and x.copy_(y) is x
        assert (found.asked, found.copied) == (2, 2)
        for wrong in (lambda: x + y, lambda: x @ y, lambda: x.tolist(), lambda: x.cpu(), lambda: x[x > 0]):
            with pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
                wrong()
