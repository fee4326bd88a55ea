// The Node.
#include "bindings/bindings.h"

#include "base/spin.h"
#include "base/text.h"

namespace tensorwire {

void bind_node(nb::module_& m) {
  m.def(
      "listening_host",
      [](int socket) { return SocketAddress::of(listen_on(socket).get()).text(); }, "socket"_a);
  nb::class_<Pace>(m, "Pace",
                   "How long waits for one thing have taken lately, for `Word.wait_until`. Any "
                   "thread may use it.")
      .def(nb::init<>());
  m.def("crowded", &crowded,
        "Whether more threads wanted to run lately than there are cores, on the whole host.");
  nb::class_<Node>(m, "Node")
      .def(nb::new_([](const std::string& name, const std::string& host, uint16_t port,
                       nb::bytes secret, const std::vector<std::string>& transports, bool try_rdma,
                       const std::string& rdma_device, uint64_t quota_bytes, uint64_t max_peers,
                       double handshake_timeout_s, double peer_timeout_s, uint64_t incarnation,
                       int listener, const std::string& tls) {
             NodeOptions options;
             options.name = name;
             options.host = host;
             options.port = port;
             auto* bytes = reinterpret_cast<const uint8_t*>(secret.c_str());
             options.secret.assign(bytes, bytes + secret.size());
             options.transports = transport_bits(transports);
             options.try_rdma = try_rdma;
             options.rdma_device = rdma_device;
             options.quota_bytes = quota_bytes;
             options.max_peers = max_peers;
             options.handshake_timeout_s = handshake_timeout_s;
             options.peer_timeout_s = peer_timeout_s;
             options.incarnation = incarnation;
             options.listener = listener;
             options.tls = tls_use(tls);
             WithoutGil release;
             return Node::create(std::move(options));
           }),
           "name"_a, "host"_a, "port"_a, "secret"_a, "transports"_a, "try_rdma"_a, "rdma_device"_a,
           "quota_bytes"_a, "max_peers"_a, "handshake_timeout_s"_a, "peer_timeout_s"_a,
           "incarnation"_a, "listener"_a, "tls"_a)
      .def_prop_ro("name", &Node::name)
      .def_prop_ro("port", &Node::port)
      .def_prop_ro("incarnation", &Node::incarnation)
      .def_prop_ro("closed", &Node::closed)
      .def_prop_ro("progress_id", [](const Node& n) { return progress_id(n.progress()); })
      .def(
          "allocate",
          [](Node& n, uint64_t size_bytes, const std::string& name, bool writable, bool readable,
             bool mappable, int gpu) {
            WithoutGil release;  // starting a GPU takes long
            return n.allocate(size_bytes, name, {readable, writable}, mappable, gpu);
          },
          "size_bytes"_a, "name"_a, "writable"_a, "readable"_a, "mappable"_a = false, "gpu"_a = -1)
      .def(
          "restore",
          [](Node& n, int descriptor, const std::string& name, uint32_t id, uint64_t generation,
             uint64_t size_bytes, bool writable, bool readable, bool on_gpu) {
            RegionFacts facts;
            facts.id = id;
            facts.generation = generation;
            facts.size = size_bytes;
            facts.access = {readable, writable};
            facts.name = name;
            facts.on_gpu = on_gpu;
            WithoutGil release;  // starting a GPU takes long
            return n.restore(descriptor, facts);
          },
          "descriptor"_a, "name"_a, "id"_a, "generation"_a, "size_bytes"_a, "writable"_a,
          "readable"_a, "on_gpu"_a = false)
      .def("lend", &Node::lend, "descriptor"_a, "size_bytes"_a, "name"_a)
      .def("listener", &Node::duplicate_listener, nb::call_guard<WithoutGil>())
      .def("stop_listening", &Node::stop_listening, nb::call_guard<WithoutGil>())
      .def("region", &Node::region, "name"_a)
      .def("free", &Node::free, "region"_a, nb::call_guard<WithoutGil>())
      .def(
          "connect",
          [](Node& n, const std::string& host, uint16_t port, const Seconds& timeout_s,
             const std::string& require) {
            WithoutGil release;
            return n.connect(host, port, Deadline::after(timeout_s), require, run_signal_handlers);
          },
          "host"_a, "port"_a, "timeout_s"_a.none(), "require"_a)
      .def(
          "accept",
          [](Node& n, const Seconds& timeout_s) {
            PeerPtr peer;
            auto accept = [&](Deadline d) { return (peer = n.accept(d)) != nullptr; };
            if (!wait_patiently(accept, timeout_s)) time_out("no peer connected", *timeout_s);
            return peer;
          },
          "timeout_s"_a.none())
      .def("peers", &Node::peers)
      .def(
          "wait_word",
          [](Node& n, std::shared_ptr<Region> region, uint64_t offset, uint64_t value,
             const Seconds& timeout_s, std::optional<PeerPtr> peer, Pace* pace) {
            n.check_open();
            auto wait = [&](Deadline d) {
              return n.wait_word(*region, offset, value, d, peer ? *peer : nullptr, pace);
            };
            if (!wait_patiently(wait, timeout_s)) {
              time_out("the word did not reach " + std::to_string(value), *timeout_s);
            }
          },
          "region"_a, "offset"_a, "value"_a, "timeout_s"_a.none(), "peer"_a.none() = nb::none(),
          "pace"_a.none() = nb::none())
      .def("raise_word", &Node::raise_word, "region"_a, "offset"_a, "value"_a)
      .def(
          "close_peer",
          [](Node& n, PeerPtr peer, std::string reason) {
            if (reason.size() > kMaxBodyBytes || !presentable(reason)) {
              throw Error(Code::kInvalid,
                          "a reason is text without control characters, of at most " +
                              std::to_string(kMaxBodyBytes) + " bytes");
            }
            if (reason.empty()) reason = kClosedByUser;
            WithoutGil release;
            if (n.closed() || peer->lost()) return;
            n.progress()->run(
                [&] { peer->latest()->lose({Code::kClosed, "you closed this peer"}, reason); });
          },
          "peer"_a, "reason"_a)
      .def("stats",
           [](const Node& n) {
             nb::typed<nb::dict, nb::str, nb::int_> result;
             auto put = [&](const char* name, uint64_t value) { result[name] = value; };
             put("bytes_written", n.traffic().bytes_written);
             put("bytes_read", n.traffic().bytes_read);
             put("bytes_received", n.traffic().bytes_received);
             put("bytes_served", n.traffic().bytes_served);
             put("writes", n.traffic().writes);
             put("reads", n.traffic().reads);
             put("signals", n.traffic().signals);
             put("gpu_bytes_direct", n.gpu_traffic().bytes_direct);
             put("gpu_bytes_staged", n.gpu_traffic().bytes_staged);
             put("transfers_started", n.transfers().started);
             put("transfers_completed", n.transfers().completed);
             put("doorbell_rings", n.progress()->counters().rings);
             put("sleeps", n.progress()->counters().sleeps);
             put("rounds", n.progress()->counters().rounds);
             put("handovers", n.progress()->counters().handovers);
             put("spin_bound_ns", static_cast<uint64_t>(spin_bound_ns()));
             return result;
           })
      .def("close", &Node::close, nb::call_guard<WithoutGil>());
}

}  // namespace tensorwire
