// Regions here and at peers, and Python's views of their memory.
#include "bindings/bindings.h"

#include "base/word.h"
#include "memory/private_mapping.h"

namespace tensorwire {
namespace {

constexpr const char* kGone =
    "the Node is closed and its memory given back; only arrays and views from before stay";

// Memory of this process alone that can be mapped twice; no Node is needed for it.
struct LocalMemory {
  explicit LocalMemory(uint64_t size_bytes) : mapping(Mapping::create(size_bytes, true, true)) {}
  const std::shared_ptr<Mapping> mapping;
};

std::shared_ptr<PrivateMapping> map_private(const std::shared_ptr<Mapping>& mapping) {
  check_not_forked(*mapping);
  if (mapping->gpu() != nullptr) {
    throw Error(Code::kUnavailable, "memory of a GPU has no private mapping");
  }
  Descriptor own(mapping->duplicate());  // the Node may be closed meanwhile, and with it the other
  return std::make_shared<PrivateMapping>(mapping, own.get());
}

// Whatever shows memory of a region refers to one of these: it keeps the memory, also when the Node
// is closed. (numpy refers to the exporter of a memoryview and not to its buffer, so that counting
// exports would not do.)
struct View {
  View(std::shared_ptr<Mapping> of, uint64_t size, bool writable)
      : mapping(std::move(of)), size(size), writable(writable) {
    if (!mapping) throw Error(Code::kUnavailable, "the region has no memory in this process");
    check_not_forked(*mapping);
    if (!mapping->add_view(true)) throw Error(Code::kClosed, kGone);
  }
  ~View() { mapping->drop_view(); }
  View(const View&) = delete;

  const std::shared_ptr<Mapping> mapping;
  const uint64_t size;
  const bool writable;
};

// What a class shows as a buffer; usable unless it belongs to the process that this was forked
// from.
struct Shown {
  bool usable;
  std::byte* data;
  size_t size;
  bool read_only = false;
  const Gpu* gpu = nullptr;
};

Shown shown(const View& v) {
  return {v.mapping->usable(), v.mapping->data(), v.size, !v.writable, v.mapping->gpu()};
}
Shown shown(const PrivateMapping& p) { return {p.usable(), p.data(), p.size()}; }
Shown shown(const LocalMemory& l) {
  return {l.mapping->usable(), l.mapping->data(), l.mapping->size()};
}

template <class T>
nb::type_slots exporter() {
  getbufferproc get = [](PyObject* object, Py_buffer* buffer, int flags) {
    Shown memory = shown(*nb::inst_ptr<T>(nb::handle(object)));
    buffer->obj = nullptr;
    if (!memory.usable) {
      set_error(Code::kClosed, kForked);
      return -1;
    }
    if (memory.gpu != nullptr) {
      set_error(Code::kUnavailable, "the region's memory is on " + memory.gpu->label() +
                                        ", where no CPU can look at it: use tensor(), or read() "
                                        "and write() by a peer");
      return -1;
    }
    return PyBuffer_FillInfo(buffer, object, memory.data, static_cast<Py_ssize_t>(memory.size),
                             memory.read_only, flags);
  };
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get)}, {0, nullptr}};
  return nb::type_slots(slots);
}

// A class of regions with what is told of every one.
template <class T>
nb::class_<T> region_class(nb::module_& m, const char* name) {
  return nb::class_<T>(m, name)
      .def_prop_ro("size_bytes", [](const T& r) { return r.size; })
      .def_prop_ro("name", [](const T& r) { return r.name; })
      .def_prop_ro("id", [](const T& r) { return r.id; })
      .def_prop_ro("generation", [](const T& r) { return r.generation; })
      .def_prop_ro("writable", [](const T& r) { return r.access.write; })
      .def_prop_ro("readable", [](const T& r) { return r.access.read; })
      .def_prop_ro("on_gpu", [](const T& r) { return r.on_gpu; })
      .def_prop_ro("gpu", [](const T& r) {
        return r.mapping && r.mapping->gpu() != nullptr ? r.mapping->gpu()->ordinal() : -1;
      });
}

}  // namespace

void bind_regions(nb::module_& m) {
  nb::class_<PrivateMapping>(m, "PrivateMapping", exporter<PrivateMapping>())
      .def_prop_ro("size_bytes", &PrivateMapping::size)
      .def_prop_ro("tracked", &PrivateMapping::tracked)
      .def_prop_ro_static("told_by_kernel",
                          [](nb::handle) { return PrivateMapping::told_by_kernel(); })
      .def(
          "written",
          [](PrivateMapping& p, bool compare) {
            check_not_forked(p.shared());
            return p.written(compare);
          },
          "compare"_a)
      .def("revert", [](PrivateMapping& p) {
        check_not_forked(p.shared());
        p.revert();
      });
  nb::class_<LocalMemory>(m, "LocalMemory", exporter<LocalMemory>())
      .def(nb::init<uint64_t>(), "size_bytes"_a)
      .def("map_private", [](const LocalMemory& l) { return map_private(l.mapping); });
  m.def(
      "memory_file",
      [](const std::string& name, uint64_t size) {
        return memory_file(name.c_str(), size).release();
      },
      "name"_a, "size_bytes"_a, "A memfd without pages that can be sealed, as a descriptor.");
  nb::class_<View>(m, "View", exporter<View>())
      .def_prop_ro("address",
                   [](const View& v) { return reinterpret_cast<uint64_t>(v.mapping->data()); })
      .def_prop_ro("writable", [](const View& v) { return v.writable; });
  region_class<Region>(m, "Region")
      .def("view", [](const Region& r) { return new View(r.mapping, r.size, true); })
      .def_prop_ro("freed", [](const Region& r) { return r.freed.load(); })
      .def_prop_ro("address", [](const Region& r) { return reinterpret_cast<uint64_t>(r.data()); })
      .def("discard",
           [](const Region& r) {
             check_not_forked(*r.mapping);
             r.mapping->discard();
           })
      .def("map_private", [](const Region& r) { return map_private(r.mapping); })
      .def("descriptor",
           [](const Region& r) {
             check_not_forked(*r.mapping);
             return r.mapping->duplicate();
           })
      .def(
          "load_word",
          [](const Region& r, uint64_t offset) {
            check_word(r, offset);
            check_not_forked(*r.mapping);
            uint64_t value = word_at(r.data() + offset).load(std::memory_order_acquire);
            if (r.mapping->gone()) throw Error(Code::kClosed, kGone);
            return value;
          },
          "offset"_a)
      .def(
          "reaches",  // for event loops: throws nothing but in a forked child
          [](const Region& r, uint64_t offset, uint64_t value) {
            check_not_forked(*r.mapping);
            bool high = !r.on_gpu && r.contains(offset, 8) &&
                        word_at(r.data() + offset).load(std::memory_order_acquire) >= value;
            return high || r.mapping->gone();
          },
          "offset"_a, "value"_a);
  region_class<RemoteRegion>(m, "RemoteRegion")
      .def("view",
           [](const RemoteRegion& r) { return new View(r.mapping, r.size, r.access.write); })
      .def_prop_ro("mapped", [](const RemoteRegion& r) { return r.mapping != nullptr; })
      .def_prop_ro("copied", [](const RemoteRegion& r) { return r.copied; })
      .def_prop_ro("incarnation", [](const RemoteRegion& r) { return r.incarnation; });
}

}  // namespace tensorwire
