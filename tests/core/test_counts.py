"""Exact numbers of parameters of options, at full size.

Those of named architectures are in ``tests/plugin/test_architectures.py``.
"""

import functools

import pytest

from tests.helpers.decoder_attention import KINDS, LUNA
from tests.helpers.models import full_size, size_of

C = 512
PRE, POST = "transformer_prenorm_6l", "transformer_postnorm_6l"
CONNECTIONS, ATTENTIONS, LAYERS = 30, 18, 12
SSRU = (4 * C**2 + 4 * C) - (2 * C**2 + C)  # less than self-attention has
GATE = 2 * C**2 + 2 * C  # of SDU and highway
GRU = 6 * C**2 + 6 * C + (6 + 6) * 2 * C  # of MSC, with a norm for each block and each decoder layer
DENSE = {  # the paper's 111.10 M and 356.38 M less its baselines' 88.01 M and 264.06 M
    "": {"hierarchical": 23090176, "iterative": 31493120, "linear": 2 * 6 * C**2},
    "_big": {"hierarchical": 92317696, "iterative": 125900800, "linear": 2 * 6 * 1024**2},
}


def routing(capsules_are_em, pre_norm):
    """A map of 9 C^2 and its biases per encoder layer, with a norm before it in pre-norm stacks, and one norm above."""
    return 6 * (9 * C**2 + 5 * C + 2 * C * pre_norm) + 2 * C * capsules_are_em + 2 * C * (1 - pre_norm)


def luna(top):
    """Untied: 3 C^2 more per encoder layer, 5 C^2 per decoder layer, with biases and norms, and l C for p."""
    return 6 * (3 * C**2 + 5 * C) + 6 * (5 * C**2 + 7 * C) + top + LUNA["luna_length"] * C


FUSIONS = [({"kind": "mean"}, 0), ({"kind": "learned"}, 6), ({"kind": "ffn"}, 7 * C * 2048 + 2048 + C),
           ({"kind": "ffn", "hidden": 5}, 7 * C * 5 + 5 + C), ({"kind": "multi-hop"}, C * (C + 4) + 4 * C**2),
           ({"kind": "multi-hop", "hidden": 7, "hops": 1}, 7 * (C + 1) + C**2)]  # fmt: skip
# (architecture, flags, what they add to it)
ADDED = [
    (PRE, {"norm": "rms"}, -C * (6 * 2 + 6 * 3 + 2)),
    (PRE, {"ffn": "swiglu"}, LAYERS * (3 * 1368 * C - 2 * 2048 * C - 2048 - C)),
    (PRE, {"decoder_kv_heads": 2}, -12 * 2 * (C - 128) * (C + 1)),
    (PRE, {"qk_norm": True}, ATTENTIONS * 2 * 64),
    (PRE, {"attention_gate": "heads"}, ATTENTIONS * 8 * C),
    (PRE, {"attention_gate": "features"}, ATTENTIONS * C**2),
    (PRE, {"sub_norm": True}, ATTENTIONS * 2 * C + LAYERS * 2 * 2048),
    (PRE, {"rotary_positions": True}, 0),
    (PRE, {"value_residual": True}, 2 * (5 + 5)),
    ("transformer_prenorm_6l1l", {"value_residual": True}, 2 * 5),
    (POST, {"deep_init": "admin"}, CONNECTIONS * C),
    (POST, {"deep_init": "rezero"}, LAYERS - CONNECTIONS * 2 * C),
    (POST, {"deep_init": "tfixup"}, -CONNECTIONS * 2 * C),
    *((POST, {"deep_init": name}, 0) for name in ("deepnet", "ds", "lipschitz", "xavier", "depth-scaled")),
    (PRE, {"residual": "sdu", "sdu_layers": 2}, (2 * 2 + 2 * 3) * GATE),
    (PRE, {"encoder_residual": "sdu"}, 12 * GATE),
    (POST, {"residual": "highway", "highway_form": "attention"}, CONNECTIONS * GATE),
    (PRE, {"residual": "peri"}, CONNECTIONS * 2 * C),
    (PRE, {"residual": "layerscale"}, CONNECTIONS * C),
    *((POST, {"residual": name}, 0) for name in ("b2t", "branchnorm", "prores")),
    *((PRE, {"residual": name}, 0) for name in ("completep", "layernorm-scaling", "mix-ln")),
    ("transformer_prenorm_18l", {"layer_agg": "msc", "decoder_memory": "msc"}, GRU - 2 * C),  # no final norm
    ("transformer_postnorm_18l", {"layer_agg": "msc", "decoder_memory": "msc"}, GRU),
    *((f"{arch}{size}", {"layer_agg": name}, added) for arch in (PRE, POST) for size, table in DENSE.items()
      for name, added in table.items()),
    ("transformer_postnorm_12l", {"layer_agg": "gtrans"}, 4 + 2 * C),
    (PRE, {"layer_agg": "hyper-connections", "hyper_connections_kind": "static"}, CONNECTIONS * (4 * 4 + 2 * 4)),
    (PRE, {"layer_agg": "attention-residual", "decoder_attn": "merged"}, 55259136 - 61569024 + 2 * C * (12 + 12)),
    *((PRE, {"layer_agg": "ode", "ode_method": name}, size) for name, size in (
        ("rk2", 0), ("rk3", 0), ("rk4", 0), ("rk2-learned", 2 * C + 1), ("rk2-init", 2))),
    *((PRE, {"layer_agg": "ode", "ode_method": "ema", "ode_order": order}, int(order > 1)) for order in (1, 2, 3, 4)),
    *((arch, {"encoder_layer_agg": "routing", "routing_kind": kind}, routing(kind == "em", arch == PRE))
      for arch in (PRE, POST) for kind in ("dynamic", "em")),
    *((arch, {"layer_agg": "mlrf", **{f"mlrf_{key}": value for key, value in options.items()}}, size + norms)
      for arch, norms in ((PRE, 2 * C * 6), (POST, 2 * C)) for options, size in FUSIONS),
    (POST, LUNA, luna(-2 * C)),  # the last norm of p is not read
    (PRE, LUNA, luna(2 * C)),
]  # fmt: skip


@functools.cache
def plain(arch):
    return full(arch)


def full(arch, **flags):
    """The size of a model, with a small vocabulary: parameters that are added are in the layers."""
    arch, depth = (PRE, {"decoder_layers": 1}) if arch.endswith("1l") else (arch, {})
    return size_of(full_size(arch, 40, share_all_embeddings=True, **depth, **flags))


@pytest.mark.parametrize("arch, flags, added", ADDED, ids=str)
def test_an_option_adds_exactly_so_many_parameters(arch, flags, added):
    assert full(arch, **flags) - plain(arch) == added


# absolute numbers, with a joined vocabulary of that size
LSTM, MATT = ("transformer_lstm_6l", 35628), ("transformer_matt_6l", 55022)
GATES = 6 * C**2 + 6 * C
SIZES = [  # the LSTM's paper counts one gate set, "gate-encdec", for most models
    (*LSTM, {}, 71792640),
    (*LSTM, {"lstm_share": "none"}, 87552000),
    (*LSTM, {"lstm_share": "gate-encdec"}, 70216704),
    (*LSTM, {"lstm_share": "all"}, 43961344),
    (*LSTM, {"lstm_merge": "concat"}, 78870528),
    (*LSTM, {"lstm_merge": "two"}, 89121792),
    (*LSTM, {"lstm_ffn": 1}, 45014016 + GATES),
    (*LSTM, {"lstm_share": "gate-encdec", "lstm_hidden": 1536}, 62340096),
    (*LSTM, {"lstm_final_norm": True}, 71792640 + 2 * 2 * C),
    (*LSTM, {"lstm_biases": True}, 71792640 + 2 * 3 * C + 12 * 5 * C),
    (*LSTM, {"layer_agg": "rnn"}, 68640768),
    (*LSTM, {"layer_agg": "rnn", "lstm_share": "all"}, 43961344 - GATES),
    *(("transformer_dlcl_30l", 34040, flags, size) for flags, size in (  # its ablations
        ({"decoder_layer_agg": "residual"}, 137257921), ({"dlcl_weight_type": "vector"}, 137780224),
        ({"encoder_layers": 20, "dlcl_no_norm": True}, 105702890), ({"dlcl_fixed": True}, 137264114 - 31 * 31 - 7 * 7),
    )),
]  # fmt: skip
# of the paper on merged attention, whose code has an embedding bias of C numbers, which fairseq does not have
ABLATIONS = {"self": 72310272, "average": 72304128, "average-ffn": 84902400, "merged": 66000384,
             "merged-self": 72304128, "merged-average": 72297984, "merged-average-ffn": 84896256,
             "ssru": 72310272 - 6 * SSRU}  # fmt: skip
SIZES += [(*MATT, {"decoder_attn": "self", **KINDS[kind]}, size - C) for kind, size in ABLATIONS.items()]


@pytest.mark.parametrize("arch, entries, flags, expected", SIZES, ids=str)
def test_options_have_the_sizes_of_their_papers(arch, entries, flags, expected):
    assert size_of(full_size(arch, entries, share_all_embeddings=True, **flags)) == expected


