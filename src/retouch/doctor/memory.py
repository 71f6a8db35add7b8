"""Lower bounds of a run's memory and disk, computed from the shapes of its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from retouch.config.cost import pixels_of
from retouch.config.derived import moment_bytes, rows_per_forward, snapshots
from retouch.config.errors import ConfigError
from retouch.config.run import RunConfig
from retouch.doctor.line import BYTES, size
from retouch.doctor.model import downloaded, find_model, loaded
from retouch.doctor.networks import Networks, asked_adapter, build_networks
from retouch.families.base import FamilySpec, TrainFull, TrainIpAdapter, TrainLora
from retouch.families.sizes import Released, Sizes, released_sizes
from retouch.registry import load_attribute

if TYPE_CHECKING:
    from retouch.adapters.shape import AdapterShape
    from retouch.doctor.launch import Launch


@dataclass(frozen=True)
class Counted:
    """Weights of a run.

    Attributes:
        frozen: frozen ones of the trained network.
        adapter: frozen ones of a style adapter.
        saved: weights in a file of a style adapter in fp32: trained ones, and those that LoRA is merged into.
        saved_frozen: the others in it.
        quantized: bytes of the frozen weights of the network, where `model.quantize` sets them.
        others: frozen networks beside it, by name.
        waiting: names of those that are on the device only while they encode.
        decoder: bytes of the activations of one decode with gradient; 0 where the algorithm takes none.
        tables: bytes of tables of positions in the network that are neither weights nor buffers.
        whole: False where only some of the networks are known.
    """

    trained: int
    frozen: int
    adapter: int = 0
    saved: int = 0
    saved_frozen: int = 0
    quantized: int | None = None
    others: Mapping[str, int] = field(default_factory=dict[str, int])
    waiting: frozenset[str] = frozenset()
    decoder: int = 0
    tables: int = 0
    whole: bool = True


@dataclass(frozen=True)
class Part:
    """A use of memory; `waits`: it is on the CPU while it is not used."""

    what: str
    weights: int
    bytes: int
    waits: bool = False


def count_weights(run: RunConfig, networks: Networks) -> Counted | None:
    """Count the weights of the networks on the meta device; None if the trained network or the adapter is unknown, or
    if the text encoder is trained.

    Raises:
        ConfigError: options of a style adapter that do not fit the network.
    """
    name = run.model.spec.network_name
    if name not in networks.parts or run.algorithm.trains_text_encoder:
        return None
    from retouch.families.quantized import sizes_of

    others = {part: weights_in(made) for part, made in networks.parts.items() if part != name}
    if networks.encoder is not None:
        others["image_encoder"] = weights_in(networks.encoder)
    shape = asked_adapter(run.model, networks)
    about: Any = {"whole": networks.whole, "decoder": decoder_bytes(run, networks)}
    return _counted(run, sizes_of(networks.parts[name]), others, shape, **about)


def count_released(run: RunConfig) -> Counted | None:
    """As `count_weights`, of a released model by the counts that come with the package: without torch and without the
    configs of the hub. None where more than these decides, such as another image encoder, or a decode in tiles.

    Raises:
        ConfigError: as of `count_weights`.
    """
    # Each return of None is a run that another count decides: sizes that are not the released ones, a text encoder
    # that trains, a decode in tiles, another image encoder. All of them need the networks, and torch to build them.
    model, train, spec = run.model, run.model.train, run.model.spec
    if not model.is_released:
        return None
    styled, decodes = isinstance(train, TrainIpAdapter), run.algorithm.decoder_backwards(run) > 0
    if run.algorithm.trains_text_encoder or (decodes and model.vae_batch == "tiles"):
        return None
    if styled and (spec.adapter is None or model.reference_encoder != spec.adapter.image_encoder):
        return None
    if (released := released_sizes(spec)) is None:
        return None
    from retouch.doctor.data import needs_no_t5

    folder = downloaded(model.path) if spec.optional else None
    loaded_ones = loaded(model, embedded=needs_no_t5(run), folder=folder)
    beside = {name: count for name, count in released.others.items() if name in loaded_ones}
    if styled and model.embeddings is None:
        beside["image_encoder"] = released.image_encoder
    about: dict[str, Any] = {"whole": set(loaded_ones) <= {spec.network_name, *released.others}}
    if decodes:
        height, width = (side // spec.downsampling for side in pixels_of(run.data))
        recomputes = run.training.gradient_checkpointing
        about["decoder"] = released.decode_bytes(BYTES[model.dtype], (height, width), checkpointing=recomputes)
    return _counted(
        run,
        released.network,
        beside,
        _released_adapter(train, spec, released) if isinstance(train, TrainIpAdapter) else None,
        **about,
    )


def _released_adapter(train: TrainIpAdapter, spec: FamilySpec, released: Released) -> AdapterShape:
    """Shape of a style adapter with the default encoder of references."""
    from retouch.adapters.shape import shape_in

    stored = released.more["adapter"]
    assert spec.adapter is not None, "`count_released` leaves other families out"
    inner = tuple(width for width, count in stored["inner"] for _ in range(count))
    return shape_in(train, spec, spec.adapter.width, stored["token_width"], inner)


def _counted(
    run: RunConfig, network: Sizes, beside: Mapping[str, int], adapter: AdapterShape | None, **about: Any
) -> Counted | None:
    """The weights of a run; None for a style adapter of unknown shape.

    Args:
        beside: component -> number of weights of the networks beside the trained one.
        about: fields of `Counted` for `_counted` to pass on.

    Raises:
        ConfigError: not as many factors of a style adapter's `scale` as blocks.
    """
    others = dict(beside)
    if network.buffers:  # of SD3: the table of positions
        others[f"{run.model.spec.network_name}, buffers"] = network.buffers
    stays = not (run.model.offload_text_encoders or run.model.free_text_encoders)
    waiting = {part for part in others if part.startswith("text_") and not stays}
    waiting |= {"vae"} & others.keys() if run.model.offload_vae else set()
    waiting |= {"image_encoder"} & others.keys()
    scheme, train = run.model.quantize, run.model.train
    quantized = None if scheme is None else network.quantized_bytes(scheme, BYTES[run.model.dtype])
    about |= {"quantized": quantized, "others": others, "waiting": frozenset(waiting), "tables": network.tables}
    if isinstance(train, TrainFull):
        return Counted(network.weights, 0, **about)
    if isinstance(train, TrainLora):
        targets = train.targets or run.model.spec.lora_targets
        return Counted(network.lora_weights(targets, train.rank), network.weights, **about)
    if adapter is None:
        return None
    if isinstance(train.scale, list) and len(train.scale) != len(adapter.inner):
        raise ConfigError(
            f"model.train.scale: given {len(train.scale)} factors; the network has {len(adapter.inner)} blocks: give "
            "one for each, or one number for all"
        )
    return Counted(frozen=network.weights, **adapter_weights(train, adapter), **about)


def decoder_bytes(run: RunConfig, networks: Networks) -> int:
    """Bytes of the activations of one decode with gradient, where the algorithm takes any and the VAE is known."""
    vae = networks.parts.get("vae")
    if not run.algorithm.decoder_backwards(run) or vae is None:
        return 0
    model, recomputes = run.model, run.training.gradient_checkpointing
    return traced_decode(model.spec, vae, pixels_of(run.data), model.dtype, model.vae_batch)[recomputes]


def traced_decode(spec: FamilySpec, vae: Any, size: tuple[int, int], dtype: str, batch: str = "all") -> tuple[int, int]:
    """Bytes of the activations of one decode with gradient of an image of (height, width), without and with
    checkpointing.

    Args:
        vae: on the meta device.
        batch: `model.vae_batch`.
    """
    import torch

    from retouch.families.loading import DTYPES
    from retouch.families.meta import to_run_without_data, without_data
    from retouch.families.vae import gradient_bytes

    vae = copy.deepcopy(vae)  # for it loses its place on the meta device
    kind, mode, (height, width) = load_attribute(spec.model).autoencoder_class, without_data(), size
    autoencoder = kind(vae.requires_grad_(False), "meta", batch)
    autoencoder.device = torch.device("cpu")
    to_run_without_data(vae, mode, lambda _: DTYPES[dtype])
    with mode:
        cells = height // autoencoder.downsampling, width // autoencoder.downsampling
        latents = torch.empty(1, autoencoder.channels, *cells, dtype=torch.float32)
        return gradient_bytes(autoencoder, latents)


def adapter_weights(train: TrainIpAdapter, shape: AdapterShape) -> dict[str, int]:
    """`trained`, `adapter` (frozen), `saved` and `saved_frozen` weights of a style adapter."""
    from retouch.adapters.shape import is_trained

    sizes = {key: math.prod(size) for key, size in shape.tensors().items()}
    whole = sum(sizes.values())
    if train.weights == "kv_lora":
        blocks = {key: size for key, size in shape.tensors().items() if key.startswith("ip_adapter.")}
        factors, merged = train.rank * sum(sum(size) for size in blocks.values()), sum(map(math.prod, blocks.values()))
        return {"trained": factors, "adapter": whole, "saved": merged, "saved_frozen": whole - merged}
    trained = sum(count for key, count in sizes.items() if is_trained(key, train.weights))
    return {"trained": trained, "adapter": whole - trained, "saved": trained, "saved_frozen": whole - trained}


def network_weights(run: RunConfig, networks: Networks) -> int | None:
    """Number of weights of the network; None if unknown."""
    network = run.model.spec.network_name
    return weights_in(networks.parts[network]) if network in networks.parts else None


def weights_in(network: Any) -> int:
    """Number of weights of a network."""
    return sum(weight.numel() for weight in network.parameters())


def memory_parts(run: RunConfig, weights: Counted, world_size: int = 1) -> list[Part]:
    """Memory of a process before any activation of the network: state of the trained weights in fp32 (on several
    processes with the buckets of the gradient exchange), frozen weights in the precision of the run file, tables of
    positions, and of reward gradients the activations of one decode with gradient. A sharded network counts with its
    shard; gradients that are not sharded count in full."""
    trained, small = weights.trained, BYTES[run.model.dtype]
    what = {"full": "network", "lora": "LoRA", "ip_adapter": "style adapter"}[run.model.train.kind]
    state = {f"{what}, trained": 4, "gradients": 4, "optimizer": moment_bytes(run)}
    state |= {f"snapshot {name}" if name != "ema" else "ema": 4 for name in sorted(snapshots(run))}
    sharding = run.training.sharding if world_size > 1 else "none"
    shared = 1 if sharding in ("none", "zero2") else world_size  # weights
    moments = 1 if sharding == "none" else world_size
    whole: dict[str, int] = {}
    if sharding == "none" and world_size > 1:
        whole = {"exchange of gradients": 4}
    elif sharding != "none" and not run.training.shard_gradients:
        whole = {"gradients, until exchanged": 4}
    shares = {name: moments if name in ("gradients", "optimizer") else shared for name in state}
    if sharding == "zero2":
        state["DeepSpeed's copy of the weights"], shares["DeepSpeed's copy of the weights"] = 4, moments
    frozen = {"style adapter, frozen": weights.adapter, "network, frozen": weights.frozen, **weights.others}
    shares_of = {name: shared if name == "network, frozen" else 1 for name in frozen}
    stored = {name: small * count for name, count in frozen.items()}
    if weights.quantized is not None:
        stored["network, frozen"] = weights.quantized
    return [
        *(Part(name, trained, math.ceil(size * trained / shares[name])) for name, size in state.items()),
        *(Part(name, trained, size * trained) for name, size in whole.items()),
        *(
            Part(name, n, math.ceil(stored[name] / shares_of[name]), name in weights.waiting)
            for name, n in frozen.items()
            if n
        ),
        *([Part("network, tables", 0, weights.tables)] if weights.tables else []),
        *([Part("decode with gradient", 0, weights.decoder)] if weights.decoder else []),
    ]


def device_bytes(run: RunConfig, weights: Counted, world_size: int = 1) -> int:
    """Device memory of a process before any activation."""
    return sum(part.bytes for part in memory_parts(run, weights, world_size) if not part.waits)


def host_bytes(run: RunConfig, weights: Counted) -> int:
    """Host memory of a process that has a device."""
    return sum(part.bytes for part in memory_parts(run, weights) if part.waits)


def checkpoint_bytes(run: RunConfig, weights: Counted) -> int:
    """A checkpoint: weights, two moments and each snapshot, in fp32; a style adapter is in two files, whole, its frozen
    part as small as in memory."""
    kept = snapshots(run)
    weights_and_ema = 1 + ("ema" in kept)
    one = 4 * weights.trained
    if run.model.train.kind == "ip_adapter":
        factors = one if run.model.train.weights == "kv_lora" else 0
        one = factors + 2 * (4 * weights.saved + BYTES[run.model.dtype] * weights.saved_frozen)
    moments = moment_bytes(run) + 4 * len(kept - {"ema"})
    return moments * weights.trained + weights_and_ema * one


def report_memory(run: RunConfig, world_size: int = 1, launch: Launch | None = None) -> dict[str, Any]:
    """The report of `retouch check --memory`: `device_bytes`, `host_bytes`, the `parts` of both, `notes` on what is not
    counted, and for vlm_grpo also the `phases`.

    Args:
        launch: how TRL's trainer is sharded, for vlm_grpo.

    Raises:
        ConfigError: no such model, one whose configs cannot be downloaded, or a `launch` of another algorithm.
    """
    if launch is not None and not run.algorithm.trains_text_encoder:
        raise ConfigError(
            f"--accelerate: given, but {run.algorithm.name} is not sharded by accelerate; leave it out, and set "
            "training.sharding"
        )
    weights = count_released(run)
    if weights is not None:
        return _report(run, weights, world_size)
    import torch  # noqa: F401  # if it is missing, the message names the extra

    from retouch.doctor.data import needs_no_t5

    found = find_model(run.model, embedded=needs_no_t5(run))
    if found.folder is None and found.problems:
        raise ConfigError(found.problems[0])
    networks = build_networks(run.model, found, download=True)
    if run.algorithm.trains_text_encoder:
        from retouch.doctor.launch import Launch
        from retouch.doctor.vlm_memory import dropped_tokens, report_vlm

        dropped = dropped_tokens(run.model, found)
        report = report_vlm(run, networks.parts, dropped, launch or Launch(), world_size)
        return _with_rewards(report, run, world_size)
    weights = count_weights(run, networks)
    if weights is None:
        raise ConfigError(
            "--memory: not counted: "
            + (found.missing if found.missing and not networks.parts else why_unknown(run, networks))
        )
    return _report(run, weights, world_size)


def _report(run: RunConfig, weights: Counted, world_size: int) -> dict[str, Any]:
    report = {
        "device_bytes": device_bytes(run, weights, world_size),
        "host_bytes": host_bytes(run, weights),
        "complete": weights.whole,
        "parts": [asdict(part) for part in memory_parts(run, weights, world_size)],
        "rows_per_forward": rows_per_forward(run, "gpu"),
        "notes": [],
    }
    return _with_rewards(report, run, world_size)


def _with_rewards(report: Mapping[str, Any], run: RunConfig, world_size: int) -> dict[str, Any]:
    """The report with the networks of the rewards that share a device with the run."""
    from retouch.doctor.scorers import scorers_beside

    known, unknown = scorers_beside(run, world_size)
    more = sum(size for _, size in known.values())
    sums = {name: report[name] + more for name in ("device_bytes", "peak_bytes") if name in report}
    parts = [asdict(Part(f"rewards.{name}", *counted)) for name, counted in known.items()]
    notes = [f"rewards.{name}: its networks" for name in unknown]
    return {**report, **sums, "parts": [*report["parts"], *parts], "notes": [*report["notes"], *notes]}


def memory_table(report: Mapping[str, Any]) -> list[str]:
    """The report as lines of text."""
    lines = [f"  {'memory of a process, counted':32} {'weights':>16} {'bytes':>10}"]
    for part in report["parts"]:
        waits = "  on the CPU while it waits" if part["waits"] else ""
        lines.append(f"    {part['what'].replace('_', ' '):30} {part['weights']:16,} {size(part['bytes']):>10}{waits}")
    unknown = "" if report["complete"] else "; text encoders, VAE or image encoder are not here to be counted"
    of = f" of {report['rows_per_forward']} rows in a training forward" if "rows_per_forward" in report else ""
    on_top = "" if "phases" in report else f"  activations{of} come on top{unknown}"
    lines.append(f"    {'on the device':47} {size(report['device_bytes']):>10}{on_top}")
    notes = [f"    not counted: {note}" for note in report["notes"]]
    if "phases" not in report:
        return lines + notes
    lines += [f"    {'+ while it ' + phase['what']:47} {size(phase['bytes']):>10}" for phase in report["phases"]]
    largest = max(report["phases"], key=lambda phase: phase["bytes"])
    lines.append(f"    {'at most':47} {size(report['peak_bytes']):>10}  while it {largest['what']}")
    return lines + notes


def why_unknown(run: RunConfig, networks: Networks) -> str:
    """Why `count_weights` counts nothing."""
    if run.algorithm.trains_text_encoder:
        return "retouch check --memory counts what TRL trains, with --accelerate FILE as DeepSpeed shards it"
    if run.model.train.kind == "ip_adapter" and networks.reference_width is None:
        return f"the config of the image encoder {run.model.reference_encoder} is not known"
    return "the shapes of the network's weights are not known"
