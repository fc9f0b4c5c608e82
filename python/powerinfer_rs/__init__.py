"""Run ReLU-sparse and ordinary GGUF language models fast on ordinary machines.

Examples:
    >>> from powerinfer_rs import Engine
    >>> print(Engine().generate("The capital of France is", max_tokens=2, temperature=0))
     Paris.
"""

from importlib.metadata import version

from ._engine import (
    ContextOverflowError,
    DeviceError,
    InternalError,
    InvalidArgumentError,
    ModelFileError,
    ModelFormatError,
    ModelNotFoundError,
    PowerInferError,
    UnsupportedModelError,
)
from .completion import Completion, Timings
from .engine import Engine
from .sampling import Sampler, SamplingError, SamplingParams
from .tokenizer import StreamDecoder, Tokenizer

__version__ = version("powerinfer-rs")

__all__ = [
    "Completion",
    "ContextOverflowError",
    "DeviceError",
    "Engine",
    "InternalError",
    "InvalidArgumentError",
    "ModelFileError",
    "ModelFormatError",
    "ModelNotFoundError",
    "PowerInferError",
    "Sampler",
    "SamplingError",
    "SamplingParams",
    "StreamDecoder",
    "Timings",
    "Tokenizer",
    "UnsupportedModelError",
    "__version__",
]
