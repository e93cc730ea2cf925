"""Settings from outside (a TOML file, `section.key=value`, Python mappings) into a frozen
EngineConfig, and back.

Names and types are checked here and ranges by the sections; whether the values go together is
`batch.buckets.resolve`'s business.
"""

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config import EngineConfig

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class SettingsError(ValueError):
    """A setting that cannot be read: the message names where it stands, the key, and what is
    allowed."""


def read(path: Path | None = None, assignments: Sequence[str] = ()) -> EngineConfig:
    """Defaults, then the TOML file, then each `section.key=value`; the later one wins.

    Raises SettingsError for an unreadable file, an unknown name, or a value of the wrong type.
    """
    config = EngineConfig()
    if path is not None:
        config = merge(config, _read_toml(path), str(path))
    return assign(config, assignments)


def assign(config: EngineConfig, assignments: Sequence[str]) -> EngineConfig:
    """`config` with each `section.key=value` put over it, as `read` does."""
    for text in assignments:
        section, key, value = _split_assignment(text)
        config = merge(config, {section: {key: value}}, f"--set {text}")
    return config


def merge(config: EngineConfig, values: Mapping[str, Any], where: str) -> EngineConfig:
    """A new config with `values` ({section: {key: value}} or {section: its dataclass}) put over
    `config`.

    `where` (a file, an option) opens the message of every SettingsError.
    """
    sections: dict[str, Any] = {}
    for name, table in values.items():
        if name not in _sections():
            raise SettingsError(f"{where}: {_unknown_section(name, table)}")
        current = getattr(config, name)
        if isinstance(table, type(current)):
            sections[name] = table
        elif isinstance(table, Mapping):
            sections[name] = _merge_section(name, current, table, where)
        else:
            raise SettingsError(
                f"{where}: {name} is a section, so it needs keys: [{name}] in a file"
            )
    return dataclasses.replace(config, **sections)


def loads(text: str) -> EngineConfig:
    """The config of a TOML text, as `dump` writes it."""
    return merge(EngineConfig(), tomllib.loads(text), "config")


def dump(config: EngineConfig, derived: EngineConfig | None = None) -> str:
    """The config as TOML text that `read` turns back into an equal config.

    Where `derived` has another value, it stands behind as a comment.
    """
    lines: list[str] = []
    for name in _sections():
        section, other = getattr(config, name), getattr(derived or config, name)
        lines.append(f"[{name}]")
        for field in dataclasses.fields(section):
            value, later = getattr(section, field.name), getattr(other, field.name)
            comment = "" if later == value else f"  # here: {_toml(later)}"
            lines.append(f"{field.name} = {_toml(value)}{comment}")
        lines.append("")
    return "\n".join(lines)


def _sections() -> list[str]:
    return [field.name for field in dataclasses.fields(EngineConfig)]


def _keys(section: str) -> dict[str, Any]:
    """Key -> type of one section."""
    return typing.get_type_hints(typing.get_type_hints(EngineConfig)[section])


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the config: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error


def _split_assignment(text: str) -> tuple[str, str, Any]:
    name, equals, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    section, dot, key = name.partition(".")
    if not equals:
        raise SettingsError(f"--set {text}: write it as section.key=value")
    if not dot:
        message = f"{name!r} has no section; write it as section.key=value"
        raise SettingsError(f"--set {text}: {message}{_hint(name, _all_names())}")
    hint = _keys(section).get(key) if section in _sections() else None
    return section, key, _parse_value(raw, hint)


def _parse_value(raw: str, hint: Any) -> Any:
    """A TOML value; a bare word is a string, and `1,2` is a list where the setting is one."""
    if typing.get_origin(hint) is tuple and not raw.startswith("["):
        raw = f"[{raw}]"
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    is_one_value = list(parsed) == ["value"]
    wants_text = hint is str and not isinstance(parsed["value"], str)
    return parsed["value"] if is_one_value and not wants_text else raw


def _merge_section(name: str, current: Any, table: Mapping[str, Any], where: str) -> Any:
    keys = _keys(name)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in keys:
            hint = _hint(f"{name}.{key}", _all_names()) or f"; it has {', '.join(keys)}"
            raise SettingsError(f"{where}: [{name}] has no key {key!r}{hint}")
        values[key] = _convert(value, keys[key], f"{where}: {name}.{key}")
    try:
        return dataclasses.replace(current, **values)
    except ValueError as error:  # out of range; the message names the key
        raise SettingsError(f"{where}: {error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    if typing.get_origin(hint) is Mapping and isinstance(value, Mapping):
        known = {field.name for field in dataclasses.fields(typing.get_args(hint)[1])}
        for name, table in value.items():
            for key in set(table if isinstance(table, Mapping) else ()) - known:
                raise SettingsError(f"{where}: {name} has no key {key!r}; it has {sorted(known)}")
    try:
        return msgspec.convert(value, type=hint, strict=True)
    except msgspec.ValidationError as error:
        why = f" ({error})" if isinstance(value, Mapping) else ""
        raise SettingsError(f"{where} = {value!r} is not {_describe(hint)}{why}") from error


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "a list of whole numbers"
    if typing.get_origin(hint) is Mapping:
        return "a table of names, each with ttft_ms and tpot_ms"
    return _WORDS[hint]


def _all_names() -> list[str]:
    return [f"{section}.{key}" for section in _sections() for key in _keys(section)]


def _unknown_section(name: str, table: Any) -> str:
    known = f"; the sections are {', '.join(_sections())}"
    if isinstance(table, Mapping):
        return f"there is no section [{name}]{_hint(name, _sections()) or known}"
    return f"{name!r} stands outside of any section{_hint(name, _all_names()) or known}"


def _hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, looking at the whole dotted name first and then at its last part."""
    names = list(known)
    by_key = {full.rpartition(".")[2]: full for full in names}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    close_key = difflib.get_close_matches(name.rpartition(".")[2], by_key, n=1, cutoff=0.75)
    found = close[0] if close else by_key[close_key[0]] if close_key else None
    return f"; did you mean {found}?" if found else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if dataclasses.is_dataclass(value):
        return _toml(
            {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        )
    if isinstance(value, Mapping):
        entries = ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items())
        return f"{{{entries}}}"
    return repr(value)
