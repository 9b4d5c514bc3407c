"""What a GPU kernel's name says: its kind, the dtype of its arithmetic, the tile of a matrix product.

All that is known of names is the table `RULES`, tried from the top: copies and collectives; the grammars of BLAS
libraries; those of compilers; then words of the name itself, of its namespaces, and last of its template arguments.
Words are whole: `convert` is no `conv`, the namespace `fbgemm_gpu` no `gemm`, `splitKreduce_kernel` no product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from neusight_jax.scaling.demangle import name_parts, words

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
    """A pattern that tells a kind.

    Attributes:
      pattern: a regular expression: over whole words, or over the text as written; see `_SECTIONS`. The group `dtype`
        is a dtype's word or a key of `dtypes`, `tile` the output tile.
      work: where not the usual one of the kind.
    """

    kind: str
    pattern: str
    work: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)


_DTYPE_WORDS: dict[str, str] = {
    "fp8": "float e4m3|float e5m2|(?:nv |hip )?fp8|f8|float8|e4m3|e5m2|e4m3fn|e4m3fnuz|e5m2fnuz",
    "fp4": "float e2m1|(?:nv |mx )?fp4|f4|float4|e2m1|e2m1fn|nvfp4|mxfp4",
    "bf16": "b float16|bfloat16|bf16|bhalf",
    "fp16": "half2?|fp16|f16|float16",
    "tf32": "tf32|tfloat32|xf32",
    "int8": "int8|i8|s8|signed char",
    "fp64": "double(?! buffer)|f64|fp64|float64",
    "fp32": "float|f32|fp32|float32",
}
"""Dtype -> its words in names: CUDA's, PyTorch's, CUTLASS's, ROCm's."""
_DTYPE = re.compile(f" (?:{'|'.join(f'(?P<{dtype}>{text})' for dtype, text in _DTYPE_WORDS.items())})(?= )")

_COPIES = (  # as CUPTI, roctracer, Kineto, Nsight Systems and XLA write them; one within the device is no transfer
    Rule(
        "copy", r"^(?!.*(?:p(?:to|2)p|peer))\W*(?:cuda |hip |unified memory )*memcpy.*(?:d(?:to|2)d|device.{1,4}device)"
    ),
    Rule(
        "transfer",
        r"^\W*(?:cuda |hip |unified memory )*memcpy.*(?:[hd]to[hd]|[hd]2[hd]|host|p(?:to|2)p|peer)|"
        r"^(?:memory_)?copy_?(?:host_?to_?device|device_?to_?host)",
    ),
    Rule("copy", r"^\W*(?:cuda |hip |unified memory )*mem(?:cpy|set)|^(?:memory_)?copy_?device_?to_?device"),
    Rule("copy", r"^__amd_rocclr_|^buffercopy|^fillbuffer"),
)
_COLLECTIVES = (  # NCCL, RCCL, MSCCL++, NVSHMEM; XLA's collectives; vLLM's, TensorRT-LLM's, FlashInfer's, PyTorch's own
    Rule(
        "collective", r"nccl|rccl|msccl\w*|nvshmem\w*|all ?reduce|all ?gather|reduce ?scatter|all ?to ?all|alltoallv?"
    ),
    Rule("collective", r"collective permute|cross device reduce|userbuffers|multimem|send recv|allreduce \w+|lamport"),
)
_TYPE = "tf32|bf16|f16|f32|f64|e4m3|e5m2|e2m1|i8|i32|u8|i4|b1"
_XMMA = rf"xmma_{{}}_(?:{_TYPE})+_(?P<dtype>{_TYPE})(?:{_TYPE})*_(?:.*tilesize(?P<tile>\d+x\d+))?"
_CODE = (
    r"^(?=.*(?:^|_)(?:maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell|cutlass\w*?)_)(?P<before>.*?(?:^|_))"
    r"(?P<letter>[shdiz]|g?c){}(?P<mma>\d+x\d+x\d+|\d{{3,6}})?(?P<inner>tf32|bf16|f16)?"
    r"(?P<op>gemm|cudnn|fprop|dgrad|wgrad)(?=_|$)(?P<after>.*?(?:(?<![\dx])(?P<tile>\d{{2,3}}x\d{{2,3}})(?!\d).*)?)$"
)
"""cuBLAS and cuDNN by architecture, and CUTLASS: `volta_fp16_s884gemm_fp16_128x128_...`, `ampere_sgemm_32x32_nn`,
`cutlass_80_tensorop_bf16_s16816gemm_bf16_...`, `cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_...`."""
_LIBRARIES = (
    # cuBLAS and cuDNN since CUDA 11, types of operands, of multiplication and accumulation, of the output:
    # `sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_...`
    Rule("conv", _XMMA.format(r"[a-z0-9_]*?(?:fprop|dgrad|wgrad|conv)[a-z0-9_]*?")),
    Rule("gemm", _XMMA.format("[a-z0-9_]*?")),
    # cuBLAS since Hopper, first letter the operands' type: `nvjet_tst_128x256_...` bf16, `nvjet_sm100_qqtst_...` fp8
    Rule(
        "gemm",
        r"(?:^|_)nvjet_(?:sm\d+[a-z]?_)?(?P<dtype>[a-z])[a-z]*_(?:.*?(?P<tile>\d+x\d+))?",
        dtypes={"t": "bf16", "h": "fp16", "s": "fp32", "d": "fp64", "q": "fp8", "r": "fp8", "o": "fp4"},
    ),
    # rocBLAS and hipBLASLt: `Cijk_Ailk_Bljk_SB_MT128x128x16_...`, the operands' type first, `_MX` is xf32, AMD's tf32.
    # Names without indices (`Cijk_SB_GA`, `..._PostGSU8`) scale the output or add up partial products.
    Rule("gemm", r"^(?!.*PostGSU).*Cijk_[A-Z][a-z]+_[A-Z][a-z]+_[A-Z0-9]+_(?P<dtype>MX)(?:.*?_MT(?P<tile>\d+x\d+))?"),
    Rule(
        "gemm",
        r"^(?!.*PostGSU).*Cijk_[A-Z][a-z]+_[A-Z][a-z]+_(?P<dtype>F8|B8|N8|F4|I8|4xi8|[HBSDCZ])(?:.*?_MT(?P<tile>\d+x\d+))?",
        dtypes={
            **dict.fromkeys(("F8", "B8", "N8"), "fp8"),
            **{"F4": "fp4", "I8": "int8", "4xi8": "int8", "H": "fp16", "B": "bf16"},
            **{"S": "fp32", "C": "fp32", "D": "fp64", "Z": "fp64"},
        },
    ),
    Rule("reduce", "Cijk_"),
    Rule("gemm", _CODE.format("")),
    Rule("gemm", _CODE.format("?")),
    # TensorRT-LLM's generated products (output, operands, sums) and FBGEMM's (operands, output)
    Rule("gemm", r"^(?:bmm|gemm)_\w+?_(?P<dtype>(?:Mx|[A-Z])\w*?)_Fp32_\w*?t(?P<tile>\d+x\d+)x"),
    Rule("gemm", r"^(?P<dtype>f8|bf16|f16|i8|f4)(?:f8|bf16|f16|i8|f4|i4)(?:bf16|f16|f32)?(?:_\w+)?$"),
)
_MOVES = "gather|scatter|transpose|concatenate|slice|pad|copy|dynamic|update|reverse|broadcast|reshape|bitcast|iota"
"""HLO operators that compute nothing; a fusion of nothing else moves data."""
_FUSED = "^ (?:(?=loop |input |wrapped |(?:nested )?gemm )|(?=.*fusion $))"
_EMITTER = "(?:(?:loop|input|wrapped|triton|gemm|nested gemm|cudnn|custom) )?"
_COMPILERS = (
    # Inductor (torch/_inductor/codegen/triton.py): poi is pointwise, red and per reduce, tem is a template named by the
    # operator it stands for; the operators behind `fused` are what was fused
    Rule("optimizer", "^ triton (?:poi|for|unk|mix) fused .*(?<= )(?:adamw?|sgd|adagrad|foreach) "),
    Rule("elementwise", "^ triton (?:poi|for|unk|mix) fused "),
    Rule("attention", "^ triton tem fused .*(?<= )(?:attention|sdpa|flex) "),
    Rule("conv", "^ triton tem fused .*(?<= )convolution "),
    Rule("gemm", "^ triton tem fused "),
    Rule("softmax", "^ triton (?:red|per|spl|cross|helion) fused .*(?<= )softmax "),
    Rule("norm", "^ triton (?:red|per|spl|cross|helion) fused .*(?<= )norm "),
    Rule("reduce", "^ triton (?:red|per|spl|cross|helion) fused "),
    # XLA: kernels named after one HLO operator
    Rule("softmax", "^ triton softmax (?:fusion )?(?:computation )?$"),
    Rule("gemm", "^ dot $"),
    Rule("conv", "^ convolution $"),
    Rule("reduce", "^ reduce (?:window )?$"),
    Rule("sort", "^ (?:sort|topk) $"),
    Rule("copy", "^ copy (?:start |done )?$"),
    Rule("memory", "^ (?:gather|scatter|transpose|concatenate|slice|pad|reverse|broadcast|iota|reshape) $"),
    Rule("memory", "^ (?:dynamic slice|dynamic update slice|select and scatter) $"),
    Rule(
        "elementwise", "^ (?:abs|add|and|atan2|cbrt|ceil|clamp|compare|complex|convert|cosine|divide|erf|exponential) $"
    ),
    Rule("elementwise", "^ (?:floor|imag|is finite|log|logistic|map|maximum|minimum|multiply|negate|not|or|popcnt) $"),
    Rule("elementwise", "^ (?:power|real|reduce precision|remainder|rng|rng bit generator|round|rsqrt|select|sign) $"),
    Rule("elementwise", "^ (?:sine|sqrt|subtract|tan|tanh|xor|fusion) $"),
    # XLA's fusions: `loop_` computes element by element whatever operators it names, `input_` is a reduction, transpose
    # or scatter, `wrapped_` one operator, `gemm_fusion_dot` what it says, a bare `fusion.12` of loops most often
    Rule("gemm", "^ (?:nested )?gemm |" + _FUSED + "(?!loop ).*(?<= )(?:dot|gemm) "),
    Rule("conv", _FUSED + ".*(?<= )convolution "),
    Rule("softmax", _FUSED + ".*(?<= )softmax "),
    Rule("reduce", _FUSED + ".*(?<= )reduce "),
    Rule("sort", _FUSED + ".*(?<= )sort "),
    Rule("memory", f"{_FUSED}{_EMITTER}(?:(?:{_MOVES}) )+(?:fusion )?$|^ input .*(?<= )(?:{_MOVES}) "),
    Rule("elementwise", _FUSED),
)
_WORDS = (
    # vLLM, SGLang, TensorRT-LLM: the experts' products, and what sorts tokens for them
    Rule("moe", r"(?:fused|marlin) (?:moe|mo e)(?! (?:router|gate|gating|align))|fmoe|moe (?:\w+ )*gemm\w*", "product"),
    Rule("moe", "(?:moe|mo e) (?:fc|stage[12]|single|ck2stages)|grouped gemm moe", "product"),
    Rule("moe", "topk gating|topk softmax|topk sigmoid|grouped topk|moe|expert|experts|expand input rows"),
    # rotary embeddings compute; all other embeddings look up. FBGEMM: split_embedding_codegen_forward_..._kernel
    Rule("elementwise", "rotary|rope"),
    Rule("memory", "embedding|embeddings|embedding bag"),
    # torch.optim foreach and fused, Apex, DeepSpeed, bitsandbytes
    Rule("optimizer", r"multi tensor|adam|adamw|sgd|lamb|lars|adagrad|rmsprop|adafactor|(?:k )?optimizer\w*"),
    # at::native sort and topk, CUB, FlashInfer's samplers
    Rule("sort", r"radix|bitonic|\w*sort|sort \w+|top ?k|topk|kth|top p|sampling|multinomial|sbtopk|mbtopk"),
    # paged caches: written, gathered, moved
    Rule("memory", r"(?:reshape|concat|append|gather|write|store|copy|set|update|load|swap)(?: \w+){0,4} cache"),
    Rule("memory", "(?:copy|swap) blocks|gather cached|repack"),
    # FlashAttention 1 to 3, xformers, cuDNN, vLLM, FlashInfer, TensorRT-LLM, Composable Kernel, aiter, FlashMLA
    Rule("attention", r"attention|attn\w*|flash\w*|fmha\w*|sdpa|mha|mmha|xqa|mla|mqa|unified attention"),
    Rule("attention", "(?:batch|single) (?:prefill|decode)|paged kv|merge states?|merge attn|kernel mha"),
    # helpers of a product cut along its contraction
    Rule("reduce", "split kreduce|splitk reduce|split k reduce|reduce split ?k|kreduce|splitk reduction"),
    Rule("memory", r"im2col\w*|col2im\w*|im2d2 col|im2d2col|im3d2col|im3d2 col"),
    # cuDNN, MIOpen (igemm_fwd_gtcx, miopenSp3AsmConv, gridwise_convolution), Mamba's causal_conv1d
    Rule("conv", r"conv|conv[123]d|convnd|convolution\w*|convolve\w*|winograd\w*|fprop\w*|[dw]grad\w*|scudnn"),
    Rule("conv", r"igemm (?:fwd|bwd|wrw)|implicit gemm|implicit convolve|depthwise|\w*asm conv\w*|sp3 asm conv"),
    Rule("softmax", r"softmax\w*|soft max"),
    Rule("norm", r"(?:layer|rms|batch|group|instance|ada|weight) ?norm\w*|norm|norms|ln (?:fwd|bwd|fw|bw)|rmsnorm\w*"),
    Rule("norm", "bn (?:fw|bw)|welford|gamma beta|grad gamma|compute grad input|rowwise moments|mi open batch norm"),
    # a matrix times a vector: cuBLAS gemv2T, gemvNSP; bitsandbytes kgemm_4bit_inference_naive; split TensorRT-LLM
    Rule("gemm", r"\w*gemv\w*|kgemm 4bit inference\w*|wv split k", "vector"),
    # cuBLAS, CUTLASS, Triton, Marlin, AWQ, GPTQ, DeepGEMM, FBGEMM, Composable Kernel
    Rule("gemm", r"(?!fbgemm)\w*gemm\w*|\w*matmul\w*|mm|bmm|addmm|baddbmm|wgmma|gmma|mma|cublas\w*|tensorop"),
    Rule("gemm", "marlin|machete|nvjet|cijk|collective mma"),
    # at::native, CUB, cuDNN's layouts and pools
    Rule("elementwise", "elementwise kernel with index"),
    Rule("memory", r"ind(?:ex|ices)\w*|gather\w*|scatter\w*|cat|cat array|concat\w*|transpose\w*|permute\w*"),
    Rule("memory", r"copy\w*|copies|fill|pad|padding|pack|unpack|roll|flip|dropout|pool|pooling|(?:max|avg) pool\w*"),
    Rule("memory", r"upsample\w*|interpolate|grid sampler|resize|slice|nonzero|unique|select|where|tile|repeat"),
    Rule("memory", "expand|bucketize|lookup|arange|jagged to dense|dense to jagged|cached?|linearize"),
    Rule("memory", "nchw|nhwc|swizzle|layout|triu|tril"),
    Rule("reduce", r"reduc\w*|cumsum|cumprod|scan|sum|mean|max|min|argmax|argmin|logsumexp|loss|cross entropy"),
    Rule("reduce", "nrm2|asum|dot|histogram|segmented|count"),
    Rule("elementwise", r"elementwise\w*|element wise|elem wise\w*|pointwise\w*|vectorized|unrolled|gelu\w*|relu"),
    Rule("elementwise", r"silu|swish|swi glu|sigmoid|tanh|glu|act|activation\w*|bias|add|mul|multiply|div|exp"),
    Rule("elementwise", r"quant\w*|dequant\w*|cast|cvt|convert\w*|float ?to ?\w+|rounding|scale|scal|axpy"),
    Rule("elementwise", "distribution|philox|random|rng|op tensor|generic|unary|binary|clamp|neuron"),
)
_SPACES = (  # for names that say nothing themselves: `gemvx::kernel`, `marlin::Marlin`
    Rule("collective", "deep ep"),
    Rule("gemm", "gemvx", "vector"),
    Rule("attention", "(?:pytorch )?flash|fmha|flashmla"),
    Rule("gemm", "marlin|gptq|deep gemm"),
    Rule("sort", "sbtopk|mbtopk"),
    Rule("norm", "layer norm|normalization"),
    Rule("softmax", "softmax"),
)
_DATA_FUNCTORS = (Rule("memory", "direct copy"),)
"""Functors of PyTorch's elementwise kernels that only move data."""

RULES: dict[str, tuple[Rule, ...]] = {
    "the whole name": _COPIES,
    "words: collectives": _COLLECTIVES,
    "the name itself": _LIBRARIES,
    "operators": _COMPILERS,
    "words": _WORDS,
    "words: functors": _DATA_FUNCTORS,
    "words: spaces": _SPACES,
}
"""Rules by what their patterns are searched in, the first that matches counts. Names that each is for are in
`tests/data/kernel_names.txt`."""
_COMPILED = {
    section: [(rule, re.compile(f" (?:{rule.pattern})(?= )" if "words" in section else rule.pattern)) for rule in rules]
    for section, rules in RULES.items()
}
_WRAPPER = re.compile(r"^(?:[kK]ernel\d?|device_kernel|kentry|globalKernel|_kernel_agent|kernel_entry|launch\w*|run)$")
"""Names of wrappers: what they run is in their template arguments."""
_NUMBERS = re.compile(r"(?:[._-](?:\d+|clone|remat))+$")


@functools.lru_cache(maxsize=65536)
def read_name(name: str) -> KernelName:
    """What a kernel's name says; kind "unknown" if nothing in it is known."""
    spaces, base, arguments = name_parts(name)
    dtype = dtype_in(base) or dtype_in(arguments)
    if found := _first("the whole name", name.lower()):
        return KernelName(found[0].kind)
    if found := _first("words: collectives", words(base)):
        return KernelName("collective", dtype)
    wrapped = re.split(r"[<,>(\s]", arguments, maxsplit=1)[0].rpartition("::")[2] if _WRAPPER.match(base) else ""
    for text in (base, wrapped):
        if found := _first("the name itself", text):
            return _library(*found)
    operators = re.sub(r"[^A-Za-z0-9]+", " ", f" {_NUMBERS.sub('', base)} ")
    found = None if " " in base else _first("operators", operators)
    if not found and not _WRAPPER.match(base):
        found = _first("words", words(base))
        if found and found[0].kind == "elementwise":
            found = _first("words: functors", words(arguments)) or found
    found = found or _first("words: spaces", words(" ".join(spaces)))
    found = found or _first("words: collectives", words(arguments)) or _first("words", words(arguments))
    if not found:
        return KernelName("unknown", dtype)
    work = found[0].work
    return KernelName(found[0].kind, dtype, None, WORK.get(found[0].kind, "") if work is None else work)


def kind_of(name: str) -> str:
    """Kind of a kernel by its name; "unknown" if no word of it is known."""
    return read_name(name).kind


def dtype_of(name: str) -> str:
    """Dtype of a kernel's arithmetic by its name; fp32 if it does not say."""
    return read_name(name).dtype or "fp32"


def tile_of(name: str) -> tuple[int, int] | None:
    """Output tile of a matrix product by its name, or None: `volta_sgemm_128x64_tn` is (128, 64)."""
    return read_name(name).tile


def dtype_in(text: str) -> str | None:
    """The first dtype whose word is in a text; None without one."""
    found = _DTYPE.search(words(text))
    return found.lastgroup if found else None


def _first(section: str, text: str) -> tuple[Rule, re.Match[str]] | None:
    return next(((rule, found) for rule, pattern in _COMPILED[section] if (found := pattern.search(text))), None)


def _library(rule: Rule, found: re.Match[str]) -> KernelName:
    said = found.groupdict()
    kind, dtype = rule.kind, rule.dtypes.get(said.get("dtype") or "") or dtype_in(said.get("dtype") or "")
    if "op" in said:
        kind = "gemm" if said["op"] == "gemm" and "implicit_" not in said["before"] else "conv"
        dtype = _blas_dtype(**{name: text or "" for name, text in said.items()})
    if said.get("dtype") == "MX":
        dtype = "tf32"
    rows, _, columns = (said.get("tile") or "").partition("x")
    return KernelName(kind, dtype, (int(rows), int(columns)) if rows else None, WORK.get(kind, ""))


def _blas_dtype(before: str, letter: str, mma: str, inner: str, after: str, **_: str) -> str | None:
    """Dtype of a product of cuBLAS, cuDNN or CUTLASS.

    The letter is the accumulator as in BLAS (s, d, h, c, z, i), digits behind it are the shape of the tensor-core
    instruction; without them the kernel runs on vector lanes, whatever type it stores (`sgemm_fp16`).
    """
    if letter in ("d", "z"):
        return "fp64"
    if letter == "i":
        return "int8" if dtype_in(after) != "fp4" and "_s4" not in after else "int4"
    named = dtype_in(inner) or dtype_in(after) or dtype_in(before)
    if not mma and "tensorop" not in before:
        return {"s": "fp32", "c": "fp32", "gc": "fp32", "h": "fp16"}.get(letter, named)
    turing = re.search(r"(?:^|_)(?:turing_|\w+_(?:sm)?75(?:_|$))", before)
    if named == "fp32" or (named is None and mma == "1688" and letter != "h" and not turing):
        return "tf32"  # tensor cores take fp32 operands as tf32, and from Ampere on 16x8x8 is the shape for it
    return named or "fp16"
