"""pydantic's errors as problems in the operator's words, with the nearest valid key or value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mtppp.cluster.fields import FieldErrors
from mtppp.cluster.managed import MANAGED_FLAGS
from mtppp.cluster.schema import Cluster, Serve
from mtppp.cluster.source import KeyPath, Problem, describe, shorten


def problems_of(error: ValidationError) -> list[Problem]:
    """Every problem that `error` holds, in its order."""
    return [problem for details in error.errors() for problem in _problems(details)]


def unknown_keys(error: ValidationError) -> list[Problem]:
    """Of the problems those that are a key the schema does not have."""
    return [
        Problem(details["loc"], _message(details))
        for details in error.errors()
        if details["type"] == "extra_forbidden"
    ]


def _problems(error: ErrorDetails) -> Iterator[Problem]:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FieldErrors):
        for problem in cause.problems:
            yield Problem((*error["loc"], *problem.path), problem.message)
    else:
        yield Problem(error["loc"], _message(error))


# pydantic's error types; {value} is what is in the file, the other names are pydantic's own.
_WORDING = {
    "missing": "required, and not in the file",
    "string_type": "must be text; is {value}",
    "path_type": "must be text; is {value}",
    "int_type": "must be a whole number; is {value}",
    "bool_parsing": "must be true or false; is {value}",
    "bool_type": "must be true or false; is {value}",
    "greater_than_equal": "must be at least {ge}; is {value}",
    "less_than_equal": "must be at most {le}; is {value}",
    "model_type": "must be a mapping; is {value}",
    "model_attributes_type": "must be a mapping; is {value}",
    "dict_type": "must be a mapping; is {value}",
    "tuple_type": "must be a list; is {value}",
    "value_error": "{error}",
}


def _message(error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"])
    if kind == "literal_error":
        return _not_one_of(context["expected"], value)
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"must be text; write it in quotes; is {describe(value)}"
    wording = _WORDING.get(kind, "{msg}; is {value}")
    return wording.format_map({**context, "msg": error["msg"], "value": describe(value)})


def _not_one_of(expected: str, value: object) -> str:
    # pydantic writes the values as 'ssh' or 'local'
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    message = f"must be {' or '.join(choices)}; is {describe(value)}"
    return message + _did_you_mean(value, choices)


# What the same is called elsewhere, and too unlike it to be found by its letters.
_ALSO_CALLED = {
    "identity": "identity_file",
    "key": "identity_file",
    "key_file": "identity_file",
    "keyfile": "identity_file",
    "private_key": "identity_file",
    "ssh_key": "identity_file",
}


def _unknown_key(path: KeyPath) -> str:
    key, section = str(path[-1]), _section_at(path[:-1])
    if (known := _ALSO_CALLED.get(key.lower())) in section.model_fields:
        return f"unknown key; did you mean {shorten(str(known))}?"
    # More alike than for values: user is not serve.
    if near := _did_you_mean(key, section.model_fields, cutoff=0.7):
        return f"unknown key{near}"
    if reason := MANAGED_FLAGS.get(key.replace("_", "-")):
        return f"unknown key: {reason}"
    if elsewhere := [place for place in _all_keys(Cluster) if place.split(".")[-1] == key]:
        places = [place if "." in place else f"{place} at the top level" for place in elsewhere]
        return f"unknown key here; there is {' and '.join(places)}"
    if section is Serve:
        return "unknown key; flags of vllm serve go under serve.args"
    return f"unknown key; there are {', '.join(section.model_fields)}"


def _did_you_mean(wrong: object, choices: Iterable[str], cutoff: float = 0.6) -> str:
    if not isinstance(wrong, str):
        return ""
    alike = difflib.get_close_matches(wrong.lower(), list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {shorten(alike[0])}?" if alike else ""


def _section_at(path: KeyPath) -> type[BaseModel]:
    """The model of the mapping at `path`."""
    section: type[BaseModel] = Cluster
    for key in path:
        if isinstance(key, str):
            section = _section_in(section.model_fields[key].annotation) or section
    return section


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key the file can have: `serve.port`, `nodes[].address`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if inner := _section_in(field.annotation):
            many = "[]" if get_origin(field.annotation) is tuple else ""
            yield from _all_keys(inner, f"{prefix}{name}{many}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's annotation, be it optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, Annotated):
        return next(filter(None, map(_section_in, get_args(annotation))), None)
    return None
