"""`fedaccord run --list-keys`: every key of a run configuration, in 80 columns."""

import json
import textwrap

WIDTH = 80


def keys_json() -> list[dict[str, object]]:
    """Every key with its default, meaning and allowed values."""
    from fedaccord import config
    from fedaccord.core.options import meaning

    return [
        {
            "key": key,
            "default": config.default(field),
            "meaning": meaning(field),
            "allowed": config.allowed(key, field),
        }
        for key, field in config.keys().items()
    ]


def keys_text() -> str:
    """A line with a key and its default, then its meaning and allowed values."""
    from fedaccord import config
    from fedaccord.core.options import meaning

    lines = []
    for key, field in config.keys().items():
        words = meaning(field, allowed=config.allowed(key, field))
        lines += [f"{key} = {json.dumps(config.default(field))}", *indented(words)]
    return "\n".join(lines)


def indented(words: str) -> list[str]:
    """Lines of at most 80 columns; numbers and names are not split."""
    indent = "    "
    return textwrap.wrap(
        words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
