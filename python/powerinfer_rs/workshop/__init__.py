"""The workshop: what prepares models and measures them."""

from ..activations import load_counts
from .activations import profile
from .splits import Split, split

__all__ = ["Split", "load_counts", "profile", "split"]
