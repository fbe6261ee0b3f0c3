"""Supervised alignments: the loss and every gradient of fairseq's ``transformer_align``."""

import types

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment as Criterion,
)
from fairseq.models.transformer_align import TransformerAlignModel

from tests.helpers.models import fairseq_transformer, make_batch, tiny_flags


def aligned(dictionary):
    """A batch in which the second target word of each sentence has two links, and the others one or none."""
    source, lengths, target = make_batch(dictionary)
    rows, width = target.shape
    links, weights = [], []
    for row in range(rows):
        first = source.size(1) - int(lengths[row])
        for word, place, weight in ((0, 0, 1.0), (1, 0, 0.5), (1, 1, 0.5)):
            links.append((first + place, row * width + word))
            weights.append(weight)
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
    return {
        "net_input": net_input,
        "target": target.roll(-1, 1).masked_fill(target.eq(dictionary.pad()), dictionary.pad()),
        "ntokens": int(target.ne(dictionary.pad()).sum()),
        "alignments": torch.tensor(links),
        "align_weights": torch.tensor(weights),
    }


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
@pytest.mark.parametrize("flags", [{"alignment_heads": 2}, {"full_context_alignment": True}], ids="-".join)
def test_loss_and_gradients_are_those_of_transformer_align(norm, flags, build, dictionary):
    name = f"transformer_{norm}_6l"
    flags = {**tiny_flags(name), "share_all_embeddings": True, "alignment_layer": 3, **flags}
    aligner = fairseq_transformer(dictionary, norm, TransformerAlignModel, **flags)
    model = build(name, **flags)
    model.decoder.aligns = True  # as with --load-alignments
    model.load_state_dict(aligner.state_dict())
    sample = aligned(dictionary)
    criterion = Criterion(types.SimpleNamespace(target_dictionary=dictionary), False, 0.1, 0.3)
    (ours, _, log), (theirs, _, expected) = (criterion(each.train(), sample) for each in (model, aligner))
    assert expected["alignment_loss"] > 0
    torch.testing.assert_close(log, expected, rtol=1e-5, atol=1e-5)
    (ours + theirs).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, aligner.get_parameter(key).grad, rtol=1e-4, atol=1e-5, msg=key)
    fields = ("src_tokens", "src_lengths", "prev_output_tokens")
    batch = [sample["net_input"][field] for field in fields]
    words = batch[2].ne(dictionary.pad())
    found = [m.eval()(*batch)[1]["attn"][0][words] for m in (model, aligner)]
    torch.testing.assert_close(*found)
