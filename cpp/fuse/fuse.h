// A mount whose files are answered by this process: requests of the kernel by /dev/fuse, without
// libfuse. Reads of memory that was given here are answered from it; all other requests are
// returned by `next`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tensorwire::fuse {

inline constexpr uint32_t kMostBytes = 1 << 20;  // of one read or write

// Pieces of memory that make up a file, one after the other.
struct Content {
  std::vector<std::pair<const std::byte*, uint64_t>> pieces;
  std::shared_ptr<void> owner;
};

struct Request {
  uint32_t operation;
  uint64_t unique;  // its number, under which it is answered
  uint64_t node;
  std::string body;  // what follows the header, as the kernel has written it
};

// The pieces of [offset, offset + size) of a content, as far as there is one.
std::vector<std::pair<const std::byte*, uint64_t>> part_of(const Content& content, uint64_t offset,
                                                           uint64_t size);

// A mount. Any thread; several may call `next` at a time.
class Mount {
 public:
  // Mounts on the folder `path`, which this user owns and alone may write. Throws kUnavailable if
  // the kernel has no FUSE, kPermission if this process may not mount, kInvalid else.
  Mount(const std::string& path, uint32_t uid, uint32_t gid);
  // Answers the requests of a device that the caller has opened and mounted; takes ownership.
  explicit Mount(int device);
  ~Mount();
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;

  // Waits for a request that is not answered here; nothing when it is unmounted or `end` was
  // called.
  std::optional<Request> next();

  // Answers one. An error is a number of errno.h; a request that was given up meanwhile is no
  // error.
  void answer(uint64_t unique, int error,
              const std::vector<std::pair<const std::byte*, uint64_t>>& pieces);

  // Wakes the poller of a file.
  void wake_poll(uint64_t poll);

  // Reads of an open file are answered from memory from now on.
  void serve(uint64_t handle, Content content);
  void unserve(uint64_t handle);

  // Lets the kernel read and map an open file's content from another one itself, without this
  // process: the number by which an answer to OPEN names it, until `unback`. Throws kUnavailable
  // where the kernel or its rules allow none, which `backs` tells before.
  uint32_t back(int file);
  void unback(uint32_t backing);

  // Whether the kernel does that; nothing before it has said so.
  std::optional<bool> backs() const;

  // Takes it out of the tree of files and ends `next` in all threads. Idempotent.
  void end();

 private:
  class Waiter;

  std::unique_ptr<Waiter> waiter();
  std::optional<Request> next(Waiter& waiter);
  bool answered_here(const char* data, size_t size);
  void initialise(const char* data, size_t size);

  std::string path_;
  int64_t mount_ = -1;  // its number
  int device_ = -1;
  int ended_ = -1;  // an eventfd that is never read
  std::once_flag end_;
  std::atomic<int> backs_ = -1;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Waiter>> waiters_;  // of threads that do not wait just now
  std::unordered_map<uint64_t, std::shared_ptr<const Content>> served_;
};

}  // namespace tensorwire::fuse
