"""ckptflow: training checkpoints in, proven Hugging Face models out."""

__version__ = "0.1.0"
