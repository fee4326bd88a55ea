// The measuring loops, as the submodule `bench_loops`.
#include "bindings/bindings.h"

#include "bench/loops.h"

namespace tensorwire {

void bind_bench_loops(nb::module_& m) {
  using namespace bench_loops;
  using Release = nb::call_guard<WithoutGil>;
  nb::module_ d = m.def_submodule("bench_loops", "Measuring loops in C++, for tensorwire bench.");
  d.def("copy_pieces", &copy_pieces, "target"_a, "source"_a, "piece_bytes"_a, "stride_bytes"_a,
        "pieces"_a, "repeats"_a, "batch"_a, Release());
  d.def("gpu_copies", &gpu_copies, "gpu"_a, "target"_a, "source"_a, "size_bytes"_a, "repeats"_a,
        "batch"_a, Release());
  d.def("mapped_address", &mapped_address, "remote"_a);
  d.def("socket_rounds", &socket_rounds, "descriptor"_a, "buffer"_a, "send_bytes"_a,
        "receive_bytes"_a, "repeats"_a, "batch"_a, Release());
  d.def("socket_serve", &socket_serve, "descriptor"_a, "buffer"_a, "receive_bytes"_a,
        "send_bytes"_a, Release());
  d.def("exchange_limit", &exchange_limit, "parameters"_a, "states"_a, "gradients"_a, "elements"_a,
        "threads"_a, "repeats"_a, Release());
  d.def("exchange_limit_constants", &exchange_limit_constants);
  d.def(
      "start_complete",
      [](const PyPrepared& p, const std::vector<int64_t>& indices, size_t repeats, size_t batch) {
        WithoutGil release;
        return start_complete(*p.prepared, indices, repeats, batch);
      },
      "prepared"_a, "indices"_a, "repeats"_a, "batch"_a);
  d.def(
      "start_pipelined",
      [](const PyPrepared& p, size_t count, size_t depth) {
        WithoutGil release;
        return start_pipelined(*p.prepared, count, depth);
      },
      "prepared"_a, "count"_a, "depth"_a);
  d.def("fetch_add_complete", &fetch_add_complete, "peer"_a, "remote"_a, "offset"_a, "repeats"_a,
        "batch"_a, Release());
  d.def("signal_ping", &signal_ping, "node"_a, "mine"_a, "my_offset"_a, "peer"_a, "theirs"_a,
        "their_offset"_a, "first"_a, "rounds"_a, "pause_s"_a, "timeout_s"_a, Release());
  d.def("signal_pong", &signal_pong, "node"_a, "mine"_a, "my_offset"_a, "peer"_a, "theirs"_a,
        "their_offset"_a, "first"_a, "rounds"_a, "timeout_s"_a, Release());
}

}  // namespace tensorwire
