"""Methods of quantization: one reader each, from its section of a config to schemes by module name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.quantization.modules import Names, names
from neusight_jax.graph.quantization.scheme import INT4, MXFP4, NVFP4, Scheme

_EXCLUDED: tuple[str, ...] = (
    *("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"),
    *("llm_int8_skip_modules", "skip_modules"),
)
"""Keys under which methods list the modules they leave alone."""

Rule = tuple[Names, Scheme | None]


@dataclass(frozen=True)
class Read:
    """What a method said of a model.

    Attributes:
      rules: names and their scheme, None = not quantized; the first that matches holds.
      otherwise: scheme of linear layers and experts that no rule names.
      head: scheme of `lm_head` where no rule names it.
      kv_cache: dtype of the KV cache, where it is said.
    """

    rules: tuple[Rule, ...] = ()
    otherwise: Scheme | None = None
    head: Scheme | None = None
    kv_cache: str | None = None


class Section:
    """An object of a config; reads keys, and raises `InputError` naming the key when one is unusable."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def whole(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of some keys that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{self.where}.{key} is {value!r}, expected a whole number of at least {least}")
            return value
        if default is None:
            raise InputError(f"{self.where} has no {keys[0]}; expected a whole number")
        return default

    def word(self, key: str, choices: Mapping[str, Any], default: str | None = None) -> str:
        """One of a few words, in any case."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        folded = {choice.lower(): choice for choice in choices}
        if str(value).lower() not in folded:
            raise InputError(f"{self.where}.{key} is {value!r}, expected one of {', '.join(choices)}")
        return folded[str(value).lower()]

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.where}.{key} is {value!r}, expected true or false")
        return default if value is None else value

    def words(self, key: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self.values.get(key)
        if value is None:
            return []
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise InputError(f"{self.where}.{key} is {str(value)[:60]}, expected a list of module names")
        return list(value)

    def section(self, key: str) -> Section | None:
        """An object below this one."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise InputError(f"{self.where}.{key} is {str(value)[:60]!r}, expected an object")
        return Section(value, f"{self.where}.{key}")

    def entries(self, key: str) -> dict[str, Section]:
        """Objects by name below a key."""
        inner = self.section(key)
        if inner is None:
            return {}
        found = {name: inner.section(name) for name in inner.values}
        return {name: each or Section({}, f"{inner.where}.{name}") for name, each in found.items()}

    def excluded(self) -> tuple[Rule, ...]:
        """The modules the method leaves alone, as a rule."""
        listed = [name for key in _EXCLUDED for name in self.words(key)]
        return ((names(listed, self.where), None),) if listed else ()

    def kv_cache(self) -> str | None:
        """Dtype of the KV cache, where it is said."""
        algorithm = self.values.get("kv_cache_quant_algo", self.values.get("kv_cache_scheme"))
        if algorithm is None:
            return None
        if isinstance(algorithm, Mapping):
            bits, kind = algorithm.get("num_bits"), algorithm.get("type", "float")
            algorithm = f"{'INT' if kind == 'int' else 'FP'}{bits}"
        dtype = {"FP8": "fp8", "NVFP4": "fp4", "FP4": "fp4", "INT8": "int8"}.get(str(algorithm).upper())
        if dtype is None:
            raise InputError(f"{self.where}: KV cache in {algorithm} is not read; expected FP8, NVFP4 or INT8")
        return dtype


def _grouped(name: str, bits: int, group: int, extra: float, arithmetic: str = "") -> Scheme:
    """Groups along the contraction, a whole row where `group` is not positive; `extra`: bits beside a 16-bit scale."""
    return Scheme(name, float(bits), (1, max(group, 0)), 16.0 + extra, arithmetic)


def _awq(section: Section) -> Read:
    bits = section.whole("bits", "w_bit", default=4)
    group = section.whole("group_size", "q_group_size", default=128, least=-1)
    zero = bits if section.flag("zero_point", True) else 0
    return Read(section.excluded(), _grouped(f"int{bits}", bits, group, zero), kv_cache=section.kv_cache())


def _gptq(section: Section) -> Read:
    bits, group = section.whole("bits"), section.whole("group_size", default=128, least=-1)
    own = _grouped(f"int{bits}", bits, group, bits)
    rules: list[Rule] = []
    for pattern, over in section.entries("dynamic").items():
        where = f"{section.where}.dynamic"
        if pattern.startswith("-:"):
            rules.append((names([pattern[2:]], where, True), None))
            continue
        width, length = over.whole("bits", default=bits), over.whole("group_size", default=group, least=-1)
        rules.append((names([pattern.removeprefix("+:")], where, True), _grouped(f"int{width}", width, length, width)))
    rules += section.excluded()
    inside = section.values.get("modules_in_block_to_quantize")
    if inside:
        lists = inside if isinstance(inside, list) and all(isinstance(each, list) for each in inside) else [inside]
        listed = [name for each in lists for name in Section({"names": each}, section.where).words("names")]
        rules.append((names(listed, section.where), own))
    head = own if section.flag("lm_head") else None
    return Read(tuple(rules), None if inside else own, head, section.kv_cache())


def _auto_round(section: Section) -> Read:
    bits, group = section.whole("bits"), section.whole("group_size", default=128, least=-1)
    floating = "fp" in str(section.values.get("data_type", "int"))
    zero = 0 if section.flag("sym", True) else bits

    def scheme(width: int, length: int) -> Scheme | None:
        if width >= 16:
            return None
        if floating and width == 4:
            return MXFP4 if length == 32 else NVFP4
        return _grouped(f"{'fp' if floating else 'int'}{width}", width, length, zero)

    rules: list[Rule] = []
    for name, over in section.entries("extra_config").items():
        own = scheme(over.whole("bits", default=bits), over.whole("group_size", default=group, least=-1))
        rules.append((names([name], section.where), own))
    return Read((*rules, *section.excluded()), scheme(bits, group), kv_cache=section.kv_cache())


def _fp8(section: Section) -> Read:
    block = section.values.get("weight_block_size")
    shape = (0, 0) if block is None else _pair(block, f"{section.where}.weight_block_size")
    section.word("activation_scheme", {"dynamic": 0, "static": 0}, "dynamic")
    own = Scheme("fp8", 8.0, shape, 32.0, "fp8")
    rules = [*_listed(section), *(() if section.values.get("quantized_layers") else section.excluded())]
    if section.values.get("expert_dtype") == "fp4":  # DeepSeek-V4's: scales of powers of two, eight-bit activations
        rules.append((names(["experts"], section.where), replace(MXFP4, arithmetic="fp8")))
    return Read(tuple(rules), own, kv_cache=section.kv_cache())


def _pair(value: Any, where: str) -> tuple[int, int]:
    right = isinstance(value, list | tuple) and len(value) == 2
    if not right or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in value):
        raise InputError(f"{where} is {value!r}, expected two whole numbers, rows and columns of a block")
    return value[0], value[1]


def _fbgemm(section: Section) -> Read:
    return Read(section.excluded(), Scheme("fp8", 8.0, (1, 0), 32.0, "fp8"), kv_cache=section.kv_cache())


def _mxfp4(section: Section) -> Read:
    return Read((*section.excluded(), (names(["experts"], section.where), MXFP4)), kv_cache=section.kv_cache())


def _bitsandbytes(section: Section) -> Read:
    rules = section.excluded()
    if section.flag("load_in_4bit") or section.flag("_load_in_4bit"):
        kind = section.word("bnb_4bit_quant_type", {"nf4": 0, "fp4": 0}, "fp4")
        # A 32-bit scale for 64 elements, or an 8-bit one with a 32-bit scale for 256 of those.
        bits = 8.0 + 32.0 / 256.0 if section.flag("bnb_4bit_use_double_quant") else 32.0
        return Read(rules, Scheme(kind, 4.0, (1, 64), bits))
    if section.flag("load_in_8bit") or section.flag("_load_in_8bit"):
        return Read(rules, Scheme("int8", 8.0, (1, 0), 32.0, "int8"))
    raise InputError(f"{section.where} has neither load_in_4bit nor load_in_8bit; expected one of them to be true")


def _eetq(section: Section) -> Read:
    section.word("weights", {"int8": 0}, "int8")
    return Read(section.excluded(), _grouped("int8", 8, 0, 0))


def _quanto(section: Section) -> Read:
    kind = section.word("weights", {"int8": 0, "int4": 0, "int2": 0, "float8": 0}, "int8")
    activations = {"int8": "int8", "float8": "fp8"}.get(str(section.values.get("activations")), "")
    if kind in ("int4", "int2"):
        return Read(section.excluded(), _grouped(kind, int(kind[-1]), 128, 16, activations))
    name = "fp8" if kind == "float8" else kind
    return Read(section.excluded(), _grouped(name, 8, 0, 0, activations))


def _hqq(section: Section) -> Read:
    whole = section.section("quant_config")
    if whole is None:
        raise InputError(f"{section.where} has no quant_config; expected an object with weight_quant_params")

    def scheme(inner: Section) -> Scheme:
        bits = inner.whole("nbits", default=4)
        return _grouped(f"int{bits}", bits, inner.whole("group_size", default=64, least=-1), 16)

    own = whole.section("weight_quant_params")
    if own is not None:
        return Read(section.excluded(), scheme(own))
    rules = []
    for name, each in section.entries("quant_config").items():
        rules.append((names([name], section.where), scheme(each.section("weight_quant_params") or each)))
    return Read((*section.excluded(), *rules))


_TORCHAO: dict[str, Scheme] = {
    "int4weightonly": Scheme("int4", 4.0, (1, 128), 32.0),
    "int8weightonly": Scheme("int8", 8.0, (1, 0), 16.0),
    "float8weightonly": Scheme("fp8", 8.0, (1, 0), 32.0),
    "int8dynamicactivationint8weight": Scheme("int8", 8.0, (1, 0), 16.0, "int8"),
    "int8dynamicactivationint4weight": Scheme("int4", 4.0, (1, 32), 32.0, "int8"),
    "float8dynamicactivationfloat8weight": Scheme("fp8", 8.0, (1, 0), 32.0, "fp8"),
    "float8dynamicactivationint4weight": Scheme("int4", 4.0, (1, 128), 32.0, "fp8"),
}
"""Configurations of torchao; its int4 has a bfloat16 scale and zero point for a group."""


def _torchao(section: Section) -> Read:
    if section.flag("include_input_output_embeddings"):
        raise InputError(f"{section.where}: torchao with include_input_output_embeddings is not read; expected false")
    given = section.values.get("quant_type")
    group = section.section("quant_type_kwargs") or Section({}, section.where)
    if isinstance(given, Mapping):
        outer = Section(given, f"{section.where}.quant_type").section("default")
        inner = outer.values if outer else given
        data = inner.get("_data")
        given = inner.get("_type")
        group = Section(data if isinstance(data, Mapping) else {}, f"{section.where}.quant_type")
    name = str(given).replace("_", "").lower().removesuffix("config")
    if name not in _TORCHAO:
        known = "int4_weight_only, int8_weight_only, float8_weight_only, or those with dynamic activations"
        raise InputError(f"{section.where}: torchao quant_type {given!r} is not read; expected {known}")
    own = _TORCHAO[name]
    if own.bits < 8.0:
        own = replace(own, group=(1, group.whole("group_size", default=own.group[1])))
    return Read(section.excluded(), own)


def _compressed_tensors(section: Section) -> Read:
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.values.get("format", "dense") != "dense":
        raise InputError(f"{section.where}: sparse weights ({sparsity.values['format']}) are not read; expected dense")
    groups = section.entries("config_groups")
    if not groups:
        raise InputError(f"{section.where} has no config_groups; expected at least one with weights and targets")
    rules, everything = list(section.excluded()), None
    for group in groups.values():
        scheme = _group_scheme(group)
        targets = group.words("targets") or ["Linear"]
        classes = [name for name in targets if name[:1].isupper() and "." not in name]
        unknown = [name for name in classes if not name.endswith(("Linear", "MoE", "Experts"))]
        if unknown:
            raise InputError(f"{group.where}: target {unknown[0]!r} is not read; expected Linear, or module names")
        by_name = [name for name in targets if name not in classes]
        if by_name:
            rules.append((names(by_name, group.where), scheme))
        if classes:
            everything = scheme
    return Read(tuple(rules), everything, everything, section.kv_cache())


def _group_scheme(group: Section) -> Scheme | None:
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        return None
    bits, kind = weights.whole("num_bits"), weights.word("type", {"int": 0, "float": 0}, "int")
    length = weights.whole("group_size", default=0, least=-1)
    block = weights.values.get("block_structure")
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    arithmetic = ""
    if inputs is not None:
        width, of = inputs.whole("num_bits"), inputs.word("type", {"int": 0, "float": 0}, "int")
        arithmetic = {("float", 4): "fp4", ("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int8"}.get(
            (of, width), ""
        )
        if not arithmetic and width < 16:
            raise InputError(f"{inputs.where}: {width}-bit {of} activations are not read; expected 8 or 4 bits")
    if kind == "float" and length > 0 and bits in (4, 8) and (bits == 4 or length == 32):
        return Scheme(name, float(bits), (1, length), 8.0, arithmetic)  # nvfp4, mxfp4, mxfp8
    if isinstance(block, list):
        return Scheme(name, float(bits), _pair(block, f"{weights.where}.block_structure"), 32.0, arithmetic)
    if length <= 0 and weights.values.get("strategy") in (None, "tensor"):
        return Scheme(name, float(bits), (0, 0), 32.0, arithmetic)
    return _grouped(name, bits, length, 0 if weights.flag("symmetric", True) else bits, arithmetic)


_ALGORITHMS: dict[str, Scheme] = {
    "FP8": Scheme("fp8", 8.0, (0, 0), 32.0, "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8.0, (1, 0), 32.0, "fp8"),
    "FP8_PB_WO": Scheme("fp8", 8.0, (128, 128), 32.0),
    "FP8_PB_REAL": Scheme("fp8", 8.0, (128, 128), 32.0, "fp8"),
    "MXFP8": Scheme("fp8", 8.0, (1, 32), 8.0, "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ"), replace(NVFP4, arithmetic="fp4")),
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": replace(NVFP4, arithmetic="fp8"),
    "MXFP4": replace(MXFP4, arithmetic="fp4"),
    "W4A16_MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": replace(MXFP4, arithmetic="fp8"),
    **dict.fromkeys(("W4A16_AWQ", "INT4_AWQ", "W4A16"), replace(INT4, scale_bits=16.0)),
    "W4A8_AWQ": replace(INT4, scale_bits=16.0, arithmetic="fp8"),
    "W8A16": Scheme("int8", 8.0, (1, 0), 16.0),
    **dict.fromkeys(("W8A8_SQ_PER_CHANNEL", "INT8_SQ"), Scheme("int8", 8.0, (1, 0), 32.0, "int8")),
}
"""modelopt's `quant_algo`. W4A16 and its like have four-bit weights and sixteen-bit activations."""


def _algorithm(section: Section) -> Scheme:
    own = _ALGORITHMS[section.word("quant_algo", _ALGORITHMS)]
    rows, cols = own.group
    return replace(own, group=(1, section.whole("group_size", default=cols))) if rows == 1 and cols else own


def _listed(section: Section) -> list[Rule]:
    """modelopt's `quantized_layers`: an algorithm for each, all others as they are."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, each in section.entries("quantized_layers").items():
        by_scheme.setdefault(_algorithm(each), []).append(name)
    return [(names(listed, section.where), scheme) for scheme, listed in by_scheme.items()]


def _modelopt(section: Section) -> Read:
    algorithm = section.values.get("quant_algo")
    if algorithm is None and section.values.get("config_groups"):
        return _compressed_tensors(section)
    if str(algorithm).upper() == "MIXED_PRECISION":
        layers = _listed(section)
        if not layers:
            raise InputError(f"{section.where}: MIXED_PRECISION has no quantized_layers; expected layers by name")
        return Read((*section.excluded(), *layers), kv_cache=section.kv_cache())
    own = None if algorithm is None else _algorithm(section)
    return Read(section.excluded(), own, kv_cache=section.kv_cache())


METHODS: dict[str, Callable[[Section], Read]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm,
    "auto-round": _auto_round,
    "torchao": _torchao,
    "hqq": _hqq,
    "quanto": _quanto,
    "eetq": _eetq,
}
"""Readers by `quant_method`."""
