// The target's side against a peer that lies: a real Peer with real regions on one end of a socket,
// on the other end whatever frames the input makes: forged regions, generations, offsets, lengths,
// totals and flags, cut short, mixed with honest ones, while the owner frees regions under them.
//
// Whatever comes, only bytes that some frame could rightly reach may change, and no byte of memory
// that was not granted for reading may be answered.
#include <algorithm>

#include "rig.h"

namespace tensorwire::fuzz {
namespace {

struct Kind {
  const char* name;
  uint64_t size;
  Access access;
};
// Odd sizes, so that bytes lie behind each region in its last page. The one without a name can be
// reached by its generation only, which the input does not know.
constexpr Kind kKinds[] = {
    {"both", 5000, {true, true}}, {"read", 4097, {true, false}}, {"write", 100, {false, true}},
    {"none", 64, {false, false}}, {"word", 8, {true, true}},     {"tiny", 1, {true, true}},
    {"", 300, {true, true}},
};
constexpr size_t kCount = std::size(kKinds), kSecret = kCount - 1;
constexpr size_t kPageBytes = 4096, kMostBytes = 2 * kPageBytes;

// Readable memory holds bytes below 0x80, and so does what the input writes; all else is kHidden.
constexpr std::byte kPublic{0x33}, kHidden{0xe7};
constexpr uint64_t kLowBits = 0x7f7f7f7f7f7f7f7f;

class Target {
 public:
  Target() {
    for (size_t i = 0; i < kCount; ++i) {
      uint64_t size = kKinds[i].size;
      initial_[i].assign((size + kPageBytes - 1) / kPageBytes * kPageBytes, kHidden);
      bool readable = kKinds[i].access.read && i != kSecret;
      if (readable) std::fill_n(initial_[i].begin(), size, kPublic);
      allocate(i);
    }
  }

  // Frees the region as its owner and puts a new one in its place.
  void replace(size_t index) {
    rig().fabric.progress->run([&] { rig().free(regions_[index]); });
    check(index);
    // Kept as by its owner's last user: nothing may reach it any more.
    std::byte* data = regions_[index]->data();
    retired_.push_back({regions_[index], {data, data + initial_[index].size()}});
    allocate(index);
  }
  const Region& region(size_t index) const { return *regions_[index % kCount]; }

  // The input may change these bytes from now on.
  void allow(size_t index, uint64_t offset, uint64_t length) {
    const Kind& kind = kKinds[index];
    if (!kind.access.write || offset > kind.size || length > kind.size - offset) return;
    allowed_[index].push_back({offset, offset + length});
  }
  void allow_all() {
    for (size_t i = 0; i < kSecret; ++i) allow(i, 0, kKinds[i].size);
  }

  void check_all() {
    for (const Retired& each : retired_) {
      EXPECT(std::memcmp(each.region->data(), each.content.data(), each.content.size()) == 0);
    }
    retired_.clear();
    for (size_t i = 0; i < kCount; ++i) {
      check(i);
      fill(i);
    }
  }

 private:
  void allocate(size_t index) {
    const Kind& kind = kKinds[index];
    regions_[index] = rig().regions->allocate(kind.size, kind.name, kind.access, true, 0);
    fill(index);
  }
  void fill(size_t index) {
    std::memcpy(regions_[index]->data(), initial_[index].data(), initial_[index].size());
    allowed_[index].clear();
  }
  bool allowed(size_t index, size_t at) const {
    return std::any_of(allowed_[index].begin(), allowed_[index].end(),
                       [at](const Range& range) { return range.begin <= at && at < range.end; });
  }
  void check(size_t index) const {
    const std::byte* data = regions_[index]->data();
    const auto& initial = initial_[index];
    if (std::memcmp(data, initial.data(), initial.size()) == 0) return;
    for (size_t at = 0; at < initial.size(); ++at) {
      EXPECT(data[at] == initial[at] || allowed(index, at));
    }
  }

  std::shared_ptr<Region> regions_[kCount];
  std::vector<std::byte> initial_[kCount];  // whole pages
  struct Range {
    uint64_t begin, end;
  };
  struct Retired {
    std::shared_ptr<Region> region;
    std::vector<std::byte> content;
  };
  std::vector<Retired> retired_;
  std::vector<Range> allowed_[kCount];
};

class Liar {
 public:
  Liar(Target& target, Input input)
      : target_(target),
        input_(input),
        options_(input_.byte()),
        is_shm_(options_ & 1),
        line_(is_shm_) {}

  void run() {
    if (is_shm_ && !(options_ & 4)) line_.attach();
    // Most inputs begin with grants, without which all frames are refused for the same reason.
    for (index_ = 0; options_ & 2 && index_ < kSecret; ++index_) ask_for(kKinds[index_].name);
    for (int turn = 0; turn < 64 && !input_.empty() && !line_.peer().lost(); ++turn) step();
    catch_up();
  }

 private:
  void step() {
    constexpr void (Liar::* kActions[])() = {&Liar::raw,         &Liar::frame, &Liar::honest_write,
                                             &Liar::honest_read, &Liar::find,  &Liar::free,
                                             &Liar::free_midway, &Liar::lease, &Liar::give_back,
                                             &Liar::catch_up,    &Liar::attach};
    (this->*kActions[input_.byte() % std::size(kActions)])();
  }

  void raw() {
    anything_ = true;
    target_.allow_all();
    auto bytes = input_.take(input_.byte());
    line_.send({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, descriptors());
  }
  void honest_read() {
    Header header = addressed(FrameType::kRead);
    header.length = std::min<uint64_t>(input_.byte() * 17, size());
    header.total = input_.byte();
    line_.send(header, {});
  }
  void free() {
    catch_up();
    target_.replace(pick());
  }
  void lease() {
    Header header{.type = FrameType::kAllocate};
    header.total = input_.byte() * 7;
    header.flags = input_.byte() & (kReadable | kWritable);
    line_.send(header, {});
  }
  void attach() {
    int pair[] = {Rig::kPage, Rig::kDoorbell};
    for (int& fd : pair) fd = rig().descriptor(input_.byte() & 1 ? input_.byte() : fd);
    line_.send({.type = FrameType::kAttach, .generation = kTheirIncarnation}, {},
               is_shm_ ? std::span<const int>(pair) : std::span<const int>());
  }
  void catch_up() {
    line_.pump();
    check_answers();
  }

  size_t pick() { return index_ = input_.byte() % kCount; }
  uint64_t size() const { return kKinds[index_].size; }
  // Near what matters: the start, the end, the limits of numbers.
  uint64_t number() {
    switch (input_.byte() % 8) {
      case 0:
        return input_.byte();
      case 1:
        return size() - input_.byte() % 9;
      case 2:
        return size() + input_.byte() % 9;
      case 3:
        return ~uint64_t{0} - input_.byte();
      case 4:
        return input_.number<uint64_t>();
      case 5:
        return (uint64_t{1} << 63) + input_.byte();
      case 6:
        return kMaxChunkBytes + input_.byte() - 4;
      default:
        return 8u * input_.byte();
    }
  }
  Header addressed(FrameType type) {
    Header header;
    header.type = type;
    header.transfer = input_.byte() % 8;
    const Region& region = target_.region(pick());
    header.region = region.id;
    // Nobody tells the generation of the region without a name.
    header.generation = index_ == kSecret ? input_.byte() : region.generation;
    return header;
  }
  std::vector<int> descriptors() {
    std::vector<int> result;
    if (!is_shm_) return result;
    for (int i = input_.byte() % 6; i > 0; --i) result.push_back(rig().descriptor(input_.byte()));
    return result;
  }

  // Any frame, with a wrong field here and there.
  void frame() {
    auto type = static_cast<FrameType>(input_.byte() % (kLastFrameType + 2));
    Header header = addressed(type);
    uint8_t wrong = input_.byte();
    header.flags = input_.byte() & (wrong & 1 ? 0xff : kAllFlags);
    header.offset = number();
    header.length = number();
    header.total = number();
    header.value = input_.number<uint64_t>() & kLowBits;
    if (wrong & 2) header.generation ^= input_.byte();
    if (wrong & 4) header.region += input_.byte();
    if (wrong & 8) header.status = input_.byte();
    if (wrong & 16) header.reserved3 = input_.byte();
    if (wrong & 32) header.magic = input_.byte();
    // What could rightly happen.
    bool right = header.region == target_.region(index_).id &&
                 header.generation == target_.region(index_).generation;
    if (type == FrameType::kFetchAdd) anything_ = true;  // may carry into the high bits
    if (right && type == FrameType::kWrite) target_.allow(index_, header.offset, header.length);
    bool word = type == FrameType::kSignal || type == FrameType::kFetchAdd;
    if (right && word && header.offset % 8 == 0) target_.allow(index_, header.offset, 8);
    if (type == FrameType::kLookup) header.length = std::min<uint64_t>(header.length, 300);
    if (type == FrameType::kAllocate && header.flags & 1) header.total %= 1 << 16;

    bool follows = type != FrameType::kRead && header.length <= kMostBytes;
    std::string rest(follows ? header.length : input_.byte(), 'x');
    size_t at = 0;
    for (uint8_t byte : input_.take(std::min<size_t>(rest.size(), 16))) rest[at++] = byte & 0x7f;
    if (wrong & 64 && !rest.empty()) rest.resize(rest.size() - 1);  // cut short: all shifts
    if (wrong & 64) target_.allow_all(), anything_ = true;
    line_.send(header, rest, wrong & 128 ? descriptors() : std::vector<int>());
  }

  void honest_write() {
    Header header = addressed(FrameType::kWrite);
    uint64_t length = std::min<uint64_t>(input_.byte() * 33, size());
    header.offset = size() - length;
    header.total = length;
    target_.allow(index_, header.offset, length);
    bool signal = input_.byte() & 1;
    uint64_t first = length / 2;
    header.length = first;
    line_.send(header, std::string(first, 'a'));
    header.offset += first;
    header.length = length - first;
    header.flags = signal ? 0 : kLast;
    line_.send(header, std::string(header.length, 'b'));
    if (!signal) return;
    header.type = FrameType::kSignal;
    header.offset = 0;
    header.length = 0;
    header.flags = kLast;
    header.value = input_.byte();
    target_.allow(index_, 0, 8);
    line_.send(header, {});
  }

  // The owner frees a region while the payload for it is on its way.
  void free_midway() {
    Header header = addressed(FrameType::kWrite);
    header.length = header.total = std::min<uint64_t>(2 + input_.byte() * 16u, size());
    header.flags = kLast;
    std::string payload(header.length, 'm');
    std::string_view bytes(payload);
    size_t first = input_.byte() * 16u % (payload.size() + 1);
    target_.allow(index_, 0, header.length);
    line_.send(header, bytes.substr(0, first));
    line_.pump();
    target_.replace(index_);
    line_.send(bytes.substr(first));
  }

  // Uses what was leased, and frees it; perhaps twice.
  void give_back() {
    catch_up();
    if (leases_.empty()) return;
    Header header{.region = leases_.back().region, .generation = leases_.back().generation};
    for (int i = input_.byte() % 4; i > 0; --i) {
      constexpr FrameType kUses[] = {FrameType::kWrite, FrameType::kRead, FrameType::kFetchAdd,
                                     FrameType::kFree};
      header.type = kUses[input_.byte() % std::size(kUses)];
      header.flags = header.type == FrameType::kWrite ? kLast : 0;
      bool sized = header.type == FrameType::kWrite || header.type == FrameType::kRead;
      header.length = sized ? input_.byte() : 0;
      header.total = header.length;
      bool payload = header.type == FrameType::kWrite;
      line_.send(header, std::string(payload ? header.length : 0, 'l'));
    }
    if (input_.byte() & 1) leases_.pop_back();
  }

  void find() {
    Header header = addressed(FrameType::kLookup);
    if (input_.byte() & 1) return ask_for(kKinds[index_].name);
    line_.send(header, {});
  }
  void ask_for(std::string_view name) {
    line_.send({.type = FrameType::kLookup, .length = name.size()}, name);
  }

  void check_answers() {
    for (const Received& answer : line_.receive()) {
      const Header& header = answer.header;
      bool lease = header.type == FrameType::kGrant && header.status == 0;
      if (lease && answer.bytes.empty()) leases_.push_back(header);
      if (anything_) continue;
      if (header.type == FrameType::kData) {
        EXPECT(std::find(answer.bytes.begin(), answer.bytes.end(), kHidden) == answer.bytes.end());
      }
      if (header.type == FrameType::kDone) EXPECT((header.value & ~kLowBits) == 0);
      if (header.type == FrameType::kGrant && header.status == 0) {
        EXPECT(header.generation != target_.region(kSecret).generation);
      }
    }
  }

  Target& target_;
  Input input_;
  const uint8_t options_;
  const bool is_shm_;
  Line line_;
  size_t index_ = 0;
  std::vector<Header> leases_;  // and regions without a name
  bool anything_ = false;       // bytes were sent whose meaning is not known here
};

void run(Input input) {
  static Target* target = new Target;
  Liar(*target, input).run();
  target->check_all();
}

}  // namespace
}  // namespace tensorwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tensorwire::fuzz::run({data, size});
  return 0;
}
