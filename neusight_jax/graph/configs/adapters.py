"""Adapters: the small products LoRA trains beside frozen weights (Hu et al., "LoRA", 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import Config, shown, whole
from neusight_jax.graph.kernel import matrix_product, rowwise
from neusight_jax.graph.quantization.modules import modules_of, names
from neusight_jax.kernels.table import Kernel
from neusight_jax.records import Record


@dataclass(frozen=True)
class Lora(Record):
    """Adapters that alone are trained, all other weights frozen; static.

    Attributes:
      rank: width of the product between their two matrices.
      targets: parts of names of products that have one, such as "qkv" or "attention"; () = all of a layer's but those
        of routed experts and of the router.
      weight_dtype: what the frozen weights are stored in, where narrower than their products, such as int4: QLoRA.
    Raises: `InputError` for a rank that is no positive whole number.
    """

    rank: int
    targets: tuple[str, ...] = ()
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        whole("lora rank", self.rank)

    def has(self, name: str) -> bool:
        """Whether a product has an adapter."""
        return not self.targets or any(word in name for word in self.targets)

    def elements(self, features: int, width: int) -> float:
        """Elements of both matrices beside a product of `features` x `width`."""
        return float(self.rank) * (features + width)

    def values(self) -> dict[str, Any]:
        """Rank and targets as plain values, and the storage of what is frozen where it is narrower."""
        stored = {"weight_dtype": self.weight_dtype} if self.weight_dtype else {}
        return {"rank": self.rank, "targets": list(self.targets), **stored}

    def check(self, names: Iterable[str]) -> None:
        """`InputError` for a target that none of a model's products has in its name."""
        products = list(dict.fromkeys(names))
        for word in self.targets:
            if not any(word in name for name in products):
                raise InputError(
                    f"lora target {word!r} is in no product's name; expected parts of {', '.join(products)}"
                )


def lora_of(part: Config, model_type: str, products: Iterable[str]) -> Lora:
    """Adapters as PEFT's adapter_config.json has them; `products`: names of those of a model that may have one.

    Raises: `InputError` for other adapters than LoRA, and for modules that no product runs.
    """
    part.choice("peft_type", "LORA", ("LORA",))
    modules = part.values.get("target_modules")
    if modules is None or modules == "all-linear":
        return Lora(part.size("r", 8))
    words = [modules] if isinstance(modules, str) else modules
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{part.name}.target_modules is {shown(modules)}, expected a list of names, or all-linear")
    meant = names(words, f"{part.name}.target_modules", isinstance(modules, str))
    targets = [name for name in products if any(map(meant.match, modules_of(name, model_type, 0)))]
    if not targets:
        raise InputError(f"{part.name}.target_modules {shown(modules)} names no product of {model_type} layers")
    return Lora(part.size("r", 8), tuple(targets))


def adapter_kernels(
    rows: int, features: int, width: int, rank: int, dtype: str, graphed: bool
) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
    """Kernels of an adapter of a product, by phase.

    Down to `rank` and up again, scaled, added to what the frozen weight makes; its gradient is added to that of the
    activations. Both matrices have gradients.

    Args:
      rows, features, width: as of `Step.linear`.
      rank: width between both matrices.
      dtype: of activations.
      graphed: as of `kernel.rowwise`.
    """

    def added(cols: int, passes: float) -> Kernel:
        return rowwise("pointwise", rows, cols, passes, passes / 2.0 + 0.5, dtype, graphed=graphed)

    down, up = (rank, width), (features, rank)
    forward = [matrix_product(1, rows, *size, dtype) for size in (down, up)]
    backward = [matrix_product(1, rows, size[1], size[0], dtype) for size in (up, down)]
    weights = [matrix_product(1, *size, rows, dtype, upright=False) for size in (up, down)]
    return [*forward, added(features, 3.0)], [*backward, added(width, 2.0)], weights
