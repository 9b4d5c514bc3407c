"""What a GPU kernel's name says: its kind, the dtype of its arithmetic, the tile of a matrix product.

A name is read in this order, and the first that knows it decides: copies and collectives; the grammars of BLAS
libraries (`library_names`); those of compilers (`compiler_names`); then words of the name itself (`WORDS`), of its
namespaces (`SPACES`), and last of its template arguments. Words are whole: `convert` is no `conv`, the namespace
`fbgemm_gpu` no `gemm`, `splitKreduce_kernel` no product.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from neusight_jax.scaling.compiler_names import compiler_kind
from neusight_jax.scaling.demangle import NameParts, name_parts, words
from neusight_jax.scaling.library_names import LIBRARIES, LibraryName, dtype_in

KINDS: tuple[str, ...] = (
    *("gemm", "conv", "attention", "moe", "elementwise", "softmax", "norm", "memory", "reduce", "sort", "optimizer"),
    *("copy", "transfer", "collective", "idle", "host", "unknown"),
)
"""Kinds of work. `memory` moves data (embeddings, gathers, transposes), `copy` does so by the copy engine; `transfer`
crosses the link to the host, `idle` launched nothing, `host` is an operator of a trace without GPU kernels."""

WORK: dict[str, str] = {
    **{"gemm": "product", "softmax": "softmax", "norm": "norm"},
    **{"elementwise": "elementwise", "optimizer": "elementwise"},
    **dict.fromkeys(("memory", "reduce", "sort", "moe"), "memory"),
}
"""Kind -> work whose size a time can be turned into (`rules`); kinds that are not here have none."""


@dataclass(frozen=True)
class KernelName:
    """What a name says.

    Attributes:
      kind: one of `KINDS`.
      dtype: of the arithmetic, one of `arithmetic.DTYPES` or a path this package does not have (fp64, int4); None if
        the name does not say.
      tile: output tile of a matrix product, if named.
      work: "product", "vector" (a matrix times a vector), or a row-wise family; "" = none that is known.
    """

    kind: str
    dtype: str | None = None
    tile: tuple[int, int] | None = None
    work: str = ""


@dataclass(frozen=True)
class Rule:
    """Words that tell a kind: alternatives as regular expressions over whole words; the work where not the usual."""

    kind: str
    pattern: str
    work: str | None = None


MOVES: tuple[tuple[str, str], ...] = (
    ("transfer", r"^\W*(?:cuda |hip |unified memory )*memcpy.*(?:[hd]to[hd]|[hd]2[hd]|host|p(?:to|2)p|peer)"),
    ("transfer", r"^(?:memory_)?copy_?(?:host_?to_?device|device_?to_?host)"),
    ("copy", r"^\W*(?:cuda |hip |unified memory )*mem(?:cpy|set)|^(?:memory_)?copy_?device_?to_?device"),
    ("copy", r"^__amd_rocclr_|^buffercopy|^fillbuffer"),
)
"""Copies as CUPTI, roctracer, Kineto, Nsight Systems and XLA write them; a copy within the device is no transfer."""
_WITHIN = re.compile(r"d(?:to|2)d|device.?to.?device|device -> device", re.IGNORECASE)
_PEERS = re.compile(r"p(?:to|2)p|peer", re.IGNORECASE)

COLLECTIVE = Rule(
    "collective",
    "nccl|rccl|msccl\\w*|nvshmem\\w*|all ?reduce|all ?gather|reduce ?scatter|all ?to ?all|alltoallv?|"
    "collective permute|cross device reduce|userbuffers|multimem|send recv|allreduce \\w+|lamport",
)
"""NCCL, RCCL, MSCCL++, NVSHMEM; XLA's collectives; vLLM's, TensorRT-LLM's, FlashInfer's and PyTorch's own."""

WORDS: tuple[Rule, ...] = (
    # vLLM, SGLang, TensorRT-LLM: the experts' products, and what sorts tokens for them
    Rule(
        "moe", "(?:fused|marlin) (?:moe|mo e)(?! (?:router|gate|gating|align))|fmoe|moe (?:\\w+ )*gemm\\w*", "product"
    ),
    Rule("moe", "(?:moe|mo e) (?:fc|stage[12]|single|ck2stages)|grouped gemm moe", "product"),
    Rule("moe", "topk gating|topk softmax|topk sigmoid|grouped topk|moe|expert|experts|expand input rows"),
    # rotary embeddings compute; all other embeddings look up. FBGEMM: split_embedding_codegen_forward_..._kernel
    Rule("elementwise", "rotary|rope"),
    Rule("memory", "embedding|embeddings|embedding bag"),
    # torch.optim foreach and fused, Apex, DeepSpeed, bitsandbytes
    Rule("optimizer", "multi tensor|adam|adamw|sgd|lamb|lars|adagrad|rmsprop|adafactor|(?:k )?optimizer\\w*"),
    # at::native sort and topk, CUB, FlashInfer's samplers
    Rule("sort", "radix|bitonic|\\w*sort|sort \\w+|top ?k|topk|kth|top p|sampling|multinomial|sbtopk|mbtopk"),
    # paged caches: written, gathered, moved
    Rule("memory", "(?:reshape|concat|append|gather|write|store|copy|set|update|load|swap)(?: \\w+){0,4} cache"),
    Rule("memory", "(?:copy|swap) blocks|gather cached|repack"),
    # FlashAttention 1 to 3, xformers, cuDNN, vLLM, FlashInfer, TensorRT-LLM, Composable Kernel, aiter, FlashMLA
    Rule("attention", "attention|attn\\w*|flash\\w*|fmha\\w*|sdpa|mha|mmha|xqa|mla|mqa|unified attention"),
    Rule("attention", "(?:batch|single) (?:prefill|decode)|paged kv|merge states?|merge attn|kernel mha"),
    # helpers of a product cut along its contraction
    Rule("reduce", "split kreduce|splitk reduce|split k reduce|reduce split ?k|kreduce|splitk reduction"),
    Rule("memory", "im2col\\w*|col2im\\w*|im2d2 col|im2d2col|im3d2col|im3d2 col"),
    # cuDNN, MIOpen (igemm_fwd_gtcx, miopenSp3AsmConv, gridwise_convolution), Mamba's causal_conv1d
    Rule("conv", "conv|conv[123]d|convnd|convolution\\w*|convolve\\w*|winograd\\w*|fprop\\w*|[dw]grad\\w*|scudnn"),
    Rule("conv", "igemm (?:fwd|bwd|wrw)|implicit gemm|implicit convolve|depthwise|\\w*asm conv\\w*|sp3 asm conv"),
    Rule("softmax", "softmax\\w*|soft max"),
    Rule("norm", "(?:layer|rms|batch|group|instance|ada|weight) ?norm\\w*|norm|norms|ln (?:fwd|bwd|fw|bw)|rmsnorm\\w*"),
    Rule("norm", "bn (?:fw|bw)|welford|gamma beta|grad gamma|compute grad input|rowwise moments|mi open batch norm"),
    # a matrix times a vector: cuBLAS gemv2T, gemvNSP; bitsandbytes kgemm_4bit_inference_naive; split TensorRT-LLM
    Rule("gemm", "\\w*gemv\\w*|kgemm 4bit inference\\w*|wv split k", "vector"),
    # cuBLAS, CUTLASS, Triton, Marlin, AWQ, GPTQ, DeepGEMM, FBGEMM, Composable Kernel
    Rule("gemm", "(?!fbgemm)\\w*gemm\\w*|\\w*matmul\\w*|mm|bmm|addmm|baddbmm|wgmma|gmma|mma|cublas\\w*|tensorop"),
    Rule("gemm", "marlin|machete|nvjet|cijk|collective mma"),
    # at::native, CUB, cuDNN's layouts and pools
    Rule("elementwise", "elementwise kernel with index"),
    Rule("memory", "ind(?:ex|ices)\\w*|gather\\w*|scatter\\w*|cat|cat array|concat\\w*|transpose\\w*|permute\\w*"),
    Rule("memory", "copy\\w*|copies|fill|pad|padding|pack|unpack|roll|flip|dropout|pool|pooling|(?:max|avg) pool\\w*"),
    Rule("memory", "upsample\\w*|interpolate|grid sampler|resize|slice|nonzero|unique|select|where|tile|repeat"),
    Rule("memory", "expand|bucketize|lookup|arange|jagged to dense|dense to jagged|cached?|linearize"),
    Rule("memory", "nchw|nhwc|swizzle|layout|triu|tril"),
    Rule("reduce", "reduc\\w*|cumsum|cumprod|scan|sum|mean|max|min|argmax|argmin|logsumexp|loss|cross entropy"),
    Rule("reduce", "nrm2|asum|dot|histogram|segmented|count"),
    Rule("elementwise", "elementwise\\w*|element wise|elem wise\\w*|pointwise\\w*|vectorized|unrolled|gelu\\w*|relu"),
    Rule("elementwise", "silu|swish|swi glu|sigmoid|tanh|glu|act|activation\\w*|bias|add|mul|multiply|div|exp"),
    Rule("elementwise", "quant\\w*|dequant\\w*|cast|cvt|convert\\w*|float ?to ?\\w+|rounding|scale|scal|axpy"),
    Rule("elementwise", "distribution|philox|random|rng|op tensor|generic|unary|binary|clamp|neuron"),
)
"""Rules over the words of a name, the first that matches. Names of the libraries beside them are in the tests."""

SPACES: tuple[Rule, ...] = (
    Rule("collective", "deep ep"),
    Rule("gemm", "gemvx", "vector"),
    Rule("attention", "(?:pytorch )?flash|fmha|flashmla"),
    Rule("gemm", "marlin|gptq|deep gemm"),
    Rule("sort", "sbtopk|mbtopk"),
    Rule("norm", "layer norm|normalization"),
    Rule("softmax", "softmax"),
)
"""Rules over the words of namespaces, for names that say nothing themselves: `gemvx::kernel`, `marlin::Marlin`."""
_GENERIC = re.compile(r"^(?:[kK]ernel\d?|device_kernel|kentry|globalKernel|_kernel_agent|kernel_entry|launch\w*|run)$")
"""Names of wrappers: what they run is in their template arguments."""
_DATA_FUNCTORS = re.compile(r" direct copy ")
"""Functors of PyTorch's elementwise kernels that only move data."""


def _compiled(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, re.Pattern[str]], ...]:
    return tuple((rule, re.compile(f" (?:{rule.pattern})(?= )")) for rule in rules)


_MOVES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in MOVES)
_COLLECTIVE, _WORDS, _SPACES = _compiled((COLLECTIVE,)), _compiled(WORDS), _compiled(SPACES)


@functools.lru_cache(maxsize=65536)
def read_name(name: str) -> KernelName:
    """What a kernel's name says; kind "unknown" if nothing in it is known."""
    parts = name_parts(name)
    moved = _moved(name)
    if moved is not None:
        return KernelName(moved)
    dtype = next((found for text in (parts.base, parts.arguments) if (found := dtype_in(text))), None)
    if _first(_COLLECTIVE, parts.base) is not None:
        return KernelName("collective", dtype)
    library = _library(parts)
    if library is not None:
        return KernelName(library.kind, library.dtype, library.tile, WORK.get(library.kind, ""))
    kind = compiler_kind(parts.base)
    if kind is not None:
        return KernelName(kind, dtype, None, WORK.get(kind, ""))
    rule = _rule(parts)
    if rule is None:
        return KernelName("unknown", dtype)
    work = WORK.get(rule.kind, "") if rule.work is None else rule.work
    return KernelName(rule.kind, dtype, None, work)


def kind_of(name: str) -> str:
    """Kind of a kernel by its name; "unknown" if no word of it is known."""
    return read_name(name).kind


def dtype_of(name: str) -> str:
    """Dtype of a kernel's arithmetic by its name; fp32 if it does not say."""
    return read_name(name).dtype or "fp32"


def tile_of(name: str) -> tuple[int, int] | None:
    """Output tile of a matrix product by its name, or None: `volta_sgemm_128x64_tn` is (128, 64)."""
    return read_name(name).tile


def _moved(name: str) -> str | None:
    kind = next((kind for kind, pattern in _MOVES if pattern.search(name)), None)
    return "copy" if kind == "transfer" and _WITHIN.search(name) and not _PEERS.search(name) else kind


def _library(parts: NameParts) -> LibraryName | None:
    """What a BLAS library's grammar makes of the name, or of a wrapper's first template argument."""
    inner = parts.arguments if _GENERIC.match(parts.base) else ""
    first = re.split(r"[<,>(\s]", inner, maxsplit=1)[0].rpartition("::")[2]
    return next((found for text in (parts.base, first) for read in LIBRARIES if (found := read(text))), None)


def _first(rules: tuple[tuple[Rule, re.Pattern[str]], ...], text: str) -> Rule | None:
    spaced = words(text)
    return next((rule for rule, pattern in rules if pattern.search(spaced)), None)


def _rule(parts: NameParts) -> Rule | None:
    wrapper = _GENERIC.match(parts.base) is not None
    inside = None if wrapper else _first(_WORDS, parts.base)
    if inside is not None and inside.kind == "elementwise" and _DATA_FUNCTORS.search(words(parts.arguments)):
        return Rule("memory", "")
    spaces = " ".join(parts.spaces)
    return inside or _first(_SPACES, spaces) or _first(_COLLECTIVE, parts.arguments) or _first(_WORDS, parts.arguments)
