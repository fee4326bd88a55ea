// The local memory of transfers: buffers of Python objects, and what keeps them until the end.
#include "bindings/bindings.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include "memory/mapping.h"
#include "memory/private_mapping.h"
#include "memory/table_rows.h"

namespace tensorwire {
namespace {

// Objects whose transfers ended on a thread without the GIL; dropped by the next call that has it.
struct Graveyard {
  std::mutex mutex;
  std::vector<Keepalive> dead;
  std::atomic<bool> occupied{false};
  std::atomic<bool> asked{false};
};

// Outlives the interpreter. A forked child has one of its own: the lock of its copy of the parent's
// may be held for ever, and what that one buries is never dropped there.
Graveyard& graveyard() { return fork::of_this_process<Graveyard>(); }

void inter(Keepalive dead) {
  Graveyard& g = graveyard();
  {
    std::lock_guard lock(g.mutex);
    g.dead.push_back(dead);
    g.occupied = true;
  }
  // Nobody may call for a long time: let the main thread do it when it gets round to it.
  if (!g.asked.exchange(true)) {
    auto bury = [](void*) {
      graveyard().asked = false;
      bury_the_dead();
      return 0;
    };
    if (Py_AddPendingCall(bury, nullptr) != 0) g.asked = false;
  }
}

void release_view(void* view) {
  inter({view, [](void* dead) {
           PyBuffer_Release(static_cast<Py_buffer*>(dead));
           delete static_cast<Py_buffer*>(dead);
         }});
}

// An 'O' in the format (PEP 3118) outside the names of fields, which stand between colons.
bool holds_objects(const char* format) {
  bool in_name = false;
  for (; format != nullptr && *format != 0; ++format) {
    if (*format == ':') in_name = !in_name;
    if (*format == 'O' && !in_name) return true;
  }
  return false;
}

// numpy exports no dtype that struct has no letter for (datetime64, also in a structure), though
// its items are bytes like others: the same array as items without a meaning. Else nothing.
nb::object as_plain_items(nb::handle object) {
  nb::object dtype = nb::getattr(object, "dtype", nb::none());
  nb::object has_object = nb::getattr(dtype, "hasobject", nb::none());
  if (!has_object.is(nb::bool_(false))) return {};
  nb::object items = nb::str("V{}").attr("format")(dtype.attr("itemsize"));
  return object.attr("view")(items);
}

// So many are copied without letting go of the GIL.
constexpr size_t kQuickBytes = 1 << 18;

Error read_only() {
  return Error(Code::kInvalid, "the destination is read-only; pass a writable array");
}

void check_on_host(const Local& local) {
  if (local.gpu() == nullptr) return;
  throw Error(Code::kInvalid, "the memory is on " + local.gpu()->label() +
                                  "; only memory of the host can be looked at here");
}

[[noreturn]] void explain(nb::handle object, bool writable) {
  if (!PyObject_CheckBuffer(object.ptr())) {
    throw Error(Code::kType, std::string("expected an array, tensor, bytes-like object or Region, "
                                         "not ") +
                                 Py_TYPE(object.ptr())->tp_name);
  }
  Py_buffer any;
  if (PyObject_GetBuffer(object.ptr(), &any, PyBUF_STRIDED_RO | PyBUF_FORMAT) == 0) {
    bool contiguous = PyBuffer_IsContiguous(&any, 'C') != 0, read_only_view = any.readonly != 0;
    PyBuffer_Release(&any);
    if (!contiguous) {
      throw Error(Code::kInvalid,
                  "the array is not contiguous in memory; pass numpy.ascontiguousarray(array) or "
                  "tensor.contiguous()");
    }
    if (writable && read_only_view) throw read_only();
  }
  PyErr_Clear();
  throw Error(Code::kType, std::string("cannot get at the memory of a ") +
                               Py_TYPE(object.ptr())->tp_name +
                               "; if it is an array, use a numeric dtype");
}

// Bytes that nobody has yet. Where there are many, in large pages: fresh memory costs a fault for
// each page, which takes several times as long as filling it.
nb::object unfilled_bytes(size_t size) {
  nb::object made = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!made.is_valid()) throw nb::python_error();
  ask_for_large_pages(PyBytes_AS_STRING(made.ptr()), size);
  return made;
}

}  // namespace

void bury_the_dead() {
  Graveyard& g = graveyard();
  if (!g.occupied.load(std::memory_order_acquire)) return;
  std::vector<Keepalive> dead;
  {
    std::lock_guard lock(g.mutex);
    dead.swap(g.dead);
    g.occupied = false;
  }
  for (const Keepalive& each : dead) each.release(each.object);
}

void release_object(void* object) {
  inter({object, [](void* dead) { Py_DECREF(static_cast<PyObject*>(dead)); }});
}

Local::Local(nb::handle object, bool writable) {
  Buffer* buffer = nullptr;  // which does not have the buffer protocol
  if (!PyObject_CheckBuffer(object.ptr()) && nb::try_cast(object, buffer, false) &&
      buffer != nullptr) {
    if (writable && !buffer->writable) throw read_only();
    data_ = reinterpret_cast<std::byte*>(buffer->address);
    size_ = buffer->size;
    gpu_ = buffer->gpu;
    mapping_ = buffer->mapping;
    owner_ = nb::borrow(object);
    return;
  }
  int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
    // An object's own __buffer__ may be Python code: what interrupts it is no matter of buffers.
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
    PyErr_Clear();
    owner_ = as_plain_items(object);
    if (!owner_.is_valid() || PyObject_GetBuffer(owner_.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      explain(owner_.is_valid() ? owner_ : object, writable);
    }
  }
  if (holds_objects(view_.format)) {
    PyBuffer_Release(&view_);
    throw Error(Code::kType, "arrays of Python objects cannot be transferred; use a numeric dtype");
  }
  has_view_ = true;
  data_ = static_cast<std::byte*>(view_.buf);
  size_ = static_cast<uint64_t>(view_.len);
}

void Local::keep_until_done(Transfer& transfer) {
  if (has_view_) {
    auto* view = new Py_buffer(view_);
    if (transfer.hold({view, release_view})) {
      has_view_ = false;
    } else {
      delete view;
    }
  } else if (owner_.is_valid()) {
    Py_INCREF(owner_.ptr());
    if (!transfer.hold({owner_.ptr(), release_object})) Py_DECREF(owner_.ptr());
  }
}

void bind_buffers(nb::module_& m) {
  nb::class_<Buffer>(m, "Buffer")
      .def(
          "__init__",
          [](Buffer* made, uint64_t address, uint64_t size_bytes, bool writable, nb::object owner,
             int gpu, std::optional<std::shared_ptr<Region>> region, bool verify) {
            Gpu* of = gpu < 0 ? nullptr : &Gpu::at(gpu);
            auto* memory = reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
            if (verify && of != nullptr && size_bytes > 0 &&
                of->kind_of(memory, size_bytes) != Gpu::Kind::kGpu) {
              throw Error(Code::kInvalid,
                          "what was given as memory of " + of->label() + " is none there");
            }
            new (made) Buffer{address,          size_bytes, writable,
                              std::move(owner), of,         region ? (*region)->mapping : nullptr};
          },
          "address"_a, "size_bytes"_a, "writable"_a, "owner"_a, "gpu"_a = -1,
          "region"_a.none() = nb::none(), "verify"_a = false)
      .def_ro("size_bytes", &Buffer::size)
      .def_prop_ro("gpu", [](const Buffer& b) { return b.gpu == nullptr ? -1 : b.gpu->ordinal(); });
  m.def(
      "gpus",
      [] {
        int version = cuda::library().version;
        std::string text =
            std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
        return std::make_pair(text, Gpu::names());
      },
      "The newest CUDA that NVIDIA's driver knows, and the names of the GPUs that are seen here.");
  m.def(
      "import_gpu_memory",
      [](int descriptor, uint64_t size_bytes, bool writable) {
        GpuMemory::import(descriptor, size_bytes, writable);
      },
      "descriptor"_a, "size_bytes"_a, "writable"_a,
      "Maps what a peer could pass as memory of a GPU, and lets go of it: for tests.");
  m.def(
      "gpu_of",
      [](uint64_t address) {
        auto* memory = reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
        return Gpu::holding(memory).ordinal();
      },
      "address"_a, "The number of the GPU whose memory is at an address.");
  m.def(
      "gpu_dlpack",
      [](nb::ndarray<nb::ro, nb::c_contig, nb::device::cuda> array) {
        nb::object owner = nb::cast(array);
        return nb::make_tuple(reinterpret_cast<uint64_t>(array.data()),
                              static_cast<uint64_t>(array.nbytes()), array.device_id(), owner);
      },
      "array"_a, nb::sig("def gpu_dlpack(array: object) -> tuple[int, int, int, object]"),
      "Address, bytes, GPU and owner of the memory of a contiguous DLPack object.");
  m.def(
      "unfilled_bytes",
      [](size_t size) {
        nb::object made = unfilled_bytes(size);
        auto address = reinterpret_cast<uint64_t>(PyBytes_AS_STRING(made.ptr()));
        return nb::make_tuple(made, address);
      },
      "size"_a, nb::sig("def unfilled_bytes(size: int) -> tuple[bytes, int]"),
      "Bytes with any content, and where it is: to be filled before anybody else has them.");
  m.def(
      "copied_bytes",
      [](nb::handle local) {
        Local source(local, false);
        check_on_host(source);
        nb::object made = unfilled_bytes(source.size());
        char* target = PyBytes_AS_STRING(made.ptr());
        if (source.size() < kQuickBytes) {
          std::memcpy(target, source.data(), source.size());
        } else {
          WithoutGil release;
          std::memcpy(target, source.data(), source.size());
        }
        return made;
      },
      "local"_a, nb::sig("def copied_bytes(local: object) -> bytes"), "As bytes(local).");
  m.def(
      "same_bytes",
      [](nb::handle one, nb::handle other) {
        Local first(one, false), second(other, false);
        check_on_host(first);
        check_on_host(second);
        WithoutGil release;
        return first.size() == second.size() &&
               std::memcmp(first.data(), second.data(), first.size()) == 0;
      },
      "one"_a, "other"_a);
  auto rows_def = [&](const char* name, bool takes, const char* about) {
    m.def(
        name,
        [takes](nb::handle table, uint64_t row_bytes, const Indices& rows, nb::handle packed) {
          Local whole(table, !takes), values(packed, takes);
          check_on_host(whole);
          check_on_host(values);
          std::span<const int64_t> listed(rows.data(), rows.size());
          WithoutGil release;
          TableBytes bytes{whole.data(), whole.size(), row_bytes};
          if (takes) {
            take_rows(bytes, listed, {values.data(), values.size()});
          } else {
            put_rows(bytes, listed, {values.data(), values.size()});
          }
        },
        "table"_a, "row_bytes"_a, "rows"_a.noconvert(), "packed"_a, about);
  };
  rows_def(
      "take_rows", true,
      "Copies rows of a table out of it, to `packed`, one behind the other.\n\n"
      "`table` has rows of `row_bytes` each and `packed` has room for those that are taken; "
      "both are contiguous memory of the host, with the buffer protocol. `rows` has their "
      "numbers, an array of int64 with one dimension, which must not change meanwhile. Much is "
      "copied by several threads; the GIL is not held. Any thread may call it.\n\n"
      "Raises TypeError if `rows` is another array, ValueError if a number is no row's or "
      "something has no room; nothing was copied then.");
  rows_def("put_rows", false,
           "Copies `packed` into rows of a table; each number may be there once. See `take_rows`.");
  m.def(
      "checksum",
      [](nb::handle local) {
        Local bytes(local, false);
        check_on_host(bytes);
        WithoutGil release;
        return checksum({bytes.data(), bytes.size()});
      },
      "local"_a);
}

}  // namespace tensorwire
