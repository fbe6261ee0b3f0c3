"""``fairseq-deep export``: for every structure, other programs compute and write what the model does."""

import runpy

import pytest

from fairseq_deep.runtime import Translator, find_bundle, load_model
from fairseq_deep.runtime.dictionary import Dictionary
from tests.helpers.paths import ROOT

LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
SHARED = {"share_all_embeddings": True}
NORMED = {"layernorm_embedding": True}
ONE = {"encoder_layers": 1, "decoder_layers": 1}
RELATIVE = {"relative_positions": 3, "no_token_positional_embeddings": True}
MODERN = {"norm": "rms", "ffn": "swiglu", "rotary_positions": True}


def by(kind):
    """What the command says of the class of transformers."""
    return {"huggingface": f"/out: {kind}ForConditionalGeneration"}


CT2 = {"ctranslate2": "/out: for CTranslate2, float32"}
TORCH = {"torch": "/out.pt2: beam 1, 13 positions"}
STRUCTURES = {
    "one table": ("prenorm_6l", SHARED, CT2 | by("M2M100")),
    "three tables of one dictionary": ("prenorm_6l", {"one": True, "activation_fn": "gelu"}, CT2 | by("M2M100")),
    "a larger target": ("prenorm_6l", {"no_scale_embedding": True}, CT2 | by("M2M100")),
    "a smaller target": ("prenorm_6l", {"share_decoder_input_output_embed": True, "swap": True},
                         CT2 | by("Blenderbot")),
    "learned positions": ("prenorm_6l", {**LEARNED, **SHARED, "activation_fn": "gelu_accurate"},
                          CT2 | by("Blenderbot")),
    "one side learned": ("prenorm_6l", {"decoder_learned_pos": True, "max_target_positions": 20},
                         CT2 | by("Blenderbot")),
    "no positions": ("prenorm_6l", {"no_token_positional_embeddings": True}, CT2 | by("Blenderbot")),
    "a narrow output": ("prenorm_6l", {"decoder_output_dim": 8}, by("M2M100")),
    "post-norm": ("postnorm_6l", {}, CT2 | by("FSMT")),
    "a norm of the embeddings": ("prenorm_6l", {**NORMED, **SHARED}, CT2 | by("MBart")),
    "post-norm, embeddings normed": ("lipschitz_postnorm_6l", {**NORMED, **LEARNED, "decoder_layers": 1},
                                     CT2 | by("Bart")),
    "pruned layers": ("prenorm_6l", {"encoder_layers": 3, "encoder_layers_to_keep": "0,2", **SHARED},
                      CT2 | by("M2M100")),
    "LayerScale": ("layerscale_18l18l", {"layerscale_start": 0.5, **SHARED}, CT2 | by("M2M100")),
    "DeepNet, embeddings normed": ("deepnet_18l18l", {**NORMED, **SHARED}, CT2 | by("Bart")),
    "Admin": ("admin_18l18l", {**NORMED, **LEARNED, **SHARED}, CT2 | by("Bart")),
    "no final norm": ("prenorm_6l", {"no_decoder_final_norm": True}, CT2),
    "sides differ": ("prenorm_6l", {"encoder_embed_dim": 32, "decoder_attention_heads": 4,
                                    "decoder_normalize_before": False}, CT2),
    "relative keys": ("postnorm_6l", {**RELATIVE, "activation_fn": "tanh"}, CT2),
    "relative values": ("relative_6l", RELATIVE, CT2),
    "swish": ("prenorm_6l", {"activation_fn": "swish"}, CT2),
    "Peri-LN": ("peri_18l18l", {}, CT2),
    "Peri-LN below": ("prenorm_6l", {"encoder_residual": "peri", "activation_fn": "gelu"}, CT2),
    "Peri-LN above": ("prenorm_6l", {"decoder_residual": "peri", "encoder_residual": "layerscale", **RELATIVE}, CT2),
    "modern": ("modern_6l", {"decoder_kv_heads": 1}, CT2),
    "modern post-norm": ("postnorm_6l", {**MODERN, "ffn": "geglu", **NORMED}, CT2),
    "LSTM": ("lstm_6l", ONE, TORCH),
    "merged attention": ("ds_matt_12l12l", ONE, TORCH),
}  # fmt: skip
LINES = [" ".join(f"w{(5 * number + word) % 25}" for word in range(1 + number % 9)) for number in range(24)]


def greedy(path, **parts):
    """The first words of greedy translations: at the limit, transformers does not end a sentence as we do."""
    if path.suffix == ".pt2":
        found = runpy.run_path(str(ROOT / "examples/translate_pt2.py"))["Model"](str(path)).translate(LINES)
    else:
        search = {"beam": 1, "max_len_a": 0, "max_len_b": 12}
        found = Translator(find_bundle(str(path), **parts), cpu=True, **search).translate(LINES)
    return [line.split()[:8] for line in found]


@pytest.mark.parametrize("structure, form", [(name, form) for name, row in STRUCTURES.items() for form in row[2]])
def test_every_structure_computes_and_writes_the_same(structure, form, make, command):
    """Log-probabilities, which the commands compare; translations; and a checkpoint made of a model of transformers."""
    pytest.importorskip("transformers" if form == "huggingface" else form)
    name, flags, made = STRUCTURES[structure]
    _, folder = make(name, **flags)
    output = folder / ("out.pt2" if form == "torch" else "out")
    words = ["--format", form, "--tokenizer", "none", "--output", output]
    words += ["--beam", "1", "--capacity", "13"] * (form == "torch")
    code, said, err = command("export", folder / "model.pt", *words)
    assert (code, err) == (0, "") and f"{made[form]}; log-probabilities of 16 sentences within " in said
    expected = greedy(folder / "model.pt", tokenizer="none")
    assert greedy(output) == expected and len({*map(tuple, expected)}) > 1
    if form != "huggingface":
        return
    shared = "share_all_embeddings" in flags
    assert not (shared and (output / "target").exists())
    (folder / "back").mkdir()
    words = ["--from", "huggingface", "--tokenizer", "none", "--output", folder / "back/model.pt"]
    assert command("import", output, *words)[::2] == (0, "")
    again, sides = load_model(find_bundle(str(folder / "back/model.pt"))), ("src", "tgt")
    symbols = [Dictionary.load(str(folder / f"dict.{side}.txt")).symbols for side in sides]
    assert [again.source.symbols, again.target.symbols] == symbols
    assert greedy(folder / "back/model.pt") == expected and again.stored.flags.share_all_embeddings == shared
