"""Models in flax linen for the tests of the front-end: GPT-2, and the five networks Habitat was judged on."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Gpt2Block(nn.Module):
    hidden: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        y = nn.LayerNorm(name="ln_1")(x)
        qkv = nn.Dense(3 * width, name="c_attn")(y)
        query, key, value = (
            part.reshape(batch, length, self.heads, width // self.heads) for part in jnp.split(qkv, 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(jnp.float32(width // self.heads))
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)
        x = x + nn.Dense(width, name="c_proj")(context)
        y = nn.LayerNorm(name="ln_2")(x)
        y = nn.gelu(nn.Dense(4 * width, name="c_fc")(y), approximate=True)
        return x + nn.Dense(width, name="mlp_c_proj")(y)


class Gpt2(nn.Module):
    vocabulary: int
    positions: int
    hidden: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.hidden, name="wte")
        places = nn.Embed(self.positions, self.hidden, name="wpe")(jnp.arange(ids.shape[1]))
        x = embed(ids) + places
        for layer in range(self.layers):
            x = Gpt2Block(self.hidden, self.heads, name=f"h_{layer}")(x)
        x = nn.LayerNorm(name="ln_f")(x)
        return embed.attend(x)


class Convolution(nn.Module):
    features: int
    window: tuple[int, int]
    stride: int = 1
    padding: Any = "SAME"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        steps = (self.stride, self.stride)
        x = nn.Conv(self.features, self.window, steps, padding=self.padding, use_bias=False)(x)
        return nn.BatchNorm(use_running_average=not train)(x)


def _pad(size: int) -> list[tuple[int, int]]:
    return [(size, size), (size, size)]


class Bottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.relu(Convolution(self.width, (1, 1))(x, train))
        y = nn.relu(Convolution(self.width, (3, 3), self.stride, _pad(1))(y, train))
        y = Convolution(4 * self.width, (1, 1))(y, train)
        if y.shape != x.shape:
            x = Convolution(4 * self.width, (1, 1), self.stride)(x, train)
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """He et al., CVPR 2016, with the stride in the 3×3 window, as torchvision has it."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.relu(Convolution(64, (7, 7), 2, _pad(3))(x, train))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=_pad(1))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 << stage, 2 if stage and not block else 1)(x, train)
        return nn.Dense(1000)(x.mean((1, 2)))


class Inception(nn.Module):
    """Inception v3, Szegedy et al., CVPR 2016, without the auxiliary classifier."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        def conv(y: jax.Array, features: int, window: int | tuple[int, int], stride: int = 1, pad: Any = "SAME") -> Any:
            sides = (window, window) if isinstance(window, int) else window
            return nn.relu(Convolution(features, sides, stride, pad)(y, train))

        def chain(y: jax.Array, *steps: tuple[int, Any]) -> jax.Array:
            for features, window in steps:
                y = conv(y, features, window)
            return y

        def mean(y: jax.Array) -> jax.Array:
            return nn.avg_pool(y, (3, 3), (1, 1), "SAME")

        def join(*parts: jax.Array) -> jax.Array:
            return jnp.concatenate(parts, axis=-1)

        x = conv(conv(conv(x, 32, 3, 2, "VALID"), 32, 3, 1, "VALID"), 64, 3)
        x = nn.max_pool(x, (3, 3), (2, 2))
        x = conv(conv(x, 80, 1), 192, 3, 1, "VALID")
        x = nn.max_pool(x, (3, 3), (2, 2))
        for pooled in (32, 64, 64):
            parts = chain(x, (64, 1)), chain(x, (48, 1), (64, 5)), chain(x, (64, 1), (96, 3), (96, 3))
            x = join(*parts, conv(mean(x), pooled, 1))
        deep = conv(chain(x, (64, 1), (96, 3)), 96, 3, 2, "VALID")
        x = join(conv(x, 384, 3, 2, "VALID"), deep, nn.max_pool(x, (3, 3), (2, 2)))
        for width in (128, 160, 160, 192):
            seven = chain(x, (width, 1), (width, (1, 7)), (192, (7, 1)))
            double = chain(x, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7)))
            x = join(conv(x, 192, 1), seven, double, conv(mean(x), 192, 1))
        deep = conv(chain(x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, 2, "VALID")
        x = join(conv(conv(x, 192, 1), 320, 3, 2, "VALID"), deep, nn.max_pool(x, (3, 3), (2, 2)))
        for _ in range(2):
            y, z = conv(x, 384, 1), chain(x, (448, 1), (384, 3))
            split = [conv(branch, 384, window) for branch in (y, z) for window in ((1, 3), (3, 1))]
            x = join(conv(x, 320, 1), *split, conv(mean(x), 192, 1))
        return nn.Dense(1000)(x.mean((1, 2)))


class Transformer(nn.Module):
    """The base model of Vaswani et al., NeurIPS 2017, on WMT: encoder, decoder, one embedding for both and the head."""

    vocabulary: int = 37000
    hidden: int = 512
    heads: int = 8
    layers: int = 6

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.hidden)

        def attend(x: jax.Array, y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
            out = nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(x, y, mask=mask)
            return nn.LayerNorm()(x + out)

        def feed(x: jax.Array) -> jax.Array:
            return nn.LayerNorm()(x + nn.Dense(self.hidden)(nn.relu(nn.Dense(4 * self.hidden)(x))))

        x = embed(source)
        for _ in range(self.layers):
            x = feed(attend(x, x))
        y = embed(target)
        for _ in range(self.layers):
            y = feed(attend(attend(y, y, nn.make_causal_mask(target)), x))
        return embed.attend(y)


class Gnmt(nn.Module):
    """Wu et al., 2016, as MLPerf has it: LSTMs of 1024, 4 + 4 layers, the first of the encoder in both directions."""

    vocabulary: int = 32320
    hidden: int = 1024
    layers: int = 4

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        def lstm(x: jax.Array, reverse: bool = False) -> jax.Array:
            return nn.RNN(nn.OptimizedLSTMCell(self.hidden), reverse=reverse, keep_order=True)(x)

        x = nn.Embed(self.vocabulary, self.hidden)(source)
        x = lstm(jnp.concatenate([lstm(x), lstm(x, reverse=True)], axis=-1))
        for _ in range(self.layers - 2):
            x = x + lstm(x)
        y = lstm(nn.Embed(self.vocabulary, self.hidden)(target))
        query, key = nn.Dense(self.hidden)(y), nn.Dense(self.hidden)(x)
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", query, key))
        context = jnp.einsum("bqk,bkd->bqd", weights, x)
        for layer in range(self.layers - 1):
            out = lstm(jnp.concatenate([y, context], axis=-1))
            y = out + y if layer else out
        return nn.Dense(self.vocabulary)(y)


class Generator(nn.Module):
    """DCGAN's generator for 64×64 images: Radford, Metz, Chintala, ICLR 2016, sizes of PyTorch's example."""

    @nn.compact
    def __call__(self, noise: jax.Array, train: bool = True) -> jax.Array:
        x = nn.ConvTranspose(512, (4, 4), (1, 1), padding="VALID", use_bias=False)(noise)
        for width in (256, 128, 64):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.ConvTranspose(width, (4, 4), (2, 2), padding="SAME", use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2), padding="SAME", use_bias=False)(x))


class Discriminator(nn.Module):
    """DCGAN's discriminator."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        for width in (64, 128, 256, 512):
            x = nn.Conv(width, (4, 4), (2, 2), padding=_pad(1), use_bias=False)(x)
            if width > 64:
                x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.leaky_relu(x, 0.2)
        return nn.Conv(1, (4, 4), (1, 1), padding="VALID", use_bias=False)(x)


def images(batch: int, side: int, channels: int = 3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)


def tokens(batch: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length), jnp.int32)


def shapes_of(model: nn.Module, *inputs: Any) -> Any:
    """Variables of a model as shapes; nothing is computed."""
    return jax.eval_shape(lambda *given: model.init(jax.random.key(0), *given), *inputs)


def parameters(variables: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def apply(model: nn.Module) -> Any:
    """(params, statistics, *inputs) -> output, statistics dropped."""

    def run(params: Any, stats: Any, *inputs: Any) -> jax.Array:
        variables = {"params": params, **stats}
        if not stats:
            return model.apply(variables, *inputs)
        return model.apply(variables, *inputs, mutable=list(stats))[0]

    return run


def step(model: nn.Module) -> Any:
    """(params, statistics, *inputs) -> params after one step of gradient descent on the sum of squares."""
    run = apply(model)

    def update(params: Any, stats: Any, *inputs: Any) -> Any:
        slopes = jax.grad(lambda p: jnp.sum(run(p, stats, *inputs) ** 2))(params)
        return jax.tree.map(lambda old, slope: old - 1e-3 * slope, params, slopes)

    return update


def split(variables: Any) -> tuple[Any, Any]:
    """Parameters, and everything else."""
    return variables["params"], {name: part for name, part in variables.items() if name != "params"}
