#include "fuse/fuse.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fstream>

#include "base/error.h"

namespace tensorwire::fuse {
namespace {

constexpr uint32_t kMinor = 31;  // of the protocol; its structures are those of this version
constexpr size_t kBufferBytes = kMostBytes + 4096;
constexpr uint16_t kMostPages = kMostBytes / 4096;
constexpr size_t kMostPieces = 1024;  // of one answer; UIO_MAXIOV

// Of version 7.40, which the headers of older systems do not have.
constexpr uint32_t kInitExt = 1u << 30, kPassthrough2 = 1u << 5;  // of flags, and of flags2
constexpr size_t kStackDepthAt = offsetof(fuse_init_out, flags2) + sizeof(uint32_t);

struct BackingMap {
  int32_t file;
  uint32_t flags;
  uint64_t padding;
};
constexpr auto kBackingOpen = _IOW(229, 1, BackingMap);
constexpr auto kBackingClose = _IOW(229, 2, uint32_t);

template <class Body>
Body body_of(const char* data, size_t size) {
  Body body{};
  size_t left = size - sizeof(fuse_in_header);
  std::memcpy(&body, data + sizeof(fuse_in_header), std::min(left, sizeof body));
  return body;
}

Error mount_error(const std::string& path, int number) {
  if (number == EPERM) {
    return Error(Code::kPermission,
                 "this process may not mount anything at " + path +
                     ": run it as root, or with CAP_SYS_ADMIN (in a container --cap-add SYS_ADMIN "
                     "--device /dev/fuse)");
  }
  if (number == ENODEV) {
    return Error(Code::kUnavailable, "the kernel has no FUSE: load its module by 'modprobe fuse'");
  }
  return Error(Code::kInvalid, system_message("nothing can be mounted at " + path, number));
}

int open_device() {
  int device = ::open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (device >= 0) return device;
  if (errno == EACCES || errno == EPERM) {
    throw Error(Code::kPermission,
                "this user may not open /dev/fuse: run as root, or be let into it by its owner");
  }
  throw Error(Code::kUnavailable,
              system_message("/dev/fuse cannot be opened, which a mount needs (load the kernel's "
                             "module by 'modprobe fuse'; in a container --device /dev/fuse)",
                             errno));
}

// Which mount a path leads to; -1 if that cannot be found. It asks no file system, so also not us.
int64_t mount_at(const std::string& path) {
  int folder = ::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -1;
  std::ifstream told("/proc/self/fdinfo/" + std::to_string(folder));
  int64_t found = -1;
  for (std::string word; told >> word;) {
    if (word == "mnt_id:") told >> found;
  }
  ::close(folder);
  return found;
}

// Tries it with a file in memory, as there are rules of the kernel besides.
bool may_back(int device) {
  int file = ::memfd_create("tensorwire", MFD_CLOEXEC);
  if (file < 0) return false;
  BackingMap map{file, 0, 0};
  int found = ::ioctl(device, kBackingOpen, &map);
  ::close(file);
  if (found <= 0) return false;
  auto backing = static_cast<uint32_t>(found);
  (void)::ioctl(device, kBackingClose, &backing);
  return true;
}

}  // namespace

std::vector<std::pair<const std::byte*, uint64_t>> part_of(const Content& content, uint64_t offset,
                                                           uint64_t size) {
  std::vector<std::pair<const std::byte*, uint64_t>> found;
  for (const auto& [data, bytes] : content.pieces) {
    if (size == 0) break;
    if (offset >= bytes) {
      offset -= bytes;
      continue;
    }
    uint64_t part = std::min(bytes - offset, size);
    found.emplace_back(data + offset, part);
    offset = 0;
    size -= part;
  }
  return found;
}

// How one thread waits. A request wakes one of those that wait, where poll(2) would wake all.
class Mount::Waiter {
 public:
  Waiter(int device, int ended) : device_(device), ended_(ended) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    epoll_event requests{EPOLLIN | EPOLLEXCLUSIVE, {.fd = device}}, end{EPOLLIN, {.fd = ended}};
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, device, &requests) == 0 &&
        ::epoll_ctl(epoll_, EPOLL_CTL_ADD, ended, &end) == 0) {
      return;
    }
    if (epoll_ >= 0) ::close(epoll_);
    epoll_ = -1;  // no descriptor is left: it is woken with others
  }
  ~Waiter() {
    if (epoll_ >= 0) ::close(epoll_);
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Waits until there may be a request; false when `end` was called.
  bool wait() {
    epoll_event found[2];
    pollfd waits[] = {{device_, POLLIN, 0}, {ended_, POLLIN, 0}};
    int count;
    while ((count = epoll_ < 0 ? ::poll(waits, 2, -1) : ::epoll_wait(epoll_, found, 2, -1)) < 0) {
      if (errno != EINTR) return false;
    }
    if (epoll_ < 0) return waits[1].revents == 0;
    return std::none_of(found, found + count,
                        [this](const epoll_event& each) { return each.data.fd == ended_; });
  }

 private:
  int device_, ended_, epoll_;
};

std::unique_ptr<Mount::Waiter> Mount::waiter() {
  {
    std::lock_guard lock(mutex_);
    if (!waiters_.empty()) {
      auto found = std::move(waiters_.back());
      waiters_.pop_back();
      return found;
    }
  }
  return std::make_unique<Waiter>(device_, ended_);
}

Mount::Mount(const std::string& path, uint32_t uid, uint32_t gid) : path_(path) {
  device_ = open_device();
  ended_ = ::eventfd(0, EFD_CLOEXEC);
  std::string options = "fd=" + std::to_string(device_) +
                        ",rootmode=40000,user_id=" + std::to_string(uid) +
                        ",group_id=" + std::to_string(gid) +
                        ",default_permissions,allow_other,max_read=" + std::to_string(kMostBytes);
  int failed = ended_ < 0 ? errno : 0;
  if (failed == 0 && ::mount("tensorwire", path.c_str(), "fuse.tensorwire",
                             MS_NOSUID | MS_NODEV | MS_NOEXEC, options.c_str()) != 0) {
    failed = errno;
  }
  if (failed != 0) {
    ::close(device_);
    if (ended_ >= 0) ::close(ended_);
    throw mount_error(path, failed);
  }
  mount_ = mount_at(path_);
}

Mount::Mount(int device) : device_(device) {
  ended_ = ::eventfd(0, EFD_CLOEXEC);
  if (ended_ >= 0) return;
  int number = errno;
  ::close(device_);
  throw Error(Code::kBusy, system_message("no descriptor is left", number));
}

Mount::~Mount() {
  end();
  ::close(device_);
  ::close(ended_);
}

void Mount::end() {
  std::call_once(end_, [this] {
    // It may have been unmounted by somebody else, and the path then leads to another mount, which
    // may even have its number; or another one lies over it.
    pollfd device{device_, 0, 0};
    bool is_mounted =
        !path_.empty() && ::poll(&device, 1, 0) >= 0 && (device.revents & POLLERR) == 0;
    if (is_mounted && mount_at(path_) == mount_) ::umount2(path_.c_str(), MNT_DETACH);
    uint64_t one = 1;
    (void)!::write(ended_, &one, sizeof one);
  });
}

std::optional<Request> Mount::next() {
  auto mine = waiter();
  auto found = next(*mine);
  std::lock_guard lock(mutex_);
  waiters_.push_back(std::move(mine));
  return found;
}

std::optional<Request> Mount::next(Waiter& waiter) {
  auto buffer = std::make_unique_for_overwrite<char[]>(kBufferBytes);
  while (waiter.wait()) {
    ssize_t size = ::read(device_, buffer.get(), kBufferBytes);
    if (size < 0) {
      if (errno == EINTR || errno == EAGAIN || errno == ENOENT) continue;  // ENOENT: given up
      return std::nullopt;                                                 // ENODEV: unmounted
    }
    if (static_cast<size_t>(size) < sizeof(fuse_in_header)) continue;
    if (answered_here(buffer.get(), static_cast<size_t>(size))) continue;
    fuse_in_header header;
    std::memcpy(&header, buffer.get(), sizeof header);
    return Request{
        header.opcode, header.unique, header.nodeid,
        std::string(buffer.get() + sizeof header, static_cast<size_t>(size) - sizeof header)};
  }
  return std::nullopt;
}

bool Mount::answered_here(const char* data, size_t size) {
  fuse_in_header header;
  std::memcpy(&header, data, sizeof header);
  if (header.opcode == FUSE_INIT) {
    initialise(data, size);
    return true;
  }
  if (header.opcode != FUSE_READ) return false;
  auto read = body_of<fuse_read_in>(data, size);
  std::shared_ptr<const Content> content;
  {
    std::lock_guard lock(mutex_);
    auto found = served_.find(read.fh);
    if (found == served_.end()) return false;
    content = found->second;
  }
  auto pieces = part_of(*content, read.offset, std::min(read.size, kMostBytes));
  if (pieces.size() >= kMostPieces) return false;
  answer(header.unique, 0, pieces);
  return true;
}

void Mount::initialise(const char* data, size_t size) {
  fuse_in_header header;
  std::memcpy(&header, data, sizeof header);
  auto asked = body_of<fuse_init_in>(data, size);
  if (asked.major != FUSE_KERNEL_VERSION || asked.minor < kMinor) {
    answer(header.unique, EPROTO, {});
    return;
  }
  constexpr uint32_t wanted = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_PARALLEL_DIROPS |
                              FUSE_MAX_PAGES | FUSE_ATOMIC_O_TRUNC;
  fuse_init_out told{};
  told.major = FUSE_KERNEL_VERSION;
  told.minor = kMinor;
  told.max_readahead = asked.max_readahead;
  told.flags = asked.flags & wanted;
  if ((asked.flags & kInitExt) != 0 && (asked.flags2 & kPassthrough2) != 0) {
    told.flags |= kInitExt;
    told.flags2 = kPassthrough2;
    uint32_t depth = 1;  // what is backed lies in memory, not in a stack of file systems
    std::memcpy(reinterpret_cast<char*>(&told) + kStackDepthAt, &depth, sizeof depth);
  }
  told.max_background = 64;
  told.congestion_threshold = 48;
  told.max_write = kMostBytes;
  told.time_gran = 1;
  told.max_pages = kMostPages;
  answer(header.unique, 0, {{reinterpret_cast<const std::byte*>(&told), sizeof told}});
  backs_ = told.flags2 != 0 && may_back(device_);
}

uint32_t Mount::back(int file) {
  BackingMap map{file, 0, 0};
  int found = ::ioctl(device_, kBackingOpen, &map);
  if (found > 0) return static_cast<uint32_t>(found);
  throw Error(Code::kUnavailable, system_message("the kernel does not read a file itself", errno));
}

void Mount::unback(uint32_t backing) { (void)::ioctl(device_, kBackingClose, &backing); }

std::optional<bool> Mount::backs() const {
  int found = backs_;
  return found < 0 ? std::nullopt : std::optional<bool>(found != 0);
}

void Mount::answer(uint64_t unique, int error,
                   const std::vector<std::pair<const std::byte*, uint64_t>>& pieces) {
  fuse_out_header header{};
  std::vector<iovec> parts{{&header, sizeof header}};
  uint64_t size = sizeof header;
  for (const auto& [data, bytes] : pieces) {
    parts.push_back({const_cast<std::byte*>(data), bytes});
    size += bytes;
  }
  header.len = static_cast<uint32_t>(size);
  header.error = -error;
  header.unique = unique;
  // The device takes an answer whole or not at all; ENOENT: whoever asked was interrupted.
  (void)!::writev(device_, parts.data(), static_cast<int>(parts.size()));
}

void Mount::wake_poll(uint64_t poll) {
  fuse_notify_poll_wakeup_out told{poll};
  fuse_out_header header{sizeof header + sizeof told, FUSE_NOTIFY_POLL, 0};
  iovec parts[] = {{&header, sizeof header}, {&told, sizeof told}};
  (void)!::writev(device_, parts, 2);  // ENOENT: nobody polls any more
}

void Mount::serve(uint64_t handle, Content content) {
  auto made = std::make_shared<const Content>(std::move(content));
  std::shared_ptr<const Content> before;
  {
    std::lock_guard lock(mutex_);
    before = std::exchange(served_[handle], std::move(made));
  }
}

void Mount::unserve(uint64_t handle) {
  std::shared_ptr<const Content> before;
  {
    std::lock_guard lock(mutex_);
    auto found = served_.find(handle);
    if (found == served_.end()) return;
    before = std::move(found->second);
    served_.erase(found);
  }
}

}  // namespace tensorwire::fuse
