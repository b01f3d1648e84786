"""Write the measured tables into docs/study.md: `python benchmarks/study.py`.

Every block between `<!-- table NAME -->` and `<!-- end -->` is replaced by the table of runs/study/NAME, as
`seps ablate examples/study/NAME.yaml` or `seps baseline` wrote it; what was not run keeps its block. A copy
of the figures goes beside, to docs/study/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from statistics import fmean, stdev

from seps.evaluation import COLUMN_NAMES, COLUMNS

BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def seeds_of(found: dict) -> dict[str, list[dict[str, float]]]:
    """Row name -> the figures of every seed, from either command's table.json."""
    if "figures" in found:
        return {name: [figures] for name, figures in found["figures"].items()}
    return {name: list(seeds.values()) for name, seeds in found.items()}


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Mean and standard deviation over the seeds, and the gain in rSum over the first row."""
    lines = [
        f"| | seeds | {COLUMN_NAMES} | to the first |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = fmean(each["rsum"] for each in next(iter(rows.values())))
    for name, seeds in rows.items():
        cells = [f"{fmean(each[column] for each in seeds):.1f}" for column in COLUMNS]
        if len(seeds) > 1:
            cells[-1] += f" ± {stdev(each['rsum'] for each in seeds):.1f}"
        gain = fmean(each["rsum"] for each in seeds) - first
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} | {gain:+.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="runs/study", help="where the runs are")
    parser.add_argument("--page", default="docs/study.md", help="the page to fill in")
    asked = parser.parse_args()
    page, kept = Path(asked.page), Path(asked.page).with_suffix("")
    kept.mkdir(exist_ok=True)

    def fill(block: re.Match[str]) -> str:
        name = block.group(2)
        source, copy = Path(asked.runs) / name / "table.json", kept / f"{name}.json"
        if source.is_file():
            found = json.loads(source.read_text(encoding="utf-8"))
            found = {"figures": found["figures"]} if "figures" in found else found
            copy.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if not copy.is_file():
            return block.group(0)
        rows = seeds_of(json.loads(copy.read_text(encoding="utf-8")))
        return block.group(1) + table(rows) + block.group(3)

    page.write_text(BLOCK.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{page}: tables written")


if __name__ == "__main__":
    main()
