"""Write goldens: ``python -m tests.golden.make [NAME ...]`` (those that are there already are left alone)."""

import sys
import zlib

import torch

from tests.golden import FOLDER, NARROW, VOCAB, build, model_flags, outputs
from tests.helpers.flags import parse


def plain(norm, *flags):
    return ["--arch", f"transformer_{norm}_2l2l_tiny", *NARROW, "--encoder-ffn-embed-dim", "12", *flags]


def alone(method, *flags):
    return ["--arch", f"transformer_{method}_2l2l_tiny", *NARROW, *flags]


CASES = {
    "prenorm": plain("prenorm"),
    "postnorm": plain("postnorm", "--layernorm-embedding"),
    "wider_encoder": [
        "--arch", "transformer_prenorm_2l2l_tiny", *NARROW[2:-3], "--dropout", "0", "--encoder-embed-dim", "12",
        "--decoder-embed-dim", "8", "--encoder-ffn-embed-dim", "8",
    ],
    "dlcl": plain("dlcl"),
    "dlcl_postnorm": plain("dlcl_postnorm"),
    "dlcl_vector": plain("dlcl", "--dlcl-weight-type", "vector", "--dlcl-normalize", "--dlcl-window", "2"),
    "dlcl_groups": plain("dlcl_postnorm", "--dlcl-weight-type", "scalar_4"),
    "dlcl_fixed": plain("dlcl", "--dlcl-fixed", "--dlcl-init", "one", "--dlcl-no-norm"),
    "dlcl_encoder": plain("dlcl", "--decoder-layer-agg", "residual"),
    "lstm": alone("lstm"),
    "lstm_query": alone("lstm", "--lstm-share", "none", "--lstm-hidden", "4"),
    "lstm_1layer": alone("lstm", "--lstm-ffn", "1", "--lstm-share", "gate-encdec", "--relative-positions", "2"),
    "lstm_concat": alone("lstm", "--lstm-merge", "concat", "--lstm-hidden", "8", "--lstm-final-norm"),
    "lstm_two": alone("lstm", "--lstm-merge", "two", "--lstm-forget-bias", "1"),
    "lstm_two_none": alone("lstm", "--lstm-merge", "two", "--lstm-share", "none", "--lstm-hidden", "4"),
    "lstm_share_all": alone("lstm", "--lstm-share", "all", "--lstm-attn-residual", "--lstm-glu", "swish"),
    "lstm_share_none": alone("lstm", "--lstm-share", "none", "--lstm-hidden", "4"),
    "lstm_merged": alone("lstm", "--decoder-attn", "merged"),
    "lstm_decoder": plain("postnorm", "--decoder-layer-agg", "lstm"),
    "rnn": ["--arch", "transformer_rnn_6l", *NARROW],
    # rows with another aggregator than theirs: which of the row's options hold is part of a checkpoint
    "row_concat_rnn": ["--arch", "transformer_lstm_concat_6l", *NARROW, "--layer-agg", "rnn"],
    "row_1layer_rnn": ["--arch", "transformer_lstm_1layer_6l", *NARROW, "--layer-agg", "rnn"],
    "row_two_decoder_rnn": ["--arch", "transformer_lstm_two_6l", *NARROW, "--decoder-layer-agg", "rnn"],
    "row_relative_dlcl": ["--arch", "transformer_lstm_relative_12l_big", *NARROW, "--layer-agg", "dlcl",
                          "--encoder-ffn-embed-dim", "12"],
    "row_ds_lstm": ["--arch", "transformer_ds_6l", *NARROW, "--layer-agg", "lstm"],
    "ds_merged": plain("postnorm", "--deep-init", "ds", "--decoder-attn", "merged"),
    "merged_dlcl": plain("dlcl", "--decoder-attn", "merged"),
    "merged_self": plain("postnorm", "--decoder-attn", "merged-self"),
    "merged_average": plain("prenorm", "--decoder-attn", "merged-average", "--average-ffn"),
    "average": plain("postnorm", "--decoder-attn", "average"),
    "average_ffn": plain("prenorm", "--decoder-attn", "average", "--average-ffn"),
    "deepnet": plain("postnorm", "--deep-init", "deepnet"),
    "admin": plain("postnorm", "--deep-init", "admin"),
    "admin_merged": plain("postnorm", "--deep-init", "admin", "--decoder-attn", "merged"),
    "rezero": plain("postnorm", "--deep-init", "rezero"),
    "tfixup": plain("postnorm", "--deep-init", "tfixup"),
}


def make(name):
    """Write the golden *name*."""
    torch.manual_seed(zlib.crc32(name.encode()))
    args = parse(*CASES[name])
    resolved = model_flags(args)
    model = build(args)
    with torch.no_grad():  # so that norms, biases and closed gates are seen in the outputs, too
        for key, value in model.state_dict().items():
            if value.is_floating_point() and not key.endswith("version"):
                value.add_(torch.randn_like(value) * 0.2)
                value.copy_(value.bfloat16())
    source, target = torch.randint(4, VOCAB, (3, 5)), torch.randint(4, VOCAB, (3, 4))
    source[1, :2] = model.encoder.padding_idx
    target[:, 0], target[2, 3] = model.encoder.dictionary.eos(), model.encoder.padding_idx
    output, translations = outputs(model, source, target)
    weights = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    golden = {
        "flags": CASES[name],
        "resolved": resolved,
        "shapes": shapes,
        "weights": torch.cat([value.flatten() for value in weights.values()]),  # one tensor: a file of a few kB
        "source": source,
        "target": target,
        "output": output,
        "translations": translations,
    }
    torch.save(golden, FOLDER / f"{name}.pt")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        if not (FOLDER / f"{name}.pt").exists():
            make(name)
            print(name)
