"""What somebody may have meant who has written a name that there is not."""

import difflib
from collections.abc import Iterable

_ALIKE = 0.75  # of 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that a name is unknown: " (did you mean 'code'?)", or "".

    Args:
        word: what was written.
        known: the names that there are.
    """
    known = list(known)
    near = difflib.get_close_matches(word[:100], known, 1, _ALIKE)
    near += [name for name in known if word.startswith(name)]
    return f" (did you mean {near[0]!r}?)" if near else ""
