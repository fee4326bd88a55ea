#include "transports/gpu_relay.h"

#include <map>

namespace tensorwire {

struct GpuRelay::Call : KeptCall {
  Call(std::span<const Piece> all, const SignalTo& to, bool is_read, TransferPtr transfer)
      : KeptCall(all, to), is_read(is_read), transfer(std::move(transfer)) {}

  const bool is_read;
  const TransferPtr transfer;
  std::vector<MappingView> views;
  size_t parts_left = 0;  // driving thread only, as the outcome
  GpuOutcome outcome;
};

TransferPtr GpuRelay::write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) {
  return start(pieces, signal, false, how);
}

TransferPtr GpuRelay::read(std::span<const Piece> pieces, const How& how) {
  return start(pieces, {}, true, how);
}

TransferPtr GpuRelay::start(std::span<const Piece> pieces, const SignalTo& signal, bool is_read,
                            const How& how) {
  bool here = how.after != nullptr;
  for (const Piece& piece : pieces) here = here || piece.gpu != nullptr;
  if (!here) return is_read ? inner_->read(pieces, how) : inner_->write(pieces, signal, how);
  auto transfer = std::make_shared<Transfer>(progress_, total_bytes(pieces));
  auto call = std::make_shared<Call>(pieces, signal, is_read, transfer);
  try {
    queue_->start();
    const Mapping* last = nullptr;
    for (const Piece& piece : pieces) {
      if (!piece.mapping || piece.mapping.get() == last) continue;
      last = piece.mapping.get();
      call->views.emplace_back(piece.mapping);
    }
  } catch (const Error& error) {
    transfer->complete(error.status());
    return transfer;
  }
  auto self = shared_from_this();
  if (how.after) {
    queue_->when(how.after, [self, call](const GpuOutcome& outcome) {
      if (outcome.ok()) return self->run(call);
      call->parts_left = 1;
      self->part_done(call, outcome);
    });
    return transfer;
  }
  bool taken = progress_->post([self, call] {
    self->run(call);
    return false;
  });
  if (!taken) transfer->complete({Code::kClosed, "the Node is closed"});
  return transfer;
}

// In the driving thread, like all that follows.
void GpuRelay::run(const std::shared_ptr<Call>& call) {
  std::map<Gpu*, std::vector<size_t>> staged;
  std::vector<Piece> host;
  for (size_t i = 0; i < call->pieces.size(); ++i) {
    const Piece& piece = call->pieces[i];
    if (piece.length == 0) continue;
    if (piece.gpu != nullptr) {
      staged[piece.gpu].push_back(i);
    } else {
      host.push_back(piece);
    }
  }
  call->parts_left = staged.size() + 2;
  auto self = shared_from_this();
  for (auto& [gpu, pieces] : staged) stage(call, *gpu, std::move(pieces));
  auto then = [self, call](const GpuOutcome& outcome) { self->part_done(call, outcome); };
  if (host.empty()) {
    then({});
  } else {
    pass_on(call->is_read ? inner_->read(host, {}) : inner_->write(host, {}, {}), then);
  }
  then({});
}

void GpuRelay::stage(const std::shared_ptr<Call>& call, Gpu& gpu, std::vector<size_t> pieces) {
  std::vector<GpuStaging::Item> items;
  uint64_t bytes = 0;
  for (size_t i : pieces) {
    items.push_back({&gpu, call->pieces[i].local, call->pieces[i].length});
    bytes += call->pieces[i].length;
  }
  traffic_->bytes_staged.fetch_add(bytes, std::memory_order_relaxed);
  auto self = shared_from_this();
  auto other_side = [self, call, pieces = std::move(pieces)](
                        std::span<const GpuStaging::Segment> segments, const GpuThen& then) {
    std::vector<Piece> parts;
    for (const auto& segment : segments) {
      const Piece& piece = call->pieces[pieces[segment.item]];
      parts.push_back({segment.chunk, piece.remote, piece.offset + segment.from, segment.length,
                       nullptr, nullptr});
    }
    pass_on(call->is_read ? self->inner_->read(parts, {}) : self->inner_->write(parts, {}, {}),
            then);
  };
  staging_->move(std::move(items), call->is_read, other_side,
                 [self, call](const GpuOutcome& outcome) { self->part_done(call, outcome); });
}

void GpuRelay::pass_on(const TransferPtr& inner, GpuThen then) {
  inner->then([inner = inner.get(), then = std::move(then)] { then({inner->status()}); });
}

// The word follows when the peer has answered for all bytes.
void GpuRelay::part_done(const std::shared_ptr<Call>& call, const GpuOutcome& outcome) {
  if (outcome.left || call->outcome.ok()) call->outcome = outcome;
  if (--call->parts_left > 0) return;
  if (call->outcome.left) {
    new std::shared_ptr<Call>(call);  // its memory stays for ever
    call->transfer->abandon(call->outcome.status);
    return;
  }
  call->views.clear();
  auto end = [call, progress = progress_](const GpuOutcome& last) {
    call->transfer->complete(last.status);
    progress->notify();
  };
  if (!call->outcome.ok() || call->signal.region == nullptr) return end(call->outcome);
  pass_on(inner_->signal(call->signal), end);
}

}  // namespace tensorwire
