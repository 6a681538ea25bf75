"""Checks of what users pass to callbacks."""

from __future__ import annotations


def check_whole(name: str, value: object, least: int, unit: str = "") -> None:
    """Refuse an argument that is no whole number, such as "8GiB", 8e9 or True, or less than `least`.

    Raises:
        ValueError: With the argument's name and value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number{unit} of at least {least}.")


def check_flag(name: str, value: object) -> None:
    """Refuse an argument that is neither True nor False, such as "no", which would count as true.

    Raises:
        ValueError: With the argument's name and value.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")
