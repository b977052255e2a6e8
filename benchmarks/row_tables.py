"""Tables of the row store: its speed against what was asked, and how many rows fit."""

from __future__ import annotations

from typing import Any

from bench import RESULTS, load, markdown

WHAT = {
    "dependent, interleaved 8": "transactions whose keys depend on rows, interleaved by 8",
    "independent, interleaved 8": "transactions of 10 known keys, interleaved by 8",
    "90/10, interleaved 8": "the same, one key in ten written",
    "multi_get, group 32": "`multi_get` against one key after the other",
    "cache-resident, inline": "transactions on 2,048 rows (in the cache)",
    "cache-resident, group 32": "`multi_get` on 2,048 rows",
}


def speed() -> str:
    """Ratios within one run against what the specification asks."""
    found = load(RESULTS / "row_store.json")
    gates = found["gates"]
    rows = [
        [
            shown,
            "sequential",
            f"**{gates[name]['ratio']:.2f}x** the speed",
            f"{gates[name]['gate']}x",
        ]
        for name, shown in WHAT.items()
    ]
    python = found["from_python"]
    dense = gates["multi_get time / torch.index_select time"]
    ours = python["multi_get"]["ns_per_key"]
    rows.append(
        [
            f"`multi_get` from Python, {ours:.0f} ns a key",
            "`torch.index_select` on a dense tensor, "
            f"{python['torch.index_select, dense']['ns_per_key']:.0f} ns",
            f"**{dense['ratio']:.2f}** of its time",
            f"at most {dense['gate']}",
        ]
    )
    huge = python.get("torch.index_select, dense, huge pages")
    if huge:
        rows.append(
            [
                "the same",
                f"the dense tensor in huge pages, {huge['ns_per_key']:.0f} ns",
                f"{huge['ratio'] / python['multi_get']['ratio']:.2f} of its time",
                "",
            ]
        )
    by_dict = python["against a dict"]["multi_get"]["ratio"]
    rows.append(
        ["the same", "a dict of row numbers, then the tensor", f"{by_dict:.0f}x the speed", ""]
    )
    rows.append(
        [
            "`apply`: a step of row-wise Adagrad",
            "torch, in place on a dense tensor",
            f"{found['training']['apply']['ratio']:.2f}x the speed",
            "",
        ]
    )
    return markdown(["what", "against", "measured", "asked"], rows)


def capacity() -> str:
    """Bytes a row, evictions and the way to the disk and back."""
    found = load(RESULTS / "capacity.json")
    per_row, pruned, spilled = found["bytes_per_row"], found["pruned"], found["spilled"]
    rows = [
        [
            f"{found['rows'] / 1e6:.0f} M rows of 16 floats with their state, two shards",
            f"**{per_row['filled']:.1f} B a row** resident",
            "at most 120",
        ],
        [
            f"the same while a Zipf stream evicts {found['evictions'] / 1e6:.1f} M rows",
            f"{per_row['after the stream']:.1f} B a row, "
            f"moving by {100 * found['resident_spread_in_stream']:.2f} %",
            "flat within 1 %",
        ],
        [
            f"{spilled['rows']:,} rows, a tenth in memory, {spilled['recalled']:,} recalled",
            f"{spilled['different']} differ in any bit",
            "0",
        ],
        [
            f"{pruned['rows'] / 1e6:.0f} M rows of {pruned['dim']} floats, pruned by 70 %",
            f"{100 * pruned['resident_share_kept']:.1f} % of the memory is left, "
            f"{pruned['resident_against_prediction']:.2f} of what was counted",
            "within 5 %",
        ],
    ]
    return markdown(["what", "measured", "asked"], rows)


def pieces() -> list[list[str]]:
    """Lines for the README."""
    store = load(RESULTS / "row_store.json")
    gates, python = store["gates"], store["from_python"]
    dense: dict[str, Any] = gates["multi_get time / torch.index_select time"]
    huge = python["torch.index_select, dense, huge pages"]["ratio"] / python["multi_get"]["ratio"]
    interleaved = gates["dependent, interleaved 8"]["ratio"]
    found = load(RESULTS / "capacity.json")
    return [
        [
            "row store: transactions interleaved by 8 against sequential; "
            "`multi_get` against `torch.index_select` on a dense tensor",
            "2x; at most 1.1",
            f"{interleaved:.1f}x the speed; {dense['ratio']:.2f} of its time "
            f"({huge:.2f} where that has huge pages too)",
            "row_store.py",
        ],
        [
            f"memory of {found['rows'] / 1e6:.0f} M embedding rows (16 floats and their state)",
            "at most 120 B",
            f"{found['bytes_per_row']['filled']:.0f} B a row resident",
            "capacity.py",
        ],
    ]
