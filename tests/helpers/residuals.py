"""Residual connections: each form, and where its norms may be."""

from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.stack import Stack

T, B, C, F, HEADS = 3, 2, 6, 8, 2
# each method and form: its name, options, and the norm placements that it is for
FORMS = {
    "sdu": ("sdu", {}, ("pre", "post")),
    "sdu tanh": ("sdu", {"activation": "tanh"}, ("pre", "post")),
    "highway": ("highway", {}, ("pre", "post")),
    "highway attention": ("highway", {"form": "attention"}, ("pre", "post")),
    "b2t": ("b2t", {}, ("post",)),
    "peri": ("peri", {}, ("pre",)),
    "layerscale": ("layerscale", {"start": 0.3}, ("pre", "post")),
    "branchnorm": ("branchnorm", {"updates": 10}, ("post",)),
    "completep": ("completep", {"base": 0.6}, ("pre",)),
    "layernorm-scaling": ("layernorm-scaling", {}, ("pre",)),
    "mix-ln": ("mix-ln", {"layers": 1}, ("pre",)),
    "mix-ln 2": ("mix-ln", {"layers": 2}, ("pre",)),
    "prores": ("prores", {"period": 5}, ("pre", "post")),
    "prores completep": ("prores", {"period": 5, "around": "completep"}, ("pre",)),
    "prores layernorm-scaling": ("prores", {"period": 5, "around": "layernorm-scaling"}, ("pre",)),
}
PLACED = [(form, norm) for form, (_, _, norms) in FORMS.items() for norm in norms]


def describe(side="encoder", norm="pre", layers=2):
    return Stack(layers=layers, dim=C, pre_norm=norm == "pre", side=side, ffn_dim=F, heads=HEADS)


def scores(model, batch):
    return model(*batch)[0]


def flags_of(form):
    """Model flags that choose *form*."""
    name, options, _ = FORMS[form]
    return {"residual": name, **{f"{RESIDUALS.prefix(name)}_{option}": value for option, value in options.items()}}
