// Peers: how transfers start, prepared lists, and questions that are waited for.
#include "bindings/bindings.h"

#include <span>

namespace tensorwire {
namespace {

// The connection that is to be asked, and told whatever else there is to say about the question.
PeerPtr asked_now(const Peer& peer) { return peer.latest()->shared_from_this(); }

std::shared_ptr<RemoteRegion> answer(const PeerPtr& peer, const AskedPtr& asked, const char* what,
                                     const Seconds& timeout_s) {
  try {
    if (!wait_patiently([&](Deadline d) { return asked->transfer->wait(d); }, timeout_s)) {
      time_out(std::string(what) + ": no answer from peer '" + peer->name() + "'", *timeout_s);
    }
  } catch (...) {
    peer->abandon(asked);
    throw;
  }
  return std::const_pointer_cast<RemoteRegion>(peer->finish(asked));
}

// The region of a word, its offset there and the value.
using MaybeSignal = std::optional<std::tuple<std::shared_ptr<RemoteRegion>, uint64_t, uint64_t>>;

SignalTo signal_to(const MaybeSignal& signal) {
  if (!signal) return {};
  const auto& [region, offset, value] = *signal;
  return {region.get(), offset, value};
}

PyTransfer hand_over(TransferPtr transfer, std::span<Local> locals) {
  if (!transfer->done()) {
    for (Local& local : locals) local.keep_until_done(*transfer);
  }
  return {std::move(transfer)};
}

// Never imports asyncio: without it there is no event loop.
bool under_event_loop() {
  nb::handle asyncio = PyDict_GetItemString(PyImport_GetModuleDict(), "asyncio");
  if (!asyncio.is_valid()) return false;
  nb::object running = nb::getattr(asyncio, "_get_running_loop", nb::none());
  return !running.is_none() && !running().is_none();
}

// An event loop's thread copies no more itself than what takes about as long as a switch of tasks;
// the Node's thread does the rest. It is asked only about what would be too much.
How how_of(uint64_t bytes, const OnStream& on_stream) {
  How how(bytes > kKeepGilShmBytes && under_event_loop() ? kKeepGilShmBytes : 0);
  if (on_stream) {
    Gpu& gpu = Gpu::at(on_stream->second);
    cuda::Stream stream = stream_of(on_stream->first);
    GpuScope scope(gpu);
    GpuEvent::check_stream(gpu, stream);
    how.after = GpuEvent::record_unless_idle(gpu, stream);
    how.on_stream = true;
  }
  return how;
}

PyTransfer transfer_one(Peer& peer, nb::handle object, const RemoteRegion& remote, uint64_t offset,
                        uint64_t limit, const SignalTo& signal, const OnStream& on_stream,
                        bool is_write) {
  Local local(object, !is_write);
  if (local.size() > limit) {
    throw Error(Code::kInvalid, "the local memory has " + std::to_string(local.size()) +
                                    " bytes, the target only " + std::to_string(limit) +
                                    "; slice one of them");
  }
  Piece piece = local.piece(remote, offset);
  How how = how_of(local.size(), on_stream);
  auto transfer = start_transfer(peer, local.size(), needs_gpu({&piece, 1}, how), [&] {
    return is_write ? peer.write({&piece, 1}, signal, how) : peer.read({&piece, 1}, how);
  });
  return hand_over(std::move(transfer), {&local, 1});
}

using Objects = nb::typed<nb::sequence, nb::object>;
using Remotes = std::vector<std::shared_ptr<RemoteRegion>>;
using Offsets = std::vector<uint64_t>;

struct PieceList {
  std::vector<Local> locals;
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
};

PieceList piece_list(const Objects& objects, const Remotes& remotes, const Offsets& offsets,
                     bool writable) {
  PieceList list;
  size_t count = nb::len(objects);
  if (count != remotes.size() || count != offsets.size()) {
    throw Error(Code::kInvalid, "there are " + std::to_string(count) + " local and " +
                                    std::to_string(remotes.size()) + " remote pieces");
  }
  list.locals.reserve(count);
  for (nb::handle object : objects) {
    Local& local = list.locals.emplace_back(object, writable);
    size_t i = list.pieces.size();
    if (!remotes[i]) throw Error(Code::kType, "a remote piece is a RemoteRegion, not None");
    list.pieces.push_back(local.piece(*remotes[i], offsets[i]));
    list.bytes += local.size();
  }
  return list;
}

PyTransfer transfer_many(Peer& peer, const Objects& objects, const Remotes& remotes,
                         const Offsets& offsets, const SignalTo& signal, const OnStream& on_stream,
                         bool is_write) {
  PieceList list = piece_list(objects, remotes, offsets, !is_write);
  How how = how_of(list.bytes, on_stream);
  auto transfer = start_transfer(peer, list.bytes, needs_gpu(list.pieces, how), [&] {
    return is_write ? peer.write(list.pieces, signal, how) : peer.read(list.pieces, how);
  });
  return hand_over(std::move(transfer), list.locals);
}

}  // namespace

void bind_peer(nb::module_& m) {
  nb::class_<PyPrepared>(m, "Prepared")
      .def_prop_ro("size", [](const PyPrepared& p) { return p.prepared->size(); })
      .def_prop_ro("bytes", [](const PyPrepared& p) { return p.prepared->bytes(); })
      .def_prop_ro("runs", [](const PyPrepared& p) { return p.prepared->runs(); })
      .def(
          "start",
          [](nb::handle self, const std::optional<Indices>& indices, const MaybeSignal& to,
             const OnStream& on_stream) {
            auto& prepared = *nb::cast<PyPrepared&>(self).prepared;
            SignalTo signal = signal_to(to);
            // Indices may name a piece again and again.
            How how = how_of(indices ? UINT64_MAX : prepared.bytes(), on_stream);
            bool by_gpu = prepared.by_gpu() || how.after;
            auto transfer = start_transfer(*prepared.peer(), prepared.bytes(), by_gpu, [&] {
              return indices ? prepared.start({indices->data(), indices->size()}, signal, how)
                             : prepared.start(signal, how);
            });
            if (!transfer->done()) {
              Py_INCREF(self.ptr());
              if (!transfer->hold({self.ptr(), release_object})) Py_DECREF(self.ptr());
            }
            return PyTransfer{std::move(transfer)};
          },
          "indices"_a.none() = nb::none(), "signal"_a.none() = nb::none(),
          "on_stream"_a.none() = nb::none());

  nb::class_<FaultPlan>(m, "FaultPlan")
      .def(nb::init<uint64_t, const std::string&, double>(), "nth"_a, "action"_a, "delay_s"_a = 0.0)
      .def_prop_ro("count", &FaultPlan::count)
      .def_prop_ro("hit", &FaultPlan::hit);

  nb::class_<Peer>(m, "Peer")
      .def_prop_ro("name", &Peer::name)
      .def_prop_ro("address", &Peer::address)
      .def_prop_ro("incarnation", &Peer::incarnation)
      .def_prop_ro("pid", &Peer::pid)
      .def_prop_ro("transport", &Peer::transport)
      .def_prop_ro("reason", &Peer::reason)
      .def_prop_ro("offered", &Peer::offered)
      .def_prop_ro("encrypted", &Peer::encrypted)
      .def_prop_ro("wire", &Peer::wire)
      .def_prop_ro("lost", &Peer::lost)
      .def_prop_ro("lost_reason", [](const Peer& p) { return p.lost_status().message; })
      .def(
          "allocate",
          [](const Peer& peer, uint64_t size_bytes, const std::string& name,
             const Seconds& timeout_s) {
            PeerPtr p = asked_now(peer);
            return answer(p, p->ask_allocate(size_bytes, name, {true, true}), "allocate",
                          timeout_s);
          },
          "size_bytes"_a, "name"_a, "timeout_s"_a.none())
      .def(
          "lookup",
          [](const Peer& peer, const std::string& name, const Seconds& timeout_s, bool await) {
            PeerPtr p = asked_now(peer);
            return answer(p, p->ask_lookup(name, await), "region", timeout_s);
          },
          "name"_a, "timeout_s"_a.none(), "await_"_a = false)
      .def(
          "attach",
          [](const Peer& peer, uint32_t id, uint64_t generation, const Seconds& timeout_s,
             bool copied) {
            PeerPtr p = asked_now(peer);
            return answer(p, p->ask_attach(id, generation, copied), "region", timeout_s);
          },
          "id"_a, "generation"_a, "timeout_s"_a.none(), "copied"_a = false)
      .def(
          "free",
          [](const Peer& peer, const RemoteRegion& remote, const Seconds& timeout_s) {
            PeerPtr p = asked_now(peer);
            answer(p, p->ask_free(remote), "free", timeout_s);
          },
          "remote"_a, "timeout_s"_a.none())
      .def(
          "write",
          [](Peer& p, const Objects& locals, const Remotes& remotes, const Offsets& offsets,
             const MaybeSignal& signal, const OnStream& on_stream) {
            return transfer_many(p, locals, remotes, offsets, signal_to(signal), on_stream, true);
          },
          "locals"_a, "remotes"_a, "offsets"_a, "signal"_a.none() = nb::none(),
          "on_stream"_a.none() = nb::none())
      .def(
          "read",
          [](Peer& p, const Objects& locals, const Remotes& remotes, const Offsets& offsets,
             const OnStream& on_stream) {
            return transfer_many(p, locals, remotes, offsets, {}, on_stream, false);
          },
          "locals"_a, "remotes"_a, "offsets"_a, "on_stream"_a.none() = nb::none())
      .def(
          "write_one",
          [](Peer& p, nb::handle local, const RemoteRegion& remote, uint64_t offset, uint64_t limit,
             const MaybeSignal& signal, const OnStream& on_stream) {
            return transfer_one(p, local, remote, offset, limit, signal_to(signal), on_stream,
                                true);
          },
          "local"_a, "remote"_a, "offset"_a, "limit"_a, "signal"_a.none() = nb::none(),
          "on_stream"_a.none() = nb::none())
      .def(
          "read_one",
          [](Peer& p, nb::handle local, const RemoteRegion& remote, uint64_t offset, uint64_t limit,
             const OnStream& on_stream) {
            return transfer_one(p, local, remote, offset, limit, {}, on_stream, false);
          },
          "local"_a, "remote"_a, "offset"_a, "limit"_a, "on_stream"_a.none() = nb::none())
      .def(
          "signal",
          [](Peer& p, const RemoteRegion& word, uint64_t word_offset, uint64_t value,
             const std::vector<PyTransfer*>& after) {
            bury_the_dead();
            std::vector<TransferPtr> transfers;
            for (auto* t : after) {
              if (t == nullptr) throw Error(Code::kType, "after= takes transfers, not None");
              transfers.push_back(t->transfer);
            }
            return PyTransfer{p.signal({&word, word_offset, value}, transfers)};
          },
          "word"_a, "word_offset"_a, "value"_a, "after"_a)
      .def(
          "fetch_add",
          [](Peer& p, const RemoteRegion& remote, uint64_t offset, int64_t value) {
            bury_the_dead();
            return PyTransfer{p.fetch_add(remote, offset, static_cast<uint64_t>(value))};
          },
          "remote"_a, "offset"_a, "value"_a)
      .def(
          "prepare",
          [](const PeerPtr& p, bool write, const Objects& locals, const Remotes& remotes,
             const Offsets& offsets) {
            PieceList list = piece_list(locals, remotes, offsets, !write);
            std::vector<Prepared::Item> items;
            for (size_t i = 0; i < list.pieces.size(); ++i) {
              const Piece& piece = list.pieces[i];
              items.push_back(
                  {piece.local, remotes[i], offsets[i], piece.length, piece.gpu, piece.mapping});
            }
            return new PyPrepared(std::make_shared<Prepared>(p, write, std::move(items)),
                                  std::move(list.locals));
          },
          "write"_a, "locals"_a, "remotes"_a, "offsets"_a)
      .def("succeed", &Peer::succeed, "successor"_a, nb::call_guard<WithoutGil>())
      .def("follows", &Peer::follows, "other"_a)
      .def(
          "inject",
          [](Peer& p, std::optional<std::shared_ptr<FaultPlan>> plan) {
            p.inject(plan ? *plan : nullptr);
          },
          "plan"_a.none());
}

}  // namespace tensorwire
