"""What a GPU would do, by count: the parts of ``benchmarks/device_model.py``."""
