"""CTranslate2 with the weights of a fairseq Transformer.

What is made equal: weights, sentences and batches, beam, threads, the number of steps, and the score: CTranslate2's
``length_penalty`` divides the sum of log-probabilities by length^penalty as fairseq's ``--lenpen`` does, with </s> in
the length.

What cannot be: at the last step fairseq takes </s> whatever its probability, CTranslate2 the best words, so that
hypotheses which are as long as allowed differ. When more hypotheses end at one step than are missing, fairseq keeps
the first of them, CTranslate2 the best of all. CTranslate2 leaves padding out of the encoder's products and computes
the first step for one hypothesis a sentence. Its words go in and come out as strings.
"""

import logging
import tempfile

import torch

from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.tools.ctranslate2_format import build_spec, save_spec

from .fairseq_systems import load, longest, split_name

MISSING = "ctranslate2 is not installed: pip install ctranslate2==4.8.5, or leave it out of --systems"
COMPUTE = {"fp32": "float32", "int8": "int8", "bf16": "bfloat16"}


class CTranslate2System:
    """Translates the batches of `fairseq_systems` with CTranslate2."""

    def __init__(self, system, settings):
        try:
            import ctranslate2
        except ImportError:
            raise SystemExit(MISSING) from None
        logging.getLogger("ctranslate2").setLevel(logging.ERROR)
        torch.set_num_threads(1)  # what torch does here is not measured
        _, precision = split_name(system)
        if COMPUTE[precision] not in ctranslate2.get_supported_compute_types("cpu"):
            raise SystemExit(f"this CTranslate2 has no {precision} on this CPU: leave {system} out of --systems")
        _, model, self.work, config = load("stock", settings)
        sides = self.work.source_dictionary, self.work.target_dictionary
        dictionaries = [Dictionary(side.symbols[side.nspecial :]) for side in sides]
        with tempfile.TemporaryDirectory() as work:
            spec = build_spec(model, model.cfg.activation_fn, *dictionaries)
            save_spec(spec, work, "int8" if precision == "int8" else "float32")  # whose int8 fits without VNNI
            threads = {"intra_threads": settings.threads, "inter_threads": 1}
            self.translator = ctranslate2.Translator(work, compute_type=COMPUTE[precision], **threads)
        self.settings = settings
        self.options = {
            "beam_size": settings.beam,
            "num_hypotheses": settings.beam,
            "length_penalty": config.generation.lenpen,
            "min_decoding_length": settings.min_len,
            "max_input_length": 0,
        }
        dictionary = self.work.source_dictionary
        special = (dictionary.pad(), dictionary.eos())
        self.sources = [
            [[dictionary[word] for word in row if word not in special] for row in tokens.tolist()]
            for tokens in (sample["net_input"]["src_tokens"] for sample in self.work.batches)
        ]

    def translate(self, steps=1):
        """Translate all batches; *steps* are those beyond the longest hypothesis: fairseq's last is for </s>."""
        return [
            self.translator.translate_batch(
                sources,
                max_decoding_length=longest(self.settings, sample) + steps,
                **self.options,
            )
            for sample, sources in zip(self.work.batches, self.sources)
        ]

    def hypotheses(self, found):
        """{sentence: its hypotheses as lists of words without </s>, best first} of what `translate` returned."""
        if not self.settings.real:  # a fixed number: without the step that fairseq has for </s>
            found = self.translate(steps=0)
        dictionary, result = self.work.target_dictionary, {}
        for sample, sentences in zip(self.work.batches, found):
            for index, sentence in zip(sample["id"].tolist(), sentences):
                result[index] = [[dictionary.index(word) for word in words] for words in sentence.hypotheses]
        return result
