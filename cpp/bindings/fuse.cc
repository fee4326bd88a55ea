// The mount, as the submodule `fuse`.
#include "bindings/bindings.h"

#include "fuse/fuse.h"

namespace tensorwire {
namespace {

using Pieces = std::vector<std::pair<const std::byte*, uint64_t>>;

std::shared_ptr<std::vector<Local>> locals_of(const std::vector<nb::object>& buffers) {
  // The last reader of a content may be a thread that has no GIL.
  std::shared_ptr<std::vector<Local>> locals(new std::vector<Local>, [](std::vector<Local>* dead) {
    nb::gil_scoped_acquire gil;
    delete dead;
  });
  for (const nb::object& each : buffers) locals->emplace_back(each, false);
  return locals;
}

Pieces pieces_of(const std::vector<Local>& locals) {
  Pieces pieces;
  for (const Local& each : locals) {
    if (each.size() > 0) pieces.emplace_back(each.data(), each.size());
  }
  return pieces;
}

}  // namespace

void bind_fuse(nb::module_& m) {
  nb::module_ d = m.def_submodule("fuse", "A mount of which this process answers the files.");
  d.attr("MOST_BYTES") = fuse::kMostBytes;
  nb::class_<fuse::Mount>(d, "Mount")
      .def(nb::init<const std::string&, uint32_t, uint32_t>(), "path"_a, "uid"_a, "gid"_a)
      .def(
          "next",
          [](fuse::Mount& self) -> nb::object {
            std::optional<fuse::Request> found;
            {
              WithoutGil release;
              found = self.next();
            }
            if (!found) return nb::none();
            return nb::make_tuple(found->operation, found->unique, found->node,
                                  nb::bytes(found->body.data(), found->body.size()));
          },
          nb::sig("def next(self) -> tuple[int, int, int, bytes] | None"),
          "Waits for a request: its operation, number, node and body. None: it is unmounted.")
      .def(
          "answer",
          [](fuse::Mount& self, uint64_t unique, int error,
             const std::vector<nb::object>& buffers) {
            auto locals = locals_of(buffers);
            Pieces pieces = pieces_of(*locals);
            WithoutGil release;
            self.answer(unique, error, pieces);
          },
          "unique"_a, "error"_a, "buffers"_a = std::vector<nb::object>{})
      .def(
          "serve",
          [](fuse::Mount& self, uint64_t handle, const std::vector<nb::object>& buffers) {
            auto locals = locals_of(buffers);
            self.serve(handle, {pieces_of(*locals), locals});
          },
          "handle"_a, "buffers"_a, "Answers the reads of an open file from memory.")
      .def("unserve", &fuse::Mount::unserve, "handle"_a)
      .def("back", &fuse::Mount::back, "file"_a,
           "Lets the kernel read an open file itself; the number that names it in an answer.")
      .def("unback", &fuse::Mount::unback, "backing"_a)
      .def_prop_ro("backs", &fuse::Mount::backs,
                   "Whether the kernel does that; None before it has said so.")
      .def("wake_poll", &fuse::Mount::wake_poll, "poll"_a)
      .def("end", &fuse::Mount::end, nb::call_guard<WithoutGil>());
}

}  // namespace tensorwire
