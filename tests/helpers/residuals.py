"""Residual connections: each form, where its norms may be, and the connections of one layer."""

import pytest

from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.stack import Stack

T, S, B, C, F, HEADS = 3, 4, 2, 6, 8, 2
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
}
PLACED = [(form, norm) for form, (_, _, norms) in FORMS.items() for norm in norms]
every_placed_form = pytest.mark.parametrize("form, norm", PLACED)


def describe(side="encoder", norm="pre", layers=2):
    return Stack(layers=layers, dim=C, pre_norm=norm == "pre", side=side, ffn_dim=F, heads=HEADS)


def make(form, side="encoder", norm="pre", number=1):
    """The connections of one layer; in the case of BranchNorm in update 4 of 10."""
    name, options, norms = FORMS[form]
    residual = RESIDUALS.get(name)(describe(side, norm if norm in norms else norms[0]), number, **options)
    if name == "branchnorm":
        residual.set_num_updates(3)
    return residual


def scores(model, batch):
    return model(*batch)[0]
