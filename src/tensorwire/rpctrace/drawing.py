"""Prints a trace: tables of calls and messages, payload sizes, and the possible gain."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tensorwire.bench.report import add_groups, new_table
from tensorwire.bench.rows import format_seconds, format_size
from tensorwire.rpctrace.figures import SHM_BITS, TCP_BITS, Distribution, Measured, Trace

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 32
_ONE_SIDED = ("shm", "tcp", "rdma")


def show_trace(trace: Trace, console: Console) -> None:
    """Prints all of it, or why there is nothing."""
    if trace.unknown:
        text = f"not traced, as this grpcio is another inside: {'; '.join(trace.unknown)}"
        console.print(text, style="red", highlight=False, soft_wrap=True)
    if reason := nothing(trace):
        console.print(reason, style="yellow", highlight=False, soft_wrap=True)
        return
    _show_calls(trace, console)
    _show_messages(trace, console)
    for side in ("client", "server"):
        sent = [row for row in trace.messages() if row.side == side]
        if sent:
            _show_sizes(side, sent, console)
            console.print(Text(gain(sent)), soft_wrap=True)
    if trace.lost:
        text = f"not in the tables: {trace.lost} calls and messages of processes with many methods"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


def nothing(trace: Trace) -> str:
    """Returns why there is nothing to show; "" if there is something."""
    if trace.rows or trace.lost:
        return ""
    if not trace.pythons:
        return (
            "no RPC was seen: the command started no Python, or one without PYTHONPATH "
            "(python -I, -E, a fresh environment); only those with grpcio can be traced"
        )
    return f"no RPC was seen: {trace.pythons} Python processes, none of which made a call by grpcio"


def _show_calls(trace: Trace, console: Console) -> None:
    columns = ("", "method", "", ">calls", ">failed", ">mean", ">half ≤", ">99 % ≤", ">longest")
    table = new_table("calls that have ended", *columns)
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    rows: list[list[str | Text]] = []
    for row, times in trace.calls():
        good = sum(
            each.values.count
            for each in trace.rows
            if (each.kind, each.side, each.method, each.arity)
            == ("calls", row.side, row.method, row.arity)
            and each.what[0] in ("OK", "answered", "over")
        )
        failed = times.count - good
        shown = [
            format_seconds(ns * 1e-9)
            for ns in (times.total / times.count, times.below(0.5), times.below(0.99), times.most)
        ]
        bad = Text(str(failed), style="red" if failed else "")
        rows.append([row.side, row.method, row.arity, f"{times.count:,}", bad, *shown])
    add_groups(table, rows)
    console.print(table)


def _show_messages(trace: Trace, console: Console) -> None:
    messages = trace.messages()
    low, high = _range(messages)
    axis = f"sizes {_bound(low)} to {_bound(high)}"
    columns = ("", "method", "", "by", ">messages", ">bytes", ">encoded", ">left it", axis)
    table = new_table("messages", *columns)
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    rows = []
    for row in messages:
        direction, protocol = row.what
        values = row.values
        rows.append(
            (
                row.side, row.method, direction, protocol, f"{values.count:,}",
                f"{values.total:,}", f"{values.encoded:,}", f"{values.left:,}",
                _line(values, protocol, low, high),
            )
        )  # fmt: skip
    add_groups(table, rows)
    console.print(table)
    console.print(
        "encoded: bytes that passed through (de)serializers; left it: that travelled beside the "
        "message; by runtime: in frames of tensorwire.rpc; by refused: an envelope that says "
        "nothing to its receiver; again: what was sent after that, as it is",
        style="dim", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _line(values: Distribution, protocol: str, low: int, high: int) -> Text:
    """Returns how many messages there are of each size, one character for a power of two."""
    most = max(values.counts)
    text = Text()
    for bits in range(low, high + 1):
        count = values.counts[bits]
        height = -(-count * (len(_BARS) - 1) // most)
        text.append(_BARS[height], style=_style(bits, protocol))
    return text


def _style(bits: int, protocol: str) -> str:
    if protocol in _ONE_SIDED:
        return "green"
    return "yellow" if bits >= SHM_BITS else "bright_black"


def _range(messages: list[Measured]) -> tuple[int, int]:
    used = [k for row in messages for k, count in enumerate(row.values.counts) if count]
    return (min(used), max(used)) if used else (0, 0)


def _bound(bits: int) -> str:
    return format_size(1 << bits >> 1)


def _show_sizes(side: str, messages: list[Measured], console: Console) -> None:
    """Shows the bytes of one side over the sizes of its messages."""
    ahead, inside = Distribution(), Distribution()
    for row in messages:
        (ahead if row.what[1] in _ONE_SIDED else inside).join(row.values)
    most = max(max(map(sum, zip(ahead.totals, inside.totals, strict=True))), 1)
    most_count = max(max(map(sum, zip(ahead.counts, inside.counts, strict=True))), 1)
    title = f"payload of the {side}, by the size of its message"
    table = new_table(title, ">from", ">messages", "", ">bytes", "", ">share")
    whole = max(ahead.total + inside.total, 1)
    for bits, counts in enumerate(zip(ahead.counts, inside.counts, strict=True)):
        if sum(counts):
            sums = (ahead.totals[bits], inside.totals[bits])
            share = f"{100 * sum(sums) / whole:.1f} %"
            table.add_row(
                _bound(bits), f"{sum(counts):,}", _bar(counts, most_count, bits),
                f"{sum(sums):,}", _bar(sums, most, bits), share,
            )  # fmt: skip
    console.print(table)
    legend = "█ one-sidedly  ░ by gRPC, from 128 KiB on (yellow) it need not"
    console.print(legend, style="dim", highlight=False)


def _bar(parts: tuple[int, int], most: int, bits: int) -> Text:
    """Returns a bar of the bytes that went one-sidedly and the others, relative to the longest."""
    bar = Text("█" * round(_WIDTH * parts[0] / most), style="green")
    bar.append("░" * round(_WIDTH * parts[1] / most), style=_style(bits, "grpc"))
    return bar if bar or not sum(parts) else Text("▏", style="bright_black")


def gain(messages: list[Measured]) -> str:
    """Returns how much the messages of one side would gain by tensorwire.rpc, and how."""
    side = messages[0].side
    inside, whole = Distribution(), Distribution()
    for row in messages:
        whole.join(row.values)
        if row.what[1] == "grpc":
            inside.join(row.values)
    count, size = inside.from_bits(SHM_BITS)
    if not count:
        gone = f", {whole.left:,} of {whole.total:,} bytes travelled one-sidedly"
        return f"{side}: nothing by gRPC is of 128 KiB or more" + (gone if whole.left else "")
    by_tcp = inside.from_bits(TCP_BITS)
    share = 100 * size / whole.total
    what = "insecure_channel" if side == "client" else "server"
    return (
        f"{side}: {count:,} of {whole.count:,} messages, {size:,} of {whole.total:,} bytes "
        f"({share:.1f} %), would travel one-sidedly on one host (128 KiB or more); "
        f"{by_tcp[0]:,} of them, {by_tcp[1]:,} bytes, also by TCP (1 MiB or more). Change: "
        f"tensorwire.rpc.{what}, or its aio twin, for grpc.{what}, at both ends (docs/rpc.md, "
        f"Changing over); arrays as Tensor messages skip protobuf, too."
    )
