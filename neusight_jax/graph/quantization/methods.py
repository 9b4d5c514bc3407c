"""Methods of quantization: one reader each, from its section of a config to schemes by module name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.quantization.gguf import PLAIN, most_common, patterns
from neusight_jax.graph.quantization.modules import Names, names
from neusight_jax.graph.quantization.scheme import MXFP4, MXFP4_EXPERTS, NVFP4, Scheme
from neusight_jax.tables import table

_EXCLUDED: tuple[str, ...] = (
    *("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"),
    *("llm_int8_skip_modules", "skip_modules"),
)
"""Keys under which methods list the modules they leave alone."""

_NO_CACHE = frozenset({"bitsandbytes", "torchao", "hqq", "quanto", "eetq", "mlx"})
"""Methods that say nothing of the KV cache."""

Rule = tuple[Names, Scheme | None]


@dataclass(frozen=True)
class Read:
    """Rules a method states for a model.

    Attributes:
      rules: names and their scheme, None = not quantized; the first that matches holds.
      otherwise: scheme of linear layers and experts that no rule names.
      head, embedding: schemes of `lm_head` and of the embedding where no rule names them.
      kv_cache: dtype of the KV cache, where it is said.
    """

    rules: tuple[Rule, ...] = ()
    otherwise: Scheme | None = None
    head: Scheme | None = None
    embedding: Scheme | None = None
    kv_cache: str | None = None


def brief(value: Any) -> str:
    """A value as an error shows it: not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Section:
    """An object of a config; reads keys, and raises `InputError` naming the key when one is unusable."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def _checked(self, key: str, right: Callable[[Any], bool], expected: str) -> Any:
        """The value of a key, None where it is not there."""
        value = self.values.get(key)
        if value is not None and not right(value):
            raise InputError(f"{self.where}.{key} is {brief(value)}, expected {expected}")
        return value

    def whole(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of some keys that is there."""
        expected = f"a whole number of at least {least}"
        values = (self._checked(key, lambda size: type(size) is int and size >= least, expected) for key in keys)
        number: int | None = next((value for value in values if value is not None), default)
        if number is None:
            raise InputError(f"{self.where} has no {keys[0]}; expected a whole number")
        return number

    def word(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        """One of a few words, in any case."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        folded = {choice.lower(): choice for choice in choices}
        if str(value).lower() not in folded:
            raise InputError(f"{self.where}.{key} is {brief(value)}, expected one of {', '.join(choices)}")
        return folded[str(value).lower()]

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._checked(key, lambda flag: isinstance(flag, bool), "true or false")
        return default if value is None else bool(value)

    def words(self, key: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self.values.get(key)
        texts = [value] if isinstance(value, str) else value if value is not None else ()
        if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
            raise InputError(f"{self.where}.{key} is {brief(value)}, expected a list of module names")
        return list(texts)

    def section(self, key: str) -> Section | None:
        """An object below this one."""
        value = self._checked(key, lambda inner: isinstance(inner, Mapping), "an object")
        return Section(value, f"{self.where}.{key}") if value else None

    def entries(self, key: str) -> dict[str, Section]:
        """Objects by name below a key."""
        inner = self.section(key)
        if inner is None:
            return {}
        sections = {name: inner.section(name) for name in inner.values}
        return {name: section or Section({}, f"{inner.where}.{name}") for name, section in sections.items()}

    def excluded(self) -> tuple[Rule, ...]:
        """The modules the method leaves alone, as a rule."""
        modules = [name for key in _EXCLUDED for name in self.words(key)]
        return ((names(modules, self.where), None),) if modules else ()

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


def read_method(method: str, section: Section) -> Read:
    """Rules a method of `METHODS` states for a model."""
    reading = METHODS[method](section)
    reading = reading if isinstance(reading, Read) else Read(section.excluded(), reading)
    return reading if method in _NO_CACHE else replace(reading, kv_cache=section.kv_cache())


def _grouped(name: str, bits: int, group: int, extra: float, arithmetic: str = "") -> Scheme:
    """Groups along the contraction, a whole row where `group` is not positive; `extra`: bits beside a 16-bit scale."""
    return Scheme(name, float(bits), (1, max(group, 0)), 16.0 + extra, arithmetic)


def _named(kind: str) -> dict[str, Scheme]:
    """The schemes of a method that gives them names."""
    rows = table("graph.quantization", "schemes")[kind].items()
    return {name: Scheme(row[0], float(row[1]), tuple(row[2]), float(row[3]), *row[4:]) for name, row in rows}


def _awq(section: Section) -> Scheme:
    bits = section.whole("bits", "w_bit", default=4)
    group = section.whole("group_size", "q_group_size", default=128, least=-1)
    return _grouped(f"int{bits}", bits, group, bits if section.flag("zero_point", True) else 0)


def _gptq(section: Section) -> Read:
    bits, group = section.whole("bits"), section.whole("group_size", default=128, least=-1)
    common = _grouped(f"int{bits}", bits, group, bits)
    rules: list[Rule] = []
    # The first rule that matches holds, so overrides go before the modules left alone.
    for pattern, over in section.entries("dynamic").items():
        left, scheme = pattern.startswith("-:"), None
        if not left:
            width, length = over.whole("bits", default=bits), over.whole("group_size", default=group, least=-1)
            scheme = _grouped(f"int{width}", width, length, width)
        text = pattern[2:] if left else pattern.removeprefix("+:")
        rules.append((names([text], f"{section.where}.dynamic", True), scheme))
    rules += section.excluded()
    inside = section.values.get("modules_in_block_to_quantize")
    if inside:
        lists = inside if isinstance(inside, list) and all(isinstance(block, list) for block in inside) else [inside]
        modules = [name for block in lists for name in Section({"names": block}, section.where).words("names")]
        rules.append((names(modules, section.where), common))
    return Read(tuple(rules), None if inside else common, common if section.flag("lm_head") else None)


def _auto_round(section: Section) -> Read:
    bits, group = section.whole("bits"), section.whole("group_size", default=128, least=-1)
    floating = "fp" in str(section.values.get("data_type", "int"))
    symmetric = section.flag("sym", True)

    def scheme(width: int, length: int) -> Scheme | None:
        if floating and width == 4:
            return MXFP4 if length == 32 else NVFP4
        name = f"{'fp' if floating else 'int'}{width}"
        return None if width >= 16 else _grouped(name, width, length, 0 if symmetric else bits)

    rules: list[Rule] = []
    for name, over in section.entries("extra_config").items():
        override = scheme(over.whole("bits", default=bits), over.whole("group_size", default=group, least=-1))
        rules.append((names([name], section.where), override))
    return Read((*rules, *section.excluded()), scheme(bits, group))


def _fp8(section: Section) -> Read:
    block = section.values.get("weight_block_size")
    shape = (0, 0) if block is None else _pair(block, f"{section.where}.weight_block_size")
    section.word("activation_scheme", ("dynamic", "static"), "dynamic")
    rules = [*_listed(section), *(() if section.values.get("quantized_layers") else section.excluded())]
    if section.values.get("expert_dtype") == "fp4":  # DeepSeek-V4's: scales of powers of two, eight-bit activations
        rules.append((names(["experts"], section.where), replace(MXFP4, arithmetic="fp8")))
    return Read(tuple(rules), Scheme("fp8", 8.0, shape, 32.0, "fp8"))


def _pair(value: Any, where: str) -> tuple[int, int]:
    right = isinstance(value, list | tuple) and len(value) == 2
    if not right or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in value):
        raise InputError(f"{where} is {brief(value)}, expected two whole numbers, rows and columns of a block")
    return value[0], value[1]


def _bitsandbytes(section: Section) -> Scheme:
    if section.flag("load_in_4bit") or section.flag("_load_in_4bit"):
        kind = section.word("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        # A 32-bit scale for 64 elements, or an 8-bit one with a 32-bit scale for 256 of those.
        bits = 8.0 + 32.0 / 256.0 if section.flag("bnb_4bit_use_double_quant") else 32.0
        return Scheme(kind, 4.0, (1, 64), bits)
    if section.flag("load_in_8bit") or section.flag("_load_in_8bit"):
        return Scheme("int8", 8.0, (1, 0), 32.0, "int8")
    raise InputError(f"{section.where} has neither load_in_4bit nor load_in_8bit; expected one of them to be true")


def _quanto(section: Section) -> Scheme:
    kind = section.word("weights", ("int8", "int4", "int2", "float8"), "int8")
    activations = {"int8": "int8", "float8": "fp8"}.get(str(section.values.get("activations")), "")
    if kind in ("int4", "int2"):
        return _grouped(kind, int(kind[-1]), 128, 16, activations)
    return _grouped("fp8" if kind == "float8" else kind, 8, 0, 0, activations)


def _hqq(section: Section) -> Scheme | Read:
    whole = section.section("quant_config")
    if whole is None:
        raise InputError(f"{section.where} has no quant_config; expected an object with weight_quant_params")

    def scheme(inner: Section) -> Scheme:
        bits = inner.whole("nbits", default=4)
        return _grouped(f"int{bits}", bits, inner.whole("group_size", default=64, least=-1), 16)

    parameters = whole.section("weight_quant_params")
    if parameters is not None:
        return scheme(parameters)
    layers = section.entries("quant_config").items()
    rules = [
        (names([name], section.where), scheme(layer.section("weight_quant_params") or layer)) for name, layer in layers
    ]
    return Read((*section.excluded(), *rules))


def _torchao(section: Section) -> Scheme:
    if section.flag("include_input_output_embeddings"):
        raise InputError(f"{section.where}: torchao with include_input_output_embeddings is not read; expected false")
    kind = section.values.get("quant_type")
    group = section.section("quant_type_kwargs") or Section({}, section.where)
    if isinstance(kind, Mapping):
        outer = Section(kind, f"{section.where}.quant_type").section("default")
        inner = outer.values if outer else kind
        data = inner.get("_data")
        kind = inner.get("_type")
        group = Section(data if isinstance(data, Mapping) else {}, f"{section.where}.quant_type")
    scheme = _named("torchao").get(str(kind).replace("_", "").lower().removesuffix("config"))
    if scheme is None:
        supported = "int4_weight_only, int8_weight_only, float8_weight_only, or those with dynamic activations"
        raise InputError(f"{section.where}: torchao quant_type {brief(kind)} is not read; expected {supported}")
    return (
        replace(scheme, group=(1, group.whole("group_size", default=scheme.group[1]))) if scheme.bits < 8.0 else scheme
    )


def _compressed_tensors(section: Section) -> Read:
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.values.get("format", "dense") != "dense":
        raise InputError(f"{section.where}: sparse weights ({sparsity.values['format']}) are not read; expected dense")
    groups = section.entries("config_groups")
    if not groups:
        raise InputError(f"{section.where} has no config_groups; expected at least one with weights and targets")
    rules, everything = list(section.excluded()), None
    # Names go before classes, which hold for whatever no name matches: names are rules, a class is the default.
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
    return Read(tuple(rules), everything, everything)


def _group_scheme(group: Section) -> Scheme | None:
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        return None
    bits, kind = weights.whole("num_bits"), weights.word("type", ("int", "float"), "int")
    length = weights.whole("group_size", default=0, least=-1)
    block = weights.values.get("block_structure")
    name, arithmetic = f"{'fp' if kind == 'float' else 'int'}{bits}", ""
    if inputs is not None:
        width, of = inputs.whole("num_bits"), inputs.word("type", ("int", "float"), "int")
        paths = {("float", 4): "fp4", ("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int8"}
        arithmetic = paths.get((of, width), "")
        if not arithmetic and width < 16:
            raise InputError(f"{inputs.where}: {width}-bit {of} activations are not read; expected 8 or 4 bits")
    if kind == "float" and length > 0 and bits in (4, 8) and (bits == 4 or length == 32):
        return Scheme(name, float(bits), (1, length), 8.0, arithmetic)  # nvfp4, mxfp4, mxfp8
    if isinstance(block, list):
        return Scheme(name, float(bits), _pair(block, f"{weights.where}.block_structure"), 32.0, arithmetic)
    if length <= 0 and weights.values.get("strategy") in (None, "tensor"):
        return Scheme(name, float(bits), (0, 0), 32.0, arithmetic)
    return _grouped(name, bits, length, 0 if weights.flag("symmetric", True) else bits, arithmetic)


def _algorithm(section: Section) -> Scheme:
    """modelopt's `quant_algo`."""
    algorithms = _named("modelopt")
    scheme = algorithms[section.word("quant_algo", algorithms)]
    rows, cols = scheme.group
    return replace(scheme, group=(1, section.whole("group_size", default=cols))) if rows == 1 and cols else scheme


def _listed(section: Section) -> list[Rule]:
    """modelopt's `quantized_layers`: an algorithm for each, all others as they are."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, layer in section.entries("quantized_layers").items():
        by_scheme.setdefault(_algorithm(layer), []).append(name)
    return [(names(modules, section.where), scheme) for scheme, modules in by_scheme.items()]


def _modelopt(section: Section) -> Scheme | Read | None:
    algorithm = section.values.get("quant_algo")
    if algorithm is None:
        return _compressed_tensors(section) if section.values.get("config_groups") else None
    if str(algorithm).upper() != "MIXED_PRECISION":
        return _algorithm(section)
    layers = _listed(section)
    if not layers:
        raise InputError(f"{section.where}: MIXED_PRECISION has no quantized_layers; expected layers by name")
    return Read((*section.excluded(), *layers))


def _mlx(section: Section) -> Read:
    """MLX's: every product, the embedding and the head, but for modules that have an entry of their own."""
    common = _mlx_scheme(section, section)
    by_scheme: dict[Scheme | None, list[str]] = {}
    for name in section.values:
        if name in ("bits", "group_size", "mode", "quant_method"):
            continue
        value, module = section.values.get(name), name.replace(".switch_mlp.", ".experts.0.")  # experts as one
        if isinstance(value, Mapping):
            by_scheme.setdefault(_mlx_scheme(Section(value, f"{section.where}.{name}"), section), []).append(module)
        elif value is False:
            by_scheme.setdefault(None, []).append(module)
        elif value is not True:
            raise InputError(f"{section.where}.{name} is {brief(value)}, expected an object with bits, or false")
    rules = tuple((names(modules, section.where), scheme) for scheme, modules in by_scheme.items())
    return Read(rules, common, common, common)


def _mlx_scheme(section: Section, outer: Section) -> Scheme:
    """Scheme of a module or of all: groups with a scale and a bias of 16 bits, or formats that fix both."""
    bits = section.whole("bits", default=outer.whole("bits"))
    mode = section.word("mode", ("affine", "mxfp4", "mxfp8", "nvfp4"), "affine")
    group = section.whole("group_size", default=outer.whole("group_size", default=64))
    fixed = {"mxfp4": MXFP4, "nvfp4": NVFP4, "mxfp8": Scheme("fp8", 8.0, (1, 32), 8.0)}
    return fixed.get(mode) or _grouped(f"int{bits}", bits, group, 16)


def _gguf(section: Section) -> Read:
    """GGUF's: a type for every tensor."""
    types: dict[str, str] = dict(section.values.get("tensors") or ())
    schemes = _named("gguf")

    def scheme(kind: str) -> Scheme | None:
        if kind not in (*PLAIN, *schemes):
            raise InputError(f"{section.where}: tensors of type {kind} are not read; expected {', '.join(schemes)}")
        return schemes.get(kind)

    rules = tuple((names([text], section.where, True), scheme(kind)) for text, kind in patterns(types))
    embedding: str = types.get("token_embd.weight", "F16")
    head: str = types.get("output.weight", embedding)
    return Read(rules, scheme(most_common(types)), scheme(head), scheme(embedding))


METHODS: dict[str, Callable[[Section], Scheme | Read | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": lambda section: Read((*section.excluded(), (names(["experts"], section.where), MXFP4_EXPERTS))),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fbgemm_fp8": lambda _: Scheme("fp8", 8.0, (1, 0), 32.0, "fp8"),
    "auto-round": _auto_round,
    "torchao": _torchao,
    "hqq": _hqq,
    "quanto": _quanto,
    "eetq": lambda section: _grouped(section.word("weights", ("int8",), "int8"), 8, 0, 0),
    "mlx": _mlx,
    "gguf": _gguf,
}
"""Readers by `quant_method`: the scheme of all linear layers and experts, or more than that."""
