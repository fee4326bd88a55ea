// A Peer without a Node around it, whose other end the fuzzer holds: what the stateful fuzzers
// share. One Rig lives for the whole run; every input gets a fresh Line.
#pragma once

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "expect.h"
#include "node/peer.h"

namespace tensorwire::fuzz {

inline constexpr uint64_t kMyIncarnation = 0x11, kTheirIncarnation = 0x22;

class Rig {
 public:
  Rig() {
    fabric.progress = std::make_shared<Progress>();
    fabric.mappings = std::make_shared<Mappings>();
    fabric.traffic = std::make_shared<Traffic>();
    fabric.gpu_queue = std::make_shared<GpuQueue>(fabric.progress);
    fabric.gpu_traffic = std::make_shared<GpuTraffic>();
    fabric.progress->page()->incarnation = kMyIncarnation;
    regions = std::make_unique<RegionTable>(fabric.progress->page(), fabric.mappings, [this] {
      if (peer) peer->answer_awaited();
    });
    fabric.regions = regions.get();
    fabric.quota_bytes = 1 << 20;
    fabric.shareable = true;
    fabric.incarnation = kMyIncarnation;
    fabric.free_region = [this](const std::shared_ptr<Region>& region) { free(region); };
    make_descriptors();
  }

  // Driving thread.
  void free(const std::shared_ptr<Region>& region) {
    regions->free(*region);
    if (peer) peer->revoke(*region);
  }

  // Descriptors of every kind that a liar may send: kinds 0 to kKinds - 1.
  enum Kind { kPage, kDoorbell, kMemory, kUnsealed, kSmall, kWrongPage, kPipe, kNull, kKinds };
  int descriptor(size_t kind) const { return descriptors_[kind % kKinds]; }

  Fabric fabric;
  std::unique_ptr<RegionTable> regions;
  PeerPtr peer;  // of the input that runs now

 private:
  // Sealed as an honest peer's.
  const Mapping& share(size_t size) {
    return *shared_.emplace_back(Mapping::create(size, true, true));
  }
  int page(uint64_t incarnation) {
    const Mapping& mapping = share(sizeof(NodePage));
    auto* made = new (mapping.data()) NodePage;
    made->incarnation = incarnation;
    made->armed = 1;  // it wants to be rung
    for (uint32_t id = 0; id < 8; ++id) made->generations[id] = 100 + id;
    return mapping.descriptor();
  }
  void make_descriptors() {
    int pipe[2], unsealed = ::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(unsealed >= 0 && ::ftruncate(unsealed, 8192) == 0);
    EXPECT(::pipe2(pipe, O_CLOEXEC | O_NONBLOCK) == 0);
    descriptors_[kPage] = page(kTheirIncarnation);
    descriptors_[kDoorbell] = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    descriptors_[kMemory] = share(8192).descriptor();
    descriptors_[kUnsealed] = unsealed;
    descriptors_[kSmall] = share(4096).descriptor();
    descriptors_[kWrongPage] = page(kTheirIncarnation + 1);
    descriptors_[kPipe] = pipe[1];
    descriptors_[kNull] = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  }

  std::vector<std::shared_ptr<Mapping>> shared_;
  int descriptors_[kKinds];
};

// The one of the whole run.
inline Rig& rig() {
  static Rig* instance = new Rig;
  return *instance;
}

// The frames that a Line has received.
struct Received {
  Header header;
  std::vector<std::byte> bytes;
};

// One connection; the fuzzer is the other side.
class Line : private FrameSink {
 public:
  explicit Line(bool is_shm) : parser_(*this) {
    int ends[2];
    if (is_shm) {
      EXPECT(::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
      theirs_ = std::make_shared<DescriptorSocket>(Descriptor(ends[0]));
      beside_ = ends[1];
    }
    EXPECT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    mine_ = ends[1];
    Hello remote;
    remote.incarnation = kTheirIncarnation;
    remote.name = "fuzz";
    rig().peer = std::make_shared<Peer>(rig().fabric, 7, remote, "nowhere:1",
                                        is_shm ? kShmBit : kTcpBit, "fuzz");
    rig().fabric.progress->run([&] {
      rig().peer->start(
          Descriptor(ends[0]), theirs_, true, [this](Peer&) { ready = true; }, [](Peer&) {});
    });
  }
  ~Line() {
    EXPECT(::shutdown(mine_, SHUT_WR) == 0);
    drive([&] { return peer().lost(); });
    ::close(mine_);
    pump();
    if (beside_ >= 0) ::close(beside_);
    EXPECT(rig().peer.use_count() == 1);
    rig().peer.reset();
    const auto& counters = rig().fabric.progress->transfers();
    EXPECT(counters.started == counters.completed);
    EXPECT(rig().regions->leased().regions == 0);
  }

  Peer& peer() { return *rig().peer; }
  bool ready = false;

  // Sends bytes, and descriptors with the first of them. Returns false once the peer has hung up.
  // Drives the peer when the socket is full.
  bool send(std::string_view bytes, std::span<const int> descriptors = {}) {
    if (!descriptors.empty()) {
      // Lost if there is no room: then a frame announces what does not come.
      pass_descriptors(beside_, bytes.substr(0, sizeof(Header)), descriptors);
    }
    while (!bytes.empty()) {
      ssize_t sent = ::send(mine_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) {
        pump();
        if (peer().lost()) return false;
        continue;
      }
      if (sent < 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  bool send(const Header& header, std::string_view rest, std::span<const int> descriptors = {}) {
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
    return send(bytes.append(rest), descriptors);
  }
  // What an honest peer on shm begins with.
  void attach() {
    int memory[] = {rig().descriptor(Rig::kPage), rig().descriptor(Rig::kDoorbell)};
    send({.type = FrameType::kAttach, .generation = kTheirIncarnation}, {}, memory);
  }

  // Lets the peer take in everything that was sent.
  void pump() {
    drive([&] {
      int unread = 0;
      return peer().lost() || (::ioctl(mine_, SIOCOUTQ, &unread) == 0 && unread == 0);
    });
    rig().fabric.progress->run([] {});
    if (!theirs_) return;
    auto end = Clock::now() + std::chrono::seconds(20);
    while (theirs_->busy() && Clock::now() < end) ::usleep(20);
    EXPECT(!theirs_->busy());
    rig().fabric.progress->run([] {});
  }

  // Takes in everything that the peer sent; what it sends must be well-formed.
  std::vector<Received> receive() {
    received_.clear();
    for (;;) {
      std::array<std::span<std::byte>, 2> spans;
      parser_.spans(spans);
      ssize_t size = ::recv(mine_, spans[0].data(), spans[0].size(), MSG_DONTWAIT);
      if (size <= 0) break;
      EXPECT(parser_.commit(static_cast<size_t>(size)));
    }
    while (beside_ >= 0 && DescriptorMessage(beside_).count() > 0) {
    }
    return std::move(received_);
  }

 private:
  template <class Condition>
  void drive(const Condition& condition) {
    EXPECT(rig().fabric.progress->wait(condition, Deadline::after(20.0)));
  }

  // FrameSink, of what the peer sends.
  bool begin_payload(const Header& header, std::byte** target) override {
    payload_.resize(header.length);
    *target = payload_.data();
    return true;
  }
  bool end_payload(const Header& header) override {
    received_.push_back({header, std::move(payload_)});
    return true;
  }
  bool control(const Header& header, std::string_view body) override {
    const auto* bytes = reinterpret_cast<const std::byte*>(body.data());
    received_.push_back({header, {bytes, bytes + body.size()}});
    return true;
  }

  int mine_ = -1, beside_ = -1;
  std::shared_ptr<DescriptorSocket> theirs_;
  FrameParser parser_;
  std::vector<std::byte> payload_;  // that has not come whole
  std::vector<Received> received_;
};

}  // namespace tensorwire::fuzz
