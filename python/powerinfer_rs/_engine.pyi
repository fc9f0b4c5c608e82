"""The native module: the Rust engine, without tokenizer or sampling. `powerinfer_rs.Engine` is the one to use."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ContextOverflowError",
    "DeviceError",
    "Engine",
    "InternalError",
    "InvalidArgumentError",
    "ModelFileError",
    "ModelFormatError",
    "ModelNotFoundError",
    "PowerInferError",
    "Reader",
    "UnsupportedModelError",
    "Writer",
    "decode_tensor",
    "gpus",
    "inspect",
    "instruction_sets",
    "measure_gpu",
    "plan",
    "read_gpu_index",
    "streaming_read",
    "write_gpu_index",
]

class PowerInferError(Exception):
    """Base of all errors of this package."""

class ModelFormatError(PowerInferError):
    """A file that breaks its format: the message names file, field, what was found and what would be right."""

class UnsupportedModelError(PowerInferError):
    """A sound file of an unknown kind: architecture, tensor type, tokenizer."""

class ContextOverflowError(PowerInferError):
    """More tokens than the context holds."""

class DeviceError(PowerInferError):
    """A device that can't be used."""

class InternalError(PowerInferError):
    """A bug in this package."""

class InvalidArgumentError(PowerInferError, ValueError):
    """An argument that can't be; also a ValueError."""

class ModelFileError(PowerInferError, OSError):
    """A file that can't be read or written; also an OSError."""

class ModelNotFoundError(PowerInferError, FileNotFoundError):
    """A file that isn't there; also a FileNotFoundError."""

@type_check_only
class Info(TypedDict):
    """What an engine is; it doesn't change.

    `unused_gpus` hold nothing: of each its number, its budget, and from how many bytes it would have a layer.
    """

    path: PathLike[str]
    weight_bytes: int
    converted_bytes: int
    interleaved: bool
    architecture: str
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_layers: int
    has_predictors: bool
    activation: Literal["relu", "silu", "gelu"]
    sparsity: Literal["predicted", "exact", "dense"]
    sparse_threshold: float
    device: str
    gpus: list[GpuInfo]
    unused_gpus: list[tuple[int, int, int]]
    instruction_set: str
    threads: int
    kv_type: Literal["f32", "f16", "q8_0"]
    kv_bytes_per_token: int

@type_check_only
class Gpu(TypedDict):
    """A GPU that the driver knows; `total` and `free` are bytes of its memory."""

    number: int
    name: str
    total: int
    free: int

@type_check_only
class GpuInfo(TypedDict):
    """What an engine has on a GPU: bytes it may use, bytes allocated (without the device's context), and the plan."""

    number: int
    name: str
    budget: int
    used: int
    plan: Placement

@type_check_only
class Stats(TypedDict):
    """What an engine has done since it was made, or since `reset_stats`."""

    tokens: int
    bytes_read: int
    density: list[float]
    active: list[float]
    kv_bytes: int

@type_check_only
class FileInfo(TypedDict):
    """What a file's header says."""

    magic: Literal["GGUF", "PWRI"]
    version: int
    file_bytes: int
    metadata: dict[str, Any]
    tensors: list[tuple[str, str, list[int], int]]

@final
class Engine:
    """A loaded model and the sequences it is at work on. Safe to use from several threads; steps take turns."""

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        threads: int | None = None,
        n_ctx: int | None = None,
        sparsity: str = "auto",
        sparse_threshold: float | None = None,
        activation: str | None = None,
        kv_type: str = "f16",
        interleave: bool | None = None,
        count_neurons: bool = False,
        batch: int | None = None,
        gpus: list[tuple[int, int, int, int]] | None = None,
        gpu_context: int | None = None,
        feed_from: int | None = None,
        neuron_counts: list[NDArray[np.uint64]] | None = None,
        hot_neurons: list[NDArray[np.uint32]] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Engine:
        """Load a model; `progress` is called with layers done and layers in all.

        With `count_neurons` it counts how often each FFN neuron fires, for `fired`.

        `batch` tokens go through the model side by side, 512 at most.

        `gpus` are the GPUs to use: number, bytes of memory, bytes of them for the device's context, and the fewest
        neurons of a layer worth handing over. They have room for the cache of `gpu_context` positions. Neurons go there
        by `neuron_counts`, (n_ff,) a layer, or those of `hot_neurons`, their numbers, ascending, a layer each. In steps
        of `feed_from` tokens or more (5 at least, 0 for never, none by the weights' type) the others are brought to
        them in pieces.

        Raises:
            DeviceError: A GPU can't be used, or its memory doesn't suffice.
        """

    def metadata(self) -> dict[str, Any]:
        """The file's keys and values."""

    def info(self) -> Info:
        """What this engine is."""

    def stats(self) -> Stats:
        """What this engine has done."""

    def fired(self) -> list[NDArray[np.uint64]]:
        """How often each neuron has fired, (n_ff,) a layer.

        Raises:
            InvalidArgumentError: The engine was made without `count_neurons`.
        """

    def reset_stats(self) -> None:
        """Start counting anew."""

    def new_sequence(self) -> int:
        """Make an empty sequence and return its number."""

    def fork(self, sequence: int) -> int:
        """Make a second sequence of the same content; both share their cache until one goes on."""

    def truncate(self, sequence: int, length: int) -> None:
        """Cut a sequence back to its first `length` tokens."""

    def free(self, sequence: int) -> None:
        """Forget a sequence."""

    def tokens(self, sequence: int) -> list[int]:
        """The tokens of a sequence."""

    def save(self, sequence: int, path: str | PathLike[str]) -> None:
        """Write a sequence with its cache to a file."""

    def restore(self, path: str | PathLike[str]) -> int:
        """Make a sequence of what a file of `save` holds; the same model must have written it."""

    def step(self, batch: list[tuple[int, NDArray[np.uint32], int]]) -> NDArray[np.float32]:
        """Continue sequences side by side.

        Args:
            batch: For each sequence its number, its next tokens (1-D uint32), and for how many of the last of them
                logits are wanted.

        Returns:
            The wanted logits, float32 of shape (wanted, n_vocab), in the batch's order.
        """

@type_check_only
class PlacedBytes(TypedDict):
    """Bytes that a plan puts on a device, by part."""

    overhead: int
    attention: int
    cache: int
    predictors: int
    head: int
    neurons: int

@type_check_only
class Placement(TypedDict):
    """What a device has. A device has a range of layers of its own; it has none for fewer bytes than `least`."""

    layers: tuple[int, int]
    n_attention: int
    n_predictors: int
    head: bool
    bytes: PlacedBytes
    least: int
    hot: list[NDArray[np.uint32]]

@type_check_only
class DevicePlan(Placement):
    """What a plan puts on one device; `coverage` is the share of its layers' activations that falls on its neurons."""

    coverage: float

@type_check_only
class GpuIndex(TypedDict):
    """A `.gpuidx`: the hot neurons' numbers, ascending, a layer each; bytes of GPU memory that they were chosen for."""

    capacity: int
    hot: list[NDArray[np.uint32]]

def gpus() -> list[Gpu]:
    """The GPUs that the NVIDIA driver knows; none where there is no driver.

    Raises:
        DeviceError: The driver fails.
    """

def measure_gpu(number: int = 0, n_bytes: int = 67108864) -> list[tuple[str, float, str]]:
    """Measure what a GPU's work costs, on matrices and copies of about `n_bytes`: what, how much, and the unit.

    It needs room for four times as much. Launches, hand-overs to the host, copies, products for every weight type.

    Raises:
        DeviceError: The GPU isn't there, fails, or has no room.
    """

def plan(
    path: str | PathLike[str],
    counts: list[NDArray[np.uint64]],
    budgets: list[int],
    *,
    n_ctx: int,
    kv_type: str = "f16",
    context_bytes: int = 0,
    least: int = 1,
) -> list[DevicePlan]:
    """Plan what of a model goes to devices of so much memory; nothing is loaded.

    First attention with its cache, then predictors, then the head; the rest goes to the neurons that fire most.

    Args:
        path: A GGUF file.
        counts: How often each neuron fired, (n_ff,) a layer.
        budgets: Bytes of each device's memory; layers are shared out by range in proportion.
        n_ctx: Positions that the cache is for.
        kv_type: "f32", "f16" or "q8_0".
        context_bytes: Bytes that a device takes for its own context.
        least: The fewest neurons of a layer that are worth handing over to a device; a layer has none, or so many.

    Returns:
        A plan for each device. `coverage` is the share of its layers' activations that falls on its neurons.

    Raises:
        InvalidArgumentError: Counts don't fit the model.
    """

def read_gpu_index(path: str | PathLike[str], n_layers: int, n_ff: int) -> GpuIndex:
    """Read PowerInfer's `.gpuidx` of a model of `n_layers` layers of `n_ff` neurons.

    Raises:
        ModelFormatError: The file is broken, or another model's.
    """

def write_gpu_index(path: str | PathLike[str], hot: list[NDArray[np.uint32]], n_ff: int, capacity: int) -> None:
    """Write a `.gpuidx` as PowerInfer's own writer does.

    Args:
        path: The file; what is there is replaced once the new one is whole.
        hot: The hot neurons' numbers, ascending, a layer each.
        n_ff: Neurons of a layer.
        capacity: Bytes of GPU memory that they were chosen for.
    """

def inspect(path: str | PathLike[str]) -> FileInfo:
    """Read a file's header: keys, and of each tensor name, type, dimensions (innermost first) and bytes."""

def decode_tensor(path: str | PathLike[str], name: str) -> NDArray[np.float32]:
    """Decode one tensor of a file into a flat float32 array."""

def streaming_read(threads: int | None = None, n_bytes: int = 536870912, repeats: int = 5) -> float:
    """Measure how fast this machine reads memory in one stream a thread: the median, in bytes a second."""

def instruction_sets() -> list[str]:
    """The instruction sets that this processor has kernels for, the fastest last."""

@final
class Reader:
    """A GGUF file, or all parts of a split one, open for reading tensors as they are."""

    def __new__(cls, path: str | PathLike[str]) -> Reader: ...
    def header(self) -> FileInfo:
        """What `inspect` gives."""

    def rows(self, name: str, start: int, end: int) -> NDArray[np.uint8]:
        """The bytes of a tensor's rows from `start` up to `end`; its first dimension is a row."""

@final
class Writer:
    """Writes a GGUF file of known keys and tensors, a few rows at a time; it takes its place once it is whole.

    Args:
        path: The file; one that is there is replaced at the end.
        keys: Names with kind and value. Kinds are u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool, string, and
            lists of them, array:u32 and so on. A name with None is left out of what `source` has.
        tensors: Name, type ("F16", "Q4_K", …) and dimensions, innermost first, in the order of writing.
        source: A file whose keys stand first, those that `keys` names replaced.
        power_infer: Begin with PowerInfer's magic.
        threads: Threads to encode with; none for the physical cores.

    Raises:
        InvalidArgumentError: A key's value isn't of its kind, or a tensor can't have its type.
        ModelFileError: The file can't be written.
    """

    def __new__(
        cls,
        path: str | PathLike[str],
        keys: Sequence[tuple[str, tuple[str, Any] | None]],
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        source: Reader | None = None,
        power_infer: bool = False,
        threads: int | None = None,
    ) -> Writer: ...
    def write(self, rows: NDArray[np.uint8], dtype: str, importance: NDArray[np.float32] | None = None) -> None:
        """Write the next rows of the current tensor.

        Args:
            rows: The bytes of whole rows in type `dtype`: copied where that is the tensor's, else decoded and encoded.
            dtype: The type of `rows`.
            importance: How much an error in each column weighs, (row length,).

        Raises:
            InvalidArgumentError: They are no whole rows, or more than the tensor has left.
            ModelFormatError: A value is no number that the tensor's type can hold.
            ModelFileError: The disk is full, say.
        """

    def finish(self) -> None:
        """Put the file in its place.

        Raises:
            InvalidArgumentError: Tensors are still to come.
        """

    def abandon(self) -> None:
        """Leave nothing behind; after `finish` this does nothing."""
