"""Checks and measures the Pallas kernels on a CUDA device.

    scripts/gpu_check.sh --out DIR [--models DIR] [--parity DIR] [--budget SECONDS] [--tune]

It ends within the budget, and writes gpu_check.md and gpu_check.json as it goes. A check that
fails, crashes or hangs is a row of the table, and the exit status is 1 then.
"""

import argparse
import sys
import time
from pathlib import Path

from scripts.gpu_check.parts import ONLY_IF_ASKED, PARTS
from scripts.gpu_check.report import JSON, MARKDOWN, Report
from scripts.gpu_check.rows import FAILED, Setting
from scripts.gpu_check.workers import run_part

BUDGET = 450.0  # seconds: with the start of python and the last part's end, under eight minutes
BLOCKS = "blocks.json"
PACKAGE = Path(__file__).resolve().parents[2] / "minfer_jax" / "pallas" / BLOCKS


def main(argv: list[str]) -> int:
    """Run what the command line asks for; the exit status."""
    args = _parsed(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in PARTS if name in ("device", *args.parts)]
    if args.tune and ONLY_IF_ASKED not in names:
        names.insert(names.index("speeds") if "speeds" in names else len(names), ONLY_IF_ASKED)
    blocks = [args.out / BLOCKS]
    if not args.rehearse:
        blocks.append(PACKAGE)
    if args.tune and not blocks[0].exists():
        blocks[0].write_bytes(PACKAGE.read_bytes())
    begin = time.time()
    report = Report(args.out, {"budget, s": args.budget, "rehearsal": args.rehearse})
    for i, name in enumerate(names):
        part, left = PARTS[name], begin + args.budget - time.time()
        share = part.share / sum(PARTS[n].share for n in names[i:])
        setting = Setting(
            rehearse=args.rehearse,
            models=args.models,
            parity=args.parity,
            blocks=tuple(blocks),
            until=time.time() + max(0.0, left) * share,
        )
        run_part(name, part, setting, lambda row, name=name: report.add(name, row))
        if name == "device" and any(row.state == FAILED for row in report.rows(name)):
            break
    report.finish(**{"seconds": round(time.time() - begin, 1), "failures": report.failures})
    print(f"\n{report.markdown()}\nwritten to {args.out / MARKDOWN} and {JSON}")
    return 1 if report.failures else 0


def _parsed(argv: list[str]) -> argparse.Namespace:
    usual = [name for name in PARTS if name != ONLY_IF_ASKED]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description="Checks and measures the Pallas kernels on a CUDA device.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and JSON")
    parser.add_argument(
        "--models",
        type=Path,
        help="folder of GGUF files, copied here by whatever means; left out without it",
    )
    parser.add_argument(
        "--parity", type=Path, help="folder with arch/NAME.gguf and .npz; else tiny models are made"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds for all parts (default: %(default)s)"
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=usual,
        help=f"some of {','.join(PARTS)} (default: all but {ONLY_IF_ASKED})",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="look for better block sizes before speeds are measured, and write them into "
        "minfer_jax/pallas/blocks.json; give a larger budget",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="try the script on a CPU: tiny shapes, kernels interpreted",
    )
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: expected some of {','.join(PARTS)}")
    for name in ("models", "parity"):
        folder = getattr(args, name)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name} {folder}: no such folder")
    if not args.budget > 0:
        parser.error(f"--budget {args.budget}: expected seconds above 0")
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
