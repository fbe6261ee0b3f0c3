"""Exact numbers of parameters of the papers' models, at full size.

Those of named architectures are in ``tests/snapshots/archs.txt``, those of narrow models in ``initial.txt``.
"""

import pytest

from tests.helpers.methods import KINDS
from tests.helpers.models import full_size, size_of

C = 512
SSRU = (4 * C**2 + 4 * C) - (2 * C**2 + C)  # less than self-attention has
GATES = 6 * C**2 + 6 * C
LSTM, MATT = ("transformer_lstm_6l", 35628), ("transformer_matt_6l", 55022)
# with a joined vocabulary of that size; the LSTM's paper counts one gate set, "gate-encdec", for most models
SIZES = [
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
SIZES += [(*MATT, KINDS[kind], size - C) for kind, size in ABLATIONS.items()]


@pytest.mark.parametrize("arch, entries, flags, expected", SIZES, ids=str)
def test_options_have_the_sizes_of_their_papers(arch, entries, flags, expected):
    assert size_of(full_size(arch, entries, share_all_embeddings=True, **flags)) == expected
