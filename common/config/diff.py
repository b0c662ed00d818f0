"""Lists the keys in which two configurations differ."""

from typing import Any

from common.config.schema import RunConfig


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """Return `key: old -> new` for every key that differs."""

    def flatten(values: dict[str, Any], path: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in values.items():
            flat |= flatten(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
        return flat

    old, new = flatten(before.model_dump(), ""), flatten(after.model_dump(), "")
    return [f"{key}: {old.get(key)} -> {new[key]}" for key in new if new[key] != old.get(key)]
