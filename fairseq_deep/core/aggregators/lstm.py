"""Depth-wise LSTM, and the depth-wise RNN of the paper's ablation.

Rewiring the Transformer with Depth-Wise LSTMs, Xu et al., 2024. An LSTM runs over the layers, separately at each
position. It replaces residual connections, feed-forward sub-layer and its norm; layers keep only their attention.
With A_i the attention output of layer i ("LSTM_Input"), [|] concatenation and * the element-wise product:

    c = [Out_{i-1} | A_i]                                         Eq. (1)
    i, f, o = sigmoid(LN(W_i c)), sigmoid(LN(W_f c)), sigmoid(LN(W_o c))   Eq. (2) to (4)
    h = GeLU(LN(W_h c))                 1-layer hidden            Eq. (5)
    h = W_h2 GLU(LN(W_h1 c))            2-layer hidden            Eq. (6)
    Cell_i = Cell_{i-1} * f + h * i                               Eq. (7)
    Out_i = Cell_i * o                                            Eq. (8)

and Cell_0 = Out_0 = the embedding output. The biases that the paper prints in Eq. (2) to (6), as in LN(W_i c + b_i),
require *biases*, because its parameter counts have none. The depth-wise RNN is Eq. (6), Out_i = h.

The paper does not give initial values. We start the forget gates near 1 (``FORGET_BIAS``): at one half, only 0.5^L of
the difference between positions would remain, and a deep stack would not learn to use its source.

Names here: ``gates[.].weight`` is the rows of W_i, W_f and W_o in this order, ``hidden[.].fc1`` and ``fc2`` are W_h1
(or W_h) and W_h2. A *step* is one application of the LSTM: one per layer, or two in a decoder of variant (b).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_deep.core.fields import PROBABILITY, Option, Range
from fairseq_deep.core.native.lstm import NativeLstm, find_lstm
from fairseq_deep.core.native.packed import runs_native
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, Stack

from .base import AGGREGATORS, Aggregator
from .lstm_parts import Gates, Hidden

SHARE = ("none", "gate", "gate-encdec", "all")
MERGE = ("add", "concat", "two")
GLU = ("sigmoid", "gelu", "swish", "relu")
TWO_LAYERS = ("ffn", (2,))
FORGET_BIAS = 5.0
"""Initial bias of the forget gate's norm: sigmoid(5) = 0.993 of the cell is passed to the next layer."""


def _check(hidden: int | None, merge: str, share: str, forget_bias: float | None, gated: bool) -> None:
    """Reject options that contradict each other.

    Raises:
        UsageError: options contradict each other
    """
    if not gated and share not in ("none", "all"):
        raise UsageError(f"--lstm-share {share} is not supported without gates (--layer-agg rnn): use none or all")
    if hidden is not None and (hidden < 2 or hidden % 2):
        raise UsageError(f"--lstm-hidden {hidden} cannot be halved by the GLU: use an even number")
    if not gated and forget_bias is not None:
        raise UsageError("--lstm-forget-bias has no effect in the RNN, which has no gates: use --layer-agg lstm")
    if gated and merge != "add" and share in ("gate-encdec", "all"):
        raise UsageError(
            f"--lstm-merge {merge} gives the decoder its own gates, and --lstm-share {share} cannot share these: "
            "use --lstm-share gate or none"
        )


@AGGREGATORS.register("lstm")
class DepthwiseLstm(Aggregator):
    """Depth-wise LSTM of one stack. The state is [Out, Cell] after the last step.

    Args:
        stack: see :class:`Aggregator`; its norm placement has no effect, its activation dropout acts on the output of
            the GLU
        ffn: layers of the hidden computation: 1, Eq. (5), or 2, Eq. (6)
        hidden: width of W_h1's output in the 2-layer form, before the GLU halves it; default 4 *dim*
        glu: gate function of the GLU, one of ``GLU``; the paper says "GLU", which has a sigmoid
        merge: computation of A_i from a decoder layer's two attention outputs S and X: "add": S + X; "concat": [S | X];
            "two": variant (b) of the paper, with one step after each attention
        attn_residual: in the decoder, the query of the attention to the source is S + Out_{i-1} instead of S; new
            models use it (``presets``), checkpoints without the option do not
        share: parameters that steps share: "none"; "gate": the gates of all layers of a stack; "gate-encdec": also
            between encoder and decoder; "all": also the hidden computation within a stack. With "two", the first steps
            of all layers share parameters, and so do the second steps.
        forget_bias: initial bias of the forget gate's norm; default ``FORGET_BIAS``
        final_norm: a layer norm after the stack
        dropout: on h; default: the stack's dropout
        biases: the biases printed in Eq. (2) to (6)

    With recomputation, only Out, Cell and A_i of each step are saved; the backward pass recomputes the rest.

    Shapes:
        Out, Cell, A_i: T x B x C; A_i of "concat" T x B x 2C

    Raises:
        UsageError: a value is out of range, or options contradict each other
    """

    paper = "Xu 2024"
    unused_flags = {
        "{side}_ffn_embed_dim": (0, "has no feed-forward sub-layer: use --lstm-hidden instead"),
        "{side}_normalize_before": (False, "has its own norms: use --lstm-final-norm for more"),
        "activation_fn": ("gelu", "has its own: use --lstm-ffn and --lstm-glu"),
    }
    unsupported_flags = ("quant_noise_pq", "quant_noise_scalar")
    decoder_flags = ("no_cross_attention", "no_decoder_final_norm")
    needs_layers = ("encoder", "decoder")
    decoder_options = ("merge", "attn_residual")
    presets = {"attn_residual": True}
    has_gates = True
    options = {
        "ffn": Option("layers of the hidden computation, 1 (GeLU) or 2 (GLU)", Range(1, 2)),
        "hidden": Option("width of the 2-layer form before the GLU halves it (default: 4 x width)", needs=TWO_LAYERS),
        "glu": Option("gate function of the GLU", GLU, needs=TWO_LAYERS),
        "merge": Option("outputs of a decoder layer's attentions, two are steps", MERGE),
        "share": Option("parameters that layers share (default: gate; RNN: none)", SHARE),
        "forget_bias": Option(f"initial bias of the forget gate (default: {FORGET_BIAS:g})"),
        "final_norm": Option("a layer norm after each stack"),
        "biases": Option("the biases of Eq. 2 to 6, which the paper's parameter counts omit"),
        "dropout": Option("dropout on the hidden computation's output (default: --dropout)", PROBABILITY),
    }

    def __init__(
        self,
        stack: Stack,
        ffn: int = 2,
        hidden: int | None = None,
        glu: str = "sigmoid",
        merge: str = "add",
        attn_residual: bool = False,
        share: str | None = None,
        forget_bias: float | None = None,
        final_norm: bool = False,
        dropout: float | None = None,
        biases: bool = False,
    ):
        super().__init__(stack)
        dim = self.dim
        self.share = share or ("gate" if self.has_gates else "none")
        _check(hidden, merge, self.share, forget_bias, self.has_gates)
        self.recompute = stack.recompute
        dropout = stack.dropout if dropout is None else dropout
        forget_bias = FORGET_BIAS if forget_bias is None else forget_bias
        in_dim = 3 * dim if stack.side == "decoder" and merge == "concat" else 2 * dim
        width = None if ffn == 1 else hidden or 4 * dim
        # shared modules: one for each step of a layer
        num_gates = stack.num_modules if self.share == "none" else stack.modules_per_layer
        num_hidden = stack.modules_per_layer if self.share == "all" else stack.num_modules
        num_gates = num_gates if self.has_gates else 0
        self.gates = nn.ModuleList(Gates(in_dim, dim, forget_bias, biases) for _ in range(num_gates))
        self.hidden = nn.ModuleList(
            Hidden(in_dim, dim, width, glu, dropout, stack.activation_dropout, biases) for _ in range(num_hidden)
        )
        self.final_norm = nn.LayerNorm(dim) if final_norm else None

    @classmethod
    def add_args(cls, parser) -> None:
        super().add_args(parser)
        text = "add a decoder layer's input to the query of its second attention"
        parser.add_argument("--lstm-attn-residual", action="store_true", default=None, help=f"{text} (new models do)")
        parser.add_argument("--lstm-no-attn-residual", action="store_false", default=None, dest="lstm_attn_residual",
                            help=f"do not {text}")  # fmt: skip

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        merge = options.get("merge", "add")
        return Layout(
            residual=False,
            feed_forward=False,
            attention_bias=False,
            merge="concat" if merge == "concat" else "add",
            attn_residual=bool(options.get("attn_residual")),
            split=side == "decoder" and merge == "two",  # variant (b): one LSTM step after each attention
        )

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        decoder = stack if stack.side == "decoder" else other
        for option in (option for option in cls.decoder_options if option in options):
            flag = f"--lstm-{'no-' if options[option] is False else ''}{option.replace('_', '-')}"
            if not issubclass(decoder.aggregator.method, DepthwiseLstm):
                raise UsageError(
                    f"{flag} has no effect on a decoder with --layer-agg {decoder.aggregator.name}: omit it"
                )
            if decoder.parallel_attention:
                raise UsageError(
                    f"{flag} is not supported with --decoder-attn {decoder.attention.name}: omit one of them"
                )
            if option == "attn_residual" and options.get("merge") == "two":
                raise UsageError(f"{flag} has no effect with --lstm-merge two: omit it, or use another merge")
        share = options.get("share")
        if cls.has_gates and share in ("gate-encdec", "all"):
            same = issubclass(other.aggregator.method, DepthwiseLstm) and other.aggregator.method.has_gates
            if not same or other.dim != stack.dim:
                raise UsageError(
                    f"--lstm-share {share} requires --layer-agg lstm and equal widths in both stacks: "
                    "use --lstm-share gate"
                )

    def tie(self, other: Aggregator) -> None:
        if self.has_gates and self.share in ("gate-encdec", "all"):
            self.gates = other.gates

    def record(self) -> dict[str, Tensor]:
        """Return the L2 norm over the matrices of each gate."""
        found = {}
        for index, name in enumerate(("input_gate", "forget_gate", "output_gate") if self.has_gates else ()):
            matrices = [gates.weight.chunk(3)[index].float() for gates in self.gates]
            found[name] = torch.stack([torch.linalg.vector_norm(matrix) for matrix in matrices]).norm()
        return found

    def matrices(self) -> list[Tensor]:
        hidden = [linear.weight for part in self.hidden for linear in (part.fc1, part.fc2) if linear is not None]
        return [matrix for gates in self.gates for matrix in gates.weight.chunk(3)] + hidden

    def compiled(self) -> list[nn.Module]:
        return list(self.gates)  # by operation count, the hidden computation gains nothing

    def start(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()  # x is a transposed view, and results of strided inputs are strided
        return [x, x] if len(self.gates) > 0 else [x]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        if self.recompute and self.training:
            # torch's non-reentrant checkpoint: DDP must see the gradient of a shared parameter once
            return checkpoint(self._step, state, layer, output, use_reentrant=False)
        return self._step(state, layer, output)

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return state[0]

    def finish(self, state: list[Tensor]) -> Tensor:
        return state[0] if self.final_norm is None else self.final_norm(state[0])

    def _step(self, state: list[Tensor], step: int, attention: Tensor) -> list[Tensor]:
        """Compute Eq. (1) to (8)."""
        native = self._native(state[0], step)
        if native is not None:
            return native(state[0], attention, state[1])
        c = torch.cat([state[0], attention], dim=-1)
        h = self.hidden[step % len(self.hidden)](c)
        if self.gates:
            return list(self.gates[step % len(self.gates)](c, h, state[1]))
        return [h.to(state[0].dtype)]  # under autocast, types can differ

    def _native(self, x: Tensor, step: int) -> NativeLstm | None:
        """Return the step as compiled kernels, for generation on a CPU; None if they do not support it."""
        if self.training or not self.gates or self.gates[0].native is None or x.size(0) != 1 or not runs_native(x):
            return None
        return find_lstm(self.hidden[step % len(self.hidden)], self.gates[step % len(self.gates)])


@AGGREGATORS.register("rnn")
class DepthwiseRnn(DepthwiseLstm):
    """Depth-wise RNN of one stack (Table 2): Out_i = h, without gates. The state is [Out].

    The arguments are the same as for :class:`DepthwiseLstm`; *share* is "none" (default) or "all", *forget_bias* is
    rejected.
    """

    has_gates = False
