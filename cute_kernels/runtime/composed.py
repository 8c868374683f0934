"""Changes fields of a configuration, or of the policies that it is made of, by the fields' names."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


def changed(config: ConfigT, **fields: object) -> ConfigT:
    """Returns the configuration with other values for fields of its own or of its policies.

    A field of a policy is named as in the policy. If several policies have the field, its name is the policy's name,
    "_" and the field's own. For example, if policies ``k`` and ``v`` both have a field ``format``, that of ``k`` is
    ``k_format``.

    Raises:
        TypeError: no policy has a field, or several have it; the message names them.
    """
    own: dict[str, Any] = {}
    of_policies: dict[str, dict[str, object]] = {}
    names = {field.name for field in dataclasses.fields(_dataclass(config))}
    for name, value in fields.items():
        if name in names:
            own[name] = value
        else:
            policy, field = _owner(config, name)
            of_policies.setdefault(policy, {})[field] = value
    for policy, values in of_policies.items():
        own[policy] = dataclasses.replace(own.get(policy, getattr(config, policy)), **values)
    return dataclasses.replace(_dataclass(config), **own)


def _owner(config: object, name: str) -> tuple[str, str]:
    """Returns (the policy that has a field, the field's name in it)."""
    held = {field.name: getattr(config, field.name) for field in dataclasses.fields(_dataclass(config))}
    policies = {policy: value for policy, value in held.items() if dataclasses.is_dataclass(value)}
    owned = {policy: {field.name for field in dataclasses.fields(value)} for policy, value in policies.items()}
    plain = [(policy, name) for policy, fields in owned.items() if name in fields]
    told = [(policy, field) for policy, fields in owned.items() for field in fields if f"{policy}_{field}" == name]
    found = plain or told
    if len(found) != 1:
        owners = ", ".join(policy for policy, _ in found) or "none"
        raise TypeError(f"{name}: got a field that {owners} of {', '.join(policies)} has, want one that one has")
    return found[0]


def _dataclass(config: object) -> Any:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"config: got {config!r}, want a dataclass")
    return config
