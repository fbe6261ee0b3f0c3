"""Use the core where fairseq, omegaconf and hydra cannot be imported: every method, forward, backward, search."""

import dataclasses

import torch
import without_fairseq

without_fairseq.block()

from fairseq_deep.core.aggregators import AGGREGATORS  # noqa: E402
from fairseq_deep.core.attention import DECODER_ATTENTIONS, ENCODER_ATTENTIONS  # noqa: E402
from fairseq_deep.core.inits import INITS  # noqa: E402
from fairseq_deep.core.memories import MEMORIES  # noqa: E402
from fairseq_deep.core.residuals import RESIDUALS  # noqa: E402
from fairseq_deep.core.search import BeamSearch, SearchOptions  # noqa: E402
from fairseq_deep.core.stack import MethodConfig, Stack  # noqa: E402
from fairseq_deep.core.transformer import Transformer  # noqa: E402


def stacks(axis, registry, name):
    """Both stacks with the method *name* on *axis*, where it is made for them."""
    method = registry.get(name)
    only = {ENCODER_ATTENTIONS: "encoder", DECODER_ATTENTIONS: "decoder", MEMORIES: "decoder"}.get(registry)
    pre_norm = "pre" in getattr(method, "norms", ("pre",))
    made = {}
    for side in ("encoder", "decoder"):
        stack = Stack(2, 16, pre_norm, side, ffn_dim=32, heads=2)
        if side == only or only is None:
            config = MethodConfig(name, method)
            stack = dataclasses.replace(stack, **{axis: config})
        made[side] = stack
    if name == "msc":
        config = MethodConfig(name, AGGREGATORS.get(name))
        made = {side: dataclasses.replace(stack, aggregator=config) for side, stack in made.items()}
        memory = MethodConfig(name, MEMORIES.get(name))
        made["decoder"] = dataclasses.replace(made["decoder"], memory=memory)
    if registry is DECODER_ATTENTIONS and name == "luna":
        made["encoder"] = stacks("attention", ENCODER_ATTENTIONS, "luna")["encoder"]
    return made


def check(axis, registry, name):
    torch.manual_seed(1)
    model = Transformer.build(stacks(axis, registry, name), 20)
    source, target = torch.randint(4, 20, (3, 5)), torch.randint(4, 20, (3, 4))
    source[1, :2] = 1
    model.train()(source, None, target)[0].float().logsumexp(-1).sum().backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, (axis, name, missing)
    found = BeamSearch([model.prepare_for_decoding()], SearchOptions(beam=3, max_len_b=6))(source)
    assert [len(sentence) for sentence in found] == [3, 3, 3], (axis, name)
    assert all(each["score"].isfinite() for sentence in found for each in sentence), (axis, name)


for axis, registry in (("aggregator", AGGREGATORS), ("residual", RESIDUALS), ("init", INITS), ("memory", MEMORIES),
                       ("attention", ENCODER_ATTENTIONS), ("attention", DECODER_ATTENTIONS)):  # fmt: skip
    for name in registry.names():
        check(axis, registry, name)
without_fairseq.assert_nothing_is_loaded()
print("every method works")
