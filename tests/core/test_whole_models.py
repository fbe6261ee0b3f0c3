"""Whole models against their equations: scores, every gradient and the place of each dropout, for all methods.

The equations are read from the descriptions of models (``tests/reference/naive_model.py``). What is special in a method
is in a file of its own.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.core import encoder
from fairseq_deep.core.aggregators.lstm import GLU
from fairseq_deep.core.attention import masks
from fairseq_deep.core.dropout import Dropout
from tests.helpers.methods import FORMS_OF_RESIDUALS, KINDS, LANGUAGES, LSTM, METHODS, OPTIONS, PLACED
from tests.helpers.models import POSTNORM, PRENORM, TINY, make_batch
from tests.helpers.tensors import assert_same, shake
from tests.reference import naive_parts
from tests.reference.naive_aggregators import NAMES
from tests.reference.naive_model import PAD, scores
from tests.reference.naive_residuals import UPDATE

RATES = {"dropout": 0.5, "attention_dropout": 0.3, "activation_dropout": 0.25}


@pytest.fixture
def make(build, monkeypatch):
    """make(arch, deviation, **flags): a narrow model with random weights, in fp64; dropout is a factor, also later.

    Tables keep their start.
    """
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(naive_parts, "RATES", RATES)
    monkeypatch.setattr(F, "dropout", lambda x, p: (1 + p) * x)
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *args, dropout_p, **how: (1 + dropout_p) * fused(*args, **how))  # fmt: skip

    def make(arch, deviation=0.5, **flags):
        model = build(arch, **RATES, **flags).double()
        encoder, decoder = model.encoder, model.decoder
        for part in (encoder.layers, encoder.aggregator, encoder.memory, encoder.packed, encoder.language_transform,
                     decoder.layers, decoder.aggregator):  # fmt: skip
            if part is not None:
                shake(part, deviation)
        decoder.need_attn = False  # where they are asked for, weights are of fp32
        for module in model.modules():
            if isinstance(module, Dropout):
                module.apply_during_inference = True
        model.set_num_updates(UPDATE - 1)
        return model

    return make


@pytest.fixture
def batch(dictionary):
    """A small one, since every pair of positions is a step of a loop."""
    return make_batch(dictionary, (4, 3), (3, 4))


@contextlib.contextmanager
def never_asks():
    """As on a GPU or under torch.compile, where masks are made without a look at the batch."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (encoder, masks):
            patch.setattr(module, "is_sync_free", lambda x: False)
        yield


def assert_equations(model, batch, causal=True, rtol=1e-7, atol=1e-8):
    """In training, which has plain products on a CPU, and in evaluation, which has fused ones; by all ways to masks."""
    source, lengths, target = batch
    words, (wanted, weights) = target.ne(PAD), scores(model, batch, causal)
    reads = any(getattr(layer, "encoder_attn", None) for layer in model.decoder.layers)
    sources, actual = dict((model if reads else model.decoder).named_parameters()), []
    how = {"full_context_alignment": not causal}
    modes = [(False, False, False), (True, False, False), (True, True, False), (True, True, bool(words[:, 0].all()))]
    if model.encoder.stack.recompute:
        modes = modes[1:2]  # layers that run again do so in the last mode
    for training, blind, model.decoder.pads_right in modes:
        with never_asks() if blind else contextlib.nullcontext():
            encoded = model.train(training).encoder(source, lengths)
            actual.append(model.decoder(target, encoder_out=encoded, **how)[0][words])
    assert_same(torch.cat(actual), torch.cat([wanted[words]] * len(modes)), sources, rtol=rtol, atol=atol)
    if reads and not model.decoder.packs:
        last = len(model.decoder.layers) // model.decoder.modules_per_layer - 1
        found = model.decoder(target, encoded, alignment_layer=last, **how)[1]["attn"][0]
        torch.testing.assert_close(found[words].double(), weights[words], rtol=1e-3, atol=1e-5)


def padded_batch(dictionary):
    """With padding on the left of sources, and on the left, on the right and in the middle of targets."""
    source, lengths, target = make_batch(dictionary, (4, 3, 2), (3, 5, 5))
    target[1] = target[1].roll(2)
    target[1, :2], target[2, 3] = PAD, PAD
    return source, lengths, target


DLCL = "transformer_dlcl_postnorm_2l2l_tiny"
STACKS = {"another width": (POSTNORM, {"encoder_embed_dim": 24}), "rnn": (LSTM, {"layer_agg": "rnn"})}
# layers of a depth-wise LSTM have no feed-forward width
ATTENTIONS = [(kind, stack, True) for kind in KINDS for stack in (POSTNORM, PRENORM, LSTM)
              if "ffn" not in kind or stack != LSTM]  # fmt: skip
# full context changes masks, whatever connects the layers; a recurrence sees no later positions
ATTENTIONS += [(kind, stack, False) for kind, stack, _ in ATTENTIONS if stack != POSTNORM and kind != "ssru"]
ATTENTIONS += [("average", "another width", True), ("merged-self", "another width", True), ("merged", "rnn", True),
               ("merged", DLCL, True), ("merged-average", "transformer_dlcl_2l2l_tiny", True)]  # fmt: skip


@pytest.mark.parametrize("kind, stack, causal", ATTENTIONS, ids=str)
def test_decoders_of_every_attention_equal_the_equations(kind, stack, causal, make, dictionary):
    name, flags = STACKS.get(stack, (stack, {}))
    model = make(name, **{"decoder_layers": 3, **flags, **KINDS[kind]})
    assert_equations(model, padded_batch(dictionary), causal)
    for lengths in ((4, 4), (4, 3)) if stack == PRENORM else ():  # without padding, and on the right alone
        assert_equations(model, make_batch(dictionary, (3, 3), lengths), causal)


LSTMS = [
    *({"lstm_share": share} for share in ("none", "gate", "gate-encdec", "all")),
    *({"lstm_merge": merge, "lstm_share": share} for merge in ("concat", "two") for share in ("none", "gate")),
    *({"layer_agg": "rnn", "lstm_merge": merge, "lstm_share": share}
      for merge, share in (("add", "all"), ("concat", "all"), ("two", "all"), ("add", "none"), ("two", "none"))),
    {"lstm_merge": "concat", "lstm_attn_residual": False, "lstm_ffn": 1, "lstm_dropout": 0.2},
    {"lstm_merge": "two", "lstm_biases": True, "lstm_ffn": 1},
    {"lstm_biases": True, "lstm_final_norm": True, "lstm_hidden": 10, "relative_positions": 2},
    *({"lstm_glu": glu, "lstm_merge": "two", "relative_positions": 1} for glu in GLU),
    {"encoder_embed_dim": 12, "decoder_embed_dim": 16, "lstm_attn_residual": False},
    *({"decoder_attn": "average", **more} for more in (
        {"lstm_merge": "concat"}, {"lstm_merge": "two"}, {"lstm_attn_residual": False})),
]  # fmt: skip


INITS = [("deepnet", "self"), ("deepnet", "average"), ("tfixup", "self"), ("tfixup", "average")]
INITS += [(init, kind) for kind in KINDS for init in ("admin", "rezero")]


# a memory of layers that are evaluated twice is that of any other aggregator
CASES = {name: row for name, row in {**METHODS, **OPTIONS, **LANGUAGES}.items()
         if not {"ode", "transparent"} <= {*map(str, row[1].values())}
         and row[1].get("layer_agg", "residual") in NAMES}  # fmt: skip
CASES |= {f"{norm}norm {form}": (TINY[norm], FORMS_OF_RESIDUALS[form]) for form, norm in PLACED}
CASES |= {f"lstm {flags}": (LSTM, flags) for flags in LSTMS}
CASES |= {f"{init} {kind}": (POSTNORM, {"deep_init": init, **KINDS[kind]}) for init, kind in INITS}
CASES |= {f"{init} dlcl": (DLCL, {"deep_init": init}) for init in ("deepnet", "admin")}
CASES |= {f"{init} alone": (POSTNORM, {"deep_init": init, "no_cross_attention": True}) for init in ("admin", "rezero")}
CASES["groups of heads"] = PRENORM, {"decoder_attention_heads": 4, "decoder_kv_heads": 2, "attention_gate": "features"}
CASES["far relative positions"] = POSTNORM, {"relative_positions": 5, "relative_values": True}
CASES["alone"] = PRENORM, {"no_cross_attention": True}
CASES["lipschitz"] = POSTNORM, {"deep_init": "lipschitz", "layernorm_embedding": True}
CASES["msc of another width"] = (PRENORM, {"layer_agg": "msc", "decoder_memory": "msc", "encoder_layers": 6,
                                           "decoder_embed_dim": 24})  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_methods_and_options_equal_the_equations(case, make, batch):
    """Depths of 3 and 2; gelu is of fp32, as is BranchNorm's number."""
    name, flags = CASES[case]
    depths = {"encoder_layers": 2 if "msc" in case else 3, "decoder_layers": 2}
    deviation = {"tfixup": 0.12, "rezero": 0.2}.get(flags.get("deep_init"), 0.3)
    model = make(name, deviation, **{**depths, **flags})
    rounds = any(word in case for word in ("geglu", "branchnorm"))
    assert_equations(model, batch, **({"rtol": 1e-4, "atol": 1e-5} if rounds else {}))
