"""Where things are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fairseq_deep"
STOCK = ROOT / "tests/data/stock_fairseq_0.12.2.pt"  # written by fairseq 0.12.2 as published, torch 1.13.1
