"""Messages of Chakra's execution traces, made when the program runs, so that no generated file is shipped.

Source: mlcommons/chakra, schema/protobuf/et_def.proto, version 0.0.4 (Apache-2.0). Needs protobuf (extra `chakra`).
"""

from __future__ import annotations

import functools
from typing import Any

from neusight_jax.errors import InputError

VERSION = "0.0.4"
"""Of the schema: what the first message of a file says."""
PACKAGE = "ChakraProtoMsg"
NODE_TYPES: tuple[str, ...] = (
    *("INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE"),
    *("COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"),
)
COLLECTIVES: tuple[str, ...] = (
    *("ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER"),
    *("REDUCE_SCATTER_BLOCK", "BARRIER"),
)
"""Values of `comm_type`, by their place."""
_KINDS: tuple[str, ...] = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
"""Kinds of an attribute's value, each alone and as a list; their fields are numbered from 3."""


@functools.cache
def messages() -> tuple[Any, Any]:
    """The classes GlobalMetadata and Node. `InputError` without protobuf."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto
    except ImportError:
        raise InputError("Chakra traces need protobuf 5.28 or newer: pip install '.[chakra]'") from None
    del proto  # writes a message with its length; absent before 5.28
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file(descriptor_pb2))
    descriptors = (pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in ("GlobalMetadata", "Node"))
    metadata, node = map(message_factory.GetMessageClass, descriptors)
    return metadata, node


def _file(pb: Any) -> Any:
    file = pb.FileDescriptorProto(name="et_def.proto", package=PACKAGE, syntax="proto3")
    for name, values in (("NodeType", NODE_TYPES), ("CollectiveCommType", COLLECTIVES)):
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    _field(pb, attribute, "name", 1, "string")
    _field(pb, attribute, "doc_string", 2, "string")
    for place, kind in enumerate(_KINDS):
        many = f"{kind.capitalize()}List"
        _field(pb, file.message_type.add(name=many), "values", 1, kind, repeated=True)
        _field(pb, attribute, f"{kind}_val", 3 + 2 * place, kind, oneof_index=0)
        _field(pb, attribute, f"{kind}_list", 4 + 2 * place, many, oneof_index=0)
    metadata = file.message_type.add(name="GlobalMetadata")
    _field(pb, metadata, "version", 1, "string")
    _field(pb, metadata, "attr", 2, "AttributeProto", repeated=True)
    tensors = file.message_type.add(name="IOInfo")
    for number, name in enumerate(("values", "shapes", "types"), 1):
        _field(pb, tensors, name, number, "string")
    node = file.message_type.add(name="Node")
    _field(pb, node, "id", 1, "uint64")
    _field(pb, node, "name", 2, "string")
    _field(pb, node, "type", 3, "NodeType", enum=True)
    for number, name in enumerate(("ctrl_deps", "data_deps"), 4):
        _field(pb, node, name, number, "uint64", repeated=True)
    for number, name in enumerate(("start_time_micros", "duration_micros"), 6):
        _field(pb, node, name, number, "uint64")
    for number, name in enumerate(("inputs", "outputs"), 8):
        _field(pb, node, name, number, "IOInfo")
    _field(pb, node, "attr", 10, "AttributeProto", repeated=True)
    return file


def _field(
    pb: Any, owner: Any, name: str, number: int, kind: str, *, repeated: bool = False, enum: bool = False, **more: int
) -> None:
    """A field of a message; a kind that is no scalar is a message of the file, or an enumeration of it."""
    types = pb.FieldDescriptorProto
    label = types.LABEL_REPEATED if repeated else types.LABEL_OPTIONAL
    if kind in _KINDS:
        owner.field.add(name=name, number=number, label=label, type=getattr(types, f"TYPE_{kind.upper()}"), **more)
        return
    type_name = f".{PACKAGE}.{kind}"
    is_a = types.TYPE_ENUM if enum else types.TYPE_MESSAGE
    owner.field.add(name=name, number=number, label=label, type=is_a, type_name=type_name, **more)
