"""Text of an experiment: download, reconstruction, checks, and sub-word segmentation."""
