// Regions: memory that this Node allocated and that peers may reach, and the table of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/page.h"
#include "memory/mapping.h"

namespace tensorwire {

inline constexpr size_t kMaxNameBytes = 255;
// The reason for kStaleHandle.
inline constexpr const char* kStale =
    "the region was freed, or its handle is of an earlier process";

// Throws kInvalid if no region can have this name: it is too long, or peers could not show it. ""
// is no name.
void check_region_name(const std::string& name);

// The rights of peers on a region.
struct Access {
  bool read = true;
  bool write = true;
  bool any() const { return read || write; }
};

// What peers asked for and whose memory still exists.
struct Leased {
  std::atomic<uint64_t> bytes{0};
  std::atomic<size_t> regions{0};
};

// The facts that the owner of a region and its peers both know of it.
struct RegionFacts {
  uint32_t id = 0;          // slot in the owner's table
  uint64_t generation = 0;  // random, never 0: knowing it is what makes a handle valid
  uint64_t size = 0;
  Access access;
  std::string name;                  // "" = unnamed, reachable by handle only
  bool on_gpu = false;               // its bytes are none that a CPU may touch
  std::shared_ptr<Mapping> mapping;  // null at a peer that does not map it

  // Overflow-safe: [offset, offset + length) lies inside.
  bool contains(uint64_t offset, uint64_t length) const {
    return offset <= size && length <= size - offset;
  }
};

// Throws kInvalid unless the region has a word at this offset, which is in memory of the host.
void check_word(const RegionFacts& region, uint64_t offset);

struct Region : RegionFacts {
  Region() = default;
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool lent = false;    // mapped for reading alone, here too
  uint64_t lessee = 0;  // the peer that asked for it, 0 = this process
  std::atomic<bool> freed{false};
  std::shared_ptr<Leased> leased;  // counts this region if a peer asked for it

  std::byte* data() const { return mapping->data(); }
};

// Thread-safe.
class RegionTable {
 public:
  // on_awaited is called by a thread that allocated a region with a name while names are awaited.
  RegionTable(NodePage* page, std::shared_ptr<Mappings> mappings, std::function<void()> on_awaited)
      : page_(page), mappings_(std::move(mappings)), on_awaited_(std::move(on_awaited)) {}

  // Throws kInvalid (size, name too long or taken), kBusy (table full), kNoMemory, kClosed.
  // gpu: its number in this process, -1 for memory of the host; then also as Gpu::at.
  std::shared_ptr<Region> allocate(uint64_t size, const std::string& name, Access access,
                                   bool shareable, uint64_t lessee, int gpu = -1);
  // Maps the memory of a region of an earlier process again, in the same slot and with the same
  // generation, so that handles of then are good now. See Mapping::restore. Throws kInvalid (also:
  // name or slot taken, access "r"), kNoMemory, kBusy, kClosed.
  std::shared_ptr<Region> restore(int memory, const RegionFacts& facts);
  // Makes a read-only region over memory of another Node of this process. See Mapping::lend. Throws
  // kInvalid (size, name), kNoMemory, kBusy, kClosed.
  std::shared_ptr<Region> lend(int memory, uint64_t size, const std::string& name);
  std::shared_ptr<Region> find(const std::string& name) const;  // null if there is none
  std::shared_ptr<Region> find(uint32_t id, uint64_t generation) const;
  // Takes it out of the table; peers' handles go stale. The memory lives until the last user.
  void free(Region& region);
  // Forgets all regions and lets no new one in.
  void close();
  std::vector<std::shared_ptr<Region>> leased_to(uint64_t peer) const;
  const Leased& leased() const { return *leased_; }
  // Adds to the number of awaited names. A caller that adds one looks for the name again then.
  void await_names(int change) { awaited_ += change; }

 private:
  // Enters it into the table: in the slot of its id, or in any.
  std::shared_ptr<Region> enter(std::shared_ptr<Region> region, bool same_id);
  void check_name(const std::string& name) const;  // locked
  uint32_t any_slot();                             // locked, and so the next one
  void take_slot(uint32_t id);

  NodePage* page_;
  const std::shared_ptr<Mappings> mappings_;
  const std::function<void()> on_awaited_;
  std::atomic<int> awaited_{0};
  bool closed_ = false;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Region>> slots_;
  std::vector<uint32_t> free_slots_;
  std::map<std::string, uint32_t> names_;
  std::shared_ptr<Leased> leased_ = std::make_shared<Leased>();
};

// 64 bits from the kernel's generator, never 0.
uint64_t random_id();

}  // namespace tensorwire
