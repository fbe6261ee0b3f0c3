"""``torch.export`` of the encoder: one graph for all batch sizes and lengths, with the outputs of the eager model."""

import pytest
import torch
from torch.export import Dim, export

from tests.helpers.methods import METHODS, depths
from tests.helpers.models import make_batch

# --decoder-attn has no part in an encoder
CASES = [case for case in METHODS if not case.startswith("decoder_attn-")]
SIZES = ({0: Dim("sentences", min=2, max=64), 1: Dim("words", min=2, max=512)},)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_exported_encoder_computes_the_same(case, build, dictionary):
    name, flags = METHODS[case]
    encoder = build(name, **{**depths(name, flags), **flags}).encoder.eval()
    exported = export(encoder, (make_batch(dictionary, (4, 4, 4))[0],), dynamic_shapes=SIZES, strict=False).module()
    source = make_batch(dictionary, (6, 2))[0]
    got, want = exported(source), encoder(source)
    words = source.ne(encoder.padding_idx).t()
    assert got.keys() == want.keys()
    for name in ("encoder_out", "encoder_memories"):
        assert len(got.get(name, [])) == len(want.get(name, []))
        for ours, theirs in zip(got.get(name, []), want.get(name, [])):
            torch.testing.assert_close(ours[words], theirs[words], rtol=1e-4, atol=1e-5)
    assert torch.equal(got["encoder_padding_mask"][0], want["encoder_padding_mask"][0])
