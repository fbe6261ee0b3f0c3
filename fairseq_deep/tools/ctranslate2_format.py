"""Export of a plain model to a directory for CTranslate2, with the specifications in its Python package.

CTranslate2's behaviour was determined by comparing outputs (tests/tools/test_export_formats.py):

- positions start at 0, and their number is the number of rows in the table; with relative positions in self-attention,
  no absolute positions are added;
- relative positions have 2K+1 vectors, for the distances -K ... K, also in decoders;
- the search does not exclude <pad>, unlike fairseq's.
"""

import operator
import os
import shutil
from typing import Any

import numpy as np
import torch

from fairseq_deep.core.layers.feed_forward import GATED
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.engines.ct2_engine import Ct2Engine, check_package
from fairseq_deep.runtime.exported import CTRANSLATE2, write_record
from fairseq_deep.runtime.plain import Unsupported
from fairseq_deep.runtime.verification import Limits
from fairseq_deep.tools.trained import Format, Trained

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_accurate": "GELUTanh", "gelu_fast": "GELUTanh", "tanh": "Tanh",
               "swish": "SWISH"}  # fmt: skip
NEVER = -1e4
"""Bias of tokens that must not be generated; representable in float16."""
NORMS = (
    ("self_attn_layer_norm", "self_attention.layer_norm", "input_layer_norm", "post_attention_layer_norm"),
    ("encoder_attn_layer_norm", "attention.layer_norm", "external_pre_encoder_attention_layer_norm",
     "external_post_encoder_attention_layer_norm"),
    ("final_layer_norm", "ffn.layer_norm", "pre_feedforward_layer_norm", "post_feedforward_layer_norm"),
)  # fmt: skip
"""Our name of each sub-layer's norm; CTranslate2's name; with Peri-LN, CTranslate2's names of inner and outer norm."""
PERI, BOTH, CROSS = "peri", "pre_post_layer_norm", "external_pre_post_encoder_layers"
"""Our name of Peri-LN, CTranslate2's argument for it, and the one for Peri-LN around cross-attention."""
WEIGHT_STEPS = 63
"""Maximum of an int8 weight. Without VNNI, a processor adds pairs of products in 16 bits: 2 x 255 x 63 fits, but some
sums overflow with 127, the maximum in CTranslate2's own converters."""
DEFAULT = "float32"
"""Type of the weights."""
EXACT, ROUNDED, SHARE = 1e-4, 0.5, 0.98
"""Limits of the difference of log-probabilities: in float32 of the maximum, relative to the largest value if that is
above 1; for other types of weights of the mean. In float32 also the share of translations that must be equal."""


class CTranslate2(Format):
    """A directory for CTranslate2.

    Raises:
        UsageError: CTranslate2 is not installed, or does not support the model
    """

    program, engine = CTRANSLATE2, Ct2Engine

    def __init__(self, trained: Trained):
        super().__init__(trained)
        loaded, flags = trained.loaded, trained.loaded.stored.flags
        plain, _ = trained.plain("ctranslate2", tables=True)
        problem = find_problem(loaded.model, flags)
        if problem:
            raise Unsupported(f"{trained.path} has {problem}")
        check_package()
        self.spec = build_spec(plain, flags.activation_fn, loaded.source, loaded.target)
        self.quantization = trained.args.quantization or DEFAULT
        other = " with length^lenpen, since it has no GNMT length penalty" * trained.search["gnmt_lenpen"]
        self.made = f"for CTranslate2{other}, {self.quantization}"
        exact = self.quantization == DEFAULT
        self.limits = Limits(EXACT, None if exact else ROUNDED, SHARE if exact else None)

    def write(self, folder: str) -> None:
        """See :class:`Format`."""
        trained = self.trained
        save_spec(self.spec, folder, self.quantization)
        del self.spec
        if trained.bundle.codes is not None:
            shutil.copyfile(trained.bundle.codes, os.path.join(folder, packaged.CODES[trained.steps.kind]))
        write_record(folder, trained.bundle, trained.search, trained.facts, trained.languages)


def find_problem(model: Transformer, flags: Any) -> str:
    """Return the part of a plain model that CTranslate2 does not support, with a fix if possible; "" if none."""
    ffn, output = model.encoder.stack.ffn, model.decoder
    found = {
        "--no-cross-attention, which CTranslate2 does not support": not model.decoder.stack.cross_attention,
        f"--activation-fn {flags.activation_fn}: CTranslate2 supports {', '.join(ACTIVATIONS)}":
            ffn not in GATED and flags.activation_fn not in ACTIVATIONS,
        "a --decoder-output-dim that differs from the width, which the export does not support":
            output.project_in_dim is not None or output.project_out_dim is not None,
    }  # fmt: skip
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        found[f"no layers ({side}); CTranslate2 requires at least one"] = not stack.layers
        found[f"--relative-positions and absolute positions ({side}), which CTranslate2 does not combine: train with "
              "--no-token-positional-embeddings"] = stack.stack.relative_positions and stack.embed_positions is not None
    return next((problem for problem, holds in found.items() if holds), "")


def build_spec(model: Transformer, activation: str, source: Any, target: Any) -> Any:
    """Return the specification of a plain model, with its weights in float32.

    Args:
        model: a `Transformer` with plain or Peri-LN connections
        activation: fairseq's name of the activation function
        source, target: the dictionaries
    """
    from ctranslate2 import specs

    encoder, decoder = model.encoder, model.decoder
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(**_structure(encoder, activation, BOTH)),
        specs.TransformerDecoderSpec(**_structure(decoder, activation, BOTH, CROSS)),
    )
    for part, stack in ((spec.encoder, encoder), (spec.decoder, decoder)):
        _set_stack(part, stack)
    _set_linear(spec.encoder.embeddings[0], encoder.embed_tokens)
    _set_linear(spec.decoder.embeddings, decoder.embed_tokens)
    _set_linear(spec.decoder.projection, decoder.output_projection)
    spec.decoder.projection.bias = np.zeros(len(target), dtype=np.float32)
    spec.decoder.projection.bias[target.pad] = NEVER
    spec.register_source_vocabulary(list(source.symbols))
    spec.register_target_vocabulary(list(target.symbols))
    for name in ("bos", "eos", "unk"):
        setattr(spec.config, f"{name}_token", target.symbols[getattr(target, name)])
    spec.config.decoder_start_token = spec.config.eos_token
    spec.config.add_source_eos = True
    spec.validate()
    return spec


def _structure(stack: Any, activation: str, *peri: str) -> dict[str, Any]:
    """Return CTranslate2's arguments for the structure of a stack.

    Args:
        peri: names of arguments that Peri-LN sets
    """
    from ctranslate2.specs import Activation

    own = stack.stack
    return {
        "num_layers": len(stack.layers),
        "num_heads": own.heads,
        "pre_norm": own.pre_norm,
        "no_final_norm": stack.layer_norm is None,
        "activation": Activation[ACTIVATIONS[GATED.get(own.ffn, activation)]],
        "layernorm_embedding": stack.layernorm_embedding is not None,
        "relative_position": own.relative_positions is not None,
        "rms_norm": own.norm == "rms",
        "ffn_glu": own.ffn in GATED,
        "num_heads_kv": None if own.kv_heads == own.heads else own.kv_heads,
        "rotary_dim": 0 if own.positions == "rotary" else None,  # all features of a head, in halves
        "rotary_interleave": False,
        **dict.fromkeys(peri, own.residual.name == PERI),
    }


def _set_stack(spec: Any, stack: Any) -> None:
    """Set positions, norms and layers of a stack."""
    spec.scale_embeddings = stack.embed_scale
    if stack.stack.positions == "rotary":
        vars(spec).pop("position_encodings", None)
    elif stack.stack.relative_positions is None:
        spec.position_encodings.encodings = _positions(stack)
    for name in ("layer_norm", "layernorm_embedding"):
        if getattr(stack, name) is not None:
            _set_norm(getattr(spec, name), getattr(stack, name))
    for part, layer in zip(spec.layer, stack.layers):
        own = layer.self_attn
        _set_linear(part.self_attention.linear[0], own.q_proj, own.k_proj, own.v_proj)
        _set_linear(part.self_attention.linear[1], own.out_proj)
        if stack.stack.relative_positions is not None:
            _set_relative(part.self_attention, own)
        if hasattr(part, "attention"):
            other = layer.encoder_attn
            _set_linear(part.attention.linear[0], other.q_proj)
            _set_linear(part.attention.linear[1], other.k_proj, other.v_proj)
            _set_linear(part.attention.linear[2], other.out_proj)
        _set_linear(part.ffn.linear_0, layer.fc1)
        if hasattr(part.ffn, "linear_0_noact"):
            _set_linear(part.ffn.linear_0_noact, layer.fc_linear)
        _set_linear(part.ffn.linear_1, layer.fc2)
        _set_norms(part, layer, stack.stack.residual.name == PERI)


def _set_norms(spec: Any, layer: Any, peri: bool) -> None:
    """Set the norms of a layer's sub-layers and, for Peri-LN, the norms of their outputs."""
    found = [names for names in NORMS if hasattr(layer, names[0])]
    for index, (own, plain, inner, outer) in enumerate(found):
        _set_norm(operator.attrgetter(inner if peri else plain)(spec), getattr(layer, own))
        if peri:
            _set_norm(getattr(spec, outer), layer.residual.layer_norms[index])


def _array(*tensors: torch.Tensor) -> np.ndarray:
    """Return a copy of *tensors*, concatenated along the first dimension."""
    return torch.cat([tensor.detach().float() for tensor in tensors]).cpu().numpy()


def _set_linear(spec: Any, *layers: Any) -> None:
    """Set linear layers, concatenated to one, or an embedding table."""
    spec.weight = _array(*(layer.weight for layer in layers))
    if getattr(layers[0], "bias", None) is not None:
        spec.bias = _array(*(layer.bias for layer in layers))


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if hasattr(spec, "beta"):  # RMSNorm has none
        spec.beta = _array(norm.bias)


def _set_relative(spec: Any, attention: Any) -> None:
    """Set the vectors of relative positions, with zeros for future positions that the layer does not use."""
    from ctranslate2.specs import model_spec

    keys, values = attention.relative_keys, attention.relative_values
    ahead = keys.new_zeros(2 * attention.farthest + 1 - len(keys), keys.size(1))
    spec.relative_position_keys = _array(keys, ahead)
    spec.relative_position_values = model_spec.OPTIONAL if values is None else _array(values, ahead)


def _positions(stack: Any) -> np.ndarray:
    """Return the position table from 0 on; zeros if the stack has none, since CTranslate2 would use its own table."""
    table = stack.embed_positions
    if table is None:
        return np.zeros((stack.max_positions(), stack.layers[0].fc1.in_features), dtype=np.float32)
    weight = table.weight if isinstance(table, torch.nn.Embedding) else table.weights
    return _array(weight[table.padding_idx + 1 :])


def _leave_room(spec: Any, name: str, value: Any) -> None:
    """Rescale the int8 weights of one variable to the range of `WEIGHT_STEPS` instead of 127."""
    from ctranslate2.specs.model_spec import NumpyVariable

    key = name.rpartition("/")[2]
    scale = getattr(spec, f"{key}_scale", None)
    if getattr(value, "dtype", None) == "int8" and scale is not None:
        share = np.float32(WEIGHT_STEPS / 127)
        setattr(spec, key, NumpyVariable(np.rint(value.numpy() * share).astype(np.int8)))
        setattr(spec, f"{key}_scale", NumpyVariable(scale.numpy() * share))


def save_spec(spec: Any, folder: str, quantization: str) -> None:
    """Write a specification to an empty directory.

    Raises:
        OSError: the directory cannot be written
    """
    spec.optimize(quantization=quantization)
    if quantization.startswith("int8"):
        spec._visit(_leave_room)
    spec.save(folder)
