"""A second device on the CPU: its tensors compute on the CPU, but one beside a tensor of the CPU is an error, as on a
GPU. It counts what a GPU makes slow: copies by direction, and waits for the device, with their places in the source.
With a capacity it runs out of memory.

Its name is "rehearsal" (torch's PrivateUse1). `rehearse` changes torch for the whole process, so each use has a process
of its own (`tests.forked`). Numbers are the CPU's to the bit, those of random generators too.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _device
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "rehearsal"
DEVICE = torch.device("cpu")
"""Set by `rehearse`: the name is unknown before."""

WAITS = {
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.equal",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.masked_select",
    "aten.is_pinned",
    "aten.bincount",
}
"""Operations whose result, or the size of it, the CPU needs: it waits until the device has computed everything."""

COPIES = {"aten._to_copy", "aten.copy_", "aten.to", "aten._copy_from", "aten._copy_from_and_resize"}

INDEXED = {"aten.index", "aten.index_put_", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index"}
"""Take indices of the CPU, which they copy; boolean ones are looked for, which waits."""

RESHAPED = {"aten.resize_", "aten.set_", "aten.t_", "aten.squeeze_", "aten.unsqueeze_", "aten.transpose_"}
"""Change the shape of a tensor in place, which this device cannot."""


COMPUTED = {"aten._conj": torch.ops.aten.conj_physical.default, "aten._neg_view": torch.ops.aten.neg.default}
"""Views of another meaning, which operations below the dispatch to Python would read without it."""


@dataclass(eq=False)
class Record:
    """What happened on the device.

    Attributes:
        to_device, to_host: bytes that were copied.
        moves: copies to the device.
        waits: operation -> how often the CPU waited, copies to it included ("to_host").
        places: "operation FILE:LINE FUNCTION", the last line of the package -> how often it waited there. Copies to the
            device count, too: until one from ordinary memory has been made, the CPU waits for all work before it.
    """

    to_device: int = 0
    to_host: int = 0
    moves: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)

    @property
    def is_open(self) -> bool:
        return self in _records

    def open(self) -> None:
        _records.append(self)

    def close(self) -> None:
        _records.remove(self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        before = _records.copy()
        _records[:] = [record for record in before if record is not self]
        try:
            yield
        finally:
            _records[:] = before

    def wait(self, what: str) -> None:
        self.waits[what] += 1
        self.places[f"{what} {_place()}"] += 1


class Memory:
    """Storages on the device.

    Attributes:
        capacity: bytes; None is endless.
        used, peak: bytes.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.used = self.peak = 0
        self.retries = 0
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()

    def block(self, raw: torch.Tensor) -> _Block:
        """The storage of a tensor, new or known.

        Raises:
            torch.OutOfMemoryError: a new one that does not fit.
        """
        storage = raw.untyped_storage()
        found = self._blocks.get(storage.data_ptr())
        if found is not None:
            return found
        size = storage.nbytes()
        if self.capacity is not None and self.used + size > self.capacity:
            self.retries += 1
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {size} bytes. {self.used} of {self.capacity} bytes are in use"
            )
        made = _Block(self, size)
        if size:
            self._blocks[storage.data_ptr()] = made
        return made


class _Block:
    """A storage, as long as a tensor on it is alive."""

    def __init__(self, memory: Memory, size: int) -> None:
        self._memory, self._size = memory, size
        memory.used += size
        memory.peak = max(memory.peak, memory.used)

    def __del__(self) -> None:
        self._memory.used -= self._size


memory = Memory()
_records: list[Record] = []


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """What happens on the device inside."""
    record = Record()
    record.open()
    try:
        yield record
    finally:
        record.close()


@contextlib.contextmanager
def capacity(size: int | None) -> Iterator[None]:
    """Inside, the device has so many bytes."""
    before, memory.capacity = memory.capacity, size
    try:
        yield
    finally:
        memory.capacity = before


class OnDevice(torch.Tensor):
    """A tensor on the device, with its values in `raw`, a tensor of the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> OnDevice:
        block = memory.block(raw)
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        made.raw, made.block = raw, block
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _wait("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        made = torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)
        return made.requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnDevice:
        copy = OnDevice(self.raw.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return as_parameter(copy) if isinstance(self, torch.nn.Parameter) else copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait("to_host")
        rebuilt: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor  # heeds `map_location`
        return rebuilt, (self.raw.detach(), self.dtype, str(self.device), self.requires_grad)


def as_parameter(tensor: Any) -> Any:
    return torch.nn.Parameter(tensor, tensor.requires_grad)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation with a tensor on the device, or that makes one."""
    name = f"{func.namespace}.{func._opname}"
    flat = pytree.tree_leaves((args, kwargs))
    on_device = [t for t in flat if isinstance(t, OnDevice)]
    device = kwargs.get("device")
    target = bool(on_device) if device is None else torch.device(device).type == NAME
    _refuse(name, flat, on_device, args)
    _count(name, on_device, target, args)
    known = {id(t.raw): t for t in on_device}
    plain_args, plain = pytree.tree_map(lambda t: t.raw if isinstance(t, OnDevice) else t, (args, kwargs))
    if device is not None:
        plain["device"] = torch.device("cpu")
    if plain.get("pin_memory"):
        plain["pin_memory"] = False
    out = COMPUTED.get(name, func)(*plain_args, **plain)
    if not target:
        return out

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = known.get(id(value))
        return OnDevice(value) if found is None else found

    if name in COPIES and name.endswith("_"):
        return args[0]
    result = pytree.tree_map(wrapped, out)
    resized = [t for t in on_device if t.shape != t.raw.shape]
    if resized:  # the shape of a tensor of this device cannot change
        raise NotImplementedError(f"{name} changes {tuple(resized[0].shape)} to {tuple(resized[0].raw.shape)} in place")
    return result


def _refuse(name: str, flat: list[Any], on_device: list[Any], args: Any) -> None:
    """Tensors of two devices; a scalar of the CPU may join a tensor of the device, and so may indices."""
    if name in RESHAPED:
        raise NotImplementedError(f"{name} on {NAME}")
    if not on_device or name in COPIES:
        return
    own = [args[0]] if name in INDEXED else flat
    values = [args[2]] if name in INDEXED and len(args) > 2 and isinstance(args[2], torch.Tensor) else []
    on_host = [t for t in [*own, *values] if isinstance(t, torch.Tensor) and not isinstance(t, OnDevice)]
    written = name.endswith("_") and on_host and on_host[0] is args[0]
    if written or any(t.dim() for t in on_host):
        shapes = [tuple(t.shape) for t in on_host]
        raise RuntimeError(f"{name}: expected all tensors on one device, found {NAME}:0 and cpu (shapes {shapes})")


def _count(name: str, on_device: list[Any], target: bool, args: Any) -> None:
    if not _records:
        return
    if name in WAITS:
        _wait(name.partition(".")[2])
    if name in INDEXED:
        for index in args[1]:
            if index is None:
                continue
            if index.dtype in (torch.bool, torch.uint8):
                _wait("mask")
            if not isinstance(index, OnDevice):
                _moved(index.nbytes)
    if name not in COPIES:
        return
    source, goes = (args[1], isinstance(args[0], OnDevice)) if name == "aten.copy_" else (args[0], target)
    if not isinstance(source, torch.Tensor) or isinstance(source, OnDevice) == goes:
        return
    size = source.numel() * source.element_size()
    if goes:
        _moved(size)
    else:
        for record in _records:
            record.to_host += size
        _wait("to_host")


def _moved(size: int) -> None:
    for record in _records:
        record.to_device += size
        record.moves += 1
        record.places[f"to_device {_place()}"] += 1


def _wait(what: str) -> None:
    for record in _records:
        record.wait(what)


WITHIN = ("predict", "sample")
"""Functions that `_place` names: a prediction, and a loop of a solver."""


def _place() -> str:
    """The innermost line of the package that is being run, and which of `WITHIN` called it; "elsewhere" in a thread
    of the backward."""
    frame: Any = sys._getframe(1)
    place, functions = "elsewhere", set[str]()
    while frame is not None:
        path = frame.f_code.co_filename
        if "/retouch/" in path and "/tests/" not in path:
            if not functions:
                place = f"{path.rpartition('/retouch/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
            functions.add(frame.f_code.co_name)
        frame = frame.f_back
    return ", in ".join([place, *(name for name in WITHIN if name in functions)])


class Generator(torch.Generator):
    """A generator that may be on the device: it draws the CPU's numbers."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.place = torch.device(device or "cpu")
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


class Backend:
    """`torch.rehearsal`: what torch, accelerate and this package ask of the module of a device."""

    _initialized = True

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        _wait("synchronize")

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: Any = None) -> int:
        return memory.used

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.peak = memory.used

    def device(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers of the device come from the CPU's generator, which torch seeds itself."""

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


LOWERED = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "bmm", "mm",
    "baddbmm", "addmm", "addbmm", "linear", "matmul", "scaled_dot_product_attention",
)  # fmt: skip
"""What autocast computes in the lower precision on a CPU."""

WIDEST = ("cat", "stack")
"""What it computes in the widest precision of its arguments."""


def _autocast(library: Any, name: str, widest: bool) -> None:
    packet = getattr(torch.ops.aten, name.partition(".")[0])
    op: Any = getattr(packet, name.partition(".")[2] or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        dtype = torch.float32 if widest else torch.get_autocast_dtype(NAME)

        def cast(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if floats and value.device.type == NAME else value

        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        mixed = not widest or len({t.dtype for t in leaves}) > 1
        with torch._C._ExcludeDispatchKeyGuard(keys):
            cast_args, cast_kwargs = pytree.tree_map(cast, (args, kwargs)) if mixed else (args, kwargs)
            return op(*cast_args, **cast_kwargs)

    library.impl(name, kernel, "AutocastPrivateUse1")


_libraries: list[Any] = []


_plain_data: Any = torch.Tensor.data


def _set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Assigning to `data` may move a tensor to another device, which changes its class here."""
    if isinstance(tensor, OnDevice) != isinstance(other, OnDevice):
        alone = other.detach().requires_grad_(tensor.requires_grad)
        torch.utils.swap_tensors(tensor, as_parameter(alone) if isinstance(tensor, torch.nn.Parameter) else alone)
        return
    _plain_data.__set__(tensor, other)
    if isinstance(tensor, OnDevice) and isinstance(other, OnDevice):
        tensor.raw, tensor.block = other.raw, other.block


COMPOSED = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""What torch composes of other operations except on devices with a kernel, as the CPU, where it rounds differently."""


def _as_on_the_cpu(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(op, args, kwargs)


def _arange(op: Any, *args: Any, **kwargs: Any) -> Any:
    return run(op, args, {"device": DEVICE, **kwargs})


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that the CPU chooses: another one rounds differently."""
    raw = [t.raw if isinstance(t, OnDevice) else t for t in (query, key, value, attn_mask)]
    choice = torch._fused_sdp_choice(*raw, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore
    if choice != 1:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return torch.ops.aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _drawn_there(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of random numbers that refuses a generator of another device. Below this place generators are the
    CPU's, without the name of the device."""

    def drawn(*args: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        made = draw(*args, generator=generator, **options) if generator else draw(*args, **options)
        if generator and made.device.type != generator.device.type:
            raise RuntimeError(f"expected a {made.device.type!r} device type for generator, found {generator.device}")
        return made

    return drawn


def _made_there(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor`, which makes a tensor below the dispatch to Python: made on the CPU, and copied."""

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, *args, device=device, **options)
        requires_grad = options.pop("requires_grad", False)
        if not isinstance(data, torch.Tensor):  # numbers of the device among those of a list are waited for
            data = pytree.tree_map(lambda value: value.item() if isinstance(value, OnDevice) else value, data)
        return make(data, *args, **options).to(device).requires_grad_(requires_grad)

    return made


def rehearse() -> torch.device:
    """Add the device to torch -> the device, for the rest of this process.

    A module that moves swaps its parameters, because their type changes.
    """
    global DEVICE
    if _libraries:
        return DEVICE
    _setup_privateuseone_for_python_backend(NAME, Backend())
    DEVICE = torch.device(NAME, 0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.Generator = Generator  # type: ignore[misc]
    warnings.filterwarnings("ignore", message=".*overrid.*kernel.*")
    fallback, autocast = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    autocast.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for kind in ("default", "start", "start_step"):  # torch's own fills a tensor of no elements
        op = getattr(torch.ops.aten.arange, kind)
        name = "arange" if kind == "default" else f"arange.{kind}"
        autocast.impl(name, partial(_arange, op), "PrivateUse1")
    for name in COMPOSED:
        autocast.impl(name, _as_on_the_cpu(getattr(torch.ops.aten, name).default), "PrivateUse1")
    for names, widest in ((LOWERED, False), (WIDEST, True)):
        for name in names:
            _autocast(autocast, name, widest)
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend([fallback, autocast, rest])
    _device._device_constructors()  # remembered: `with torch.device(...)` knows what is replaced below by its old name
    torch.Tensor.data = property(_plain_data.__get__, _set_data)  # type: ignore[attr-defined,assignment]
    torch.tensor, torch.as_tensor = _made_there(torch.tensor), _made_there(torch.as_tensor)
    for name in ("rand", "randn", "randint", "multinomial", "bernoulli"):
        setattr(torch, name, _drawn_there(getattr(torch, name)))
    return DEVICE
