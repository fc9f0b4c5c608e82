"""The workshop: what makes, measures and improves models."""

from ..activations import load_counts
from .activations import profile
from .quantize import Quantized, quantize
from .splits import Split, split

__all__ = ["Quantized", "Split", "load_counts", "profile", "quantize", "split"]
