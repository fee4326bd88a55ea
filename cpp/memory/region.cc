#include "memory/region.h"

#include <sys/random.h>
#include <unistd.h>

#include "base/control_groups.h"
#include "base/error.h"
#include "base/text.h"

namespace tensorwire {

uint64_t random_id() {
  uint64_t value = 0;
  while (value == 0) {
    if (::getrandom(&value, sizeof value, 0) != sizeof value) value = 0;
  }
  return value;
}

void check_region_name(const std::string& name) {
  if (name.size() > kMaxNameBytes) {
    throw Error(Code::kInvalid, "a region's name has at most " + std::to_string(kMaxNameBytes) +
                                    " bytes in UTF-8, and this one has " +
                                    std::to_string(name.size()));
  }
  if (!presentable(name)) {
    throw Error(Code::kInvalid, "a region's name is text without control characters");
  }
}

void check_word(const RegionFacts& region, uint64_t offset) {
  if (region.on_gpu) {
    throw Error(Code::kInvalid, "the region '" + region.name +
                                    "' is memory of a GPU, where no word can be: put the word into "
                                    "a region of the host's memory");
  }
  if (offset % 8 == 0 && region.contains(offset, 8)) return;
  throw Error(Code::kInvalid, "a word is 8 bytes at a multiple of 8 inside the region; offset " +
                                  std::to_string(offset) + " of " + std::to_string(region.size) +
                                  " bytes is not");
}

namespace {

// Below that no limit is looked up: nobody could work with so little.
constexpr uint64_t kSmallBytes = 1 << 20;

void check_fits(uint64_t size) {
  if (size <= kSmallBytes) return;
  MemoryLimit most = memory_limit();
  if (size <= most.bytes) return;
  throw Error(Code::kNoMemory, "a region of " + std::to_string(size) + " bytes is larger than " +
                                   most.of + " (" + std::to_string(most.bytes) + " bytes)");
}

}  // namespace

Region::~Region() {
  if (!leased) return;
  leased->bytes -= size;
  --leased->regions;
}

std::shared_ptr<Region> RegionTable::allocate(uint64_t size, const std::string& name, Access access,
                                              bool shareable, uint64_t lessee, int gpu) {
  if (size == 0) throw Error(Code::kInvalid, "a region has at least 1 byte");
  if (gpu < 0) check_fits(size);
  check_region_name(name);
  {
    std::lock_guard lock(mutex_);
    check_name(name);
  }
  auto region = std::make_shared<Region>();
  region->size = size;
  region->access = access;
  region->name = name;
  region->lessee = lessee;
  region->generation = random_id();
  region->on_gpu = gpu >= 0;
  // Who may read and not write gets a descriptor that is good for no more; the driver of a GPU has
  // none of that kind.
  region->mapping = region->on_gpu ? Mapping::create_on(gpu, size, shareable)
                                   : Mapping::create(size, shareable, access.write || !access.read);
  return enter(std::move(region), false);
}

std::shared_ptr<Region> RegionTable::restore(int memory, const RegionFacts& facts) {
  if (facts.size == 0) throw Error(Code::kInvalid, "a region has at least 1 byte");
  if (facts.generation == 0) throw Error(Code::kInvalid, "a region's generation is not 0");
  if (facts.id >= kMaxRegions) {
    throw Error(Code::kInvalid, "a region's id is 0 to " + std::to_string(kMaxRegions - 1) +
                                    ", not " + std::to_string(facts.id));
  }
  // Its descriptor would be good for writing, and cannot be sealed any more.
  if (facts.access.read && !facts.access.write) {
    throw Error(Code::kInvalid,
                "a region with access 'r' cannot be restored: its memory is sealed against "
                "writing, also by the process that goes on with it");
  }
  check_region_name(facts.name);
  auto region = std::make_shared<Region>();
  static_cast<RegionFacts&>(*region) = facts;
  region->mapping = facts.on_gpu ? Mapping::restore_on_gpu(memory, facts.size)
                                 : Mapping::restore(memory, facts.size);
  return enter(std::move(region), true);
}

std::shared_ptr<Region> RegionTable::lend(int memory, uint64_t size, const std::string& name) {
  if (size == 0) throw Error(Code::kInvalid, "a region has at least 1 byte");
  check_region_name(name);
  auto region = std::make_shared<Region>();
  region->size = size;
  region->access = {true, false};
  region->name = name;
  region->lent = true;
  region->generation = random_id();
  region->mapping = Mapping::lend(memory, size);
  return enter(std::move(region), false);
}

void RegionTable::check_name(const std::string& name) const {
  if (closed_) throw Error(Code::kClosed, "the Node is closed");
  if (name.empty() || !names_.contains(name)) return;
  throw Error(Code::kInvalid,
              "there is already a region named '" + name + "'; free it or choose another name");
}

uint32_t RegionTable::any_slot() {
  if (!free_slots_.empty()) {
    uint32_t id = free_slots_.back();
    free_slots_.pop_back();
    return id;
  }
  if (slots_.size() == kMaxRegions) {
    throw Error(Code::kBusy, "this Node already has " + std::to_string(kMaxRegions) +
                                 " regions; put several tensors into one region");
  }
  slots_.emplace_back();
  return static_cast<uint32_t>(slots_.size() - 1);
}

void RegionTable::take_slot(uint32_t id) {
  // Those below that nobody has taken yet are free.
  while (slots_.size() <= id) {
    free_slots_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  if (slots_[id]) {
    throw Error(Code::kInvalid,
                "there is already a region with the id " + std::to_string(id) +
                    "; restore the regions of an earlier process before others are allocated");
  }
  std::erase(free_slots_, id);
}

std::shared_ptr<Region> RegionTable::enter(std::shared_ptr<Region> region, bool same_id) {
  const std::string& name = region->name;
  {
    std::lock_guard lock(mutex_);
    check_name(name);
    if (same_id) {
      take_slot(region->id);
    } else {
      region->id = any_slot();
    }
    slots_[region->id] = region;
    mappings_->add(region->mapping);
    if (!name.empty()) names_[name] = region->id;
    if (region->lessee != 0) {
      region->leased = leased_;
      leased_->bytes += region->size;
      ++leased_->regions;
    }
    page_->generations[region->id].store(region->generation, std::memory_order_release);
  }
  if (!name.empty() && awaited_ > 0) on_awaited_();
  return region;
}

std::shared_ptr<Region> RegionTable::find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  auto found = names_.find(name);
  return found == names_.end() ? nullptr : slots_[found->second];
}

std::shared_ptr<Region> RegionTable::find(uint32_t id, uint64_t generation) const {
  std::lock_guard lock(mutex_);
  if (id >= slots_.size() || !slots_[id] || slots_[id]->generation != generation) return nullptr;
  return slots_[id];
}

void RegionTable::free(Region& region) {
  std::lock_guard lock(mutex_);
  if (region.freed.exchange(true)) return;
  page_->generations[region.id].store(0, std::memory_order_release);
  if (!region.name.empty()) names_.erase(region.name);
  free_slots_.push_back(region.id);
  slots_[region.id].reset();  // last: may destroy the region
}

void RegionTable::close() {
  std::vector<std::shared_ptr<Region>> gone;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  closed_ = true;
  gone.swap(slots_);
  free_slots_.clear();
  names_.clear();
}

std::vector<std::shared_ptr<Region>> RegionTable::leased_to(uint64_t peer) const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Region>> result;
  for (const auto& region : slots_) {
    if (region && region->lessee == peer) result.push_back(region);
  }
  return result;
}

}  // namespace tensorwire
