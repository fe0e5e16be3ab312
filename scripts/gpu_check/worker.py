"""A process that runs cases of one part and says what it does, a line of JSON each.

    {"begin": NAME}   {"row": {...}}   {"end": NAME}   and last {"done": true}

It ends early, without the last line, once a case has left the device unusable.
"""

import dataclasses
import json
import os
import sys
import traceback
from typing import Any

from minfer_jax import compile_cache
from scripts.gpu_check import failures
from scripts.gpu_check.parts import PARTS
from scripts.gpu_check.rows import FAILED, Case, Row, Setting


def main(argv: list[str]) -> None:
    """Run what one argument, JSON, asks for: see `workers._command`."""
    asked: dict[str, Any] = json.loads(argv[1])
    with os.fdopen(asked["fd"], "w", encoding="utf-8") as out:

        def say(**message: object) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        compile_cache.enable()
        cases = PARTS[asked["part"]].cases(Setting.from_json(asked["setting"]))
        mine = cases[asked["shard"] :: asked["shards"]]
        say(cases=len(mine))
        for case in mine[asked["skip"] :]:
            say(begin=case.name)
            healthy = _run(case, say)
            say(end=case.name)
            if not healthy:
                return
        say(done=True)


def _run(case: Case, say: Any) -> bool:
    """Whether the device can be used after it."""
    try:
        for row in case.run():
            say(row=dataclasses.asdict(row))
        return True
    except Exception as e:  # noqa: BLE001  a case that raises is a row, not the end of the part
        traceback.print_exc()
        say(row=dataclasses.asdict(Row(name=case.name, state=FAILED, note=failures.in_words(e))))
        return failures.usable()


if __name__ == "__main__":
    main(sys.argv)
