#include "transports/service.h"

#include <sys/resource.h>

#include <algorithm>

#include "base/text.h"
#include "base/word.h"

namespace tensorwire {
namespace {

// An honest peer has at most kWindow (tcp.cc) requests open; these leave room for control frames.
constexpr size_t kMaxOpenWrites = 1024;
constexpr size_t kMaxAnswers = 4096;
// Regions of all peers together: each costs a descriptor and a slot of the table.
constexpr size_t kMaxLeasedRegions = 1024;
constexpr size_t kMaxAwaited = 1024;
// Answers to larger transfers do not wait for company.
constexpr uint64_t kAnswerAtOnceBytes = 64 << 10;

// Streams bytes of a region as the answer to one kRead.
class Answer : public FrameSource {
 public:
  Answer(std::shared_ptr<Region> region, const Header& request,
         std::shared_ptr<std::atomic<size_t>> answering)
      : region_(std::move(region)), request_(request), answering_(std::move(answering)) {
    answering_->fetch_add(1, std::memory_order_relaxed);
  }
  ~Answer() override { answering_->fetch_sub(1, std::memory_order_relaxed); }

  bool next(Header& header, std::span<const std::byte>& payload) override {
    if (region_->freed.load(std::memory_order_relaxed)) {
      header = {.type = FrameType::kDone,
                .status = static_cast<uint16_t>(Code::kStaleHandle),
                .transfer = request_.transfer};
      return false;
    }
    uint64_t length = std::min(request_.length - sent_, kMaxChunkBytes);
    payload = {region_->data() + request_.offset + sent_, static_cast<size_t>(length)};
    bool more = sent_ + length < request_.length;
    header = {.type = FrameType::kData,
              .flags = more ? uint8_t{0} : kLast,
              .offset = request_.total + sent_,
              .length = length,
              .transfer = request_.transfer};
    sent_ += length;
    return more;
  }

 private:
  std::shared_ptr<Region> region_;
  const Header request_;
  std::shared_ptr<std::atomic<size_t>> answering_;
  uint64_t sent_ = 0;
};

// Whether so many descriptors are in use that the others had better be left to the process. The
// kernel gives the lowest free number.
bool leaves_few(int descriptor) {
  rlimit most{};
  if (descriptor < 0 || ::getrlimit(RLIMIT_NOFILE, &most) != 0) return false;
  return most.rlim_cur != RLIM_INFINITY &&
         static_cast<rlim_t>(descriptor) >= most.rlim_cur - most.rlim_cur / 4;
}

}  // namespace

Service::Service(RegionTable& regions, std::shared_ptr<Progress> progress,
                 std::shared_ptr<Traffic> traffic, uint64_t quota_bytes, bool shareable,
                 uint64_t peer, std::function<void(const std::shared_ptr<Region>&)> free_region)
    : regions_(regions),
      progress_(std::move(progress)),
      traffic_(std::move(traffic)),
      quota_bytes_(quota_bytes),
      shareable_(shareable),
      peer_(peer),
      free_region_(std::move(free_region)),
      answering_(std::make_shared<std::atomic<size_t>>(0)) {}

void Service::attach(std::shared_ptr<Stream> stream, const std::shared_ptr<GpuQueue>& gpu_queue) {
  stream_ = std::move(stream);
  gpu_ = std::make_shared<GpuService>(
      progress_, gpu_queue, stream_,
      [this](const Header& request, const Status& status) { done(request, status); });
}

Region* Service::granted(const Header& header, uint64_t offset, uint64_t length, bool write,
                         Status& status) {
  auto found = grants_.find(header.region);
  if (found == grants_.end() || found->second->generation != header.generation ||
      found->second->freed.load(std::memory_order_relaxed)) {
    status = {Code::kStaleHandle, kStale};
    return nullptr;
  }
  Region& region = *found->second;
  if (!region.contains(offset, length)) {
    status = {Code::kInvalid,
              "out of range: the region has " + std::to_string(region.size) + " bytes"};
    return nullptr;
  }
  if (write ? !region.access.write : !region.access.read) {
    status = {Code::kPermission, write ? "the region was granted read-only"
                                       : "the region was granted without read access"};
    return nullptr;
  }
  return &region;
}

Region* Service::granted_word(const Header& header, Status& status) {
  Region* region = granted(header, header.offset, sizeof(uint64_t), true, status);
  if (region != nullptr && region->on_gpu) {
    status = {Code::kInvalid, "no word can be in memory of a GPU"};
    return nullptr;
  }
  if (region != nullptr && header.offset % sizeof(uint64_t) != 0) {
    status = {Code::kInvalid, "a word's offset must be a multiple of 8"};
    return nullptr;
  }
  return region;
}

void Service::done(const Header& header, const Status& status, bool now, uint64_t value) {
  auto text = std::string_view(status.message).substr(0, kMaxBodyBytes);
  Header answer{.type = FrameType::kDone,
                .status = static_cast<uint16_t>(status.code),
                .length = text.size(),
                .transfer = header.transfer,
                .value = value};
  bool word = header.type == FrameType::kSignal || header.type == FrameType::kFetchAdd;
  if (answer_ && word) return answer_(answer, text);
  stream_->send(answer, text, now);
}

// The peer asks for more than an honest one may without taking the answers.
bool Service::overrun() const {
  size_t waiting = waiting_ ? waiting_() : 0;
  return waiting + stream_->queued() + answering_->load(std::memory_order_relaxed) > kMaxAnswers;
}

bool Service::begin_write(const Header& header, std::byte** target) {
  if (overrun()) return false;
  current_ = {};
  Region* region = granted(header, header.offset, header.length, true, current_);
  if (region != nullptr && region->on_gpu) {
    *target = gpu_->begin_write(grants_[header.region], header, current_);
  } else {
    *target = region ? region->data() + header.offset : nullptr;
  }
  return true;
}

bool Service::end_write(const Header& header) {
  traffic_->bytes_received.fetch_add(header.length, std::memory_order_relaxed);
  GpuEventPtr landing = gpu_->end_write(current_);
  auto found = open_.find(header.transfer);
  if (found == open_.end() && (header.flags & kLast)) {
    OpenWrite whole{header.length, std::move(current_), std::move(landing)};
    return finish(header, whole);
  }
  if (found == open_.end()) {
    if (open_.size() >= kMaxOpenWrites) return false;
    found = open_.try_emplace(header.transfer).first;
  }
  OpenWrite& write = found->second;
  write.placed += header.length;
  if (write.status.ok() && !current_.ok()) write.status = std::move(current_);
  if (landing) write.landing = std::move(landing);
  if (!(header.flags & kLast)) return true;
  OpenWrite whole = std::move(write);
  open_.erase(found);
  return finish(header, whole);
}

bool Service::finish(const Header& header, OpenWrite& write) {
  if (write.placed != header.total) return false;
  when_landed(std::move(write), [this, header](const Status& status) {
    done(header, status, header.total >= kAnswerAtOnceBytes);
  });
  return true;
}

// The copies of a connection to memory of a GPU are in order: the last one speaks for all.
void Service::when_landed(OpenWrite write, std::function<void(const Status&)> then) {
  if (!write.landing) return then(write.status);
  gpu_->when(write.landing,
             [status = std::move(write.status), then = std::move(then)](const GpuOutcome& outcome) {
               then(status.ok() ? outcome.status : status);
             });
}

bool Service::signal(const Header& header) {
  OpenWrite write;
  if (auto found = open_.find(header.transfer); found != open_.end()) {
    write = std::move(found->second);
    open_.erase(found);
  }
  if (write.placed != header.total || !(header.flags & kLast)) return false;
  when_landed(std::move(write), [this, header](const Status& status) { raise(header, status); });
  return true;
}

void Service::raise(const Header& header, Status status) {
  Status refusal;
  Region* word = granted_word(header, refusal);
  if (status.ok()) status = std::move(refusal);
  if (word != nullptr && status.ok()) {
    // All bytes of the transfer were placed before: the word follows them.
    store_max(word->data() + header.offset, header.value);
    progress_->changed();
  }
  done(header, status, header.total >= kAnswerAtOnceBytes);
}

bool Service::request(const Header& header, std::string_view body) {
  if (overrun()) return false;
  Status status;
  switch (header.type) {
    case FrameType::kRead: {
      Region* region = granted(header, header.offset, header.length, false, status);
      if (region == nullptr || header.length == 0) {
        if (region != nullptr) status = {Code::kInvalid, "an empty read"};
        done(header, status);
        return true;
      }
      traffic_->bytes_served.fetch_add(header.length, std::memory_order_relaxed);
      if (region->on_gpu) {
        answering_->fetch_add(1, std::memory_order_relaxed);
        std::shared_ptr<void> counted(nullptr, [count = answering_](void*) {
          count->fetch_sub(1, std::memory_order_relaxed);
        });
        gpu_->read(grants_[header.region], header, std::move(counted));
        return true;
      }
      stream_->send(std::make_shared<Answer>(grants_[header.region], header, answering_));
      return true;
    }
    case FrameType::kSignal:
      return signal(header);
    case FrameType::kFetchAdd: {
      Region* region = granted_word(header, status);
      if (region != nullptr && !region->access.read) {
        status = {Code::kPermission, "the region was granted without read access"};
        region = nullptr;
      }
      uint64_t before = 0;
      if (region != nullptr) {
        before = word_at(region->data() + header.offset).fetch_add(header.value);
        progress_->changed();
      }
      done(header, status, false, before);
      return true;
    }
    case FrameType::kAllocate:
    case FrameType::kLookup:
      try {
        header.type == FrameType::kAllocate ? allocate(header, body) : lookup(header, body);
      } catch (const Error& error) {
        refuse(header, error.status());
      }
      return true;
    case FrameType::kFree:
      return free(header);
    default:
      return false;
  }
}

void Service::grant(const Header& header, const std::shared_ptr<Region>& region) {
  if (expose_ && region->access.any()) expose_(header, region);
  grants_[region->id] = region;
  Header answer{
      .type = FrameType::kGrant,
      .flags = static_cast<uint8_t>(flags_of(region->access) | (region->on_gpu ? kOnGpu : 0)),
      .region = region->id,
      .generation = region->generation,
      .length = region->name.size(),
      .transfer = header.transfer,
      .total = region->size};
  // Whoever gets the memory can read it, so it is not handed out with a grant of nothing.
  if (pass_ && region->access.any()) return pass_(answer, region);
  stream_->send(answer, region->name, false);
}

void Service::refuse(const Header& header, const Status& status) {
  auto text = std::string_view(status.message).substr(0, kMaxBodyBytes);
  stream_->send({.type = FrameType::kGrant,
                 .status = static_cast<uint16_t>(status.code),
                 .length = text.size(),
                 .transfer = header.transfer},
                text, false);
}

void Service::allocate(const Header& header, std::string_view name) {
  uint64_t bytes = regions_.leased().bytes;
  if (header.total > quota_bytes_ || bytes > quota_bytes_ - header.total) {
    throw Error(Code::kBusy, "the Node's quota for peers is " + std::to_string(quota_bytes_) +
                                 " bytes, of which " + std::to_string(bytes) +
                                 " are in use; free regions or raise quota_bytes there");
  }
  if (regions_.leased().regions >= kMaxLeasedRegions) {
    throw Error(Code::kBusy, "peers already have " + std::to_string(kMaxLeasedRegions) +
                                 " regions on this Node; put several tensors into one");
  }
  auto region =
      regions_.allocate(header.total, std::string(name), access_of(header), shareable_, peer_);
  try {
    if (leaves_few(region->mapping->descriptor())) {
      throw Error(Code::kBusy,
                  "the process there has three quarters of its descriptors in use, and leaves the "
                  "others to itself (each region takes one; see ulimit -n there)");
    }
    grant(header, region);
  } catch (const Error&) {
    free_region_(region);
    throw;
  }
}

void Service::lookup(const Header& header, std::string_view name) {
  if (!presentable(name)) {  // the answer repeats it
    throw Error(Code::kInvalid, "a region's name is text without control characters");
  }
  if (grant_found(header, name)) return;
  if (name.empty()) throw Error(Code::kStaleHandle, kStale);
  if (!(header.flags & kAwait)) {
    throw Error(Code::kNotFound, "no region is named '" + std::string(name) + "' there");
  }
  if (awaited_.size() == kMaxAwaited) {
    throw Error(Code::kBusy, "this peer already waits for " + std::to_string(kMaxAwaited) +
                                 " regions with other names");
  }
  regions_.await_names(1);
  awaited_.emplace_back(header, name);
  answer_awaited();  // it may have been allocated just before we said that it is awaited
}

bool Service::grant_found(const Header& header, std::string_view name) {
  auto region = name.empty() ? regions_.find(header.region, header.generation)
                             : regions_.find(std::string(name));
  if (region) grant(header, region);
  return region != nullptr;
}

void Service::answer_awaited() {
  for (auto& [header, name] : std::exchange(awaited_, {})) {
    bool answered = !stream_;  // a grant that cannot be sent closes the service
    try {
      answered = answered || grant_found(header, name);
    } catch (const Error& error) {
      refuse(header, error.status());
      answered = true;
    }
    if (answered) {
      regions_.await_names(-1);
    } else {
      awaited_.emplace_back(header, std::move(name));
    }
  }
}

bool Service::free(const Header& header) {
  Status status;
  auto found = grants_.find(header.region);
  if (found == grants_.end() || found->second->generation != header.generation ||
      found->second->freed) {
    status = {Code::kStaleHandle, "the region was freed already"};
  } else if (found->second->lessee != peer_) {
    status = {Code::kPermission, "only whoever allocated a region may free it"};
  } else {
    free_region_(std::shared_ptr<Region>(found->second));
  }
  done(header, status);
  return true;
}

void Service::revoke(const Region& region) {
  auto found = grants_.find(region.id);
  if (found == grants_.end() || found->second.get() != &region) return;
  bool receiving = region.on_gpu
                       ? gpu_->revoke(region)
                       : stream_->discard_payload_in(region.data(), region.data() + region.size);
  if (receiving) {
    current_ = {Code::kStaleHandle, "the region was freed during the transfer"};
  }
  grants_.erase(found);
}

void Service::close() {
  for (const auto& region : regions_.leased_to(peer_)) free_region_(region);
  grants_.clear();
  open_.clear();
  regions_.await_names(-static_cast<int>(awaited_.size()));
  awaited_.clear();
  if (gpu_) gpu_->close();
  stream_.reset();
}

}  // namespace tensorwire
