// The asking side against a peer that lies: a real Peer reads, writes, signals, adds and asks for
// regions, and what comes back are honest answers, forged ones, and answers to nothing.
//
// The memory of every transfer is as long as it must be and is given back as soon as the transfer
// is done, as any program does: whatever the peer touches too far or too late, the sanitizer sees.
#include <list>

#include "rig.h"

namespace tensorwire::fuzz {
namespace {

class Liar {
 public:
  explicit Liar(Input input) : input_(input), is_shm_(input_.byte() & 1), line_(is_shm_) {}

  ~Liar() {
    // Before the line ends, which completes everything.
    line_.pump();
    settle();
  }

  void run() {
    if (is_shm_ && input_.byte() % 8 != 0) {
      line_.attach();
      line_.pump();
    }
    if (!is_shm_) tcp_region();
    for (int turn = 0; turn < 64 && !input_.empty() && !line_.peer().lost(); ++turn) {
      if (line_.ready || !is_shm_) {
        step();
      } else {
        answer();
      }
    }
  }

 private:
  struct InFlight {
    TransferPtr transfer;
    std::unique_ptr<std::byte[]> memory;
  };

  void step() {
    constexpr void (Liar::* kActions[])() = {&Liar::ask,    &Liar::move,   &Liar::move,
                                             &Liar::word,   &Liar::answer, &Liar::forge,
                                             &Liar::honest, &Liar::forget};
    (this->*kActions[input_.byte() % std::size(kActions)])();
    settle();
  }

  void forget() {
    if (!asked_.empty()) line_.peer().abandon(asked_.back());
  }
  // Lets go of what is done.
  void settle() {
    std::erase_if(in_flight_, [](const InFlight& each) { return each.transfer->done(); });
    std::erase_if(asked_, [&](const AskedPtr& asked) {
      if (!asked->transfer->done()) return false;
      if (asked->transfer->status().ok() && asked->region) regions_.push_back(asked->region);
      return true;
    });
    if (regions_.size() > 8) regions_.erase(regions_.begin());
  }

  // ---- asking

  // As if it had been granted before, so that an input need not get there first.
  void tcp_region() {
    auto region = std::make_shared<RemoteRegion>();
    region->id = 1;
    region->generation = 101;
    region->size = 1 << 20;
    region->incarnation = kTheirIncarnation;
    regions_.push_back(region);
  }
  void ask() {
    Peer& peer = line_.peer();
    if (peer.lost()) return;
    switch (input_.byte() % 4) {
      case 0:
        asked_.push_back(peer.ask_lookup("name"));
        break;
      case 1:
        asked_.push_back(peer.ask_allocate(input_.byte() + 1, "", {true, true}));
        break;
      case 2:
        asked_.push_back(peer.ask_attach(input_.byte(), input_.byte()));
        break;
      default:
        if (regions_.empty()) return;
        asked_.push_back(peer.ask_free(*regions_.back()));
    }
  }
  void move() {
    if (regions_.empty()) return;
    uint8_t how = input_.byte();
    auto region = regions_[how / 64 % regions_.size()];
    bool is_read = how & 1;
    if (is_read ? !region->access.read : !region->access.write) return;
    uint64_t count = 1 + how / 2 % 4,
             length = std::min<uint64_t>(input_.number<uint16_t>(), 1 << 14);
    if (how & 32) length <<= 5;  // more than the socket holds at once
    length = std::min<uint64_t>(length, region->size / count);
    auto memory = std::make_unique<std::byte[]>(count * length);
    std::vector<Piece> pieces;
    for (uint64_t i = 0; i < count; ++i) {
      pieces.push_back({memory.get() + i * length, region.get(), i * length, length});
    }
    uint64_t inline_limit = how & 16 ? 1 : 0;
    SignalTo signal;
    if (!is_read && region->size >= 8 && how & 8) signal = {region.get(), 0, how};
    auto transfer = is_read ? line_.peer().read(pieces, inline_limit)
                            : line_.peer().write(pieces, signal, inline_limit);
    in_flight_.push_back({std::move(transfer), std::move(memory)});
  }
  void word() {
    if (regions_.empty()) return;
    const auto& region = regions_.back();
    if (!region->access.write || !region->access.read || region->size < 8) return;
    uint8_t how = input_.byte();
    auto transfer = how & 1 ? line_.peer().fetch_add(*region, 0, how)
                            : line_.peer().signal({region.get(), 0, how}, {});
    in_flight_.push_back({std::move(transfer), nullptr});
  }

  // ---- answering

  std::vector<Received> requests() {
    line_.pump();
    auto all = line_.receive();
    for (const Received& request : all) {
      seen_[seen_count_++ % seen_.size()] = request.header;
    }
    return all;
  }
  void honest() {
    for (const Received& request : requests()) honest(request.header);
  }
  void honest(const Header& request) {
    switch (request.type) {
      case FrameType::kRead:
        line_.send({.type = FrameType::kData,
                    .flags = kLast,
                    .offset = request.total,
                    .length = request.length,
                    .transfer = request.transfer},
                   std::string(request.length, 'r'));
        break;
      case FrameType::kWrite:
        if (!(request.flags & kLast)) break;
        [[fallthrough]];
      case FrameType::kSignal:
      case FrameType::kFetchAdd:
      case FrameType::kFree:
        line_.send({.type = FrameType::kDone, .transfer = request.transfer}, {});
        break;
      case FrameType::kAllocate:
      case FrameType::kLookup:
        grant(request.transfer);
        break;
      default:
        break;
    }
  }
  void grant(uint64_t transfer) {
    int memory = rig().descriptor(Rig::kMemory);
    line_.send({.type = FrameType::kGrant,
                .flags = kReadable | kWritable,
                .region = 1,
                .generation = 101,
                .transfer = transfer,
                .total = 4096},
               {}, {&memory, is_shm_ ? 1u : 0u});
  }
  uint64_t number(uint64_t good) {
    switch (input_.byte() % 8) {
      case 0:
        return input_.byte();
      case 1:
        return ~uint64_t{0} - input_.byte();
      case 2:
        return input_.number<uint64_t>();
      case 3:
        return good + input_.byte();
      case 4:
        return good - input_.byte();
      default:
        return good;
    }
  }
  // One frame, made from a request that was seen, with wrong fields here and there.
  void answer() {
    requests();
    Header request = seen_[input_.byte() % seen_.size()];
    uint8_t wrong = input_.byte();
    Header header;
    header.transfer = wrong & 1 ? number(request.transfer) : request.transfer;
    bool data = request.type == FrameType::kRead;
    bool region = request.type == FrameType::kAllocate || request.type == FrameType::kLookup;
    header.type = data ? FrameType::kData : region ? FrameType::kGrant : FrameType::kDone;
    if (data && wrong & 32) header.type = FrameType::kDone, header.status = 1 + input_.byte() % 11;
    if (wrong & 2) header.type = static_cast<FrameType>(input_.byte() % (kLastFrameType + 2));
    if (wrong & 4) header.status = input_.byte() % (kLastCode + 2);
    header.flags = wrong & 8 ? input_.byte() : data ? kLast : kReadable | kWritable;
    header.offset = number(request.total);
    header.length = data ? number(request.length) : input_.byte();
    header.region = wrong & 16 ? input_.byte() : 1;
    header.generation = wrong & 16 ? input_.byte() : 101;
    header.total = number(4096);
    header.value = input_.byte();
    bool follows = header.type != FrameType::kRead && header.length <= 1 << 20;
    std::vector<int> descriptors;
    if (is_shm_ && header.type == FrameType::kGrant && !(wrong & 32)) {
      descriptors.push_back(rig().descriptor(Rig::kMemory));
    }
    if (is_shm_ && wrong & 64) {
      for (int i = input_.byte() % 6; i > 0; --i) {
        descriptors.push_back(rig().descriptor(input_.byte()));
      }
    }
    line_.send(header, std::string(follows ? header.length : 0, 'f'), descriptors);
    if (wrong & 128) line_.pump();
  }
  // A frame that has nothing to do with anything asked.
  void forge() {
    auto bytes = input_.take(sizeof(Header));
    Header header;
    std::memcpy(&header, bytes.data(), bytes.size());
    header.magic = kFrameMagic;
    header.reserved = 0;
    header.reserved2 = 0;
    header.reserved3 = 0;
    header.flags &= kAllFlags;
    header.length %= kMaxBodyBytes + 1;
    header.status %= kLastCode + 1;
    std::string rest(header.type == FrameType::kRead ? 0 : header.length, 'g');
    line_.send(header, rest);
  }

  Input input_;
  const bool is_shm_;
  std::vector<RemoteRegionPtr> regions_;
  std::vector<AskedPtr> asked_;
  std::list<InFlight> in_flight_;
  std::array<Header, 4> seen_{};
  size_t seen_count_ = 0;
  Line line_;  // ends first: it completes what is in flight
};

}  // namespace
}  // namespace tensorwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tensorwire::fuzz::Liar({data, size}).run();
  return 0;
}
