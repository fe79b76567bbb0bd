"""The metadata of a configuration's fields: the options that set one, how a report tells it, and whether it came later.

:class:`mixnorm_lab.config.run_config.RunConfig` and its parts state that in the metadata of their fields. The options of the
commands, the settings in a report and the JSON of a record are made of it here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Option:
    """An option of the commands that train: it sets a field of a run's configuration, or an entry of a field.

    Args:
        flags: such as "--components -k"; the first one names it.
        minimum, maximum: of its values.
        choices: the values that there are.
        kind: the type of what stands on the command line; that of the field, unless given.
        read: makes the field's value of that.
        key: the entry that it sets, where the field is a dictionary.
        generators: whether a comparison of generators takes it, too.
        path: the names of the part and the field. :func:`options` fills in this and what follows.
        shared: whether it is of every run, and not what a preset or an experiment decides.
        default: of the field, where it is shared.
    """

    flags: str
    help: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    key: str | None = None
    generators: bool = False
    path: tuple[str, ...] = ()
    shared: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        return self.flags.split()[0]

    @property
    def name(self) -> str:
        """Such as "em_iters" of "--em-iters"."""
        return self.flag.removeprefix("--").replace("-", "_")

    def on_command_line(self, value: Any) -> str:
        """The option with a value, as it is typed."""
        return (
            self.flag if value is True else f"{self.flag} {value:g}" if isinstance(value, float) else f"{self.flag} {value}"
        )


def setting(
    *options: Option,
    label: str | None = None,
    text: Callable[[Any], str] | None = None,
    later: bool = False,
    option_before: str | None = None,
    row_before: str | None = None,
) -> dict[str, Any]:
    """The metadata of a field.

    Args:
        label: of the field's row in a report, which else has none.
        text: what the row says, from the object that has the field; the value, unless given. Without a word there is no row.
        later: whether the field is younger than kept records. At its default it is then left out of JSON, so that older runs
            keep their identity.
        option_before, row_before: the field that this one's options, or its row, stand before. Unless given, they are in the
            order of the fields, which is that of JSON.
    """
    return {
        "options": options,
        "label": label,
        "text": text,
        "later": later,
        "option_before": option_before,
        "row_before": row_before,
    }


def options(kind: type) -> list[Option]:
    """The options that set the fields of a configuration and its parts, in the order in which a command lists them."""
    found = []
    for field in _ordered(kind, "option_before"):
        inner = _type(kind, field.name)
        if dataclasses.is_dataclass(inner):
            of_part = options(inner)  # type: ignore[arg-type]
            found += [dataclasses.replace(o, path=(field.name, *o.path), shared=False, default=None) for o in of_part]
        shared = field.default is not MISSING
        for option in field.metadata.get("options", ()):
            known = {"path": (field.name,), "shared": shared, "default": field.default if shared else None}
            found.append(dataclasses.replace(option, kind=option.kind or inner, **known))
    return found


def with_value(config: Any, option: Option, value: Any) -> Any:
    """A configuration with the value of one option, as the command line gives it."""
    if option.choices and value not in option.choices:
        raise ValueError(f"{option.flag} {value} is unknown: choose from {', '.join(option.choices)}")
    return _with(config, option, option.path, value if option.read is None else option.read(value))


def _with(owner: Any, option: Option, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    there = getattr(owner, name)
    if rest:
        value = _with(there, option, tuple(rest), value)
    elif isinstance(there, dict):
        value = there | (value if option.key is None else {option.key: value})
    return dataclasses.replace(owner, **{name: value})


def rows(config: Any) -> dict[str, str]:
    """The rows of a report about a configuration: a text for each label. Parts that it may lack come last."""
    told: dict[str, str] = {}
    last: dict[str, str] = {}
    for field in _ordered(type(config), "row_before"):
        value, label, text = getattr(config, field.name), field.metadata.get("label"), field.metadata.get("text")
        if label is not None and (text is not None or value is not None):
            words = text(config) if text is not None else f"{value:g}" if isinstance(value, float) else str(value)
            told |= {label: words} if words else {}
        if isinstance(value, dict):
            told |= {name: str(inner) for name, inner in value.items()}
        elif dataclasses.is_dataclass(value) and field.default is MISSING:
            told |= rows(value)
        elif dataclasses.is_dataclass(value):
            last |= rows(value)
    return told | last


def to_dict(config: Any) -> dict[str, Any]:
    """The fields of a configuration and of its parts, for JSON."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not (field.metadata.get("later") and value == field.default):
            values[field.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return values


def from_dict(kind: Any, values: Any) -> Any:
    """A configuration from the dictionary that JSON made of it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a configuration needs the fields of {kind.__name__}, but holds {values!r}")
    values, fields = dict(values), {field.name: field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        part = _type(kind, name)
        if dataclasses.is_dataclass(part) and (field.default is MISSING or values.get(name) is not None):
            values[name] = from_dict(part, values.get(name))
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"a configuration has the unknown field {unknown[0]!r}; {kind.__name__} has {', '.join(fields)}")
    try:
        return kind(**values)
    except TypeError as error:  # a field is missing, or has another type
        raise ValueError(f"a configuration does not fit: {error}") from error


def _ordered(kind: type, before: str) -> list[dataclasses.Field[Any]]:
    """The fields in their order, but for those that say which one they stand before."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    found = []
    for field in fields:
        if not field.metadata.get(before):
            found += [*(other for other in fields if other.metadata.get(before) == field.name), field]
    return found


def _type(kind: type, name: str) -> Any:
    """The type of a field, without the None that it may be instead, and of a choice between words that of a word."""
    hint = _hints(kind)[name]
    if get_origin(hint) is Literal:
        return str
    inner = [one for one in get_args(hint) if one is not type(None)]
    return inner[0] if type(None) in get_args(hint) and len(inner) == 1 else hint


_hints = functools.cache(get_type_hints)
