"""Everything that imports fairseq: model, architectures, task, training."""
