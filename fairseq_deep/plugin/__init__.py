"""Everything that imports fairseq: model, architectures, task, training."""

from fairseq_deep.errors import UsageError

if __name__ != "fairseq_deep.plugin":  # imported a second time, as a --user-dir
    raise UsageError("--user-dir must be the directory fairseq_deep, not a part of it; see fairseq-deep path")
