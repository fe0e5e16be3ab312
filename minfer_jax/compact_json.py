"""JSON without white space, for files and events that programs read."""

import json


def compact(value: object) -> str:
    """One line, without a space; text stays as it is, and a float that is not finite is refused."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
