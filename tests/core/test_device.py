"""Every method on a CUDA device that is not there (``tests/helpers/device.py``), in training, evaluation and decoding.

What a model computes stays on the device and in the model's type, has the values that it has on the CPU, and the host
waits for nothing. Backward passes, which need a real device, run on tensors without values. The numbers of kernels are
those that are meant: an operation of ATen that is no view and no question of the host counts as one; Triton's kernels,
which replace some of them on a GPU, do not run here.
"""

import contextlib
import copy
import math

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.diagnostics import depth_record
from fairseq_deep.plugin.generator import Generator
from tests.helpers.device import AVAILABLE, AbsentCuda, tensors_in
from tests.helpers.methods import METHODS, OPTIONS
from tests.helpers.models import PRENORM, make_batch
from tests.helpers.tensors import Kernels

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no modes that stand for a device")

# where the host waits in a step of decoding; in a forward pass it never does
DECODING_WAITS = {"beam_reorder._ask", "beam_reorder.hypotheses_per_sentence"}

# all methods; options at night
CASES = [*METHODS, *(pytest.param(case, marks=[pytest.mark.nightly]) for case in OPTIONS)]
# kernels of a forward and a backward pass, and of four steps of decoding after the encoder
LAUNCHES = {"layer_agg-residual": (454, 524), "layer_agg-dlcl": (512, 604), "layer_agg-lstm": (516, 587),
            "decoder_attn-merged": (390, 381), "decoder_attn-average": (428, 421)}  # fmt: skip
counts = torch.__version__.split("+")[0] == "2.13.0"  # another torch has other operations
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "autocast": torch.bfloat16}
DROPOUTS = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}


def decode(model, source, lengths, target, orders):
    """Logits of each step: two hypotheses a sentence, in new *orders*; alignments are asked for at the end."""
    orders = dict(orders)
    encoder_out = model.encoder.reorder_encoder_out(model.encoder(source, lengths), orders.pop(0))
    state, logits = {}, []
    model.decoder.need_attn = False
    for step in range(1, target.size(1) + 1):
        if step in orders:
            model.decoder.reorder_incremental_state_scripting(state, orders[step])
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, orders[step])
            target = target.index_select(0, orders[step])
        model.decoder.need_attn = step == target.size(1)
        output, extra = model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)
        logits.append(output[:, -1])
    return logits, (extra, encoder_out, state)


def make_orders():
    """Orders by step: within sentences; a sentence is gone; a sentence has lost a hypothesis to another."""
    orders = {0: [0, 0, 1, 1, 2, 2], 2: [1, 0, 2, 2, 4, 5], 3: [2, 3, 4, 5], 4: [0, 3, 2, 3]}
    return {step: torch.tensor(order) for step, order in orders.items()}


def assert_near(got, exact, precision):
    assert got.isfinite().all()
    assert (got.float() - exact).abs().mean() < (1e-4 if precision == "fp32" else 0.1) * exact.std()


def tensors_of(device, what):
    """The values of all tensors in *what*, which have to be on *device*."""
    return [device.give(tensor) for tensor in tensors_in(what)]


def waits(device, but=None):
    """The functions that have made the host wait since the last call, *but* for those that did so by one operation."""
    found = {function for function, operation in (name.split(": ") for name in device.waits) if operation != but}
    device.waits.clear()
    return found


REFUSED = [
    ("on the CPU and on the GPU", lambda x: x + torch.ones(3)),
    ("on the CPU and on the GPU", lambda x: torch.cat([x, torch.ones(1, 3)])),
    ("mm of", lambda x: x @ x.t().half()),
    ("native_layer_norm of", lambda x: torch.nn.functional.layer_norm(x.bfloat16(), [3], x[0], x[0])),
]
WAITS = [
    lambda x: bool(x.any()), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: x[x > 0],
    lambda x: torch.equal(x, x), lambda x: torch.tensor([1.0]).to(x.device), lambda x: x.unique(),
]  # fmt: skip


@torch.no_grad()
def test_the_imitated_device_refuses_what_a_gpu_refuses_and_notes_what_the_host_waits_for():
    for problem, operation in REFUSED:
        device = AbsentCuda()
        with device, pytest.raises(AssertionError, match=problem):
            operation(device.take(torch.ones(2, 3)))
    for ask in WAITS:
        device = AbsentCuda()
        with device:
            ask(device.take(torch.ones(2, 3)))
        assert sum(device.waits.values()) == 1


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_method_on_the_device(case, build, dictionary):
    """In fp32, fp16 and with autocast; the options of a method without fp32."""
    name, flags = {**METHODS, **OPTIONS}[case]
    exact = build(name, **DROPOUTS, **flags).eval()
    batch, prefix = make_batch(dictionary), make_batch(dictionary, target_lengths=(4,) * 6)[2]
    expected = exact(*batch)[0], decode(exact, *batch[:2], prefix, make_orders())[0]
    for precision in [*PRECISIONS][case not in METHODS :]:
        launched = assert_runs_on_the_device(exact, precision, batch, prefix, expected, dictionary.pad())
        if counts and precision == "fp16" and case in LAUNCHES:
            assert launched == LAUNCHES[case][1], "if the change is meant, put the new count into LAUNCHES"


def assert_runs_on_the_device(exact, precision, batch, prefix, wanted, pad):
    device, dtype, orders, (expected, steps) = AbsentCuda(), PRECISIONS[precision], make_orders(), wanted
    left = torch.cat([torch.full_like(batch[2][:, :1], pad), batch[2][:, :3]], dim=1)
    model = copy.deepcopy(exact) if precision == "autocast" else copy.deepcopy(exact).to(dtype)
    with device, device.autocast(dtype) if precision == "autocast" else contextlib.nullcontext():
        device.take(model)
        source, lengths, target, prefix, left = map(device.take, (*batch, prefix, left))
        orders = {step: device.take(order) for step, order in orders.items()}

        output, extra = model(source, lengths, target)
        # positions and masks are copied to the device once
        assert not waits(device, but="copy")
        assert output.dtype == dtype
        words = batch[2].ne(pad)  # what positions with padding give is of no use, and may differ
        assert_near(device.give(output)[words], expected[words], precision)
        assert len(tensors_of(device, extra)) > 2
        kept = [tensor.dtype for tensor in (extra["inner_states"][-1], extra["attn"][0]) if tensor is not None]
        assert precision == "autocast" or {*kept} == {dtype}

        model.train()
        assert all(values.isfinite().all() for values in tensors_of(device, model(source, lengths, left)))
        assert not waits(device)

        model.eval()
        with Kernels() as found:
            got, kept = decode(model, source, lengths, prefix, orders)
        assert waits(device) <= DECODING_WAITS
        for logits, want in zip(got, steps):
            assert logits.dtype == dtype
            assert_near(device.give(logits), want, precision)
        assert len(tensors_of(device, kept)) > 2
    return len(found.names)


@pytest.mark.parametrize("flags", [METHODS[f"decoder_attn-{name}"][1] for name in DECODER_ATTENTIONS.names()]
                         + [{"relative_positions": 2}, {"decoder_memory": "transparent"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [SequenceGenerator, Generator])
@torch.no_grad()
def test_beam_search_finds_on_the_device_what_it_finds_on_the_cpu(flags, kind, build, dictionary):
    """fairseq's and ours; on the CPU, both find the same."""
    model, device = build(PRENORM, **flags).eval(), AbsentCuda()
    model.make_generation_fast_(need_attn=False)
    source, lengths, _ = make_batch(dictionary)

    def translate(model, source, lengths):
        generator = kind([model], dictionary, beam_size=3, max_len_a=0, max_len_b=6, min_len=2)
        found = generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
        return [[(h["tokens"].tolist(), float(h["score"])) for h in sentence] for sentence in found]

    expected = translate(model, source, lengths)
    with device:
        source, lengths = device.take(source), device.take(lengths)
        found = translate(device.take(copy.deepcopy(model)), source, lengths)
        rough = translate(device.take(model.half()), source, lengths)
    assert all(math.isfinite(score) for sentence in rough for _, score in sentence)
    for got, want in zip(found, expected):
        assert [words for words, _ in got] == [words for words, _ in want]
        assert [score for _, score in got] == pytest.approx([score for _, score in want], abs=1e-4)


@pytest.mark.parametrize("case", METHODS)
@torch.no_grad()
def test_a_record_of_depth_is_one_transfer(case, build):
    name, flags = METHODS[case]
    model, device = build(name, **flags), AbsentCuda()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = depth_record(model)
    with device:
        gradients = [device.take(parameter.grad) for parameter in model.parameters()]
        for parameter, gradient in zip(device.take(model).parameters(), gradients):
            parameter.grad = gradient
        assert depth_record(model) == pytest.approx(expected)
    assert device.waits == {"record.depth_record: copy": 1}


@pytest.mark.parametrize("case", CASES)
def test_backward_asks_for_no_values(case, build, dictionary):
    name, flags = {**METHODS, **OPTIONS}[case]
    model = build(name, **DROPOUTS, **flags).train().half().to("meta")
    source, lengths, target = (tensor.to("meta") for tensor in make_batch(dictionary))
    aligns = DECODER_ATTENTIONS.get(flags.get("decoder_attn", "self")).full_context
    with Kernels() as before:
        for model.decoder.pads_right in (False, True):
            model(source, lengths, target)
        encoded = model.encoder(source, lengths, return_all_hiddens=True)
        model.decoder(target, encoded, full_context_alignment=aligns)
    with Kernels() as found:
        model(source, lengths, target)[0].float().square().mean().backward()
    assert before.asked == found.asked == 0
    if counts and case in LAUNCHES:
        assert len(found.names) == LAUNCHES[case][0], "if the change is meant, put the new count into LAUNCHES"
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.is_meta, key
        assert parameter.grad.dtype == parameter.dtype, key
