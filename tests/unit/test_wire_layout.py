"""docs/internals/wire.md, the core, and the Python implementation in tests/wire.py say the same.

The document is parsed: its tables are compared with the declarations of the core, and with the
layouts of wire.py, which then speaks to a real Node.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import wire

from tensorwire import Node, errors
from tensorwire.memory import handle

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/internals/wire.md").read_text()
Row = dict[str, str]


def section(heading: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", DOCUMENT, re.MULTILINE)
    assert found, f"docs/internals/wire.md has no section {heading!r}"
    rest = DOCUMENT[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(heading: str) -> list[list[Row]]:
    """The tables of a section, each a list of rows by column name."""
    found: list[list[Row]] = []
    names: list[str] = []
    for line in [*section(heading).splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            names = []
        elif not names:
            names = cells
            found.append([])
        elif set(line) - set("|-: "):
            assert len(cells) == len(names), line
            found[-1].append(dict(zip(names, cells, strict=True)))
    return found


def number(text: str) -> int:
    """A number as the document writes it: 1,024 or 0x54 or 1 MiB or a word with it."""
    found = re.search(r"0x[0-9a-f]+|\d[\d,]*", text)
    assert found, text
    value = int(found[0].replace(",", ""), 0)
    return value << 20 if "MiB" in text else value


def source(*names: str) -> str:
    return "".join((ROOT / "cpp" / name).read_text() for name in names)


def constant(name: str) -> int:
    """The value of an integer constant of the core, wherever it is declared."""
    core = ROOT / "cpp"
    files = sorted(path for kind in ("h", "cc") for path in core.glob(f"*/*.{kind}"))
    texts = (path.read_text() for path in files if path.parent.name not in ("tests", "fuzz"))
    found = re.findall(rf"constexpr \w+ {name} = ([^;]+);", "".join(texts))
    assert len(found) == 1, f"{name} is declared {len(found)} times"
    return int(eval(re.sub(r"(?<=\d)u\b", "", found[0])))  # digits and shifts


def enumerators(name: str, *files: str) -> dict[str, int]:
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}};", source(*files), re.DOTALL)
    assert body
    return {key: int(value) for key, value in re.findall(r"(k\w+) = (\d+)", body[1])}


def in_code_marks(text: str) -> str:
    return text.strip("`")


# ---- layouts


@pytest.mark.parametrize("layout", wire.LAYOUTS)
def test_a_table_is_the_layout(layout: str) -> None:
    rows = tables(layout)[0]
    documented = {row["field"]: (int(row["offset"]), int(row["size"])) for row in rows}
    spoken = {name: (offset, size) for name, (offset, size, _) in wire.LAYOUTS[layout].items()}
    assert documented == spoken
    assert len(documented) == len(rows)
    # No gap, no overlap, and the size that the text gives.
    end = 0
    for offset, size in documented.values():
        assert offset == end
        end += size
    assert end == wire.SIZES[layout]
    assert number(section(layout).strip().split("\n")[0]) == end


@pytest.mark.parametrize("layout", wire.LAYOUTS)
def test_what_is_encoded_is_decoded(layout: str) -> None:
    values: dict[str, Any] = {}
    for index, (name, (_, size, default)) in enumerate(wire.LAYOUTS[layout].items(), 1):
        content = bytes((index + at) % 256 for at in range(size))
        is_text = isinstance(default, bytes)
        values[name] = content if is_text else int.from_bytes(content, "little")
    assert wire.decode(layout, wire.encode(layout, **values)) == values
    defaults = wire.decode(layout, wire.encode(layout))
    for name, (_, size, default) in wire.LAYOUTS[layout].items():
        assert defaults[name] == (
            default.ljust(size, b"\0") if isinstance(default, bytes) else default
        )


CPP_SIZES = {"uint8_t": 1, "FrameType": 1, "uint16_t": 2, "uint32_t": 4, "uint64_t": 8}


def test_the_header_of_the_core() -> None:
    """Its members lie where the table says; C++ pads nothing, because the sum is the size."""
    body = re.search(r"struct Header {(.*?)};", source("wire/frame.h"), re.DOTALL)
    assert body
    members = re.findall(r"^\s*(\w+) (\w+) = ", body[1], re.MULTILINE)
    offset, layout = 0, {}
    for type_, name in members:
        layout[name] = (offset, CPP_SIZES[type_])
        assert offset % CPP_SIZES[type_] == 0, f"{name} would be padded"
        offset += CPP_SIZES[type_]
    assert layout == {name: (at, size) for name, (at, size, _) in wire.HEADER.items()}


def written_offsets(function: str) -> set[int]:
    """Returns the offsets at which a function of handshake.cc writes, beside its buffer."""
    body = re.search(
        rf"{re.escape(function)} const {{(.*?)^}}", source("wire/handshake.cc"), re.S | re.M
    )
    assert body
    text = body[1].replace("bytes.data()", "p")
    offsets = {int(at) for at in re.findall(r"\bp \+ (\d+)", text)}
    offsets |= {int(at) for at in re.findall(r"(?:p|bytes)\[(\d+)\] =", text)}
    return offsets | ({0} if re.search(r"\(p,", text) else set())


def test_the_hello_and_welcome_of_the_core() -> None:
    for function, fields in (("Hello::encode()", wire.HELLO), ("Welcome::encode()", wire.WELCOME)):
        documented = {at for name, (at, _, _) in fields.items() if "reserved" not in name}
        assert written_offsets(function) == documented


def test_the_page_of_the_core() -> None:
    text = source("base/page.h")
    assert constant("kPageMagic").to_bytes(8, "little") == wire.PAGE["magic"][2]
    assert wire.PAGE["generations"][1] == 8 * constant("kMaxRegions")
    assert re.search(r"alignas\(64\) std::atomic<uint32_t> armed", text)
    assert re.search(r"alignas\(64\) std::atomic<uint64_t> generations\[kMaxRegions\]", text)


def test_the_handle() -> None:
    rows = tables("Handle")[0]
    sizes = [int(row["size"]) for row in rows]
    assert [int(row["offset"]) for row in rows] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == handle._FIXED.size
    whole = sum(sizes) + handle._CHECKSUM.size
    assert whole == number(section("Handle").split(":", 1)[1])
    magic = re.search(r"bytes `(\w+)`", rows[0]["meaning"])
    assert magic
    assert magic[1].encode() == handle._MAGIC
    text = handle.Handle("h:1", 0x1122, 0x33, 0x4455, 0x66, "r", "name", "node").to_bytes()
    at = {row["field"]: (int(row["offset"]), int(row["size"])) for row in rows}

    def value(name: str) -> int:
        offset, size = at[name]
        return int.from_bytes(text[offset : offset + size], "little")

    fields = ("id", "incarnation", "generation", "size_bytes", "access", "version")
    assert [value(name) for name in fields] == [0x33, 0x1122, 0x4455, 0x66, 1, 1]
    assert [value(f"{name}_bytes") for name in ("address", "node", "name")] == [3, 4, 4]
    assert text[sum(sizes) : -4] == b"h:1nodename"


# ---- numbers


def test_frame_types() -> None:
    rows = next(rows for rows in tables("Header") if "type" in rows[0])
    documented = {in_code_marks(row["name"]): int(row["type"]) for row in rows}
    assert documented == enumerators("FrameType", "wire/frame.h")
    assert max(documented.values()) == constant("kLastFrameType")
    spoken = {"kFetchAdd": wire.FETCH_ADD, "kGoodbye": wire.GOODBYE, "kData": wire.DATA}
    assert spoken.items() <= documented.items()


def test_codes() -> None:
    (rows,) = tables("Codes")
    documented = {in_code_marks(row["name"]): int(row["code"]) for row in rows}
    assert documented == enumerators("Code", "base/error.h")
    assert max(documented.values()) == constant("kLastCode")
    for row in rows[1:]:
        error = errors.from_code(int(row["code"]), "text")
        assert type(error).__name__ == in_code_marks(row["in Python"])


def test_flags_kinds_and_bits() -> None:
    meaning = {row["field"]: row["meaning"] for row in tables("Header")[0]}
    flags = {name: int(bit) for bit, name in re.findall(r"(\d) `(k\w+)`", meaning["flags"])}
    assert flags == {name: constant(name) for name in ("kLast", "kReadable", "kWritable", "kOnGpu")}
    assert sum(flags.values()) == constant("kAllFlags")
    assert number(meaning["magic"]) == constant("kFrameMagic") == wire.HEADER["magic"][2]
    hello = {row["field"]: row["meaning"] for row in tables("Hello")[0]}
    kinds = {name: int(kind) for kind, name in re.findall(r"(\d) `(k\w+)`", hello["kind"])}
    assert kinds == enumerators("HelloKind", "wire/handshake.h")
    bits = {f"k{name.title()}Bit": int(bit) for bit, name in re.findall(
        r"(\d) (shm|tcp|rdma)", hello["transports"])}  # fmt: skip
    assert bits == enumerators("TransportBit", "wire/handshake.h")
    assert number(hello["version"]) == constant("kWireVersion") == wire.HELLO["version"][2]
    magic = re.search(r"kMagic\[8\] = {(.*?)}", source("wire/handshake.cc"))
    assert magic
    assert "".join(re.findall(r"'(.)'", magic[1])).encode() == wire.HELLO["magic"][2]


def test_limits() -> None:
    documented = {row["limit"]: number(row["value"]) for row in tables("Limits")[0][:-1]}
    assert documented == {
        "payload of one frame": constant("kMaxChunkBytes"),
        "other bodies": constant("kMaxBodyBytes"),
        "requests that wait for an answer, at the sender": constant("kWindow"),
        "requests and answers not yet sent, at the receiver": constant("kMaxAnswers"),
        "unfinished transfers of several frames, at the receiver": constant("kMaxOpenWrites"),
        "frames on shm before both sides are attached": constant("kMaxEarlyFrames"),
        "regions that all peers lease from a Node": constant("kMaxLeasedRegions"),
    }
    assert (wire.MAX_CHUNK_BYTES, wire.MAX_BODY_BYTES) == (1 << 20, constant("kMaxBodyBytes"))
    for text, name in (("name_bytes", "kMaxNodeNameBytes"), ("message_bytes", "kMessageBytes")):
        rows = [row for layout in ("Hello", "Welcome") for row in tables(layout)[0]]
        (limit,) = [number(row["meaning"]) for row in rows if row["field"] == text]
        assert limit == constant(name)
    strangers = [
        row["event"] for row in tables("What ends a handshake")[0] if "th " in row["event"]
    ]
    assert [number(event) for event in strangers] == [constant("kMaxHandshakes") + 1]
    for name in ("Hello", "Proof", "Welcome", "Choice", "Meeting"):
        assert constant(f"k{name}Bytes") == wire.SIZES[name]


def test_roles_of_the_proofs() -> None:
    rows = tables("Trust")[0]
    documented = [in_code_marks(row["role"]) for row in rows]
    assert documented == re.findall(r'hmac\(secret, "([^"]+)"', source("wire/handshake.cc"))


# ---- all of it at once


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_real_node_understands(transport: str) -> None:
    secret = b"sixteen bytes or more"
    with Node("spoken to", secret=secret) as node:
        region = node.allocate(4096, name="r")
        with wire.dial(node.address) as stream:
            theirs = wire.decode("Hello", stream.greet(wire.hello(secret)))
        assert theirs["kind"] == wire.CHALLENGE
        assert theirs["incarnation"] == node.incarnation
        assert theirs["host"] == wire.host_id()
        assert theirs["name"][: theirs["name_bytes"]] == b"spoken to"
        assert node.address.endswith(f":{theirs['port']}")

        values = {"incarnation": 0xABCD, "pid": 123, "port": 4567}
        with wire.connect(transport, node.address, secret, name=b"speaks", **values) as stream:
            peer = node.accept(10.0)
            assert (peer.name, peer.incarnation, peer.pid) == ("speaks", 0xABCD, 123)
            assert peer.address.endswith(":4567")
            assert peer.path.transport == transport
            grant = stream.ask(wire.LOOKUP, b"r", transfer=1)
            assert (grant.type, grant.status, grant.transfer) == (wire.GRANT, wire.OK, 1)
            assert (grant.flags, grant.total, grant.body) == (6, 4096, b"r")
            here = {"region": grant.region, "generation": grant.generation}
            stream.frame(wire.WRITE, b"some", offset=100, transfer=2, total=8, **here)
            stream.frame(wire.WRITE, b"thin", offset=104, transfer=2, total=8, **here)
            done = stream.ask(wire.SIGNAL, flags=1, transfer=2, total=8, value=9, **here)
            assert (done.type, done.status, done.transfer) == (wire.DONE, wire.OK, 2)
            assert region.memoryview()[100:108] == b"somethin"
            assert region.word(0).value == 9
            data = stream.ask(wire.READ, offset=102, length=4, transfer=3, total=70, **here)
            assert (data.type, data.flags, data.offset, data.body) == (wire.DATA, 1, 70, b"meth")
            old = stream.ask(wire.FETCH_ADD, transfer=4, value=2, **here)
            assert (old.type, old.value, region.word(0).value) == (wire.DONE, 9, 11)
            lease = stream.ask(wire.ALLOCATE, b"leased", total=10, flags=6, transfer=5)
            assert node.region("leased").size_bytes == lease.total == 10
            there = {"region": lease.region, "generation": lease.generation}
            assert stream.ask(wire.FREE, transfer=6, **there).status == wire.OK
            stream.frame(wire.GOODBYE, b"enough")
            assert stream.hung_up()
            assert "enough" in peer.lost_reason
