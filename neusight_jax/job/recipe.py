"""Recipe: what a training framework does beside the layout of a job, as facts with defaults by framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict, Unpack

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.configs.shard import EXPERTS
from neusight_jax.model.software import OVERLAPS, USUAL_OVERLAPS
from neusight_jax.records import Record
from neusight_jax.units import is_whole

ATTENTION: tuple[str, ...] = ("flash", "flash2", "unfused")
"""Ways attention is computed."""


@dataclass(frozen=True)
class Recipe(Record):
    """Facts of a recipe; static. The defaults are those of a framework that nobody states.

    Attributes:
      attention: "flash" = one kernel, "flash2" = one by the instructions of Ampere whatever the GPU (FlashAttention-2),
        "unfused" = products, softmax and dropout.
      experts: one of `shard.EXPERTS`.
      cuda_graphs: whether passes are replayed as CUDA graphs, so that no launch waits for the host.
      fused_accumulation: the products of gradients add to their sum; False = further kernels do.
      overlaps: classes of `software.OVERLAPS` that run beside compute.
      bucket_elements: of DeepSpeed's ZeRO, whose usual 5e8 take 9 GB; for the memory.
      gather_dtype: what shards of FSDP are gathered in, such as "fp8" (torchao's `enable_fsdp_float8_all_gather`); None
        = that of the activations.
      document_tokens: mean length of the documents that are packed into a sequence and that attention stays inside of
        (FlashAttention's `varlen`, Megatron-LM's `--reset-attention-mask`); None = it sees the whole sequence.
    Raises: `InputError` for words that it does not know.
    """

    attention: str = "flash"
    experts: str = "looped"
    cuda_graphs: bool = False
    fused_accumulation: bool = True
    overlaps: tuple[str, ...] = USUAL_OVERLAPS
    bucket_elements: float = 0.0
    gather_dtype: str | None = None
    document_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("attention", ATTENTION), ("experts", EXPERTS)):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}")
        object.__setattr__(self, "overlaps", tuple(self.overlaps))
        if self.gather_dtype is not None:
            dtype_bytes(self.gather_dtype)
        if self.document_tokens is not None and not (is_whole(self.document_tokens) and self.document_tokens >= 1):
            raise InputError(f"document_tokens is {self.document_tokens!r}, expected a positive whole number of tokens")
        unknown = [name for name in self.overlaps if name not in OVERLAPS]
        if unknown:
            raise InputError(f"overlaps has {unknown[0]!r}, expected some of {', '.join(OVERLAPS)}")

    def values(self) -> dict[str, Any]:
        """As plain values, without what is not stated."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def gathered_bytes(self) -> float | None:
        """Bytes of an element as shards are gathered, where it is stated."""
        return None if self.gather_dtype is None else dtype_bytes(self.gather_dtype)

    def documents(self, sequence_length: int) -> int:
        """Documents of a sequence of so many tokens; `InputError` where one is longer than the sequence."""
        if self.document_tokens is None:
            return 1
        if self.document_tokens > sequence_length:
            raise InputError(
                f"document_tokens {self.document_tokens} is more than sequence_length {sequence_length}; a longer "
                "document is cut, so leave document_tokens out"
            )
        return round(sequence_length / self.document_tokens)

    @property
    def flash2(self) -> float:
        """1 where attention is FlashAttention-2, as `streams.classes_of` takes it."""
        return float(self.attention == "flash2")


_EAGER = Recipe(fused_accumulation=False)
"""PyTorch's autograd adds gradients by kernels of its own."""
FRAMEWORKS: dict[str, Recipe] = {
    # Transformer Engine: attention of cuDNN; `GroupedLinear` runs one cuBLAS product an expert, on a few streams.
    "megatron": Recipe(),
    "nemo": Recipe(),
    # torchtitan/models: `use_grouped_mm = True`, scaled_dot_product_attention.
    "torchtitan": replace(_EAGER, attention="flash2", experts="grouped"),
    # deepspeed/moe/experts.py loops over local experts; ZeRO config: reduce_bucket_size 5e8.
    "deepspeed": replace(_EAGER, attention="flash2", bucket_elements=5e8),
    # nanotron/nn/attention.py: flash_attn; its accumulator adds gradients in fp32.
    "nanotron": replace(_EAGER, attention="flash2"),
    # llmfoundry/models/layers: flash_attn, MegaBlocks' grouped products.
    "llm-foundry": replace(_EAGER, attention="flash2", experts="grouped"),
    # transformers: a loop over the experts that have tokens; attention sdpa.
    "hf-trainer": replace(_EAGER, attention="flash2"),
}
"""Recipes by framework, as their public code has them by default."""


class Facts(TypedDict, total=False):
    """What a user may state of a recipe: a framework of `FRAMEWORKS`, and fields of `Recipe` that it does otherwise.

    None says nothing.
    """

    framework: str | None
    attention: str | None
    experts: str | None
    cuda_graphs: bool | None
    fused_accumulation: bool | None
    bucket_elements: float | None
    gather_dtype: str | None
    document_tokens: int | None
    overlaps: Sequence[str] | None


def recipe_of(**facts: Unpack[Facts]) -> Recipe:
    """The recipe of a framework, or of none in particular, with the facts that are stated in its place.

    Raises: `InputError` for an unknown framework, or unusable facts.
    """
    stated: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
    framework = stated.pop("framework", None)
    if framework is not None and framework not in FRAMEWORKS:
        raise unknown_name("framework", framework, FRAMEWORKS)
    return replace(Recipe() if framework is None else FRAMEWORKS[framework], **stated)
