"""From flags to the descriptions of both stacks. Nothing else reads the flags of methods."""

from dataclasses import replace
from typing import Any, Dict, Optional

from fairseq.models.transformer import TransformerConfig

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.inits import INITS
from fairseq_deep.core.memories import MEMORIES
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.stack import Stack

SIDES = ("encoder", "decoder")
# the axes that both stacks have, each with the method that is meant where no flag names one
SIDED = {"layer_agg": (AGGREGATORS, "residual"), "deep_init": (INITS, "fairseq"), "residual": (RESIDUALS, "plain")}
DECODER = {"decoder_attn": (DECODER_ATTENTIONS, "self"), "decoder_memory": (MEMORIES, "last")}
# flags that choose what a model computes with
AXES = ("layer_agg", "residual", *(f"{side}_{axis}" for side in SIDES for axis in ("layer_agg", "residual")), *DECODER)
REGISTRIES = [registry for registry, _ in (*SIDED.values(), *DECODER.values())]


def method_name(flags: Any, side: str, axis: str, default: Optional[str] = None) -> str:
    """The method that *flags* choose for *side* on an axis of ``SIDED``: its own flag, that of both, or *default*."""
    return getattr(flags, f"{side}_{axis}", None) or getattr(flags, axis, None) or default or SIDED[axis][1]


def add_args(parser) -> None:
    """Add the flags that choose methods, and those of the methods, without defaults."""
    texts = {"layer_agg": "how the layers of {} are connected", "deep_init": "how the weights of {} start",
             "residual": "the residual connections of {}"}  # fmt: skip
    for axis, (registry, _) in SIDED.items():
        for prefix, stack in (("", "both stacks"), ("encoder-", "the encoder"), ("decoder-", "the decoder")):
            parser.add_argument(registry.kind.replace("--", f"--{prefix}"), metavar="NAME", type=registry.check,
                                help=f"{texts[axis].format(stack)}: {', '.join(registry.names())}")
    decoder_texts = {DECODER_ATTENTIONS: "attentions of the decoder", MEMORIES: "what decoder layers attend to"}
    for registry, text in decoder_texts.items():
        parser.add_argument(registry.kind, metavar="NAME", type=registry.check,
                            help=f"{text}: {', '.join(registry.names())}")
    for registry in REGISTRIES:
        for add_flags in {registry.get(name).add_args: None for name in registry.names()}:
            add_flags(parser)
    parser.add_argument("--relative-positions", type=int, metavar="K",
                        help="relative positions in self-attention, clipped at K; on the keys")
    parser.add_argument("--relative-values", action="store_true", help="relative positions on the values, too")


def describe(flags: Any) -> Dict[str, Stack]:
    """The stacks that *flags* ask for, by side.

    Args:
        flags: model flags after the architecture has filled them: a namespace, or fairseq's ``TransformerConfig``

    Raises:
        UsageError: a method or an option is unknown, or clashes with another
    """
    cfg = TransformerConfig.from_namespace(flags)
    stacks = {side: _choose_methods(cfg, _numbers(cfg, side)) for side in SIDES}
    _check_used(cfg, stacks)
    for side, other in zip(SIDES, reversed(SIDES)):
        stack = stacks[side]
        for choice in (stack.aggregator, stack.init, stack.residual, stack.attention, stack.memory):
            if choice is not None:
                choice.method.check(stack, stacks[other], choice.options)
    return stacks


def _numbers(cfg: TransformerConfig, side: str) -> Stack:
    """What fairseq's own flags say of a stack."""
    own, other = getattr(cfg, side), getattr(cfg, SIDES[1 - SIDES.index(side)])
    depth, other_depth = (len(s.layers_to_keep.split(",")) if s.layers_to_keep else s.layers for s in (own, other))
    return Stack(
        layers=depth,
        dim=own.embed_dim,
        pre_norm=own.normalize_before,
        side=side,
        ffn_dim=own.ffn_embed_dim,
        heads=own.attention_heads,
        other_layers=other_depth,
        memory_dim=cfg.encoder.embed_dim,
        cross_attention=not cfg.no_cross_attention,
        dropout=cfg.dropout,
        attention_dropout=cfg.attention_dropout,
        # relu_dropout is what models of old fairseq versions call it
        activation_dropout=float(cfg.activation_dropout or cfg.relu_dropout or 0),
        activation=str(cfg.activation_fn),
        relative_positions=getattr(cfg, "relative_positions", None),
        relative_values=bool(getattr(cfg, "relative_values", False)),
        recompute=cfg.checkpoint_activations or cfg.offload_activations,
        layerdrop=own.layerdrop,
        quant_noise=(cfg.quant_noise.pq, cfg.quant_noise.pq_block_size),
        export=cfg.export,
    )


def _choose_methods(cfg: TransformerConfig, stack: Stack) -> Stack:
    chosen = {axis: registry.choose(cfg, method_name(cfg, stack.side, axis)) for axis, (registry, _) in SIDED.items()}
    if stack.side == "decoder":
        names = {axis: getattr(cfg, axis, None) or default for axis, (_, default) in DECODER.items()}
        chosen.update({axis: DECODER[axis][0].choose(cfg, name) for axis, name in names.items()})
    aggregator = chosen["layer_agg"]
    return replace(
        stack,
        layout=aggregator.method.layout(stack.side, aggregator.options),
        aggregator=aggregator,
        init=chosen["deep_init"],
        residual=chosen["residual"],
        attention=chosen.get("decoder_attn"),
        memory=chosen.get("decoder_memory"),
    )


def _check_used(cfg: TransformerConfig, stacks: Dict[str, Stack]) -> None:
    """Refuse options of methods that neither stack uses, which would silently do nothing."""
    used: Dict[str, set] = {}
    for stack in stacks.values():
        for choice in (stack.aggregator, stack.init, stack.residual, stack.attention, stack.memory):
            while choice is not None:
                kind = next(registry for registry in REGISTRIES if registry.knows(choice.method))
                used.setdefault(kind.kind, set()).add(kind.prefix(choice.name))
                choice = choice.options.get("inner")
    for registry in REGISTRIES:
        for name in registry.names():
            prefix = registry.prefix(name)
            options = {} if prefix in used.get(registry.kind, ()) else registry.options(cfg, name)
            given = [option for option, value in options.items() if value is not False]
            if given:
                flag = f"{prefix}_{given[0]}".replace("_", "-")
                names = " or ".join(n for n in registry.names() if registry.prefix(n) == prefix)
                raise UsageError(
                    f"--{flag} does nothing without {registry.kind} {names}: add that, or leave it out"
                )
