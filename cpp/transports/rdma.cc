#include "transports/rdma.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/text.h"

namespace tensorwire {
namespace {

// Words that wait for an answer; more are held back here, so that a target that is not awake holds
// up a bounded number of messages: few enough that UCX's own flow control of messages (a window of
// 512 that it wants renewed at half) does not hold up writes and reads behind them.
constexpr size_t kRdmaWindow = 128;
// A peer that is lost usually says why, or ends its stream, just after its endpoint fails.
constexpr double kGraceS = 0.2;

// A call failed because the connection did, not because of its arguments.
bool is_of_link(ucx::Status status) {
  constexpr ucx::Status kOfArguments[] = {ucx::kNoMemory,       ucx::kNoDevice,
                                          ucx::kInvalidParam,   ucx::kInvalidAddress,
                                          ucx::kNotImplemented, ucx::kUnsupported};
  return std::find(std::begin(kOfArguments), std::end(kOfArguments), status) ==
         std::end(kOfArguments);
}

Header word_frame(FrameType type, const SignalTo& word) {
  return {.type = type,
          .flags = type == FrameType::kSignal ? kLast : uint8_t{0},
          .region = word.region->id,
          .generation = word.region->generation,
          .offset = word.offset,
          .value = word.value};
}

}  // namespace

// UCX holds a plain pointer to it while a request is under way; the channel's flying_ owns it.
struct RdmaWork {
  std::shared_ptr<RdmaChannel> channel;
  TransferPtr transfer;
  std::vector<RemoteRegionPtr> regions;  // one per piece
  Header word;
  bool has_word = false;
  // Under the fabric's lock.
  size_t left = 1;  // requests under way, and one while they are being posted
  ucx::Status status = ucx::kOk;
  bool refused = false;  // the failure came from this side's UCX, not from the wire
  bool over = false;
};

struct RdmaChannel::Outgoing {
  std::shared_ptr<RdmaChannel> channel;
  std::string bytes;
};

RdmaChannel::RdmaChannel(std::shared_ptr<RdmaFabric> fabric, std::shared_ptr<Progress> progress,
                         std::shared_ptr<Traffic> traffic, std::atomic<uint64_t>& next_id,
                         Events events)
    : fabric_(std::move(fabric)),
      progress_(std::move(progress)),
      traffic_(std::move(traffic)),
      next_id_(next_id),
      events_(std::move(events)),
      token_(random_id()) {}

// ---- connecting

uint64_t RdmaChannel::offer(bool accepting) {
  std::lock_guard lock(fabric_->mutex());
  fabric_->route(token_, weak_from_this());
  if (accepting) {
    expecting_ = true;
    fabric_->expect(1);
  }
  return token_;
}

void RdmaChannel::unexpect() {
  if (!expecting_) return;
  expecting_ = false;
  fabric_->expect(-1);
}

bool RdmaChannel::attach(uint64_t token, std::string_view where, bool accepting) {
  std::optional<RdmaMessage> early;
  {
    std::lock_guard lock(fabric_->mutex());
    if (token == 0 || peer_token_ != 0) return false;
    peer_token_ = token;
    if (!accepting) return dial(where);
    if (!where.empty()) return false;
    early.swap(early_);
  }
  if (early) received(*early);
  return true;
}

bool RdmaChannel::dial(std::string_view where) {
  auto next = [&where] {
    size_t space = where.find(' ');
    std::string word(where.substr(0, space));
    where = space == std::string_view::npos ? "" : where.substr(space + 1);
    return word;
  };
  std::string port = next();
  auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), port_);
  if (error != std::errc{} || end != port.data() + port.size()) return false;
  while (!where.empty()) candidates_.push_back(next());
  if (candidates_.empty()) return false;
  dial_next();
  return true;
}

void RdmaChannel::dial_next() {
  while (!candidates_.empty()) {
    std::string host = std::move(candidates_.front());
    candidates_.pop_front();
    std::string failure;
    link_ = fabric_->dial(host, port_, weak_from_this(), failure);
    tried_ += (tried_.empty() ? "" : ", ") + host;
    if (link_ != nullptr) return send({.type = FrameType::kAttach}, {}, true);
    tried_ += " (" + failure + ")";
  }
  end(Code::kUnavailable,
      "none of its RDMA addresses can be reached: " + tried_ +
          "; is there a route between the RDMA interfaces of both hosts, do their GID types and "
          "MTUs agree, and is the port up (rdma link, ibv_devinfo)?");
}

// Later, in the driving thread, unless the stream ends first and says why.
void RdmaChannel::end(Code code, const std::string& why) {
  end_status_ = {code, why};
  if (ending_) return;
  ending_ = true;
  auto lose = [weak = weak_from_this()] {
    auto self = weak.lock();
    if (!self) return;
    Status status;
    {
      std::lock_guard lock(self->fabric_->mutex());
      status = self->end_status_;
    }
    self->events_.on_lost(std::move(status));
  };
  progress_->after(ready_ ? kGraceS : 0, lose);
}

void RdmaChannel::failed(ucx::Endpoint endpoint, const std::string& why) {
  std::lock_guard lock(fabric_->mutex());
  if (down_ || link_ == nullptr || link_->endpoint != endpoint) return;
  if (ready_) return end(Code::kPeerLost, "its RDMA connection broke: " + why);
  tried_ += " (" + why + ")";
  RdmaLink* broken = link_;
  link_ = nullptr;
  fabric_->close(broken, [] { return true; });
  dial_next();
}

void RdmaChannel::received(const RdmaMessage& message) {
  if (message.header.type != FrameType::kAttach) {
    bool word = message.header.type == FrameType::kSignal ||
                message.header.type == FrameType::kFetchAdd ||
                message.header.type == FrameType::kDone;
    if (!word || !events_.on_frame(message.header, message.body)) {
      std::lock_guard lock(fabric_->mutex());
      end(Code::kPeerLost, "it sent an RDMA message that no Node sends");
    }
    return;
  }
  {
    std::lock_guard lock(fabric_->mutex());
    if (down_ || ready_) return;
    if (peer_token_ == 0) {
      early_ = message;  // it overtook the frame on the stream that has our token for answers
      return;
    }
    if (expecting_) {
      link_ = fabric_->claim(message.from, weak_from_this());
      if (link_ == nullptr) return;
      unexpect();
      send({.type = FrameType::kAttach});
    } else if (link_ == nullptr) {
      return;
    }
    ready_ = true;
    std::string path = wire();
    if (path.empty()) {
      return end(Code::kUnavailable,
                 "UCX chose no RDMA transport for it; unset UCX_TLS or let it name rc");
    }
  }
  events_.on_ready();
}

// The transport and device of the first lane that UCX tells of, as "rc_verbs/rxe0:1".
std::string RdmaChannel::wire() const {
  std::lock_guard lock(fabric_->mutex());
  if (link_ == nullptr) return "";
  char* text = nullptr;
  size_t size = 0;
  FILE* file = ::open_memstream(&text, &size);
  if (file == nullptr) return "";
  fabric_->ucx().ucp_ep_print_info(link_->endpoint, file);
  std::fclose(file);
  std::string all(text, size);
  std::free(text);
  for (const char* kind : {"rc_", "dc_", "ud_", "srd"}) {
    size_t begin = all.find(kind);
    if (begin == std::string::npos) continue;
    size_t end = all.find_first_of(" .\n", begin);
    return all.substr(begin, end - begin);
  }
  return "";
}

// ---- keys

std::shared_ptr<RemoteKey> RdmaChannel::unpack(const Header& header, std::string_view bytes) {
  std::lock_guard lock(fabric_->mutex());
  if (link_ == nullptr || down_ || bytes.empty()) return nullptr;
  std::erase_if(keys_, [](const auto& entry) { return entry.second.expired(); });
  auto found = keys_.find(header.generation);
  if (auto known = found == keys_.end() ? nullptr : found->second.lock()) return known;
  auto key = fabric_->unpack(*link_, header, bytes);
  if (!key) return nullptr;
  keys_[header.generation] = key;
  return key;
}

void RdmaChannel::revoke(uint32_t region, uint64_t generation) {
  {
    // With the lock: whoever posts has looked at `revoked` and counted itself under it.
    std::lock_guard lock(fabric_->mutex());
    auto found = keys_.find(generation);
    if (auto key = found == keys_.end() ? nullptr : found->second.lock()) {
      key->revoked = true;
      if (key->in_flight > 0) return;
    }
  }
  events_.on_idle(region, generation);
}

void RdmaChannel::let_go(RdmaWork& work) {
  std::vector<RemoteRegionPtr> idle;
  {
    std::lock_guard lock(fabric_->mutex());
    for (const auto& region : work.regions) {
      if (--region->key->in_flight == 0 && region->key->revoked) idle.push_back(region);
    }
  }
  for (const auto& region : idle) events_.on_idle(region->id, region->generation);
  work.regions.clear();
}

// ---- writes and reads

void RdmaChannel::on_done(void* request, ucx::Status status, void* argument) {
  auto* work = static_cast<RdmaWork*>(argument);
  RdmaFabric& fabric = *work->channel->fabric_;
  std::lock_guard lock(fabric.mutex());
  fabric.ucx().ucp_request_free(request);
  if (status != ucx::kOk && work->status == ucx::kOk) work->status = status;
  if (--work->left > 0) return;
  auto& flying = work->channel->flying_;
  auto found = flying.find(work);
  if (found == flying.end()) return;
  fabric.note_finished(work->channel, std::move(found->second));
  flying.erase(found);
}

TransferPtr RdmaChannel::start(std::span<const Piece> pieces, const SignalTo& signal,
                               bool is_read) {
  uint64_t total = total_bytes(pieces);
  auto work = std::make_shared<RdmaWork>();
  work->channel = shared_from_this();
  work->transfer = std::make_shared<Transfer>(progress_, total);
  TransferPtr transfer = work->transfer;
  // A word is a maximum and never below 0: raising it to 0 changes nothing.
  if (signal.region != nullptr && signal.value > 0) {
    work->word = word_frame(FrameType::kSignal, signal);
    work->has_word = true;
  }
  {
    std::lock_guard lock(fabric_->mutex());
    if (down_ || link_ == nullptr) {
      Status status = down_status_;
      transfer->complete(std::move(status));
      return transfer;
    }
    auto is_stale = [](const RemoteRegion* region) { return !region->key || region->key->revoked; };
    bool stale = signal.region != nullptr && is_stale(signal.region);
    for (const Piece& piece : pieces) stale = stale || is_stale(piece.remote);
    if (stale) {
      transfer->complete({Code::kStaleHandle, kStale});
      return transfer;
    }
    const ucx::Library& ucx = fabric_->ucx();
    ucx::RequestParams params{};
    params.mask = ucx::RequestParams::kCallback | ucx::RequestParams::kUserData;
    params.on_done = on_done;
    params.user_data = work.get();
    auto posted = [&](void* request) {
      if (request == nullptr) return;
      if (!ucx::is_error(request)) {
        ++work->left;
      } else if (work->status == ucx::kOk) {
        work->status = ucx::status_of(request);
        work->refused = true;
      }
    };
    for (const Piece& piece : pieces) {
      if (piece.length == 0) continue;
      RemoteKey& key = *piece.remote->key;
      ++key.in_flight;
      work->regions.push_back(piece.remote->shared_from_this());
      uint64_t address = key.address + piece.offset;
      posted(is_read ? ucx.ucp_get_nbx(link_->endpoint, piece.local, piece.length, address, key.key,
                                       &params)
                     : ucx.ucp_put_nbx(link_->endpoint, piece.local, piece.length, address, key.key,
                                       &params));
      if (work->status != ucx::kOk) break;
    }
    if (!is_read && total > 0) posted(ucx.ucp_ep_flush_nbx(link_->endpoint, &params));
    if (--work->left > 0) {
      flying_.emplace(work.get(), work);
      return transfer;
    }
  }
  finished(work);
  return transfer;
}

bool RdmaChannel::ended_by_link(const RdmaWork& work) const {
  return (link_ != nullptr && link_->failed) || !work.refused || is_of_link(work.status);
}

// All requests of the work are over. Without the lock: completing a transfer lets go of objects of
// Python, and a thread that has the interpreter may be waiting for the lock.
void RdmaChannel::finished(const WorkPtr& work) {
  if (work->over) return;
  work->over = true;
  let_go(*work);
  if (work->status == ucx::kOk) {
    if (work->has_word) return ask(work->word, work->transfer);
    work->transfer->complete();
    return;
  }
  std::string text = fabric_->ucx().text(work->status);
  Status status{work->status == ucx::kNoMemory ? Code::kNoMemory : Code::kUnavailable,
                "the NIC cannot reach the local memory: " + text +
                    "; is it read-only, or is the limit of locked memory too low (ulimit -l)?"};
  {
    std::lock_guard lock(fabric_->mutex());
    if (down_) {
      status = down_status_;
    } else if (ended_by_link(*work)) {
      broken_.push_back(work->transfer);
      // The endpoint's own failure says more, if it comes.
      if (!ending_) end(Code::kPeerLost, "its RDMA connection broke: " + text);
      return;
    }
  }
  work->transfer->complete(std::move(status));
}

TransferPtr RdmaChannel::write(std::span<const Piece> pieces, const SignalTo& signal, const How&) {
  auto transfer = start(pieces, signal, false);
  traffic_->writes.fetch_add(1, std::memory_order_relaxed);
  traffic_->bytes_written.fetch_add(transfer->bytes, std::memory_order_relaxed);
  if (signal.region != nullptr) traffic_->signals.fetch_add(1, std::memory_order_relaxed);
  return transfer;
}

TransferPtr RdmaChannel::read(std::span<const Piece> pieces, const How&) {
  auto transfer = start(pieces, {}, true);
  traffic_->reads.fetch_add(1, std::memory_order_relaxed);
  traffic_->bytes_read.fetch_add(transfer->bytes, std::memory_order_relaxed);
  return transfer;
}

// ---- words

TransferPtr RdmaChannel::signal(const SignalTo& signal) {
  traffic_->signals.fetch_add(1, std::memory_order_relaxed);
  auto transfer = std::make_shared<Transfer>(progress_, 0);
  ask(word_frame(FrameType::kSignal, signal), transfer);
  return transfer;
}

TransferPtr RdmaChannel::fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) {
  auto transfer = std::make_shared<Transfer>(progress_, 0);
  ask(word_frame(FrameType::kFetchAdd, {&region, offset, value}), transfer);
  return transfer;
}

void RdmaChannel::ask(const Header& header, TransferPtr transfer) {
  Status status;
  {
    std::lock_guard lock(fabric_->mutex());
    if (!down_) {
      waiting_.push_back({header, std::move(transfer)});
      issue();
      return;
    }
    status = down_status_;
  }
  transfer->complete(std::move(status));
}

void RdmaChannel::issue() {
  while (!waiting_.empty() && asked_.size() < kRdmaWindow) {
    Word word = std::move(waiting_.front());
    waiting_.pop_front();
    word.header.transfer = next_id_.fetch_add(1, std::memory_order_relaxed);
    asked_.emplace(word.header.transfer, std::move(word.transfer));
    send(word.header);
  }
}

bool RdmaChannel::done(const Header& header, std::string_view message) {
  TransferPtr transfer;
  {
    std::lock_guard lock(fabric_->mutex());
    auto found = asked_.find(header.transfer);
    if (found == asked_.end()) return false;
    transfer = std::move(found->second);
    asked_.erase(found);
    issue();
  }
  transfer->complete({static_cast<Code>(header.status), presented(message)}, header.value);
  progress_->changed();
  return true;
}

void RdmaChannel::on_sent(void* request, ucx::Status, void* argument) {
  auto* outgoing = static_cast<Outgoing*>(argument);
  RdmaFabric& fabric = *outgoing->channel->fabric_;
  std::lock_guard lock(fabric.mutex());
  fabric.ucx().ucp_request_free(request);
  delete outgoing;  // a failure is the endpoint's, which tells it by itself
}

void RdmaChannel::send(const Header& header, std::string_view body, bool first) {
  std::lock_guard lock(fabric_->mutex());
  if (down_ || link_ == nullptr) return;
  auto outgoing = std::make_unique<Outgoing>();
  outgoing->channel = shared_from_this();
  RdmaFrame frame{peer_token_, header};
  frame.header.length = body.size();
  outgoing->bytes.reserve(sizeof frame + body.size());
  outgoing->bytes.assign(reinterpret_cast<const char*>(&frame), sizeof frame);
  outgoing->bytes.append(body);
  ucx::RequestParams params{};
  params.mask =
      ucx::RequestParams::kCallback | ucx::RequestParams::kUserData | ucx::RequestParams::kFlags;
  params.flags = ucx::RequestParams::kEager | (first ? ucx::RequestParams::kReply : 0);
  params.on_done = on_sent;
  params.user_data = outgoing.get();
  void* request =
      fabric_->ucx().ucp_am_send_nbx(link_->endpoint, kRdmaFrameMessage, nullptr, 0,
                                     outgoing->bytes.data(), outgoing->bytes.size(), &params);
  if (ucx::is_error(request)) {
    end(Code::kPeerLost,
        "its RDMA connection broke: " + fabric_->ucx().text(ucx::status_of(request)));
  } else if (request != nullptr) {
    outgoing.release();
  }
}

// ---- the end

void RdmaChannel::shutdown(const Status& status) {
  std::vector<WorkPtr> works;
  std::vector<TransferPtr> transfers;
  {
    std::lock_guard lock(fabric_->mutex());
    down_ = true;
    down_status_ = status;
    unexpect();
    fabric_->unroute(token_);
    // Afterwards the NIC does not touch the memory of transfers, here or there.
    if (link_ != nullptr) fabric_->close(link_, [this] { return flying_.empty(); });
    link_ = nullptr;
    works = fabric_->take_finished(*this);
    transfers.swap(broken_);
    for (auto& [pointer, work] : flying_) {
      transfers.push_back(work->transfer);
      work->over = true;  // UCX did not let go of it in time: it stays where it is
    }
    for (auto& [id, transfer] : asked_) transfers.push_back(std::move(transfer));
    asked_.clear();
    for (Word& word : waiting_) transfers.push_back(std::move(word.transfer));
    waiting_.clear();
  }
  for (const auto& work : works) finished(work);
  for (auto& transfer : transfers) transfer->complete(status);
}

}  // namespace tensorwire
