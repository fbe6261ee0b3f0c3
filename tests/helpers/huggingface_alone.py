"""Load the packaged model ARGUMENT with transformers, where fairseq, omegaconf and hydra cannot be imported."""

import sys

import without_fairseq

without_fairseq.block()

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402

import fairseq_deep  # noqa: E402, F401 (registers its classes, for the Auto classes are imported)

folder, *lines = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
found = model.generate(**tokenizer(lines, padding=True, return_tensors="pt"))
print("\n".join(tokenizer.batch_decode(found, skip_special_tokens=True)))
without_fairseq.assert_nothing_is_loaded()
