"""Matrices and attention of the released networks in closed form: FLOPs of a forward and numbers of weights from a
config, without torch. Norms, biases and positions are left out; they are below .2 % of both.

tests/families/test_flops.py compares every form with the FLOPs that are counted on the network itself.

Legend: D width, image and text: tokens of one sample in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]

SINUSOID = 256
"""Width of the sinusoids of a time or guidance scale."""


class Matrix(NamedTuple):
    """Equal matrices of a network.

    Attributes:
        name: end of the module's name.
        rows: vectors of one sample that it multiplies.
        copies: modules.
        kernel: places of a convolution.
    """

    name: str
    inputs: int
    outputs: int
    rows: float
    copies: int = 1
    kernel: int = 1

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.weights

    @property
    def weights(self) -> int:
        return self.copies * self.kernel * self.inputs * self.outputs

    @property
    def sides(self) -> int:
        """Weights of its LoRA for each rank."""
        return self.copies * (self.kernel * self.inputs + self.outputs)


class Attention(NamedTuple):
    """Equal attentions of `queries` to `keys`; `width` is that of all heads."""

    width: int
    queries: float
    keys: float
    copies: int = 1

    @property
    def flops(self) -> float:
        return 4 * self.copies * self.width * self.queries * self.keys


Layers = Iterator[Matrix | Attention]


def width(c: Config) -> int:
    return c["num_attention_heads"] * c["attention_head_dim"]


def embedded(name: str, inputs: int, d: int) -> Layers:
    """Two layers that embed a vector of a sample."""
    yield Matrix(f"{name}.linear_1", inputs, d, 1)
    yield Matrix(f"{name}.linear_2", d, d, 1)


def attending(names: Iterable[str], d: int, rows: float, count: int) -> Layers:
    for name in names:
        yield Matrix(f"attn.{name}", d, d, rows, count)


OWN, ADDED = ("to_q", "to_k", "to_v", "to_out.0"), ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Matrices of joint attention: of the image stream, and of the text stream."""


def two_streams(
    d: int, image: int, text: int, count: int, feed: tuple[str, str], modulation: tuple[str, str]
) -> Layers:
    """Blocks in which image and text have weights of their own and attend to both."""
    for names, mlp, mod, rows in ((OWN, feed[0], modulation[0], image), (ADDED, feed[1], modulation[1], text)):
        yield from attending(names, d, rows, count)
        yield Matrix(f"{mlp}.net.0.proj", d, 4 * d, rows, count)
        yield Matrix(f"{mlp}.net.2", 4 * d, d, rows, count)
        yield Matrix(mod, d, 6 * d, 1, count)
    yield Attention(d, image + text, image + text, count)


def flux(c: Config, image: int, text: int) -> Layers:
    d, both, single = width(c), image + text, c["num_single_layers"]
    yield Matrix("x_embedder", c["in_channels"], d, image)
    yield Matrix("context_embedder", c["joint_attention_dim"], d, text)
    for name, inputs in (("timestep", SINUSOID), ("guidance", SINUSOID), ("text", c["pooled_projection_dim"])):
        yield from embedded(f"{name}_embedder", inputs, d)
    yield from two_streams(
        d, image, text, c["num_layers"], ("ff", "ff_context"), ("norm1.linear", "norm1_context.linear")
    )
    yield from attending(OWN[:3], d, both, single)
    yield Matrix("proj_mlp", d, 4 * d, both, single)
    yield Matrix("single.proj_out", 5 * d, d, both, single)
    yield Matrix("norm.linear", d, 3 * d, 1, single)
    yield Attention(d, both, both, single)
    yield Matrix("norm_out.linear", d, 2 * d, 1)
    yield Matrix("proj_out", d, c["out_channels"], image)


def qwen_image(c: Config, image: int, text: int) -> Layers:
    d = width(c)
    yield Matrix("img_in", c["in_channels"], d, image)
    yield Matrix("txt_in", c["joint_attention_dim"], d, text)
    yield from embedded("timestep_embedder", SINUSOID, d)
    yield from two_streams(d, image, text, c["num_layers"], ("img_mlp", "txt_mlp"), ("img_mod.1", "txt_mod.1"))
    yield Matrix("norm_out.linear", d, 2 * d, 1)
    yield Matrix("proj_out", d, c["patch_size"] ** 2 * c["out_channels"], image)


def sd3(c: Config, image: int, text: int) -> Layers:
    """The last block has no text output; the first ones have a second attention of the image alone."""
    d, count, dual = width(c), c["num_layers"], len(c["dual_attention_layers"])
    patch = c["patch_size"] ** 2
    yield Matrix("pos_embed.proj", c["in_channels"], d, image, kernel=patch)
    yield Matrix("context_embedder", c["joint_attention_dim"], d, text)
    yield from embedded("timestep_embedder", SINUSOID, d)
    yield from embedded("text_embedder", c["pooled_projection_dim"], d)
    yield from two_streams(d, image, text, count - 1, ("ff", "ff_context"), ("norm1.linear", "norm1_context.linear"))
    yield from attending(OWN, d, image, 1)
    yield from attending(ADDED[:3], d, text, 1)
    yield Matrix("ff.net.0.proj", d, 4 * d, image)
    yield Matrix("ff.net.2", 4 * d, d, image)
    yield Matrix("norm1.linear", d, 6 * d, 1)
    yield Matrix("norm1_context.linear", d, 2 * d, 1)
    yield Attention(d, image + text, image + text)
    for name in OWN:
        yield Matrix(f"attn2.{name}", d, d, image, dual)
    yield Matrix("norm1.linear", d, 3 * d, 1, dual)
    yield Attention(d, image, image, dual)
    yield Matrix("norm_out.linear", d, 2 * d, 1)
    yield Matrix("proj_out", d, patch * c["out_channels"], image)


def flux2(c: Config, image: int, text: int) -> Layers:
    """Modulations are shared by the blocks of a kind; MLPs are gated."""
    d, both, double, single = width(c), image + text, c["num_layers"], c["num_single_layers"]
    hidden = int(d * c["mlp_ratio"])
    yield Matrix("x_embedder", c["in_channels"], d, image)
    yield Matrix("context_embedder", c["joint_attention_dim"], d, text)
    for name in ("timestep_embedder", *(["guidance_embedder"] if c["guidance_embeds"] else [])):
        yield from embedded(name, c["timestep_guidance_channels"], d)
    for name, parts in (("double_stream_img", 6), ("double_stream_txt", 6), ("single_stream", 3)):
        yield Matrix(f"{name}_modulation.linear", d, parts * d, 1)
    for names, mlp, rows in ((OWN, "ff", image), (ADDED, "ff_context", text)):
        yield from attending(names, d, rows, double)
        yield Matrix(f"{mlp}.linear_in", d, 2 * hidden, rows, double)
        yield Matrix(f"{mlp}.linear_out", hidden, d, rows, double)
    yield Matrix("attn.to_qkv_mlp_proj", d, 3 * d + 2 * hidden, both, single)
    yield Matrix("attn.to_out", d + hidden, d, both, single)
    yield Attention(d, both, both, double + single)
    yield Matrix("norm_out.linear", d, 2 * d, 1)
    yield Matrix("proj_out", d, c["patch_size"] ** 2 * c["in_channels"], image)


def qwen_image_21(c: Config, image: int, text: int) -> Layers:
    """One stream, modulated for two times: that of the step, and 0 of everything but the image that is made."""
    d, both, count = width(c), image + text, c["num_layers"]
    hidden = c["mlp_ratio"] * d
    yield Matrix("img_in", c["patch_size"] ** 2 * c["in_channels"], d, image)
    yield Matrix("txt_in.in_layer", c["context_in_dim"], d, text)
    yield Matrix("txt_in.out_layer", d, d, text)
    yield Matrix("timestep_embedder.linear_1", SINUSOID, d, 2)
    yield Matrix("timestep_embedder.linear_2", d, d, 2)
    yield Matrix("modulation.1", d, 4 * d, 2)
    yield from attending(OWN, d, both, count)
    for name in ("proj", "gate_layer"):
        yield Matrix(f"img_mlp.{name}", d, hidden, both, count)
    yield Matrix("img_mlp.out", hidden, d, both, count)
    yield Attention(d, text, text, count)  # causal: nothing before the image attends to it
    yield Attention(d, image, both, count)
    yield Matrix("norm_out.linear", d, d, 2)
    yield Matrix("proj_out", d, c["patch_size"] ** 2 * c["out_channels"], both)


def z_image(c: Config, image: int, text: int) -> Layers:
    """Refiners of the image and of the text, then layers on both, each padded to a multiple of 32."""
    d, layers, refiners, patch = c["dim"], c["n_layers"], c["n_refiner_layers"], 4
    image, text = (-(-count // 32) * 32 for count in (image, text))
    both, hidden, times = image + text, int(d / 3 * 8), min(d, SINUSOID)
    yield Matrix("all_x_embedder", patch * c["in_channels"], d, image)
    yield Matrix("cap_embedder.1", c["cap_feat_dim"], d, text)
    yield Matrix("t_embedder.mlp.0", SINUSOID, 1024, 1)
    yield Matrix("t_embedder.mlp.2", 1024, times, 1)
    for rows, count, modulated in ((image, refiners, True), (text, refiners, False), (both, layers, True)):
        for name in OWN:
            yield Matrix(f"attention.{name}", d, d, rows, count)
        for name, inputs, outputs in (("w1", d, hidden), ("w2", hidden, d), ("w3", d, hidden)):
            yield Matrix(f"feed_forward.{name}", inputs, outputs, rows, count)
        if modulated:
            yield Matrix("adaLN_modulation.0", times, 4 * d, 1, count)
        yield Attention(d, rows, rows, count)
    yield Matrix("final_layer.linear", d, patch * c["in_channels"], both)
    yield Matrix("final_layer.adaLN_modulation.1", times, d, 1)


def unet(c: Config, image: int, text: int) -> Layers:
    """The U-Net of Stable Diffusion; `image` counts the cells of the latents, of which a level has a quarter."""
    channels, layers, last = c["block_out_channels"], c["layers_per_block"], len(c["block_out_channels"]) - 1
    given = c.get("transformer_layers_per_block", 1)
    depths = [given] * (last + 1) if isinstance(given, int) else list(given)
    times = 4 * channels[0]
    cells = [image / 4**level for level in range(last + 1)]

    def conv(inputs: int, outputs: int, rows: float) -> Layers:
        yield Matrix("conv", inputs, outputs, rows, kernel=9)

    def resnet(inputs: int, outputs: int, rows: float) -> Layers:
        yield from conv(inputs, outputs, rows)
        yield from conv(outputs, outputs, rows)
        yield Matrix("time_emb_proj", times, outputs, 1)
        if inputs != outputs:
            yield Matrix("conv_shortcut", inputs, outputs, rows)

    def transformer(d: int, rows: float, depth: int) -> Layers:
        yield Matrix("proj_in", d, d, rows)
        yield Matrix("proj_out", d, d, rows)
        for name in OWN:
            yield Matrix(f"attn1.{name}", d, d, rows, depth)
        for name, inputs, read in (
            ("to_q", d, rows), ("to_k", c["cross_attention_dim"], text), ("to_v", c["cross_attention_dim"], text),
            ("to_out.0", d, rows),
        ):  # fmt: skip
            yield Matrix(f"attn2.{name}", inputs, d, read, depth)
        yield Attention(d, rows, rows, depth)
        yield Attention(d, rows, text, depth)
        yield Matrix("ff.net.0.proj", d, 8 * d, rows, depth)
        yield Matrix("ff.net.2", 4 * d, d, rows, depth)

    yield from conv(c["in_channels"], channels[0], image)
    yield from embedded("time_embedding", channels[0], times)
    if c.get("addition_embed_type"):
        yield from embedded("add_embedding", c["projection_class_embeddings_input_dim"], times)
    for level, d in enumerate(channels):
        for n in range(layers):
            yield from resnet(channels[max(0, level - 1)] if n == 0 else d, d, cells[level])
            if c["down_block_types"][level].startswith("Cross"):
                yield from transformer(d, cells[level], depths[level])
        if level < last:
            yield from conv(d, d, cells[level + 1])
    for _ in range(2):
        yield from resnet(channels[last], channels[last], cells[last])
    yield from transformer(channels[last], cells[last], depths[last])
    for n, level in enumerate(reversed(range(last + 1))):
        d, before, below = channels[level], channels[min(last, level + 1)], channels[max(0, level - 1)]
        for k in range(layers + 1):
            yield from resnet((before if k == 0 else d) + (below if k == layers else d), d, cells[level])
            if c["up_block_types"][n].startswith("Cross"):
                yield from transformer(d, cells[level], depths[level])
        if level:
            yield from conv(d, d, cells[level - 1])
    yield from conv(channels[0], c["out_channels"], image)


FORMS: Mapping[str, Callable[[Config, int, int], Layers]] = {
    "FluxTransformer2DModel": flux,
    "Flux2Transformer2DModel": flux2,
    "QwenImageTransformer2DModel": qwen_image,
    "QwenImage21Transformer2DModel": qwen_image_21,
    "SD3Transformer2DModel": sd3,
    "ZImageTransformer2DModel": z_image,
    "UNet2DConditionModel": unet,
}
"""Class of diffusers -> its layers."""


def flops(network: str, config: Config, image: int, text: int) -> float:
    """FLOPs of a forward of one sample (a multiply-add is two), without adapters."""
    return sum(layer.flops for layer in FORMS[network](config, image, text))


def weights(network: str, config: Config) -> int:
    """Weights of the matrices of a network."""
    return sum(layer.weights for layer in FORMS[network](config, 1, 1) if isinstance(layer, Matrix))


def lora_weights(network: str, config: Config, targets: Iterable[str], rank: int) -> int:
    """Weights of the LoRA on modules whose names end so."""
    ends = tuple(f".{target}" for target in targets)
    matrices = (layer for layer in FORMS[network](config, 1, 1) if isinstance(layer, Matrix))
    return rank * sum(matrix.sides for matrix in matrices if f".{matrix.name}".endswith(ends))
