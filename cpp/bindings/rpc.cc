// Lines of calls, as the submodule `rpc`.
#include "bindings/bindings.h"

#include "rpc/line.h"

namespace tensorwire {
namespace {

using MaybeSeconds = std::optional<double>;

constexpr double kPatienceS = 0.001;

// A frame as the tuple that Python makes of it, of a subclass of its own.
nb::object frame_of(const rpc::FrameHeader& header, std::span<const char> body, nb::handle type) {
  auto number = nb::make_tuple(header.slot, header.generation);
  auto fields =
      nb::make_tuple(header.kind, header.flags, number, nb::bytes(body.data(), body.size()));
  // As tuple.__new__(type, fields), of which Python sees nothing.
  auto args = nb::make_tuple(fields);
  auto* made =
      PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(type.ptr()), args.ptr(), nullptr);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

void check_frame_type(nb::handle type) {
  if (!PyType_Check(type.ptr()) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), &PyTuple_Type)) {
    throw Error(Code::kType, "a class of frames is a subclass of tuple");
  }
}

struct PyReader {
  rpc::LineReader reader;
  nb::object frame_type;
};

// Waits for a transfer that this process started; false if the time is over.
bool wait_done(const TransferPtr& transfer, MaybeSeconds timeout_s) {
  if (!wait_patiently([&](Deadline d) { return transfer->wait(d); }, timeout_s)) return false;
  bury_the_dead();
  if (!transfer->status().ok()) throw Error(transfer->status());
  return true;
}

// Frames of the outbox that fit into so many bytes, in one object; none if the first does not fit.
nb::object batch_of(nb::handle outbox, uint64_t most) {
  std::vector<nb::object> frames;
  uint64_t bytes = 0;
  while (nb::len(outbox) > 0) {
    nb::object first = outbox[0];
    if (!PyBytes_Check(first.ptr())) throw Error(Code::kType, "frames are bytes");
    auto size = static_cast<uint64_t>(PyBytes_GET_SIZE(first.ptr()));
    if (size > most - bytes) break;
    bytes += size;
    frames.push_back(outbox.attr("popleft")());
  }
  if (frames.empty()) return nb::object();
  if (frames.size() == 1) return frames[0];
  nb::object joined = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!joined.is_valid()) throw nb::python_error();
  char* at = PyBytes_AS_STRING(joined.ptr());
  for (const nb::object& frame : frames) {
    auto size = static_cast<size_t>(PyBytes_GET_SIZE(frame.ptr()));
    at = std::copy_n(PyBytes_AS_STRING(frame.ptr()), size, at);
  }
  return joined;
}

bool write_out(rpc::LineWriter& writer, nb::handle outbox, uint64_t most, bool patient) {
  while (nb::len(outbox) > 0) {
    // Meanwhile others leave what they have to whoever writes: fewer and larger writes.
    if (TransferPtr before = patient ? writer.under_way() : nullptr) wait_done(before, kPatienceS);
    nb::object data = batch_of(outbox, std::min(writer.room(), most));
    if (!data.is_valid()) return false;
    Local local(data, false);
    std::span<const char> bytes(PyBytes_AS_STRING(data.ptr()), local.size());
    TransferPtr placed =
        start_transfer(*writer.peer(), bytes.size(), false, [&] { return writer.write(bytes); });
    if (!placed->done()) local.keep_until_done(*placed);
  }
  return true;
}

}  // namespace

void bind_rpc(nb::module_& m) {
  nb::module_ d = m.def_submodule("rpc", "Lines of calls between two processes.");
  d.attr("RING_BYTES") = rpc::kRingStart + rpc::kRingBytes;
  d.attr("CAPACITY_BYTES") = rpc::kRingBytes;
  d.attr("PIECE_BYTES") = rpc::kPieceBytes;
  d.attr("MOST_FRAME_BYTES") = rpc::kMostFrameBytes;
  nb::exception<rpc::FrameError>(d, "FrameError");
  d.def(
      "parse",
      [](nb::bytes data, nb::handle frame_type) {
        check_frame_type(frame_type);
        nb::list frames;
        std::span<const char> left(data.c_str(), data.size());
        while (!left.empty()) {
          auto header = rpc::first_frame(left);
          auto body = left.subspan(sizeof header, header.size - sizeof header);
          frames.append(frame_of(header, body, frame_type));
          left = left.subspan(header.size);
        }
        return frames;
      },
      "data"_a, "frame_type"_a,
      nb::sig("def parse(data: bytes, frame_type: object) -> list[typing.Any]"),
      "The frames that bytes are made of, as a reader gives them.");
  nb::class_<PyReader>(d, "LineReader")
      .def(
          "__init__",
          [](PyReader* self, std::shared_ptr<Node> node, std::shared_ptr<Region> memory,
             std::shared_ptr<RemoteRegion> other, PeerPtr peer, nb::object frame_type) {
            check_frame_type(frame_type);
            rpc::LineEnd end(std::move(node), std::move(memory), std::move(other), std::move(peer));
            new (self) PyReader{rpc::LineReader(std::move(end)), std::move(frame_type)};
          },
          "node"_a, "memory"_a, "other"_a, "peer"_a, "frame_type"_a)
      .def_prop_ro(
          "awaited", [](const PyReader& self) { return self.reader.awaited(); },
          "The value of the first word from which there is something to take.")
      .def(
          "read",
          [](PyReader& self, MaybeSeconds timeout_s) {
            if (!wait_patiently([&](Deadline d) { return self.reader.wait(d); }, timeout_s)) {
              return false;
            }
            bury_the_dead();
            self.reader.take();
            return true;
          },
          "timeout_s"_a.none(), "Waits until something has arrived, and takes it.")
      .def(
          "take", [](PyReader& self) { self.reader.take(); }, "Takes what has arrived.")
      .def(
          "next",
          [](PyReader& self) -> nb::object {
            std::span<const char> body;
            auto header = self.reader.next(body);
            return header ? frame_of(*header, body, self.frame_type) : nb::none();
          },
          nb::sig("def next(self) -> typing.Any"),
          "The next frame of what was taken; None: there are no more.");
  nb::class_<rpc::LineWriter>(d, "LineWriter")
      .def(
          "__init__",
          [](rpc::LineWriter* self, std::shared_ptr<Node> node, std::shared_ptr<Region> memory,
             std::shared_ptr<RemoteRegion> other, PeerPtr peer) {
            rpc::LineEnd end(std::move(node), std::move(memory), std::move(other), std::move(peer));
            new (self) rpc::LineWriter(std::move(end));
          },
          "node"_a, "memory"_a, "other"_a, "peer"_a)
      .def_prop_ro("room", &rpc::LineWriter::room)
      .def(
          "wait_room",
          [](const rpc::LineWriter& self, uint64_t bytes, MaybeSeconds timeout_s) {
            auto wait = [&](Deadline d) { return self.wait_room(bytes, d); };
            if (!wait_patiently(wait, timeout_s)) {
              time_out("the other end did not read on", *timeout_s);
            }
          },
          "bytes"_a, "timeout_s"_a.none())
      .def(
          "write_out", &write_out, "outbox"_a, "most_bytes"_a, "patient"_a,
          nb::sig("def write_out(self, outbox: collections.deque[bytes], most_bytes: int, patient: "
                  "bool) -> bool"),
          "Writes frames as long as there is room, so many bytes at a time; False: some are left.")
      .def(
          "drain",
          [](rpc::LineWriter& self, MaybeSeconds timeout_s) {
            TransferPtr under_way = self.under_way();
            if (under_way && !wait_done(under_way, timeout_s)) {
              time_out("what was sent is not at the other end", *timeout_s);
            }
          },
          "timeout_s"_a.none());
}

}  // namespace tensorwire
