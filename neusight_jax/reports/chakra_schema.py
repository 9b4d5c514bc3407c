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
"""Kinds of an attribute's value, each alone and as a list."""
FIELDS: dict[str, dict[str, str]] = {
    "GlobalMetadata": {"version": "string", "attr": "AttributeProto*"},
    "AttributeProto": {
        **dict.fromkeys(("name", "doc_string"), "string"),
        **{
            name: of
            for kind in _KINDS
            for name, of in ((f"{kind}_val", kind), (f"{kind}_list", f"{kind.capitalize()}List"))
        },
    },
    **{f"{kind.capitalize()}List": {"values": f"{kind}*"} for kind in _KINDS},
    "IOInfo": dict.fromkeys(("values", "shapes", "types"), "string"),
    "Node": {
        **{"id": "uint64", "name": "string", "type": "NodeType", "ctrl_deps": "uint64*", "data_deps": "uint64*"},
        **{"start_time_micros": "uint64", "duration_micros": "uint64", "inputs": "IOInfo", "outputs": "IOInfo"},
        "attr": "AttributeProto*",
    },
}
"""Kinds of the fields of every message, which are numbered by their place; * = repeated."""


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
    types = pb.FieldDescriptorProto
    for name, values in (("NodeType", NODE_TYPES), ("CollectiveCommType", COLLECTIVES)):
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    # Readers go by numbers alone, so that places in the tables above are what must not change.
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for number, (field, kind) in enumerate(fields.items(), 1):
            label = types.LABEL_REPEATED if kind.endswith("*") else types.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            kind = kind.removesuffix("*")
            if kind in _KINDS:
                added.type = getattr(types, f"TYPE_{kind.upper()}")
            else:
                added.type = types.TYPE_ENUM if kind == "NodeType" else types.TYPE_MESSAGE
                added.type_name = f".{PACKAGE}.{kind}"
            if field.endswith(("_val", "_list")):
                added.oneof_index = 0
    return file
