"""``fairseq-deep export``: structures that a format lacks are refused in one line, without the format's package.

tests/project/test_portability.py has the layers of all methods.
"""

import sys

import pytest
import torch

from fairseq_deep.runtime.plain import NAMES
from fairseq_deep.tools.export import OTHERS

FAIRSEQ, CT2, HF = FORMATS = ("fairseq", "ctranslate2", "huggingface")
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
GROWS = "branches that still grow (layer 1 of the encoder is at 0.001 of its size): use a checkpoint of"
LACKS, PLAIN = ", which {} does not support", "--layer-agg dlcl (encoder) with weights that are not exactly residual"
PRE, POST = "prenorm_6l", "postnorm_6l"
CASES = [  # architecture, flags, problem, formats
    ("dlcl_6l", {}, "--layer-agg dlcl (encoder)" + LACKS, FORMATS),
    ("dlcl_6l", {"dlcl_no_norm": True}, PLAIN + LACKS, FORMATS),
    (PRE, {"decoder_layer_agg": "dlcl"}, "--layer-agg dlcl (decoder)" + LACKS, FORMATS),
    ("prores_18l18l", {}, GROWS, FORMATS),
    ("relative_6l", {}, "--relative-positions and absolute positions (encoder), which CTranslate2 does not combine: "
     "train with --no-token-positional-embeddings", [CT2]),
    (PRE, {"activation_fn": "relu_squared"}, "--activation-fn relu_squared: CTranslate2 supports relu, gelu,", [CT2]),
    (PRE, {"adaptive_softmax_cutoff": "10,20", "criterion": "adaptive_loss"}, "--adaptive-softmax-cutoff requires "
     "fairseq", [CT2, HF]),
    (PRE, {"decoder_output_dim": 8}, "a --decoder-output-dim that differs from the width, which the export", [CT2]),
    (PRE, {"encoder_layers": 0}, "no layers (encoder); CTranslate2 requires at least one", [CT2]),
    (PRE, {"encoder_layers": 0}, "no layers (encoder), for which transformers has no class", [HF]),
    (PRE, {"no_cross_attention": True}, "--no-cross-attention, which CTranslate2 does not support", [CT2]),
    (PRE, {"no_cross_attention": True}, "--no-cross-attention, for which transformers has no class", [HF]),
    (POST, LEARNED, "post-norm without sinusoidal positions and without --layernorm-embedding, for which", [HF]),
    (PRE, {"decoder_normalize_before": False}, "pre-norm and post-norm stacks, for which transformers has", [HF]),
    (PRE, {"encoder_embed_dim": 32}, "different widths (32 and 16), for which transformers has no class", [HF]),
    (PRE, {"no_decoder_final_norm": True}, "no final norm (decoder), for which transformers has no class", [HF]),
    ("admin_18l18l", {}, "weights of residual connections that differ by feature (encoder)", [HF]),
]  # fmt: skip


@pytest.mark.parametrize("name, flags, problem, form", [
    pytest.param(name, flags, problem.format(NAMES[form]), form, id=f"{form}: {problem[:50]}")
    for name, flags, problem, forms in CASES for form in forms
])  # fmt: skip
def test_a_structure_that_a_format_lacks_is_refused(name, flags, problem, form, make, command, tmp_path, monkeypatch):
    path = make(name, **flags)[1] / "model.pt"
    if name.startswith("admin"):
        state = torch.load(path, weights_only=False)
        for key, value in state["model"].items():
            if ".residual." in key:
                value.uniform_(0.5, 2.0)
        torch.save(state, path)
    for module in ("ctranslate2", "ctranslate2.specs", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    tokens = [] if form == FAIRSEQ else ["--tokenizer", "none"]
    code, out, err = command("export", path, "--format", form, "--output", tmp_path / "out", *tokens)
    assert (code, out, err.count("\n")) == (2, "", 1) and not (tmp_path / "out").exists()
    assert err.startswith(f"fairseq-deep export: {path} ") and f" {problem}" in err, err
    fixed = ": use " in err.replace(OTHERS, "") or ": train with " in err
    assert "requires fairseq" in err or err.endswith(f"; {'or ' * fixed}{OTHERS}\n"), err
    assert ("--residual completep has all formats" in err) == ("--layer-agg" in problem)
