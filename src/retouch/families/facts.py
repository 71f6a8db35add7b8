"""Facts of a model family (`FamilySpec`) and of its style adapter, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from retouch.types import Prediction


@dataclass(frozen=True)
class AdapterFacts:
    """The style adapter (IP-Adapter) of a family.

    Attributes:
        network: class of the network that takes it.
        host: "module:class" of the host that places it into the network; see `retouch.adapters.hosts`.
        head: default head, from a reference vector to tokens; see `retouch.adapters.formats`.
        tokens: default number of tokens.
        image_encoder: hub id of the default encoder of references.
        width: width of the vectors of that encoder.
        normalizes_values: whether its attention can normalize values (`model.train.value_norm`).
        encoder: config of that encoder; empty if it is not known.
    """

    network: str
    host: str
    head: Literal["mlp", "linear"]
    tokens: int
    image_encoder: str
    width: int
    normalizes_values: bool = True
    encoder: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class FamilySpec:
    """Facts of a model family; sizes are those of the released model, or of the networks that were loaded.

    Attributes:
        prediction: "flow" or "epsilon"; step rules declare which they take.
        latent_channels: C of the latents.
        downsampling: pixels per side of a latent cell.
        size_multiple: image sides must be multiples of it.
        guidance_scale: default of the released model.
        needs: fields of `Example` that must be set.
        lora_targets: module-name suffixes that LoRA adapts by default.
        network_name: component that is trained, and prefix of its LoRA keys.
        model: "module:class" of the family; the class loads itself with `from_config`, takes a diffusers pipeline with
            `from_pipeline`, and builds a pipeline of toy size with `tiny`.
        pipeline: class name of the diffusers pipeline.
        networks: component -> class name of each network of the pipeline, the trained one first. Each text encoder has
            a tokenizer of the same number, and every pipeline has a scheduler.
        has_processor: whether the pipeline has a processor/ of images for its text encoder.
        tokenizer_in_processor: whether the tokenizer is in processor/ too, and there is no tokenizer/.
        released: component -> config of the network at its released size, to count weights without files.
        hub_ids: released models, of these sizes.
        writes_words: whether a released model writes some words right; RL on a reader raises nothing else.
        doubles_for_guidance: whether a guidance_scale above 1 doubles the network forwards (classifier-free guidance);
            false where the scale is embedded. `ModelSection.doubles_for_guidance` also reads the run file.
        edits_without_mask: whether it takes a source without a mask although it needs neither.
        optional: components of `networks` that may be missing in a model: null in its model_index.json.
        drops_text_stream: whether the last block's text output is unused: its text MLP then never has a gradient, which
            DDP must not wait for (True); or there is none, and only its text queries have a gradient, always 0, and
            never learn ("partly").
        embedded_encoder: text encoder that examples can replace by a file (t5_embedding_path); None where they cannot.
        adapter: the style adapter; None where the family has none.
        empty_prompt: prompt of "no caption", which classifier-free guidance steers away from.
        unmasked_attention: whether its attention has no masks and goes through diffusers' choice of kernels.
        reference_width: width of a reference vector; None where references are not encoded.
    """

    family: str
    prediction: Prediction
    latent_channels: int
    downsampling: int
    size_multiple: int
    guidance_scale: float
    needs: frozenset[str]
    lora_targets: tuple[str, ...]
    network_name: str
    model: str = ""
    pipeline: str = ""
    networks: Mapping[str, str] = field(default_factory=dict[str, str])
    has_processor: bool = False
    tokenizer_in_processor: bool = False
    released: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    hub_ids: tuple[str, ...] = ()
    writes_words: bool = True
    doubles_for_guidance: bool = False
    edits_without_mask: bool = False
    optional: frozenset[str] = frozenset()
    drops_text_stream: bool | Literal["partly"] = False
    embedded_encoder: str | None = None
    adapter: AdapterFacts | None = None
    empty_prompt: str = ""
    unmasked_attention: bool = False
    reference_width: int | None = None

    def __post_init__(self) -> None:
        if self.prediction not in get_args(Prediction):
            names = ", ".join(map(repr, get_args(Prediction)))
            raise ValueError(f"FamilySpec.prediction: given {self.prediction!r}; set one of {names}")

    @property
    def edits(self) -> bool:
        """Whether it changes a whole image, and so takes a source without a mask."""
        return self.edits_without_mask or ("source" in self.needs and "mask" not in self.needs)
