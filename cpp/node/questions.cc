#include "node/questions.h"

#include "base/text.h"

namespace tensorwire {

Header Questions::to_free(const RemoteRegion& region) {
  return {.type = FrameType::kFree, .region = region.id, .generation = region.generation};
}

TransferPtr Questions::send(const AskedPtr& asked, Header header, std::string_view body) {
  auto answer = std::make_shared<Transfer>(progress_, 0);
  header.transfer = next_id_.fetch_add(1, std::memory_order_relaxed);
  header.length = body.size();
  {
    std::lock_guard lock(mutex_);
    if (!closed_.ok()) {
      answer->complete(closed_);
      return answer;
    }
    asked->answer = answer;
    open_.emplace(header.transfer, asked);
  }
  stream_->send(header, body);
  return answer;
}

void Questions::abandon(const AskedPtr& asked) {
  {
    std::lock_guard lock(mutex_);
    asked->abandoned = true;
    if (!asked->granted) return;  // answered() gives it back when it comes
  }
  if (asked->wants.lease && asked->region) give_back(*asked->region);
}

void Questions::give_back(const RemoteRegion& region) {
  send(std::make_shared<Asked>(Asked::Wants{.region = false}), to_free(region), {});
}

AskedPtr Questions::find(uint64_t transfer) const {
  std::lock_guard lock(mutex_);
  auto found = open_.find(transfer);
  return found == open_.end() ? nullptr : found->second;
}

bool Questions::answered(const Header& header, std::string_view body, Granted granted) {
  AskedPtr asked;
  {
    std::lock_guard lock(mutex_);
    auto found = open_.find(header.transfer);
    if (found == open_.end()) return false;
    asked = std::move(found->second);
    open_.erase(found);
  }
  Status status{static_cast<Code>(header.status), presented(body)};
  bool well_formed = true;
  if (header.type == FrameType::kGrant && status.ok()) {
    auto region = std::make_shared<RemoteRegion>();
    region->id = header.region;
    region->generation = header.generation;
    region->size = header.total;
    region->incarnation = incarnation_;
    region->access = access_of(header);
    region->name = body;
    region->on_gpu = (header.flags & kOnGpu) != 0;
    status.message.clear();
    bool memory = region->access.any();
    if (memory && transport_ == kShmBit) {
      auto found = known_.find(region->generation);
      auto known = found == known_.end() ? nullptr : found->second.mapping.lock();
      if (known && found->second.id == region->id && found->second.size == region->size &&
          found->second.writable == region->access.write) {
        region->mapping = known;  // one mapping, however often it is looked up
        if (asked->wants.copied) status = granted.status;
      } else {
        region->mapping = std::move(granted.mapping);
        status = granted.status;
        if (region->mapping) mappings_->add(region->mapping);
      }
      // Out of address space, descriptors or GPUs is our trouble; anything else is a lie.
      well_formed = status.ok() || status.code == Code::kNoMemory || status.code == Code::kBusy ||
                    status.code == Code::kUnavailable;
      region->copied = std::move(granted.copied);
      if (status.ok()) {
        known_[region->generation] = {region->id, region->size, region->access.write,
                                      region->mapping};
      }
      std::erase_if(known_, [](const auto& entry) { return entry.second.mapping.expired(); });
    }
    if (memory && transport_ == kRdmaBit) {
      region->key = std::move(granted.key);
      if (!region->key) well_formed = false;
    }
    if (header.total == 0 || header.generation == 0 || !presentable(body)) well_formed = false;
    bool unwanted;
    {
      std::lock_guard lock(mutex_);
      if (status.ok()) asked->region = region;
      asked->granted = true;
      unwanted = asked->abandoned;
    }
    // A lease is given back even if it cannot be mapped here, since nobody else knows of it.
    if (well_formed && asked->wants.lease && (!status.ok() || unwanted)) give_back(*region);
  }
  asked->answer->complete(std::move(status));
  progress_->changed();
  return well_formed;
}

void Questions::inherit(const Questions& earlier) {
  for (const auto& [generation, known] : earlier.known_) {
    if (!known.mapping.expired()) known_.insert_or_assign(generation, known);
  }
}

void Questions::close(const Status& status) {
  std::unordered_map<uint64_t, AskedPtr> open;
  {
    std::lock_guard lock(mutex_);
    closed_ = status;
    open.swap(open_);
  }
  for (auto& [id, asked] : open) asked->answer->complete(status);
}

}  // namespace tensorwire
