"""Mapping of a plain model to one of transformers' classes: choice of the class, configuration and weights.

| class | norm | embedding norm | positions | output bias |
|---|---|---|---|---|
| M2M100 | pre | no | sinusoids | no |
| Blenderbot | pre | no | stored, row t for token t = 0, 1, ... | yes |
| MBart | pre | yes | stored, row t + 2 | yes |
| Bart | post | yes | stored, row t + 2 | yes |
| FSMT | post | no | sinusoids | no; a table per side |

Names after the prefix ``model.`` are fairseq's, and no tensor is transposed. Rows after the target dictionary are
*silent*: the output bias prevents their generation.
"""

import glob
import os
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_deep.core.positions import LearnedPositions, SinusoidalPositions, sinusoids
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.engines.transformers_engine import TARGET, TransformersEngine, check_package, quiet
from fairseq_deep.runtime.exported import TRANSFORMERS, write_record
from fairseq_deep.runtime.plain import Unsupported
from fairseq_deep.runtime.verification import Limits
from fairseq_deep.tools import huggingface_tokenizer as text
from fairseq_deep.tools.card import counts, make_export_card
from fairseq_deep.tools.output_files import write_text
from fairseq_deep.tools.trained import Format, Trained

M2M100, BLENDERBOT, MBART, BART, FSMT = MODEL_TYPES = ("m2m_100", "blenderbot", "mbart", "bart", "fsmt")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh",
               "tanh": "tanh", "linear": "linear", "swish": "silu", "relu_squared": "relu2"}  # fmt: skip
"""transformers' names of activation functions by fairseq's names."""
OFFSETS = {BLENDERBOT: 0, MBART: 2, BART: 2}
"""Rows before the first position in classes that store positions."""
NEVER = -1e4
"""Output bias of silent rows; representable in float16."""
BOS, PAD, EOS, UNK = range(4)
SHARE, LENPEN = 0.98, 0.6
"""Share of translations that must be equal, and minimum length penalty of this check. With smaller penalties, the
searches differ: transformers compares all hypotheses that end at the same step, and fairseq stops at the first ones."""
TOLERANCE, SHORT_FORM = 1e-5, 1e-4
"""Maximum difference of log-probabilities, relative to the largest one if that is above 1. The second value applies if
folding changes the eps of DeepNet's first norms, as with fixed positions."""
PACKAGES = ("fairseq_deep", "torch", "transformers", "tokenizers")


class Vocabulary(NamedTuple):
    """Sizes of a model's embedding tables.

    Attributes:
        source, target: sizes of the dictionaries
        meanings: dictionary entry of each tokenizer id after the source dictionary
        shared: whether both sides share one dictionary
    """

    source: int
    target: int
    meanings: Sequence[int]
    shared: bool

    @property
    def rows(self) -> int:
        """Rows of all tables in classes with one size for both sides."""
        return max(self.source + len(self.meanings), self.target)


class Transformers(Format):
    """A directory that transformers loads without this package.

    Raises:
        UsageError: transformers is missing, or has no class for the model
    """

    program, engine = TRANSFORMERS, TransformersEngine

    def __init__(self, trained: Trained):
        super().__init__(trained)
        path, loaded, flags = trained.path, trained.loaded, trained.loaded.stored.flags
        if trained.search["gnmt_lenpen"]:
            raise UsageError(f"{path} has GNMT's length penalty, which transformers does not support")
        self.plain, streams = trained.plain("huggingface")
        text.check_tags(trained)
        merges = text.read_merges(trained.bundle.codes)
        try:
            _, meanings = text.make_vocabulary(loaded.source.symbols, merges)
            text.make_vocabulary(loaded.target.symbols, merges)  # rejects what a tokenizer cannot distinguish
            shared = loaded.source == loaded.target
            self.sizes = Vocabulary(len(loaded.source), len(loaded.target), meanings, shared)
        except UsageError as error:
            raise UsageError(f"{path} has {error}") from error
        problem = find_problem(self.plain, flags.activation_fn)
        if problem:
            raise Unsupported(f"{path} has {problem}, for which transformers has no class")
        self.kind = choose_class(self.plain, self.sizes)
        check_package()
        tolerance = SHORT_FORM if streams and self.kind == FSMT else TOLERANCE
        self.limits = Limits(tolerance, None, SHARE if trained.search["lenpen"] >= LENPEN else None)
        config = make_config(self.plain, flags, self.kind, self.sizes, trained.languages)
        with quiet():
            self.model = make_model(self.plain, config, self.sizes)
        self.model.generation_config = make_generation(trained.search, self.plain)
        self.made, self.size = type(self.model).__name__, sum(each.numel() for each in self.model.parameters())

    def write(self, folder: str) -> None:
        """See :class:`Format`."""
        trained, loaded = self.trained, self.trained.loaded
        with quiet():
            self.model.save_pretrained(folder)
        del self.model
        for path in glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):  # created with private permissions
            shutil.copymode(os.path.join(folder, "config.json"), path)
        sides = [(folder, loaded.source, self.plain.encoder)]
        sides += [(os.path.join(folder, TARGET), loaded.target, self.plain.decoder)] * (not self.sizes.shared)
        for place, dictionary, stack in sides:
            text.save_tokenizer(place, dictionary.symbols, trained.bundle.codes, stack.max_positions())
        write_record(folder, trained.bundle, trained.search, trained.facts, trained.languages)

    def encode(self, engine: TransformersEngine, texts: Sequence[str], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the ids of *texts* from transformers' tokenizer.

        Raises:
            UsageError: they do not mean the tokens in *rows*
        """
        meanings, found = [*range(self.sizes.source), *self.sizes.meanings], [*map(engine.source.encode, texts)]
        for line, row, own in zip(texts, rows, found):
            if [meanings[index] for index in own.tolist()] != row.tolist():
                raise UsageError(f"the tokenizer for transformers splits a sentence differently ({line[:60]!r})")
        return found

    def finish(self, folder: str, found: str) -> None:
        """Write the card."""
        own = sum(parameter.numel() for parameter in self.trained.loaded.model.parameters())
        stored = f" ({self.size:,} as stored by the class)" * (self.size != own)
        rows = {"class": self.made, "parameters": f"{own:,}{stored}", "weights": "float32", "checked": found,
                "dictionaries": counts(self.trained.loaded, {})["dictionaries"]}  # fmt: skip
        limits = [stack.max_positions() for stack in (self.plain.encoder, self.plain.decoder)]
        card = make_export_card(
            self.trained, "transformers", PACKAGES, rows, decoder="tokenizer" if self.sizes.shared else "target",
            tags=text.tags_of(self.trained.loaded.source.symbols), limit=limits[1] - 1,
            positions=min(limits) * (self.kind in OFFSETS),
        )  # fmt: skip
        write_text(os.path.join(folder, "README.md"), card)


def find_problem(model: Any, activation: str) -> str:
    """Return the property of a plain `Transformer` that no class supports; "" if a class supports it.

    Args:
        activation: fairseq's name of the activation function
    """
    encoder, decoder = model.encoder.stack, model.decoder.stack
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    plain = not encoder.pre_norm and model.encoder.layernorm_embedding is None
    problems = {
        f"different widths ({encoder.dim} and {decoder.dim})": encoder.dim != decoder.dim,
        "pre-norm and post-norm stacks": encoder.pre_norm != decoder.pre_norm,
        **{f"no final norm ({side})": each.stack.pre_norm and each.layer_norm is None for side, each in stacks.items()},
        **{f"no layers ({side})": not each.layers for side, each in stacks.items()},
        "--no-cross-attention": not decoder.cross_attention,
        f"--activation-fn {activation}": activation not in ACTIVATIONS,
        "post-norm without sinusoidal positions and without --layernorm-embedding": plain and not has_sinusoids(model),
    }
    return next((problem for problem, holds in problems.items() if holds), "")


def has_sinusoids(model: Any) -> bool:
    """Return whether both stacks have sinusoidal positions."""
    return all(isinstance(each.embed_positions, SinusoidalPositions) for each in (model.encoder, model.decoder))


def choose_class(model: Any, vocabulary: Vocabulary) -> str:
    """Return the ``model_type`` that supports a plain *model* without a problem."""
    if model.encoder.layernorm_embedding is not None:
        return MBART if model.encoder.stack.pre_norm else BART
    if not model.encoder.stack.pre_norm:
        return FSMT
    return M2M100 if has_sinusoids(model) and vocabulary.rows == vocabulary.target else BLENDERBOT


def make_config(model: Any, flags: Any, kind: str, vocabulary: Vocabulary, languages: Sequence[str]) -> Any:
    """Return the configuration of the class *kind* for a plain *model*."""
    from transformers import AutoConfig

    stacks = {"encoder": model.encoder.stack, "decoder": model.decoder.stack}
    names = (("layers", "layers"), ("attention_heads", "heads"), ("ffn_dim", "ffn_dim"))
    sizes = {f"{side}_{name}": getattr(stack, own) for side, stack in stacks.items() for name, own in names}
    if kind == FSMT:
        source = vocabulary.source + len(vocabulary.meanings)
        tables = {"src_vocab_size": source, "tgt_vocab_size": vocabulary.target}
    else:
        tables = {"vocab_size": vocabulary.rows}
    if kind == BLENDERBOT:
        tables["encoder_no_repeat_ngram_size"] = 0  # the default is 3
    rates = ("dropout", "attention_dropout", "activation_dropout")
    return AutoConfig.for_model(
        kind,
        langs=list(languages),
        d_model=stacks["encoder"].dim,
        **sizes,
        **tables,
        **{name: float(getattr(stacks["encoder"], name)) for name in rates},
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        activation_function=ACTIVATIONS[flags.activation_fn],
        scale_embedding=stacks["encoder"].scale_embedding,
        max_position_embeddings=max(stack.max_positions() for stack in (model.encoder, model.decoder)),
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=None,
        tie_word_embeddings=is_tied(model, kind, vocabulary),
    )  # fmt: skip


def is_tied(model: Any, kind: str, vocabulary: Vocabulary) -> bool:
    """Return whether source, target and output share one table, also in the class *kind*."""
    tables = [model.encoder.embed_tokens, model.decoder.embed_tokens, model.decoder.output_projection]
    narrow = model.decoder.project_in_dim is not None or model.decoder.project_out_dim is not None
    one = len({table.weight.data_ptr() for table in tables}) == 1 and not narrow
    return one and not (kind == FSMT and vocabulary.meanings)


def make_tensors(model: Any, kind: str, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Return the weights of a plain *model* by their names in the class *kind*, in float32."""
    state = {name: value.detach().float() for name, value in model.state_dict().items()}
    apart = (".history.", ".version", ".embed_", ".output_projection.", ".project_", ".residual.")
    tensors = {f"model.{name}": value for name, value in state.items() if not any(part in f".{name}" for part in apart)}
    source, target, output = _tables(model)
    source = torch.cat([source, source[list(vocabulary.meanings)]])
    if kind == FSMT:
        tensors["model.decoder.output_projection.weight"] = output
    else:
        rows = vocabulary.rows
        source = torch.cat([source, source[UNK].expand(rows - len(source), -1)])
        tied = is_tied(model, kind, vocabulary)  # a shared table has copies of <unk> in silent rows
        target, output = (source, source) if tied else (_extend(target, rows), _extend(output, rows))
        tensors.update({"model.shared.weight": source, "lm_head.weight": output})
    tensors["model.encoder.embed_tokens.weight"], tensors["model.decoder.embed_tokens.weight"] = source, target
    if kind in OFFSETS:
        longest = max(stack.max_positions() for stack in (model.encoder, model.decoder))
        for side in ("encoder", "decoder"):
            table = _positions(getattr(model, side), PAD + 1 + longest)
            tensors[f"model.{side}.embed_positions.weight"] = table[PAD + 1 - OFFSETS[kind] :]
        bias = torch.zeros(1, vocabulary.rows)
        bias[:, vocabulary.target :] = NEVER
        tensors["final_logits_bias"] = bias
    return tensors


def _tables(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of source, target and output, multiplied by projections between widths."""
    decoder = model.decoder
    target, output = decoder.embed_tokens.weight.detach(), decoder.output_projection.weight.detach()
    if decoder.project_in_dim is not None:
        target = target @ decoder.project_in_dim.weight.detach().T
    if decoder.project_out_dim is not None:
        output = output @ decoder.project_out_dim.weight.detach()
    return model.encoder.embed_tokens.weight.detach().float(), target.float(), output.float()


def _extend(table: Tensor, rows: int) -> Tensor:
    """Return *table*, extended to *rows* rows with zeros."""
    return torch.cat([table, table.new_zeros(rows - len(table), table.size(1))])


def _positions(stack: Any, rows: int) -> Tensor:
    """Return fairseq's positions 0 ... *rows* - 1; zeros if the stack has none, and after the end of its table."""
    positions, dim = stack.embed_positions, stack.stack.dim
    if isinstance(positions, SinusoidalPositions):
        return sinusoids(rows, dim, PAD)
    if isinstance(positions, LearnedPositions):
        return _extend(positions.weight.detach().float()[:rows], rows)
    return torch.zeros(rows, dim)


def make_model(model: Any, config: Any, vocabulary: Vocabulary) -> Any:
    """Return transformers' model of *config* with the weights of a plain *model*.

    Raises:
        UsageError: names or shapes differ in this version of transformers
    """
    from transformers import AutoModelForSeq2SeqLM

    other = AutoModelForSeq2SeqLM.from_config(config).eval()
    tensors = make_tensors(model, config.model_type, vocabulary)
    try:
        missing, unexpected = other.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise UsageError(
            f"this version of transformers has unexpected shapes ({str(error).splitlines()[-1].strip()})"
        ) from error
    missing = [name for name in missing if not (config.model_type == FSMT and "embed_positions" in name)]
    if missing or unexpected:
        raise UsageError(f"this transformers has unexpected parameters: {', '.join([*missing, *unexpected][:3])}")
    return other


def make_generation(search: dict[str, Any], model: Any) -> Any:
    """Return the settings of fairseq's beam search, with the length limit of the longest source.

    Args:
        search: "beam", "lenpen", "max_len_a" and "max_len_b"
        model: the `Transformer`
    """
    from transformers import GenerationConfig

    beams = {"num_beams": search["beam"]}
    if search["beam"] > 1:
        beams.update(length_penalty=float(search["lenpen"]), early_stopping=True)
    longest = int(search["max_len_a"] * model.encoder.max_positions() + search["max_len_b"])
    return GenerationConfig(
        **beams, do_sample=False, suppress_tokens=[PAD], min_new_tokens=1,
        max_new_tokens=min(longest, model.decoder.max_positions() - 1) + 1,
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=EOS,
    )  # fmt: skip
